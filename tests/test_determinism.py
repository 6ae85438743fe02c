"""Same bits: run after run, in CUDA-graph replays, inside an outer jit; and a token's row whatever stands beside it.

Which variant holds what is stated in `notes/guarantees.md`. The interpreters are held to the same statements as the
compiled kernels, in fewer runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import backends
from backends import arrays
from shared.config import REDUCTIONS, Config
from shared.orders import ORDERS
from shared.problem import Problem
from tests.cases import SMALL, VARIANTS
from tests.test_gpu import Given, draw
from tests.where import HAS_GPU, INTERPRET, NUMERICS

RUNS = 20 if HAS_GPU else 2
DEVICE = "cuda" if HAS_GPU else "cpu"
TOKENS, EXPERTS, TOP_K = (96, 8, 4) if HAS_GPU else (20, 3, 2)
N, K = (640, 1056) if HAS_GPU else (96, 160)
"""Several tiles each way, tails in N and K; experts with more slots than a tile row holds."""
CONFIG = Config(block_m=16, block_n=64, block_k=64, num_stages=3, group_m=2) if HAS_GPU else SMALL
TWO_PASS = CONFIG.replace(split_k=3, reduction="two-pass")

EVERY_BACKEND = pytest.mark.parametrize("backend", backends.BACKENDS)


def every_variant(*names: str) -> Any:
    """backend x variant x order. By default each backend and variant in one order, interpreters with one or two."""

    def by_default(i: int, j: int, variant: str, order: str) -> bool:
        interpreted = ("fp8-w8a8-block",) if names[i] == "pallas-mosaic" else ("fp16", "fp8-w8a8-block")
        return order == ORDERS[(i + j) % len(ORDERS)] and (HAS_GPU or variant in interpreted)

    return pytest.mark.parametrize(
        ("backend", "variant", "order"),
        [
            pytest.param(
                backend, variant, order, id=f"{backend}-{variant}-{order}",
                marks=() if by_default(i, j, variant, order) else pytest.mark.slow,
            )
            for i, backend in enumerate(names)
            for j, variant in enumerate(VARIANTS)
            for order in ORDERS
        ],
    )  # fmt: skip


JAX_BACKENDS = [name for name in backends.BACKENDS if backends.load(name).FRAMEWORK == "jax"]


def drawn(variant: str) -> Given:
    dtype, layout = VARIANTS[variant]
    problem = Problem.of(
        dtype, scale_layout=layout or "channel", tokens=TOKENS, experts=EXPERTS, n=N, k=K, top_k=TOP_K,
        routing_weight=True,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    given = draw(problem, rng.integers(-1, EXPERTS, (TOKENS, TOP_K)).astype(np.int32), device=DEVICE)
    # Tokens of very different size: a scale that is taken of the batch and not of the token would show.
    size = given.x.new_tensor(2.0 ** rng.integers(-6, 5, (TOKENS, 1)))
    return dataclasses.replace(given, x=given.x * size)


def of_tokens(given: Given, tokens: list[int]) -> Given:
    """The same problem for some of its tokens, in that order."""
    problem = dataclasses.replace(given.problem, tokens=len(tokens))
    return dataclasses.replace(
        given, problem=problem, x=given.x[tokens], ids=given.ids[tokens], topk_weight=given.topk_weight[tokens]
    )


FILL = None if HAS_GPU else float("nan")
"""What y's buffer holds beforehand: on a GPU, what is there, as in a call through the door."""


def y_of(backend: str, given: Given, order: str, config: Config, *, fill: float | None = FILL) -> np.ndarray:
    """y's bits (uint16), past the door so that its buffer can hold `fill` beforehand."""
    module = backends.load(backend)
    if (reason := module.unavailable(interpret=INTERPRET) or module.unsupported(given.problem, config)) is not None:
        pytest.skip(f"{backend}: {reason}")
    native = [
        None if array is None else arrays.to_framework(array, module.FRAMEWORK, on_gpu=HAS_GPU)
        for array in (given.x, given.w, given.ids, given.w_scale, given.topk_weight)
    ]
    y = module.moe_gemm(
        *native, problem=given.problem, order=order, config=config, interpret=INTERPRET, fill=fill
    )  # fmt: skip
    return bits(y)


