"""Public reports of what went wrong for others who write, run or measure such kernels, each as a small test.

A test names the kind of its fault and where it was reported, and states the right value. Inputs are smaller or more
exact than the reports'. Most kinds are tested at length elsewhere in this suite; here each stands by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest

import backends
from backends import arrays, triton_launch, tuning
from shared import fp8, orders
from shared.checks import ArgumentError
from shared.config import REDUCTIONS, Config
from shared.models import Model, model
from shared.planning import Plan, plan
from shared.problem import Problem
from shared.reference import accumulate_fp8, error_bound, moe_gemm_reference, relative_error
from tests import test_compile_only as code
from tests import test_fp8, test_planning, test_tile_order
from tests.cases import SMALL, Data, float_dtype
from tests.execute import run
from tests.kinds import KINDS, arguments
from tests.where import HAS_GPU, INTERPRET, NUMERICS

Test = TypeVar("Test", bound=Callable[..., Any])
REPORTS: dict[str, tuple[str, ...]] = {}
_RUN_WITHOUT_GPU: set[str] = set()


def report(kind: str, *links: str) -> Callable[[Test], Test]:
    """Marks a test as that of a kind of fault; links: where it was reported (given once a kind)."""

    def mark(test: Test) -> Test:
        REPORTS[kind] = REPORTS.get(kind, ()) + links
        marks = {mark.name for mark in getattr(test, "pytestmark", [])}
        if "gpu" not in marks or HAS_GPU:
            _RUN_WITHOUT_GPU.add(kind)
        return test

    return mark


EVERY_BACKEND = pytest.mark.parametrize("backend", backends.BACKENDS)
JAX_BACKENDS = [name for name in backends.BACKENDS if backends.load(name).FRAMEWORK == "jax"]
EVERY_PLANNER = pytest.mark.parametrize("planner", [plan, *test_planning.PLANNERS.values()])
SWAPS = [
    pytest.param(backend, swap_ab, id=f"{backend}-{'w' if swap_ab else 'x'}-left")
    for backend in backends.BACKENDS
    for swap_ab in (True, False)
    if swap_ab or backend != "pallas-mosaic"  # the weights are its left operand, always
]
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's word on the infinities and NaN here


def ids_of(*counts: int) -> np.ndarray:
    """topk_ids (sum, 1): so many tokens to each expert in turn."""
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)[:, None]


def small_integers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def data_of(
    ids: np.ndarray,
    *,
    experts: int,
    n: int,
    k: int,
    dtype: str = "fp16",
    activation: str = "float16",
    x: np.ndarray | None = None,
    w: np.ndarray | None = None,
    seed: int = 0,
) -> Data:
    """Small integers unless x or w is given, scales of 1: results are exact."""
    if not dtype.startswith("fp8"):
        activation = {"fp16": "float16", "bf16": "bfloat16"}[dtype]
    problem = Problem(
        tokens=ids.shape[0], experts=experts, n=n, k=k, top_k=ids.shape[1], dtype=dtype, activation=activation,
        scale_layout="channel" if dtype.startswith("fp8") else None,
    )  # fmt: skip
    x = (small_integers((problem.tokens, k), seed) if x is None else x).astype(float_dtype(activation))
    w = small_integers((experts, n, k), seed + 1) if w is None else w
    w = w.astype(fp8.FP8 if problem.is_fp8 else float_dtype(activation))
    w_scale = np.ones((experts, n), np.float32) if problem.is_fp8 else None
    reference = moe_gemm_reference(x, w, ids, problem=problem, w_scale=w_scale)
    return Data(problem, x, w, ids, w_scale, None, reference)


def assert_close(y: np.ndarray, data: Data, config: Config) -> None:
    """No NaN, and within the bound of this config's roundings."""
    error, limit = relative_error(y, data.reference), error_bound(data.problem, config.rounded_parts(data.problem.k))
    assert error <= limit, f"relative error {error:.2e} above {limit:.1e}"


def assert_exact(y: np.ndarray, data: Data) -> None:
    np.testing.assert_array_equal(y.astype(np.float64), data.reference)


# Routing and tile order


@report(
    "index map",
    "https://github.com/meta-pytorch/applied-ai/issues/25",
    "https://github.com/meta-pytorch/applied-ai/pull/33",
)
@NUMERICS
@pytest.mark.parametrize(("rows", "cols", "seen"), [(1, 8, 1), (2, 3, 4), (4, 2, 4), (3, 3, 9)])
def test_every_order_visits_each_tile_once(rows: int, cols: int, seen: int) -> None:
    """Divisors exchanged: 1x8 visits 1 tile, 2x3 and 4x2 visit 4, 3x3 hides it. Right: each once, in every language."""
    everything = [(row, col) for row in range(rows) for col in range(cols)]
    visited = {orders.published_2024(pid, rows, cols) for pid in range(rows * cols)}
    assert len(visited & set(everything)) == seen
    for order in orders.ORDERS:
        for group_m in range(1, rows + 2):
            assert sorted(orders.walk(order, rows, cols, group_m)) == everything
    for order in orders.GRID_ORDERS:
        for backend in backends.BACKENDS:
            assert sorted(test_tile_order.WALKS[backend](order, rows, cols, 2)) == everything, (backend, order)


