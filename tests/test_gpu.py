"""What only a GPU can show: real layers, offsets past 2**31, pipelines, repeatability, no waiting for the device.

Data are drawn on the GPU and so is the float64 reference, as the weights are too large for NumPy in a test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import backends
from backends import arrays
from shared import fp8, models, routing
from shared.config import Config
from shared.orders import ORDERS
from shared.problem import SCALE_BLOCK, Problem
from shared.reference import element_bound, error_bound
from tests.cases import VARIANTS

pytestmark = pytest.mark.gpu

EVERY_BACKEND = pytest.mark.parametrize("backend", backends.BACKENDS)


@dataclasses.dataclass(frozen=True)
class Given:
    """Arguments as torch tensors. w_scale and topk_weight may be None."""

    problem: Problem
    x: Any
    w: Any
    ids: Any
    w_scale: Any
    topk_weight: Any

    def native(self, framework: str) -> list[Any]:
        given = (self.x, self.w, self.ids, self.w_scale, self.topk_weight)
        return [None if array is None else arrays.to_framework(array, framework, on_gpu=True) for array in given]


def draw(problem: Problem, ids: np.ndarray, *, device: str = "cuda", integers: bool = False) -> Given:
    """Random data of a problem, an expert at a time so that float32 copies stay small.

    FP8 weights are drawn as such, with random scales between 1/2 and 2: what they stand for does not matter here.
    """
    import torch

    generator = torch.Generator(device).manual_seed(problem.n + problem.k)

    def values(*shape: int) -> Any:
        if integers:
            return torch.randint(-1, 2, shape, generator=generator, device=device).float()
        return torch.randn(shape, generator=generator, device=device)

    activation = getattr(torch, problem.activation)
    w_dtype = torch.float8_e4m3fn if problem.is_fp8 else activation
    w = torch.empty(problem.experts, problem.n, problem.k, device=device, dtype=w_dtype)
    for expert in range(problem.experts):
        w[expert] = values(problem.n, problem.k).to(w.dtype)
    w_scale = topk_weight = None
    if problem.w_scale_shape is not None:
        w_scale = torch.rand(problem.w_scale_shape, generator=generator, device=device) * 1.5 + 0.5
        w_scale = torch.ones_like(w_scale) if integers else w_scale
    if problem.routing_weight:
        topk_weight = torch.rand(ids.shape, generator=generator, device=device) + 0.1
    x = values(problem.tokens, problem.k).to(activation)
    return Given(problem, x, w, torch.from_numpy(ids).to(device), w_scale, topk_weight)


def reference_of(given: Given) -> Any:
    """As shared.reference, in torch float64, an expert at a time."""
    import torch

    problem = given.problem
    x = given.x.double()
    if problem.quantises_x:
        q, scale = fp8.quantise_token(arrays.to_host(given.x))
        x = torch.from_numpy(q.astype(np.float64) * scale[:, None]).to(given.x.device)
    y = torch.zeros(problem.tokens, problem.top_k, problem.n, dtype=torch.float64, device=given.x.device)
    for expert in given.ids[given.ids >= 0].unique().tolist():
        token, slot = (given.ids == expert).nonzero(as_tuple=True)
        w = given.w[expert].double()
        if problem.scale_layout == "channel":
            w *= given.w_scale[expert][:, None]
        elif problem.scale_layout == "block":
            scale = given.w_scale[expert].double().repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
            w *= scale[: problem.n, : problem.k]
        y[token, slot] = x[token] @ w.T
    if given.topk_weight is not None:
        y *= given.topk_weight[:, :, None]
    return y


def call(backend: str, given: Given, order: str, config: Config) -> Any:
    """y as a torch tensor, from a buffer of NaN; skips where the backend cannot run or refuses."""
    module = backends.load(backend)
    if (reason := module.unavailable(interpret=False)) is not None:
        pytest.skip(f"{backend}: {reason}")
    if (reason := module.unsupported(given.problem, config)) is not None:
        pytest.skip(f"{backend} refuses: {reason}")
    y = module.moe_gemm(
        *given.native(module.FRAMEWORK), problem=given.problem, order=order, config=config, fill=float("nan")
    )
    return arrays.from_framework(y, "torch")


def check(y: Any, given: Given, reference: Any) -> None:
    """As tests.execute.check, on the GPU."""
    problem = given.problem
    y = y.double()
    assert y.shape == reference.shape
    assert not y.isnan().any(), f"{int(y.isnan().sum())} of {y.numel()} elements unwritten or NaN"
    assert (y[given.ids < 0] == 0).all(), "rows of -1 slots must be zeros"
    rows = reference.abs().amax(dim=2, keepdim=True)
    wrong = (y - reference).abs() > element_bound(problem) * rows
    assert not wrong.any(), f"{int(wrong.sum())} elements wrong, first {wrong.nonzero()[0].tolist()}"
    error, limit = float((y - reference).norm() / reference.norm()), error_bound(problem)
    assert error <= limit, f"relative error {error:.2e} above {limit:.1e}"


# Real layers

LAYERS = [
    ("mixtral-8x7b", "gate-up", 1),
    ("mixtral-8x7b", "gate-up", 64),
    ("gpt-oss-120b", "gate-up", 8),
    ("gpt-oss-120b", "down", 64),
    ("qwen3-30b-a3b", "gate-up", 32),
    ("deepseek-v3", "gate-up", 32),
    ("deepseek-v3", "down", 1),
    ("olmoe-1b-7b", "down", 256),
]


def layers() -> list[Any]:
    narrow = list(VARIANTS)[2:]
    chosen = [
        (*layer, variant, ORDERS[(i + j) % len(ORDERS)])
        for i, layer in enumerate(LAYERS)
        for j, variant in enumerate((("fp16", "bf16")[i % 2], narrow[i % 4]))
    ]
    chosen += [("mixtral-8x7b", "gate-up", 512, variant, ORDERS[j % len(ORDERS)]) for j, variant in enumerate(VARIANTS)]
    return [
        pytest.param(*layer, backend, id="-".join(map(str, (*layer, backend))))
        for layer in chosen
        for backend in backends.BACKENDS
    ]


_last: dict[tuple[Any, ...], tuple[Given, Any]] = {}


def layer_data(model: str, gemm: str, tokens: int, variant: str) -> tuple[Given, Any]:
    """Data and reference of the last layer asked for: its backends follow one another."""
    import torch

    key = (model, gemm, tokens, variant)
    if key not in _last:
        _last.clear()
        torch.cuda.empty_cache()
        dtype, layout = VARIANTS[variant]
        problem = models.model(model).problem(
            gemm, tokens, dtype, scale_layout=layout or "channel", routing_weight=gemm == "down"
        )
        ids = routing.uniform(tokens, problem.experts, problem.top_k, seed=tokens)
        ids[::5, -1] = -1
        given = draw(problem, ids)
        _last[key] = given, reference_of(given)
    return _last[key]


@pytest.mark.parametrize(("model", "gemm", "tokens", "variant", "order", "backend"), layers())
def test_real_layers(model: str, gemm: str, tokens: int, variant: str, order: str, backend: str) -> None:
    """With the config that a call gets on an H200, measured or by rule."""
    given, reference = layer_data(model, gemm, tokens, variant)
    config = backends.config_for(given.problem, backend=backend, gpu="NVIDIA H200")
    check(call(backend, given, order, config), given, reference)


# Offsets past 2**31


@pytest.fixture
def _room() -> Iterator[None]:
    """Memory of earlier tests given back, before and after."""
    import gc

    import torch

    _last.clear()
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("_room")
@EVERY_BACKEND
@pytest.mark.parametrize(
    ("variant", "experts"), [("fp16", 9), ("fp8-w8a8-channel", 9), ("fp8-w8a16-channel", 9), ("fp8-w8a8-block", 17)]
)
def test_weights_past_32_bit_offsets(variant: str, experts: int, backend: str) -> None:
    """E * N * K = 2.4e9 and 4.6e9 elements: past 2**31 elements, and past 2**32 bytes. First and last expert."""
    dtype, layout = VARIANTS[variant]
    problem = Problem.of(dtype, scale_layout=layout or "channel", tokens=3, experts=experts, n=16384, k=16384, top_k=2)
    assert problem.experts * problem.n * problem.k > 2**31
    given = draw(problem, np.array([(experts - 1, 0), (experts - 2, experts - 1), (0, -1)], np.int32))
    config = Config(swap_ab=dtype != "fp8-w8a16" or backend == "pallas-mosaic")
    check(call(backend, given, "column", config), given, reference_of(given))


@pytest.mark.usefixtures("_room")
@EVERY_BACKEND
def test_output_past_32_bit_offsets(backend: str) -> None:
    """T = 100,000, top_k = 6, N = 4096: y has 2.46e9 elements. Judged in parts of 5,000 tokens."""
    import torch

    problem = Problem.of("fp16", tokens=100_000, experts=8, n=4096, k=64, top_k=6)
    assert problem.slots * problem.n > 2**31
    given = draw(problem, routing.uniform(problem.tokens, 8, 6, seed=0))
    y = call(backend, given, "column", Config(block_m=128, block_n=128, block_k=64, num_warps=4))
    for start in range(0, problem.tokens, 5000):
        part = slice(start, start + 5000)
        all_experts = torch.einsum("tk,enk->ten", given.x[part].double(), given.w.double())
        reference = all_experts.gather(1, given.ids[part].long()[:, :, None].expand(-1, -1, problem.n))
        rows = reference.abs().amax(dim=2, keepdim=True)
        # "not less" instead of "greater": a NaN fails
        wrong = ~((y[part].double() - reference).abs() <= element_bound(problem) * rows)
        assert not wrong.any(), f"{int(wrong.sum())} elements wrong from token {start} on"


# Compilers and pipelines


@EVERY_BACKEND
@pytest.mark.parametrize("variant", ["fp16", "fp8-w8a8-channel"])
def test_every_pipeline_depth_gives_the_same_integers(variant: str, backend: str) -> None:
    """Elsewhere results changed with num_stages. Small integers are exact, so every depth must give the reference."""
    dtype, layout = VARIANTS[variant]
    problem = Problem.of(
        dtype, scale_layout=layout or "channel", activation="float16", tokens=40, experts=3, n=200, k=1000, top_k=2
    )
    ids = np.random.default_rng(0).integers(-1, 3, (40, 2)).astype(np.int32)
    given = draw(problem, ids, integers=True)
    reference = reference_of(given)
    ran = 0
    for stages in (1, 2, 3, 4, 5):
        config = Config(block_m=16, block_n=64, block_k=64, num_stages=stages)
        if backends.load(backend).unsupported(problem, config) is None:
            assert (call(backend, given, "grouped", config).double() == reference).all(), f"num_stages {stages}"
            ran += 1
    assert ran >= 4


@pytest.mark.parametrize(
    ("variant", "block_n", "block_k"),
    [("fp16", 128, 64), ("fp8-w8a8-channel", 128, 128), ("fp8-w8a16-channel", 64, 64)],
)
def test_warp_groups_in_turns(variant: str, block_n: int, block_k: int) -> None:
    """Several tiles a thread block, odd and even numbers of them, rings whose depth does and does not divide a tile's
    16 or 8 steps. Integers are exact, so each must give the reference, time and again."""
    dtype, layout = VARIANTS[variant]
    problem = Problem.of(
        dtype, scale_layout=layout or "channel", activation="float16", tokens=200, experts=3, n=16384, k=1000, top_k=2
    )
    ids = np.random.default_rng(1).integers(-1, 3, (200, 2)).astype(np.int32)
    given = draw(problem, ids, integers=True)
    reference = reference_of(given)
    config = Config(block_m=48, block_n=block_n, block_k=block_k, num_warps=8, ping_pong=True)
    for stages, order in ((3, "row"), (4, "column"), (5, "popular")):
        for _ in range(10):
            y = call("pallas-mosaic", given, order, config.replace(num_stages=stages))
            assert (y.double() == reference).all(), f"num_stages {stages}, {order}"


@EVERY_BACKEND
@pytest.mark.parametrize("groups", [(256, 256), (257, 255)])
def test_wide_tile_over_a_narrow_output(groups: tuple[int, int], backend: str) -> None:
    """N = 160 in a tile of 256, K = 64, two groups of tokens: was wrong elsewhere."""
    problem = Problem.of("bf16", tokens=512, experts=2, n=160, k=64, top_k=1)
    given = draw(problem, np.repeat(np.arange(2, dtype=np.int32), groups)[:, None])
    config = Config(block_m=64, block_n=256, block_k=64, num_stages=3)
    check(call(backend, given, "column", config), given, reference_of(given))


@EVERY_BACKEND
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 15])
def test_fewer_tokens_than_the_least_operand(tokens: int, backend: str) -> None:
    problem = Problem.of("fp16", tokens=tokens, experts=1, n=128, k=64, top_k=1)
    given = draw(problem, np.zeros((tokens, 1), np.int32), integers=True)
    assert (call(backend, given, "row", Config(block_k=64)).double() == reference_of(given)).all()


# Repeatability, and nothing kept from one call to the next


@EVERY_BACKEND
def test_twenty_runs_are_bit_equal(backend: str) -> None:
    given, _ = layer_data("qwen3-30b-a3b", "gate-up", 32, "bf16")
    config = backends.config_for(given.problem, backend=backend, gpu="NVIDIA H200")
    first = call(backend, given, "column", config)
    for _ in range(19):
        assert (call(backend, given, "column", config) == first).all()


@EVERY_BACKEND
def test_new_contents_at_the_same_addresses(backend: str) -> None:
    problem = Problem.of("fp16", tokens=4, experts=4, n=256, k=128, top_k=2)
    given = draw(problem, routing.uniform(4, 4, 2, seed=0))
    config = Config()
    check(call(backend, given, "column", config), given, reference_of(given))
    given.x.copy_(given.x.flip(0) * 2)
    given.w.copy_(given.w.flip(1))
    given.ids.copy_(given.ids.flip(0))
    check(call(backend, given, "column", config), given, reference_of(given))


@pytest.mark.parametrize("variant", ["fp16", "fp8-w8a16-channel", "fp8-w8a8-block"])
def test_torch_waits_for_nothing(variant: str) -> None:
    """PyTorch raises where a call would wait for the GPU. The door is part of it, its value checks are not."""
    import torch

    dtype, layout = VARIANTS[variant]
    problem = Problem.of(dtype, scale_layout=layout or "channel", tokens=4, experts=4, n=256, k=128, top_k=2)
    given = draw(problem, routing.uniform(4, 4, 2, seed=0))

    def through_the_door() -> Any:
        return backends.moe_gemm(given.x, given.w, given.ids, w_scale=given.w_scale, mode=problem.dtype)

    through_the_door()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = through_the_door()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(y, given, reference_of(given))


def test_reference_on_the_gpu_is_the_reference() -> None:
    """This file's float64 reference against shared.reference, on a small problem of each variant."""
    from shared.reference import moe_gemm_reference

    for dtype, layout in VARIANTS.values():
        problem = Problem.of(
            dtype, scale_layout=layout or "channel", tokens=5, experts=3, n=300, k=200, top_k=2,
            routing_weight=True,
        )  # fmt: skip
        ids = np.array([(0, 1), (-1, 2), (2, 2), (1, -1), (0, 0)], np.int32)
        given = draw(problem, ids)
        host = [None if a is None else arrays.to_host(a) for a in (given.x, given.w, given.w_scale, given.topk_weight)]
        expected = moe_gemm_reference(host[0], host[1], ids, problem=problem, w_scale=host[2], topk_weight=host[3])
        np.testing.assert_allclose(reference_of(given).cpu().numpy(), expected, rtol=1e-12, atol=1e-12)