def bits(y: Any) -> np.ndarray:
    return np.ascontiguousarray(arrays.to_host(y)).view(np.uint16)


def other_work() -> None:
    """Leaves other values in caches, in freed memory and on the multiprocessors."""
    if HAS_GPU:
        import torch

        a = torch.randn(1024, 1024, device="cuda")
        (a @ a).sum().item()
        del a


def assert_same_runs(backend: str, variant: str, order: str, config: Config) -> None:
    given = drawn(variant)
    first = y_of(backend, given, order, config)
    assert first.any()
    for run in range(1, RUNS):
        other_work()
        again = y_of(backend, given, order, config, fill=7.0 if run == 1 else FILL)
        assert np.array_equal(again, first), f"run {run}: {(again != first).sum()} of {first.size} elements differ"


@NUMERICS
@every_variant(*backends.BACKENDS)
def test_same_bits_run_after_run(backend: str, variant: str, order: str) -> None:
    assert_same_runs(backend, variant, order, CONFIG)


def test_only_atomic_reductions_are_not_deterministic() -> None:
    assert CONFIG.deterministic
    split = {reduction: CONFIG.replace(split_k=2, reduction=reduction).deterministic for reduction in REDUCTIONS}
    assert split == {"two-pass": True, "atomic-fp32": False, "atomic": False}
    for backend in backends.BACKENDS:  # none of them is what a call without a config gets
        for tokens in (1, 16, 256):
            problem = Problem.of("fp16", tokens=tokens, experts=8, n=4096, k=4096, top_k=2)
            assert backends.config_for(problem, backend=backend, gpu="NVIDIA H200").deterministic


@pytest.mark.gpu
@every_variant("torch-triton")
def test_same_bits_in_cuda_graph_replays(backend: str, variant: str, order: str) -> None:
    import torch

    given = drawn(variant)

    def call() -> Any:
        return backends.moe_gemm(
            given.x, given.w, given.ids, w_scale=given.w_scale, topk_weight=given.topk_weight, mode=given.problem.dtype,
            order=order, config=CONFIG, backend=backend,
        )  # fmt: skip

    eager = bits(call())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for _ in range(RUNS):
        y.zero_()
        other_work()
        graph.replay()
        assert np.array_equal(bits(y), eager)


@pytest.mark.gpu
@every_variant(*JAX_BACKENDS)
def test_same_bits_inside_an_outer_jit(backend: str, variant: str, order: str) -> None:
    """As a call by itself, also where XLA has work of its own before and after to fuse."""
    import jax

    given = drawn(variant)
    x, w, ids, w_scale, weight = given.native("jax")

    def call(x: Any, w: Any, ids: Any, w_scale: Any, weight: Any) -> Any:
        return backends.moe_gemm(
            x, w, ids, w_scale=w_scale, topk_weight=weight, mode=given.problem.dtype, order=order, config=CONFIG,
            backend=backend,
        )  # fmt: skip

    outer = jax.jit(lambda x, *others: -call(-x, *others))
    eager = bits(-call(-x, w, ids, w_scale, weight))
    for _ in range(RUNS):
        other_work()
        assert np.array_equal(bits(outer(x, w, ids, w_scale, weight)), eager)


# Batch invariance

SMALLER_BATCHES = ([TOKENS - 1, 3, 17, 4, 11, 0], [17]) if HAS_GPU else ([TOKENS - 1, 3, 17, 4, 11, 0],)
"""Tokens in another order: they meet other neighbours, in other places of other tiles, or none."""