@report("index map")
@NUMERICS
@pytest.mark.parametrize("order", orders.ORDERS)
def test_every_order_writes_each_tile(order: str) -> None:
    """The grids above as problems, into outputs full of NaN."""
    for rows, cols in ((1, 8), (2, 3), (4, 2)):
        data = data_of(ids_of(*[2] * rows), experts=rows, n=16 * cols, k=16)
        assert_exact(run("torch-triton", data, order, Config(block_m=16, block_n=16, block_k=16)), data)


@report("overflow, then performance", "https://github.com/vllm-project/vllm/pull/34507")
@pytest.mark.compile_only
def test_wide_offsets_cost_small_batches_nothing() -> None:
    """M = 100,000, top-k 6, rows of 4096: y has 2.46e9 elements. Right: 64-bit row offsets, in the very code that one
    token runs, and no 64-bit multiplication inside the loop over K."""
    config = Config()
    many, one = (Problem.of("fp16", tokens=t, experts=8, n=4096, k=1024, top_k=6) for t in (100_000, 1))
    assert many.slots * many.n > 2**31
    ptx = code.compiled("torch-triton", many, "column", config).ptx
    code.assert_wide(ptx, 4096, 2)
    assert ptx == code.compiled("torch-triton", one, "column", config).ptx
    loop = ptx[ptx.index("wgmma.mma_async") : ptx.rindex("wgmma.mma_async")]
    assert not [line for line in loop.splitlines() if "mul.lo.s64" in line or "mad.lo.s64" in line]


@report("overflow, then performance")
@pytest.mark.gpu
@EVERY_BACKEND
def test_the_last_of_many_rows(backend: str) -> None:
    """As above with K = 16 and ones: the last rows of y, past 2**31 elements, are 16. Only where memory allows."""
    import torch

    problem = Problem.of("fp16", tokens=100_000, experts=2, n=4096, k=16, top_k=6)
    module = backends.load(backend)
    if (reason := module.unavailable(interpret=False)) is not None:
        pytest.skip(reason)
    x, w = (torch.ones(shape, dtype=torch.float16, device="cuda") for shape in ((100_000, 16), (2, 4096, 16)))
    ids = torch.zeros(100_000, 6, dtype=torch.int32, device="cuda")
    native = [arrays.to_framework(array, module.FRAMEWORK, on_gpu=True) for array in (x, w, ids)]
    config = Config(block_m=128, block_n=128, block_k=32)
    y = module.moe_gemm(*native, None, None, problem=problem, order="column", config=config, fill=float("nan"))
    assert (arrays.from_framework(y, "torch")[-1000:] == 16).all()


@report(
    "routing table",
    "https://github.com/vllm-project/vllm-xpu-kernels/issues/453",
    "https://github.com/vllm-project/vllm/pull/35161",
)
@NUMERICS
@EVERY_PLANNER
def test_no_token_is_dropped_and_unused_blocks_have_no_expert(planner: Callable[..., Plan]) -> None:
    """Four tokens to the only expert, block 16. Right: 0, 1, 2, 3, then padding 4; the unused block's expert is -1."""
    made = planner(np.zeros((4, 1), np.int32), 1, 16)
    assert made.sorted_slot[:16].tolist() == [0, 1, 2, 3] + [4] * 12
    assert made.tile_expert.tolist() == [0, -1]


@report("index wrap", "https://github.com/ModelTC/LightLLM/pull/1369")
@NUMERICS
@EVERY_PLANNER
def test_each_of_five_experts_comes_once(planner: Callable[..., Plan]) -> None:
    """E = 5 in blocks of 4, taken modulo 5, processes some twice. Right: experts 0, 1, 2, 3, 4."""
    made = planner(ids_of(1, 1, 1, 1, 1), 5, 16)
    assert made.tile_expert.tolist() == [0, 1, 2, 3, 4]


@report("documented example wrong", "https://github.com/vllm-project/vllm/pull/55896")
@NUMERICS
@EVERY_PLANNER
def test_documented_alignment_example(planner: Callable[..., Plan]) -> None:
    """Counts [2, 3, 0, 6, 8] in blocks of 4. Right: 24 padded slots; experts 0, 1, 3, 3, 4, 4, then -1."""
    made = planner(ids_of(2, 3, 0, 6, 8), 5, 4)
    assert int(made.tile_rows[0]) * 4 == 24
    assert made.tile_expert[:8].tolist() == [0, 1, 3, 3, 4, 4, -1, -1]


@report(
    "empty input",
    "https://github.com/sgl-project/sglang/issues/38773",
    "https://github.com/openxla/tokamax/pull/1016",
)
@EVERY_BACKEND
def test_no_tokens_give_no_rows(backend: str) -> None:
    """x of shape (0, K). Right: y of shape (0, top_k, N), of the caller's kind."""
    for kind in KINDS:
        call = arguments(kind)
        call |= {name: call[name][:0] for name in ("x", "topk_ids", "topk_weight")}
        y = backends.moe_gemm(**call, backend=backend, interpret=True)
        assert arrays.kind_of("y", y) == kind
        assert tuple(y.shape) == (0, 2, 64)


@report("empty input")
@NUMERICS
@quiet
@EVERY_BACKEND
def test_empty_groups_contribute_nothing(backend: str) -> None:
    """Groups [8, 0, 8, 0], K = 64, N = 32. Right: finite and exact, though the weights of empty groups are all NaN."""
    data = data_of(ids_of(8, 0, 8, 0), experts=4, n=32, k=64)
    w = data.w.copy()
    w[[1, 3]] = np.nan
    assert_exact(run(backend, dataclasses.replace(data, w=w), "column", SMALL), data)


