"""The correctness suite: every backend x order x dtype x case against the float64 reference.

Output buffers hold NaN beforehand, so an element that no program writes shows. Bounds: `shared.reference.error_bound`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import backends
from backends import arrays
from shared import fp8
from shared.config import REDUCTIONS, Config
from shared.orders import ORDERS
from shared.reference import moe_gemm_reference
from tests import cases
from tests.cases import CASES, VARIANTS, Data, build
from tests.execute import check, run
from tests.where import HAS_GPU, INTERPRET, NUMERICS

EVERY_BACKEND = pytest.mark.parametrize("backend", backends.BACKENDS)


def spared(backend: str, name: str, variant: int, order: int) -> bool:
    """Left to the slow run, as JAX's interpreters compile for seconds a test: of full cases, so that every variant and
    every order remain, and with tails; of cases of integers, so that every variant remains in one of them. Of Pallas's
    interpreters more: scales of blocks by block alone, the other cases in one variant each.

    torch-triton, of which jax-triton has the kernel, runs all.
    """
    if backend == "torch-triton":
        return False
    if name in cases.FULL:
        return (variant + order) % (3 if backend.startswith("pallas") else 2) != 0
    pallas = backend.startswith("pallas") and not HAS_GPU
    if name.startswith("integers"):
        return variant % 2 != (name == "integers-wide-k")
    if pallas and name == "scale-blocks":
        return not list(VARIANTS)[variant].endswith("block")
    # The 16-bit variant of a case in one of the two, its FP8 variant in the other, in turn.
    sixteen_bit = variant < 2
    return pallas and sixteen_bit == ((list(CASES).index(name) + (backend == "pallas-triton")) % 2 == 0)


def matrix() -> list[object]:
    return list(_matrix())


def _matrix() -> Iterator[object]:
    for name, case in CASES.items():
        quick = cases.quick(name)
        for i, variant in enumerate(VARIANTS):
            for j, order in enumerate(ORDERS):
                for backend in backends.BACKENDS:
                    marks = (pytest.mark.slow,) if (variant, order) not in quick or spared(backend, name, i, j) else ()
                    yield pytest.param(
                        backend, case, variant, order, marks=marks, id=f"{name}-{variant}-{order}-{backend}"
                    )


@NUMERICS
@pytest.mark.parametrize(("backend", "case", "variant", "order"), matrix())
def test_against_reference(backend: str, case: cases.Case, variant: str, order: str) -> None:
    data = build(case.name, variant)
    y = run(backend, data, order, case.config)
    check(y, data)
    if case.integers:
        assert np.array_equal(y.astype(np.float64), data.reference), "small integers must come out exact"


def splits() -> Iterator[object]:
    """backend, variant, reduction. Where a test takes seconds, one variant of each by default, in turn (test_mosaic.py
    has more of pallas-mosaic's)."""
    for i, backend in enumerate(backends.BACKENDS):
        for j, variant in enumerate(VARIANTS):
            for k, reduction in enumerate(REDUCTIONS):
                quick = backend == "torch-triton" or (i + j + 2 * k) % len(VARIANTS) == 0
                marks = () if quick else (pytest.mark.slow,)
                yield pytest.param(backend, variant, reduction, marks=marks, id=f"{variant}-{reduction}-{backend}")


@NUMERICS
@pytest.mark.parametrize(("backend", "variant", "reduction"), list(splits()))
def test_split_k(backend: str, variant: str, reduction: str) -> None:
    """Buffers that parts of K are stored or added to hold NaN beforehand, as y does."""
    data = cases.data_of(cases.SPLIT, variant)
    config = cases.SPLIT.config.replace(reduction=reduction)
    assert (config.parts(data.problem.k), config.split_k) == (4, 5)
    check(run(backend, data, "popular", config), data, config.rounded_parts(data.problem.k))


def test_split_k_is_refused_nowhere() -> None:
    """So that no reduction falls out of the test above unseen."""
    for backend in backends.BACKENDS:
        for variant in VARIANTS:
            for reduction in REDUCTIONS:
                config = cases.SPLIT.config.replace(reduction=reduction)
                assert backends.load(backend).unsupported(cases.SPLIT.problem(variant), config) is None


@NUMERICS
@EVERY_BACKEND
@pytest.mark.parametrize("reduction", ["atomic", pytest.param("atomic-fp32", marks=pytest.mark.slow)])
def test_split_k_again_with_other_data(backend: str, reduction: str) -> None:
    """The buffer that parts are added to is cleared in every call: what it held, 7 here, is not in y. Elsewhere, jitted
    calls added to what the last call had left. The first call's result stays as it was."""
    config = cases.SPLIT.config.replace(reduction=reduction)
    first = cases.data_of(cases.SPLIT, "fp16")
    halved = dataclasses.replace(first, x=first.x / np.float16(2), reference=first.reference / 2)
    parts = config.rounded_parts(first.problem.k)
    y = run(backend, first, "column", config, fill=7.0)
    check(run(backend, halved, "column", config, fill=7.0), halved, parts)
    check(y, first, parts)


def tall() -> Iterator[object]:
    """backend, variant, order, changes of the config; few of them by default."""
    few = {
        ("torch-triton", "bf16", True), ("torch-triton", "fp8-w8a8-block", False),
        ("jax-triton", "fp8-w8a8-channel", True), ("pallas-triton", "fp8-w8a16-block", True),
    }  # fmt: skip
    for i, variant in enumerate(VARIANTS):
        for swap_ab in (True, False):
            for backend in ("torch-triton", "jax-triton", "pallas-triton"):
                order = ORDERS[(i + swap_ab) % len(ORDERS)]
                marks = () if (backend, variant, swap_ab) in few else (pytest.mark.slow,)
                name = f"{variant}-{order}-{'swap-' if swap_ab else ''}{backend}"
                yield pytest.param(backend, variant, order, {"swap_ab": swap_ab}, marks=marks, id=name)
    for reduction in REDUCTIONS:
        changes = {"split_k": 2, "reduction": reduction}
        for backend in ("torch-triton", "pallas-triton"):
            marks = () if (backend, reduction) == ("torch-triton", "two-pass") else (pytest.mark.slow,)
            name = f"split-{reduction}-{backend}"
            yield pytest.param(backend, "fp8-w8a16-channel", "row", changes, marks=marks, id=name)


@NUMERICS
@pytest.mark.parametrize(("backend", "variant", "order", "changes"), list(tall()))
def test_tiles_of_two_blocks_of_rows(backend: str, variant: str, order: str, changes: dict[str, Any]) -> None:
    """pallas-mosaic's tall tiles are another thing: tests/test_mosaic.py."""
    data = cases.data_of(cases.TALL, variant)
    config = cases.TALL.config.replace(**changes)
    check(run(backend, data, order, config), data, config.rounded_parts(data.problem.k))


@NUMERICS
@pytest.mark.parametrize(
    ("backend", "variant"),
    [
        pytest.param(backend, variant, marks=() if (i, b) in ((1, 0), (2, 1)) else pytest.mark.slow)
        for i, variant in enumerate(VARIANTS)
        for b, backend in enumerate(("torch-triton", "pallas-triton", "jax-triton"))
    ],
)
@pytest.mark.parametrize("swap_ab", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tails_of_which_half_is_multiplied(swap_ab: bool, backend: str, variant: str) -> None:
    """Not pallas-mosaic, as above."""
    data = cases.data_of(cases.HALVED, variant)
    config = cases.HALVED.config.replace(swap_ab=swap_ab)
    check(run(backend, data, "row", config), data)


@NUMERICS
@pytest.mark.parametrize("backend", ["pallas-triton", "pallas-mosaic"])
def test_a_deprecated_lowering_is_not_told_and_later_calls_change_no_warnings(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backends import pallas_prepare

    data = build("one-token", "fp16")
    config = CASES["one-token"].config.replace(group_m=5)  # no other test's: it is lowered here
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(backend, data, "row", config)

    def touched() -> None:
        raise AssertionError("a later call changes the process's warnings")

    monkeypatch.setattr(pallas_prepare.warnings, "catch_warnings", touched)
    check(run(backend, data, "row", config), data)


@NUMERICS
@pytest.mark.parametrize("k", [168, 136])
def test_two_products_a_step(k: int) -> None:
    """pallas-triton takes a K step of widened weights in halves; the last one ends within its second, or its first."""
    from backends import pallas_triton

    case = dataclasses.replace(
        cases.TALL, k=k, config=Config(block_m=48, block_n=64, block_k=64, num_stages=2),
        ids=np.repeat(np.array([0, 2], np.int32), (33, 50))[:, None],
    )  # fmt: skip
    data = cases.data_of(case, "fp8-w8a16-channel")
    assert pallas_triton._in_halves(data.problem, case.config)
    check(run("pallas-triton", data, "column", case.config), data)


@pytest.mark.parametrize("backend", ["torch-triton", "jax-triton", "pallas-triton"])
def test_rows_that_are_not_two_blocks_are_refused(backend: str) -> None:
    problem = cases.TALL.problem("fp16")
    unsupported = backends.load(backend).unsupported
    assert all(unsupported(problem, Config(block_m=m, block_n=64, block_k=64)) is None for m in (16, 48, 96, 128, 160))
    for rows in (112, 176, 208):
        reason = unsupported(problem, Config(block_m=rows, block_n=64, block_k=64))
        assert reason is not None
        assert f"config.block_m: got {rows}" in reason


@NUMERICS
@EVERY_BACKEND
def test_popularity_changes_the_walk_and_no_result(backend: str) -> None:
    """Experts hot in earlier steps are other ones than in this: rows of y are where they belong all the same."""
    case = CASES["many-rows"]
    data = build(case.name, "fp16")
    check(run(backend, data, "popular", case.config, popularity=np.array([5, -1, 5], np.int32)), data)


REFUSED = {
    # pallas-mosaic: the weights are wgmma's left operand, always
    *((("pallas-mosaic", name, variant)) for name in ("tokens-left", "integers-tokens-left") for variant in VARIANTS),
    # pallas-mosaic: one block scale a step, so block_n = 256 does not go with 128 x 128 blocks
    ("pallas-mosaic", "wide-tile", "fp8-w8a16-block"),
    ("pallas-mosaic", "wide-tile", "fp8-w8a8-block"),
}


def test_refused_combinations_are_exactly_these() -> None:
    """So that nothing falls out of the matrix unseen."""
    found = {
        (backend, name, variant)
        for backend in backends.BACKENDS
        for name, case in CASES.items()
        for variant in VARIANTS
        if backends.load(backend).unsupported(case.problem(variant), case.config)
    }
    assert found == REFUSED


def test_default_run_meets_every_backend_order_and_variant() -> None:
    met = {pair for name in CASES for pair in cases.quick(name)}
    assert met == {(variant, order) for variant in VARIANTS for order in ORDERS}
    assert all(len({v for v, _ in cases.quick(name)} & {"fp16", "bf16"}) >= 1 for name in CASES)
    assert all(any(v.startswith("fp8") for v, _ in cases.quick(name)) for name in CASES)


def test_default_run_meets_every_order_and_variant_of_each_backend() -> None:
    """With tails in N and K, and exactly; whatever is spared."""
    met: dict[str, set[tuple[str, str, str]]] = {}
    for parameter in matrix():
        backend, case, variant, order = parameter.values  # type: ignore[attr-defined]
        if not parameter.marks and backends.load(backend).unsupported(case.problem(variant), case.config) is None:  # type: ignore[attr-defined]
            met.setdefault(backend, set()).add((case.name, variant, order))
    for backend in backends.BACKENDS:
        full = {(variant, order) for name, variant, order in met[backend] if name in cases.FULL}
        assert {variant for variant, _ in full} == set(VARIANTS)
        assert {order for _, order in full} == set(ORDERS)
        assert {variant for name, variant, _ in met[backend] if CASES[name].integers} == set(VARIANTS)
        assert {name for name, _, _ in met[backend]} >= set(CASES) - {name for _, name, _ in REFUSED}


@NUMERICS
@EVERY_BACKEND
def test_poison_shows_what_is_not_written(backend: str) -> None:
    """The suite's own check: what the buffer held makes no difference, and one NaN that stays is found."""
    data = build("ragged", "fp16")
    y = run(backend, data, "row", CASES["ragged"].config, fill=7.0)
    check(y, data)
    y = y.copy()
    y[1, 0, 3] = np.nan
    with pytest.raises(AssertionError, match=r"^1 of \d+ elements unwritten"):
        check(y, data)


@NUMERICS
@EVERY_BACKEND
@pytest.mark.parametrize("wrong", [2, -2, *((3, 2**31 - 1, -(2**31)) if HAS_GPU else ())])
def test_unchecked_wrong_expert_gives_zeros(backend: str, wrong: int) -> None:
    """Ids outside [-1, E) that reach a device unchecked: a row of zeros, as documented, and no read out of bounds."""
    ids = np.array([(0, 1), (wrong, 0), (1, wrong)], np.int32)
    case = cases.Case(name="wrong-expert", reason="", ids=ids, experts=2, n=64, k=32)
    data = _build(case, "fp16")
    y = run(backend, data, "column", case.config)
    check(y, data)


@NUMERICS
@EVERY_BACKEND
@pytest.mark.parametrize("variant", ["fp16", "fp8-w8a8-channel"])
def test_rows_without_an_expert_are_zeros_where_parts_are_added(backend: str, variant: str) -> None:
    """Nobody has written their sums, and what would scale them is NaN, or not there."""
    ids = np.array([0, -1, 2, 1, -2], np.int32)[:, None]
    config = Config(block_m=16, block_n=64, block_k=32, num_stages=2, split_k=2)
    case = cases.Case(name="no-expert", reason="", ids=ids, experts=2, n=64, k=96, config=config)
    data = _build(case, variant)
    x = data.x.copy()
    x[[1, 2, 4]] = np.nan
    check(run(backend, dataclasses.replace(data, x=x), "row", config), data)


def _build(case: cases.Case, variant: str) -> Data:
    """As cases.build, for a case outside the table; ids outside [-1, E) count as -1 in the reference."""
    problem = case.problem(variant)
    rng = np.random.default_rng(0)
    dtype = cases.float_dtype(problem.activation)
    x = rng.standard_normal((problem.tokens, problem.k)).astype(dtype)
    w = rng.standard_normal((problem.experts, problem.n, problem.k)).astype(np.float32)
    w_scale = None
    if problem.is_fp8:
        quantise = fp8.quantise_channel if problem.scale_layout == "channel" else fp8.quantise_block
        w, w_scale = quantise(w)
    else:
        w = w.astype(dtype)
    topk_weight = rng.uniform(0.1, 2, case.ids.shape).astype(np.float32) if problem.routing_weight else None
    seen = np.where((case.ids < 0) | (case.ids >= problem.experts), -1, case.ids)
    reference = moe_gemm_reference(x, w, seen, problem=problem, w_scale=w_scale, topk_weight=topk_weight)
    data = Data(problem, x, w, case.ids, w_scale, topk_weight, reference)
    return dataclasses.replace(data, ids=case.ids)


def each_backend_with(*variants: str, spared: str) -> pytest.MarkDecorator:
    """backend, variant; the spared variant by default with torch-triton alone, as it goes the way of another."""
    return pytest.mark.parametrize(
        ("backend", "variant"),
        [
            pytest.param(
                backend, variant, marks=pytest.mark.slow if variant == spared and backend != "torch-triton" else ()
            )
            for backend in backends.BACKENDS
            for variant in variants
        ],
    )


@NUMERICS
@each_backend_with("fp16", "bf16", "fp8-w8a16-channel", "fp8-w8a8-channel", spared="bf16")
def test_small_terms_beside_large_ones(backend: str, variant: str) -> None:
    """K = 128 products: 448 * 448, 126 of 1 * 1, then -448 * 448; exact sum 126, after a partial sum of 200830.

    A float32 accumulator holds 200830 exactly. Hopper's FP8 unit keeps about 14 bits of a partial sum (steps of 16 at
    that size), so fp8-w8a8 on a GPU may lose some or all of the ones, and no more than that.
    """
    case = cases.Case(
        name="cancel", reason="", ids=np.zeros((1, 1), np.int32), experts=1, n=64, k=128, routing_weight=False,
        activation="float16",
    )  # fmt: skip
    problem = case.problem(variant)
    x = np.ones((1, 128), np.float32)
    w = np.ones((1, 64, 128), np.float32)
    x[:, [0, -1]] = 448
    w[:, :, 0], w[:, :, -1] = 448, -448
    dtype = cases.float_dtype(problem.activation)
    w_scale = np.ones((1, 64), np.float32) if problem.is_fp8 else None
    data = Data(
        problem, x.astype(dtype), w.astype(fp8.FP8 if problem.is_fp8 else dtype), case.ids, w_scale, None,
        np.full((1, 1, 64), 126.0),
    )  # fmt: skip
    y = run(backend, data, "row", case.config).astype(np.float64)
    if HAS_GPU and problem.quantises_x:
        assert np.all((y >= -16) & (y <= 126 + 16))
    else:
        assert np.array_equal(y, data.reference)


@NUMERICS
@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # NumPy's word on the NaN, in interpreters
@each_backend_with("fp16", "fp8-w8a16-channel", "fp8-w8a8-channel", spared="fp8-w8a16-channel")
def test_a_token_that_is_not_finite_spoils_its_own_rows_only(backend: str, variant: str) -> None:
    case = CASES["ragged"]
    data = build("ragged", variant)
    x = data.x.copy()
    x[1, 5], x[3, 0] = np.nan, np.inf
    y = run(backend, dataclasses.replace(data, x=x), "column", case.config)
    bad = [1, 3]
    assert not np.isfinite(y[bad].astype(np.float32)).any()
    if variant == "fp8-w8a8-channel":
        assert np.isnan(y[bad].astype(np.float32)).all()
    good = [0, 2, 4]
    assert np.array_equal(y[good], run(backend, data, "column", case.config)[good])


@NUMERICS
@pytest.mark.parametrize("variant", ["fp16", "fp8-w8a8-block"])
def test_torch_strides(variant: str) -> None:
    """Rows of x and of w further apart than K, experts inside a larger tensor, strided routing weights.

    What lies between the rows is NaN: K = 160 ends within a K step of 64, and 0 * NaN is NaN.
    """
    import torch

    data = build("scale-blocks", variant)
    problem = data.problem
    module = backends.load("torch-triton")
    if (reason := module.unavailable(interpret=INTERPRET)) is not None:
        pytest.skip(reason)
    x, w, ids, w_scale, weight = (
        None if a is None else arrays.to_framework(a, "torch", on_gpu=HAS_GPU) for a in data.arguments
    )
    wide_x = torch.empty(problem.tokens, problem.k + 7, dtype=x.dtype, device=x.device)
    wide_x.fill_(float("nan"))
    wide_x[:, : problem.k] = x
    byte = torch.uint8 if problem.is_fp8 else torch.int16
    nan = 0x7F if problem.is_fp8 else 0x7FFF
    wide_w = torch.full((problem.experts + 2, problem.n + 3, problem.k + 5), nan, dtype=byte, device=x.device)
    inner = wide_w[1:-1, : problem.n, : problem.k]
    inner.copy_(w.view(byte))
    assert not wide_x[:, : problem.k].is_contiguous()
    spread = None if weight is None else torch.stack([weight, weight * 100], dim=2)[:, :, 0]
    y = module.moe_gemm(
        wide_x[:, : problem.k], inner.view(w.dtype), ids, w_scale, spread, problem=problem, order="grouped",
        config=cases.SMALL.replace(block_k=64), interpret=INTERPRET, fill=float("nan"),
    )  # fmt: skip
    check(arrays.to_host(y), data)