def assert_batch_invariant(backend: str, variant: str, order: str, config: Config) -> None:
    given = drawn(variant)
    batch = y_of(backend, given, order, config)
    for tokens in SMALLER_BATCHES:
        alone = y_of(backend, of_tokens(given, tokens), order, config)
        different = (alone != batch[tokens]).any(axis=(1, 2))
        assert not different.any(), f"tokens {np.array(tokens)[different]} differ in a batch of {len(tokens)}"


@NUMERICS
@every_variant(*backends.BACKENDS)
def test_a_row_does_not_depend_on_the_batch(backend: str, variant: str, order: str) -> None:
    """Config fixed: the bits of a token's rows are the same alone, among others, and in another place."""
    assert_batch_invariant(backend, variant, order, CONFIG)


@NUMERICS
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(b, marks=pytest.mark.slow if INTERPRET and b.startswith("pallas") else ())
        for b in backends.BACKENDS
    ],
)
def test_split_k_in_two_passes_keeps_the_bits(backend: str) -> None:
    """Where K is cut depends on K and the config alone, and partial sums are added in a fixed order: by a second
    kernel, and two parts in pallas-mosaic by clusters."""
    for config in (TWO_PASS, TWO_PASS.replace(split_k=2)) if backend == "pallas-mosaic" else (TWO_PASS,):
        assert_same_runs(backend, "bf16", "row", config)
        assert_batch_invariant(backend, "bf16", "row", config)


TALL = CONFIG.replace(block_m=48)
TALL_TILES = {name: TALL for name in backends.BACKENDS if name != "pallas-mosaic"} | {
    "pallas-mosaic": TALL.replace(block_n=128, num_warps=8),
    "pallas-mosaic in turns": TALL.replace(block_n=128, num_warps=8, ping_pong=True),
}


@NUMERICS
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if INTERPRET and n.startswith("pallas") else ()) for n in TALL_TILES],
)
def test_tall_tiles_keep_the_bits(name: str) -> None:
    """A row has the same bits in a tile's first block of rows and in its second, in a short tile and in a full one."""
    backend, config = name.split()[0], TALL_TILES[name]
    given = drawn("bf16")
    given = dataclasses.replace(given, ids=given.ids * 0)  # all slots are one expert's: two blocks of rows, or more
    batch = y_of(backend, given, "row", config)
    for _ in range(RUNS):
        other_work()
        assert np.array_equal(y_of(backend, given, "row", config), batch)
    for tokens in (*SMALLER_BATCHES, list(range(TOKENS))[::-1]):
        alone = y_of(backend, of_tokens(given, tokens), "row", config)
        assert np.array_equal(alone, batch[tokens])


@NUMERICS
@EVERY_BACKEND
def test_without_a_config_the_batch_chooses_one(backend: str) -> None:
    """config=None promises no invariance: the number of tokens chooses the config, and that the order of the sums.

    What holds: such a call is the call with `config_for`'s config, bit for bit; and another depth of K steps does give
    other bits, so that a caller who needs the same ones has to fix the config. (The checks above can fail.)
    """
    few, many = (Problem.of("fp16", tokens=tokens, experts=8, n=14336, k=4096, top_k=2) for tokens in (1, 4096))
    assert backends.config_for(few, backend=backend) != backends.config_for(many, backend=backend)

    if INTERPRET and backend != "torch-triton":
        return
    given = drawn("fp16")
    chosen = backends.config_for(given.problem, backend=backend)
    y = backends.moe_gemm(
        given.x, given.w, given.ids, topk_weight=given.topk_weight, backend=backend, interpret=INTERPRET
    )  # fmt: skip
    assert np.array_equal(bits(y), y_of(backend, given, "column", chosen))
    if INTERPRET:  # a matrix unit may add in one order whatever the step
        other = CONFIG.replace(block_k=64)
        assert not np.array_equal(y_of(backend, given, "column", CONFIG), y_of(backend, given, "column", other))