@report("host synchronisation", "https://github.com/vllm-project/vllm-xpu-kernels/issues/567")
def test_torch_reads_nothing_back_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row counts read by the host break graph capture. Right: no operator of a call reads a tensor's value."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from backends import torch_triton

    seen: list[str] = []

    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    launched: list[str] = []
    monkeypatch.setattr(torch_triton, "_launch", lambda name, *rest: launched.append(name))
    ids = torch.tensor([[0], [0], [7], [0]], dtype=torch.int32)
    x, w = torch.zeros(4, 64, dtype=torch.float16), torch.zeros(8, 64, 64, dtype=torch.float16)
    problem = Problem.of("fp16", tokens=4, experts=8, n=64, k=64, top_k=1)
    with NoReads():
        torch_triton.moe_gemm(x, w, ids, None, None, problem=problem, order="column", config=SMALL)
    assert launched == ["prepare_kernel", "moe_gemm_kernel"]
    assert seen
    reads = ("_local_scalar_dense", "is_nonzero", "nonzero", "_to_copy", "copy_", "unique")
    assert not [name for name in seen if any(read in name for read in reads)]


@report("host synchronisation")
@NUMERICS
@pytest.mark.parametrize("backend", JAX_BACKENDS)
def test_one_trace_serves_every_routing(backend: str) -> None:
    """M = 4, E = 8: traced with all tokens on expert 0, called with spread ones. A read on the host could not trace."""
    import jax

    call = functools.partial(backends.moe_gemm, config=SMALL, backend=backend, interpret=INTERPRET)
    device = jax.devices("gpu" if HAS_GPU else "cpu")[0]
    jitted = jax.jit(lambda x, w, ids: call(x, w, ids))
    sizes = []
    for counts in ((4,), (4,), (1, 0, 0, 1, 1, 0, 0, 1)):
        data = data_of(ids_of(*counts), experts=8, n=64, k=32)
        assert_exact(np.asarray(jitted(*jax.device_put((data.x, data.w, data.ids), device))), data)
        sizes.append(jitted._cache_size())
    # The first call of a process may set options of JAX that are part of the key: its second one is traced again.
    assert sizes[1] == sizes[2]


@report("host synchronisation")
@pytest.mark.gpu
def test_a_captured_graph_follows_new_routing() -> None:
    """Captured with all of M = 4 on expert 0 of 8, replayed with spread routing: equal to an eager call."""
    import torch

    data = data_of(ids_of(4), experts=8, n=256, k=128)
    x, w, ids = (arrays.to_framework(a, "torch", on_gpu=True) for a in (data.x, data.w, data.ids))
    backends.moe_gemm(x, w, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = backends.moe_gemm(x, w, ids)
    ids.copy_(torch.tensor([[3], [0], [7], [5]], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, backends.moe_gemm(x, w, ids))


# K and N tails, FP8 scales


@report(
    "cast semantics",
    "https://github.com/jax-ml/ml_dtypes/issues/400",
    "https://github.com/pytorch/ao/issues/1912",
)
@NUMERICS
@quiet
@test_fp8.EVERY_IMPLEMENTATION
def test_fp8_saturates_everywhere(scale_tokens: test_fp8.ScaleTokens) -> None:
    """448, 464, 465, 1000: ml_dtypes casts to 448, 448, NaN, NaN. Right: clamped first, the same bytes in all ports."""
    values = np.array([448, 464, 465, 1000], np.float32)
    assert np.isnan(values.astype(fp8.FP8).astype(np.float32)).tolist() == [False, False, True, True]
    assert fp8.to_fp8(values).astype(np.float32).tolist() == [448] * 4
    x = np.stack([values, -values, values * 64], axis=1).astype(np.float16)
    test_fp8.assert_same_bytes(scale_tokens, x, "float8_e4m3fn")
    q, scale = scale_tokens(values[:, None].astype(np.float16), "float8_e4m3fn")
    assert (q.astype(np.float32) * scale[:, None])[:, 0].tolist() == [
        448,
        448,
        480,
        1024,
    ]  # 232, 232.5, 250: 224, 240, 256
    assert scale.tolist() == [1, 2, 2, 4]


@report("miscompiled transposed operand", "https://github.com/pytorch/pytorch/issues/188841")
@NUMERICS
@pytest.mark.parametrize(("backend", "swap_ab"), SWAPS)
def test_no_dead_columns(backend: str, swap_ab: bool) -> None:
    """M, K, N = 16, 16, 32 of small integers in FP8: 224 of 512 outputs were zero, every fourth. Right: exact."""
    data = data_of(ids_of(16), experts=1, n=32, k=16, dtype="fp8-w8a8")
    assert (data.reference != 0).any(axis=(0, 1)).all()
    y = run(backend, data, "column", SMALL.replace(swap_ab=swap_ab))
    assert_exact(y, data)


@report("accumulation precision", "https://github.com/deepseek-ai/DeepGEMM/issues/50")
@NUMERICS
@EVERY_BACKEND
@pytest.mark.parametrize("dtype", ["fp8-w8a16", "fp8-w8a8"])
def test_small_products_beside_a_large_one(dtype: str, backend: str) -> None:
    """448 * 448 and 127 of 1 * 1, exactly 200,831; minus 448 * 448 in the next K step, so that y shows the rest.

    Right: 127 where sums are float32. Hopper's FP8 unit cuts below 2**-13 of the largest of what it adds, 16 here: all
    of the ones may be lost, and 16 for each of the 5 times that it adds up 32 products, no more.
    """
    row = np.array([448, *[1] * 127, 448], np.float32)
    sign = np.where(np.arange(129) == 128, -1, 1)
    w = np.tile(row * sign, (1, 64, 1))
    data = data_of(ids_of(1), experts=1, n=64, k=129, dtype=dtype, x=row[None], w=w)
    assert accumulate_fp8(row[None, :128], row[None, :128])[0, 0] == 200_704, "what the unit keeps of 200,831"
    assert (data.reference == 127).all()
    y = run(backend, data, "row", SMALL.replace(block_k=128)).astype(np.float64)
    if HAS_GPU and dtype == "fp8-w8a8":
        assert np.all((y >= -5 * 16) & (y <= 127 + 5 * 16))
    else:
        assert np.all(y == 127)


# Split-K and tuning


def uniforms(seed: int) -> Data:
    """One token, 120 uniform numbers to be summed."""
    x = np.random.default_rng(seed).random((1, 120), np.float32)
    return data_of(ids_of(1), experts=1, n=64, k=120, x=x, w=np.ones((1, 64, 120)))


@report(
    "tuner side effect",
    "https://github.com/triton-lang/triton/issues/4217",
    "https://github.com/facebookexperimental/triton/pull/1117",
)
@NUMERICS
@pytest.mark.parametrize(
    ("reduction", "backend"),
    # the JAX backends' other reductions in the interpreters: in the test of stale outputs
    [(r, b) for r in REDUCTIONS for b in backends.BACKENDS if HAS_GPU or r == "two-pass" or b == "torch-triton"],
)
def test_calls_leave_nothing_behind(reduction: str, backend: str) -> None:
    """120 uniforms summed by parts: 79,561 at the first call, 62.5 at the next, as trials had added up.

    Right: the same again, and the sum of new data; workspace and output hold NaN beforehand.
    """
    config = SMALL.replace(split_k=4, reduction=reduction)
    first, second = uniforms(0), uniforms(1)
    assert 40 < first.reference[0, 0, 0] < 80
    for data in (first, first, second):
        assert_close(run(backend, data, "column", config), data, config)


EIGHT_EXPERTS = Problem.of("fp16", tokens=4, experts=8, n=64, k=256, top_k=2)
PARTS = Config(block_n=64, block_k=256, num_stages=2, split_k=4)
SMALL_PARTS = PARTS.replace(block_k=64)


@report("non-determinism", "https://github.com/vllm-project/vllm/issues/56887")
@pytest.mark.compile_only
@EVERY_BACKEND
def test_the_default_reduction_has_no_atomics(backend: str) -> None:
    """E = 8, K = 1024 in four parts. Right: float32 partial sums added in a fixed order unless atomics are asked for,
    and Config says which of its choices vary from run to run."""
    assert PARTS.reduction == "two-pass"
    assert PARTS.deterministic
    assert [PARTS.replace(reduction=r).deterministic for r in REDUCTIONS] == [True, False, False]
    assert SMALL_PARTS.parts(EIGHT_EXPERTS.k) == 4
    assert not atomics(backend, SMALL_PARTS)
    if backend != "jax-triton":  # so that the absence above means something; it compiles torch-triton's kernel
        assert atomics(backend, SMALL_PARTS.replace(reduction="atomic-fp32"))


def atomics(backend: str, config: Config) -> list[str]:
    """Atomic instructions on global memory, and reducing copies to it, in what is compiled for this config.

    Of pallas-triton, atomic operations in what is given to XLA, which takes ten seconds to compile it.
    """
    if backend == "pallas-triton":
        import jax

        from backends import xla_compile

        module = backends.load(backend)
        call = functools.partial(module.moe_gemm, problem=EIGHT_EXPERTS, order="column", config=config)
        return re.findall(r"atomic_\w+", str(jax.make_jaxpr(call)(*xla_compile.argument_types(EIGHT_EXPERTS))))
    ptx = code.compiled(backend, EIGHT_EXPERTS, "column", config).ptx
    return re.findall(r"\b(?:atom|red)\.(?:\w+\.)*global\S*|cp\.reduce\S*", ptx)


@report("non-determinism")
@pytest.mark.gpu
@EVERY_BACKEND
def test_twenty_runs_are_bit_equal(backend: str) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((32, 1024)), rng.standard_normal((8, 256, 1024))
    data = data_of(ids_of(*[4] * 8), experts=8, n=256, k=1024, x=x, w=w)
    first = run(backend, data, "column", PARTS)
    assert_close(first, data, PARTS)
    for _ in range(19):
        assert run(backend, data, "column", PARTS).tobytes() == first.tobytes()


@report(
    "config lookup",
    "https://github.com/vllm-project/vllm/pull/52192",
    "https://github.com/sgl-project/sglang/pull/28077",
)
def test_a_large_batch_does_not_get_a_tiny_batchs_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys {1, 2, 4, 8}, asked for M = 2048. Right: the declared fallback, and the source says that it is one."""
    shape = model("mixtral-8x7b").problem("gate-up", 2048, "fp16")
    told = {name: getattr(shape, name) for name in ("dtype", "scale_layout", "experts", "n", "k", "top_k")}
    measured = [{"backend": "torch-triton", "tokens": t, "config": {"group_m": 99}, **told} for t in (1, 2, 4, 8)]
    monkeypatch.setattr(tuning, "_entries", lambda slug: measured)
    choice = backends.choose_config(shape, gpu="Some GPU")
    assert choice.source == "rule of thumb, no measured entry for Some GPU"
    assert choice.config == tuning.rule_of_thumb(shape, "torch-triton")
    near = backends.choose_config(dataclasses.replace(shape, tokens=8), gpu="Some GPU")
    assert near.config.group_m == 99


@report("config lookup")
def test_a_config_that_does_not_fit_is_refused_before_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """147,456 bytes of shared memory needed, 101,376 available: a crash. Right: refused, with both numbers."""
    config = Config(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8)
    problem = Problem.of("fp16", tokens=4, experts=2, n=256, k=64, top_k=1)
    assert config.num_stages * config.stage_bytes(2, 2) == 147_456
    assert triton_launch.unsupported(problem, config) is None, "it fits Hopper"
    torch_triton = backends.load("torch-triton")
    monkeypatch.setattr(torch_triton, "_shared_memory_limit", lambda *_: 101_376)
    monkeypatch.setattr(torch_triton, "moe_gemm", lambda *_, **__: pytest.fail("launched"))
    data = data_of(ids_of(4), experts=2, n=256, k=64)
    with pytest.raises(ArgumentError, match=r"147456 bytes.*allowed: 101376"):
        backends.moe_gemm(data.x, data.w, data.ids, config=config, interpret=True)


# Traps of Triton and JAX


@report(
    "interpreter gap",
    "https://github.com/triton-lang/triton/issues/11584",
    "https://github.com/triton-lang/triton/issues/5894",
)
@NUMERICS
@pytest.mark.parametrize("backend", backends.BACKENDS if HAS_GPU else ["torch-triton", "jax-triton"])
@pytest.mark.parametrize(("dtype", "split_k"), [("bf16", 1), ("fp16", 2)])
def test_interpreters_compute_what_is_meant(dtype: str, split_k: int, backend: str) -> None:
    """16x16 integers from -2 to 2: Triton's interpreter multiplies bfloat16's bit patterns (1e10) and refuses atomic
    additions of float16. Right: exact, in parts of K added by 16-bit atomics too."""
    data = data_of(ids_of(16), experts=1, n=16, k=16 * split_k, dtype=dtype)
    config = Config(block_m=16, block_n=64, block_k=16, num_stages=2, split_k=split_k, reduction="atomic")
    assert config.parts(data.problem.k) == split_k
    assert_exact(run(backend, data, "row", config), data)


@report("minimum tile", "https://github.com/jax-ml/jax/issues/20051")
@NUMERICS
@EVERY_BACKEND
@pytest.mark.parametrize(("m", "n"), [(32, 8), (32, 1)] if HAS_GPU else [(32, 1)])
def test_operands_smaller_than_any_tile(m: int, n: int, backend: str) -> None:
    """(32, 32) @ (32, 8) and @ (32, 1) were refused on the device, not in the interpreter. Right: padded inside."""
    data = data_of(ids_of(m), experts=1, n=n, k=32)
    assert_exact(run(backend, data, "row", SMALL), data)


@report("minimum tile")
@NUMERICS
@pytest.mark.parametrize("backend", backends.BACKENDS if HAS_GPU else ["torch-triton"])
def test_one_to_fifteen_rows(backend: str) -> None:
    for m in range(1, 16):
        data = data_of(ids_of(m), experts=1, n=8, k=32)
        assert_exact(run(backend, data, "row", SMALL), data)


@report("masking", "https://github.com/jax-ml/jax/pull/22370")
@NUMERICS
@quiet
@EVERY_BACKEND
def test_both_operands_are_masked(backend: str) -> None:
    """K = 96 in steps of 64: what follows a row is the next one, NaN here, and 0 * NaN is NaN. Right: none of it."""
    data = data_of(ids_of(6), experts=1, n=64, k=96)
    x, w = data.x.copy(), data.w.copy()
    x[1::2], w[:, 1::2] = np.nan, np.nan
    y = run(backend, dataclasses.replace(data, x=x, w=w), "row", SMALL.replace(block_k=64)).astype(np.float64)
    assert np.isnan(y[1::2]).all()
    assert np.isnan(y[:, :, 1::2]).all()
    np.testing.assert_array_equal(y[::2, :, ::2], data.reference[::2, :, ::2])


@report("wide tile", "https://github.com/marin-community/marin/issues/7484")
@NUMERICS
@EVERY_BACKEND
@pytest.mark.parametrize("groups", [(256, 256), (257, 255)] if HAS_GPU else [(257, 255)])
def test_a_tile_wider_than_the_output(groups: tuple[int, int], backend: str) -> None:
    """M = 512, K = 64, N = 160 in a tile of 256, even and uneven groups: was wrong. Right: exact."""
    data = data_of(ids_of(*groups), experts=2, n=160, k=64, dtype="bf16")
    assert_exact(run(backend, data, "row", Config(block_m=64, block_n=256, block_k=64, num_stages=2)), data)


@report("miscompiled chain", "https://github.com/openxla/xla/issues/19780")
@NUMERICS
@pytest.mark.parametrize("backend", backends.BACKENDS if HAS_GPU else ["torch-triton", "pallas-triton"])
def test_chained_products_of_ones(backend: str) -> None:
    """bfloat16 ones, 64x128 @ 128x64 @ 64x128 with 8 warps: was wrong on an H100. Right: 128 * 64 = 8192 everywhere."""
    config = Config(block_m=64, block_n=64, block_k=64, num_stages=2, num_warps=4 if backend == "pallas-mosaic" else 8)
    ones = functools.partial(np.ones, dtype=ml_dtypes.bfloat16)
    x = ones((64, 128))
    for n, k in ((64, 128), (128, 64)):
        data = data_of(ids_of(64), experts=1, n=n, k=k, dtype="bf16", x=x, w=ones((1, n, k)))
        x = run(backend, data, "row", config)[:, 0]
    assert x.shape == (64, 128)
    assert (x.astype(np.float64) == 8192).all()


@report(
    "pipelining",
    "https://github.com/triton-lang/triton/issues/6691",
    "https://github.com/triton-lang/triton/issues/10474",
)
@NUMERICS
@EVERY_BACKEND
def test_every_pipeline_depth_gives_the_same(backend: str) -> None:
    """Results changed at num_stages 2, and 3 crashed. Right: 1 to 4 are exact, or refused before they run."""
    data = data_of(ids_of(3, 2), experts=2, n=64, k=160)
    module = backends.load(backend)
    # Triton's interpreter has no pipeline; Mosaic's compiles for seconds
    for stages in (1, 2, 3, 4) if HAS_GPU else (1, 2, 4) if backend == "pallas-mosaic" else (4,):
        config = SMALL.replace(num_stages=stages)
        refusal = module.unsupported(data.problem, config)
        if refusal is None:
            assert_exact(run(backend, data, "row", config), data)
        else:
            assert (backend, stages) == ("pallas-mosaic", 1)
            assert refusal.startswith("config.num_stages: got 1; allowed: 2 or more")


@report("API drift", "https://github.com/marin-community/marin/pull/5347")
@pytest.mark.compile_only
@EVERY_BACKEND
def test_the_backend_that_is_asked_for_compiles_its_own_kernel(backend: str) -> None:
    """A removed load crashed on the GPU after an upgrade. Right: compiled with no GPU, each backend gives the kernel of
    its own name; none stands in for another."""
    order = next(p.values[2] for p in code.in_turn() if p.values[:2] == (backend, "fp16"))  # type: ignore[attr-defined]
    ptx = code.compiled(backend, code.problem_of("fp16"), order, code.config_of(backend, "fp16")).ptx
    assert f".entry {backends.load(backend).KERNEL_NAME}" in ptx


@report("version clash", "https://github.com/jax-ml/jax-triton/issues/365")
def test_versions_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax-triton fails to import beside another Triton. Right: importing the project survives, the call says which
    versions fit, and the other backends still run."""
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    reason = backends.load("jax-triton").unavailable(interpret=True)
    assert reason is not None
    for version in ("jax>=0.11,<0.12", "jax-triton>=0.4.1", "triton>=3.7"):
        assert version in reason
    with pytest.raises(backends.BackendUnavailable, match=r"^backend jax-triton cannot run here: "):
        backends.moe_gemm(**arguments("numpy"), backend="jax-triton", interpret=True)
    assert backends.moe_gemm(**arguments("numpy"), backend="torch-triton", interpret=True).shape == (3, 2, 64)


@report("version clash")
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")
@EVERY_BACKEND
def test_a_host_without_a_gpu_is_told_so(backend: str) -> None:
    with pytest.raises(backends.BackendUnavailable, match=r"GPU.*interpret=True"):
        backends.moe_gemm(**arguments("numpy"), backend=backend)


@report(
    "stale output",
    "https://github.com/jax-ml/jax-triton/pull/388",
    "https://github.com/jax-ml/jax/pull/35218",
)
@NUMERICS
@pytest.mark.parametrize("backend", JAX_BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_a_buffer_held_is_not_added(reduction: str, backend: str) -> None:
    """Split-K inside jax.jit twice, buffers full of 7. Right: no + 7, and the arguments are alive afterwards."""
    import jax

    data = uniforms(2)
    config = SMALL.replace(split_k=2, reduction=reduction)
    options = {"problem": data.problem, "order": "row", "config": config, "interpret": INTERPRET, "fill": 7.0}
    call = jax.jit(lambda x, w, ids: backends.load(backend).moe_gemm(x, w, ids, None, None, **options))
    device = jax.devices("gpu" if HAS_GPU else "cpu")[0]
    given = jax.device_put((data.x, data.w, data.ids), device)
    for _ in range(2):
        assert_close(np.asarray(call(*given)), data, config)
    for array, original in zip(given, (data.x, data.w, data.ids), strict=True):
        np.testing.assert_array_equal(np.asarray(array), original)


# Measurement


TINY = Model(name="tiny", hidden=64, intermediate=64, experts=4, top_k=2, tp=1, source="made up for these tests")


def tiny_row(backend: str) -> Any:
    from bench.cases import Case, Row

    return Row(Case(TINY, "gate-up", 4), "fp16", "column", backend)


class Logged:
    """The rehearsal's device, writing down what is asked of it."""

    def __init__(self) -> None:
        from bench.machine import Rehearsal

        self.device, self.log = Rehearsal(), []  # type: tuple[Any, list[str]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def synchronize(self) -> None:
        self.log.append("wait")
        self.device.synchronize()

    def flush(self) -> None:
        self.log.append("flush")

    def state(self) -> dict[str, Any]:
        return {"sm_mhz": 1980, "watts": 500.0}


class Benchmark:
    """pytest-benchmark's fixture, as far as the suite uses it: pedantic with this timer."""

    def __init__(self, timer: Callable[[], float], log: list[str]) -> None:
        self.timer, self.log = timer, log
        self.extra_info: dict[str, Any] = {}
        self.group, self.has_error = "", False

    def pedantic(self, call: Callable[[], Any], *, setup: Callable[[], None], rounds: int, iterations: int) -> Any:
        assert iterations == 1, "more calls a round would find the cache warm"
        seconds = []
        self.log.clear()
        for _ in range(rounds):
            setup()
            start = self._read()
            result = call()
            seconds.append(self._read() - start)
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=seconds, median=sorted(seconds)[rounds // 2]))
        return result

    def _read(self) -> float:
        self.log.append("read")
        return self.timer()


@functools.cache
def measured_once(*, warm: bool) -> tuple[Benchmark, list[str]]:
    """One kernel-time benchmark of two rounds of the tiny row; its log and extra_info."""
    from bench import data, results
    from bench.suite import Suite, gpu_kernel_seconds

    device = Logged()
    cache = data.DataCache(lambda *key: data.build(*key, device="cpu"))
    benchmark = Benchmark(gpu_kernel_seconds, device.log)
    with tempfile.TemporaryDirectory() as folder:
        journal = results.Journal(Path(folder, "run.jsonl"))
        suite = Suite(device=device, journal=journal, data=cache, rounds=2, warm=warm, total=1, say=print)  # type: ignore[arg-type]
        suite.kernel_time(benchmark, tiny_row("torch-triton"), captured=False)
    return benchmark, device.log


@report(
    "warm cache",
    "https://github.com/NVIDIA/Fuser/pull/1132",
    "https://github.com/meta-pytorch/tritonbench/pull/519",
)
@pytest.mark.interpret
@pytest.mark.parametrize("warm", [False, True])
def test_the_cache_is_flushed_before_each_call_and_outside_of_its_time(warm: bool) -> None:
    """Rounds and replays that reuse 20 MB of weights measure L2. Right: one call a round, flushed before the clock is
    read unless warm is asked for, and the result says which; the flush reads several times L2."""
    from bench import cold

    benchmark, log = measured_once(warm=warm)
    before = [] if warm else ["flush"]
    ends = [index for index, entry in enumerate(log) if entry == "read"]
    assert len(ends) == 4
    first, second = log[: ends[0]], log[ends[1] + 2 : ends[2]]  # each reading waits for the device: ["read", "wait"]
    assert [entry for entry in first if entry == "flush"] == before
    assert [entry for entry in second if entry == "flush"] == before
    assert "flush" not in log[ends[0] : ends[1]]
    assert "flush" not in log[ends[2] : ends[3]]
    assert benchmark.extra_info["cache"] == ("warm" if warm else "cold")
    assert cold.L2_MULTIPLE >= 2


@report(
    "asynchronous timing",
    "https://github.com/rapidsai/cusignal/issues/220",
    "https://github.com/astro-informatics/s2fft/pull/359",
)
@pytest.mark.interpret
def test_the_clock_is_read_when_the_device_is_done() -> None:
    """Times of launches, not of kernels. Right: after the call, and before each reading, the device is waited for."""
    _, log = measured_once(warm=False)
    start, end = [index for index, entry in enumerate(log) if entry == "read"][:2]
    assert log[start : start + 2] == ["read", "wait"]
    assert log[start + 2 : end] == ["wait"], "the call's own"
    assert log[end : end + 2] == ["read", "wait"]


@report("asynchronous timing")
@pytest.mark.interpret
def test_arrays_are_arguments_of_the_jitted_call() -> None:
    """Arrays that a jitted function closes over may be folded into constants. Right: other arguments, other result."""
    from bench import contenders, data

    device = Logged()
    row = tiny_row("jax-triton")
    contender = contenders.prepare(row, data.build(row.case, "fp16", "channel", device="cpu"), device)  # type: ignore[arg-type]
    call = contenders.capture(contender, device)  # type: ignore[arg-type]
    first = np.asarray(call()).astype(np.float32)
    x, *rest = contender.arguments
    contender.arguments = (x * 2, *rest)
    np.testing.assert_array_equal(np.asarray(call()).astype(np.float32), first * 2)


@report("asynchronous timing")
def test_the_floor_doubles_with_n() -> None:
    """What no time may be below grows with the work, so an unsynchronised time would be seen to be impossible."""
    floors = [
        Problem.of("fp16", tokens=8, experts=8, n=n, k=4096, top_k=2).floor_seconds(
            [2] * 8, bytes_per_second=4.7e12, flops_per_second=8e14
        )
        for n in (8192, 16384)
    ]
    assert floors[1] / floors[0] == pytest.approx(2, rel=0.01)


@functools.cache
def the_gpu() -> Any:
    """One for all tests, as CUPTI takes one user; a skip where the clock cannot be had."""
    from bench.clock import ClockError
    from bench.machine import Machine

    try:
        return Machine("cupti")
    except ClockError as error:
        pytest.skip(str(error))


@report("asynchronous timing")
@pytest.mark.gpu
@EVERY_BACKEND
def test_time_doubles_with_n(backend: str) -> None:
    """Weights of 1 and 2 GB. Right: about twice the time."""
    from bench import contenders, data, measure
    from bench.cases import Case, Row

    device = the_gpu()
    device.clock.reset()
    times = []
    for intermediate in (8192, 16384):
        case = Case(dataclasses.replace(TINY, hidden=4096, intermediate=intermediate, experts=8), "gate-up", 8)
        row = Row(case, "fp16", "column", backend)
        contender = contenders.prepare(row, data.build(case, "fp16", "channel", device="cuda"), device)
        times.append(min(measure.gpu_sample(contender, device) for _ in range(5)))
    device.clock.pause()
    assert 1.6 < times[1] / times[0] < 2.4


@report(
    "data and clock bias",
    "https://www.thonking.ai/p/strangely-matrix-multiplications",
    "https://github.com/triton-lang/triton/issues/1507",
)
@pytest.mark.interpret
def test_data_is_random_and_clocks_are_recorded() -> None:
    """Zeros run faster than random numbers, as they draw less power. Right: random by default; the state of the clocks
    and the power before and after stand beside the time, in what is committed too."""
    from bench import data, machine, results

    drawn = data.build(tiny_row("torch-triton").case, "fp16", "channel", device="cpu")
    for values in (drawn.x, drawn.w):
        assert float((values == 0).float().mean()) < 0.01
        assert len(values.unique()) > values.numel() / 20
    benchmark, _ = measured_once(warm=False)
    for when in ("state_before", "state_after"):
        assert benchmark.extra_info[when] == {"sm_mhz": 1980, "watts": 500.0}
    assert {"sm_mhz", "memory_mhz", "watts"} <= set(machine._SMI_KEYS)
    for runs in results.committed().values():
        for row in (row for each in runs for row in each["rows"] if "kernel_us" in row):
            assert {"sm_mhz", "watts"} <= set(row["state_before"]), row["id"]


@report("benchmark loophole", "https://github.com/flashinfer-ai/flashinfer-bench-starter-kit/issues/21")
@NUMERICS
@EVERY_BACKEND
def test_new_contents_at_the_same_addresses_give_new_results(backend: str) -> None:
    """Outputs cached by address make a kernel look fast. Right: the same arrays with new contents, a new result."""
    first, second = (data_of(ids_of(2, 1), experts=2, n=64, k=32, seed=seed) for seed in (0, 10))
    x, w, ids = first.x.copy(), first.w.copy(), first.ids.copy()
    call = functools.partial(backends.moe_gemm, config=SMALL, backend=backend, interpret=INTERPRET)
    assert_exact(call(x, w, ids), first)
    for array, contents in ((x, second.x), (w, second.w)):
        array[...] = contents
    assert not np.array_equal(first.reference, second.reference)
    assert_exact(call(x, w, ids), second)


@report("benchmark loophole")
@pytest.mark.gpu
def test_a_timed_call_follows_new_contents() -> None:
    """The captured call of a benchmark row, replayed after its weights were doubled in place: y doubles."""
    import torch

    from bench import contenders, data
    from bench.cases import Row
    from bench.machine import Rehearsal

    row = tiny_row("torch-triton")
    device = Rehearsal()
    device.interpret, device.torch_device = False, "cuda"  # type: ignore[misc]
    device.synchronize = torch.cuda.synchronize  # type: ignore[method-assign]
    given = data.build(row.case, "fp16", "channel", device="cuda")
    contender = contenders.prepare(Row(row.case, "fp16", "column", "torch-triton"), given, device)
    call = contenders.capture(contender, device)
    first = contenders.wait(call(), "torch", device).clone()
    given.w.mul_(2)
    assert torch.equal(contenders.wait(call(), "torch", device), first * 2)


COUNTED = """==PROF== Connected
"ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum","lts__t_sector_hit_rate.pct"
"","","byte","ns","%"
"0","moe_gemm_kernel","1,000,000","20000","{hits}"
"""


@report("profiler state", "https://github.com/NVIDIA/Fuser/issues/775")
def test_hit_rates_say_how_the_profiler_left_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ncu flushes L2 before each replay, or not. Right: which of them is asked for by name and stands beside every hit
    rate, and a file of both keeps them apart."""
    from bench import counters
    from bench.points import Point

    point = Point(model="mixtral-8x7b", tokens=8, config=Config())

    def child(command: list[str], **_: Any) -> Any:
        cache = command[command.index("--cache-control") + 1]
        Path(command[command.index("--log-file") + 1]).write_text(COUNTED.format(hits={"all": 5, "none": 95}[cache]))
        Path(command[-1]).write_text(json.dumps({"launches": 1}) + "\n")
        return SimpleNamespace(stdout=[], wait=lambda timeout: 0, returncode=0)

    monkeypatch.setattr(counters, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(counters, "available_metrics", lambda ncu: ["dram__bytes_read.sum"])
    monkeypatch.setattr(counters.subprocess, "Popen", child)
    out = tmp_path / "counters.jsonl"
    for cache in ("all", "none", "all"):
        counters.collect([point], out, say=print, cache=cache)
    assert len(out.read_text().splitlines()) == 2
    for cache, hits in (("all", 5), ("none", 95)):
        (row,) = counters.read(out, cache)
        assert (row["cache_control"], row["l2_hit_percent"]) == (cache, hits)
        headings, (line,) = counters.table([row])
        assert (line[headings.index("cache control")], line[headings.index("L2 hit %")]) == (cache, f"{hits:.1f}")
    with pytest.raises(ValueError, match="cache: got 'warm'; allowed: all, none"):
        counters.measure([point], cache="warm")


def test_every_kind_has_a_link_and_a_part_that_needs_no_gpu() -> None:
    assert len(REPORTS) == 27
    assert all(links and all(link.startswith("https://") for link in links) for links in REPORTS.values())
    assert set(REPORTS) == _RUN_WITHOUT_GPU
