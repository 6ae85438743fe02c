"""Planning: the specification's invariants, and the plans made on the device equal to it for any routing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared.planning import Plan, expert_counts, plan, tile_rows_in_use
from shared.problem import Problem
from tests.execute import run_programs_backwards
from tests.where import HAS_GPU, NUMERICS

BLOCK_M = st.sampled_from([16, 32, 64, 128])
SMALL_BLOCK_M = st.sampled_from([1, 2, 3, 4, 16])
"""The specification knows no least block: small ones reach every bound with few slots."""


@st.composite
def routings(draw: st.DrawFn, most_tokens: int = 12, most_experts: int = 9) -> tuple[np.ndarray, int]:
    """(topk_ids, E): any ids in [-1, E), repeats within a token included; experts that nobody names are likely."""
    experts = draw(st.integers(1, most_experts))
    tokens, top_k = draw(st.integers(1, most_tokens)), draw(st.integers(1, 4))
    values = draw(st.sampled_from([(-1, experts - 1), (0, experts - 1), (experts - 1, experts - 1), (-1, 0), (-1, -1)]))
    ids = draw(hnp.arrays(np.int32, (tokens, top_k), elements=st.integers(*values)))
    return ids, experts


def assert_plan(
    made: Plan, ids: np.ndarray, experts: int, block_m: int, popularity: Sequence[int] | None = None
) -> None:
    """What every plan must have, said without reference to how it is made."""
    slots = ids.size
    flat = ids.reshape(-1)
    sorted_slot = np.asarray(made.sorted_slot)
    rows = sorted_slot.reshape(-1, block_m)
    tile_expert = np.asarray(made.tile_expert)
    in_use = int(made.tile_rows[0])
    assert sorted_slot.dtype == tile_expert.dtype == np.asarray(made.tile_rows).dtype == np.int32
    bound = Problem(tokens=slots, experts=experts, n=1, k=1, top_k=1).max_tile_rows(block_m)
    assert rows.shape == (bound, block_m)
    assert tile_expert.shape == (bound,)
    assert np.asarray(made.tile_rows).shape == (1,)
    assert 0 <= in_use <= bound
    # every slot once, all else padding
    real = sorted_slot[sorted_slot != slots]
    assert sorted(real) == list(range(slots))
    # nothing past the rows in use
    assert np.all(rows[in_use:] == slots)
    assert np.all(tile_expert[in_use:] == -1)
    # one expert a tile row, no empty tile row, slots ascending within each expert; experts ascending, or by falling
    # popularity and then ascending, the -1 slots last
    for row, expert in zip(rows[:in_use], tile_expert[:in_use], strict=True):
        here = row[row != slots]
        assert here.size > 0
        assert np.all(flat[here] == expert)
        assert np.all(row[: here.size] == here), "padding comes last in a tile row"
    bucket = np.where(tile_expert[:in_use] < 0, experts, tile_expert[:in_use]).tolist()
    heat = [0] * experts if popularity is None else [int(p) for p in popularity]
    assert bucket == sorted(bucket, key=lambda b: (b == experts, -heat[b] if b < experts else 0, b))
    # each tile row's expert begins at its first tile row and has so many
    span = np.asarray(made.tile_span)
    assert span.dtype == np.int32
    assert span.shape == (bound, 2)
    for row, expert in enumerate(tile_expert[:in_use]):
        mine = np.flatnonzero(tile_expert[:in_use] == expert)
        assert span[row].tolist() == [mine[0], mine.size]
    assert span[in_use:].tolist() == [[row, 1] for row in range(in_use, bound)]
    for expert in range(-1, experts):
        members = real[flat[real] == expert]
        assert np.all(np.diff(members) > 0)
        assert np.sum(tile_expert[:in_use] == expert) == -(-members.size // block_m), "no tile row too many"


@given(routing=routings(), block_m=SMALL_BLOCK_M)
def test_specification(routing: tuple[np.ndarray, int], block_m: int) -> None:
    assert_plan(plan(*routing, block_m), *routing, block_m)


@given(routing=routings(), block_m=SMALL_BLOCK_M, data=st.data())
def test_specification_by_popularity(routing: tuple[np.ndarray, int], block_m: int, data: st.DataObject) -> None:
    popularity = data.draw(popularities(routing[1]))
    assert_plan(plan(*routing, block_m, popularity), *routing, block_m, popularity.tolist())


def popularities(experts: int) -> st.SearchStrategy[np.ndarray]:
    """(E,) int32: ties, and the numbers at both ends, whose negatives and differences do not fit."""
    value = st.integers(0, 2) | st.sampled_from([-(2**31), -1, 2**31 - 1])
    return hnp.arrays(np.int32, experts, elements=value)


def test_hot_experts_come_first_whatever_this_routing_says() -> None:
    """Counts [2, 3, 0, 6, 8], block 4, popularity [1, 9, 5, 1, 0]: experts 1, then 0 and 3 as equals, then 4."""
    ids = np.repeat(np.arange(5), [2, 3, 0, 6, 8]).astype(np.int32)[:, None]
    made = plan(ids, 5, 4, np.array([1, 9, 5, 1, 0], np.int32))
    assert made.tile_expert[:6].tolist() == [1, 0, 3, 3, 4, 4]
    assert made.tile_span[:6].tolist() == [[0, 1], [1, 1], [2, 2], [2, 2], [4, 2], [4, 2]]


@given(slots=st.integers(1, 60), experts=st.integers(1, 12), block_m=SMALL_BLOCK_M)
def test_bound_is_reached(slots: int, experts: int, block_m: int) -> None:
    """Some routing needs every tile row that is allowed for: one slot for each bucket, the rest to one of them."""
    buckets = [*range(experts), -1]
    ids = np.array([*buckets, *[0] * slots][:slots], np.int32)[:, None]
    assert plan(ids, experts, block_m).tile_rows[0] == len(plan(ids, experts, block_m).tile_expert)


def test_no_slots_no_rows() -> None:
    made = plan(np.zeros((0, 2), np.int32), 4, 16)
    assert made.sorted_slot.shape == made.tile_expert.shape == (0,)
    assert made.tile_rows[0] == 0


def test_four_tokens_to_the_only_expert() -> None:
    """Elsewhere, tokens were dropped and unused blocks got expert 0: 0, 1, 2, 3, then padding 4; unused ids are -1."""
    made = plan(np.zeros((4, 1), np.int32), 1, 16)
    assert made.sorted_slot[:16].tolist() == [0, 1, 2, 3] + [4] * 12
    assert made.tile_expert.tolist() == [0, -1]
    assert made.tile_rows.tolist() == [1]


def test_each_of_five_experts_once() -> None:
    """Elsewhere, blocks of four experts wrapped around and processed some twice."""
    made = plan(np.arange(5, dtype=np.int32)[:, None], 5, 16)
    assert made.tile_expert.tolist() == [0, 1, 2, 3, 4]
    assert made.sorted_slot.reshape(5, 16)[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_documented_alignment_example() -> None:
    """Counts [2, 3, 0, 6, 8], block 4: 24 padded slots; experts 0, 1, 3, 3, 4, 4, then -1."""
    ids = np.repeat(np.arange(5), [2, 3, 0, 6, 8]).astype(np.int32)[:, None]
    made = plan(ids, 5, 4)
    assert made.tile_rows[0] * 4 == 24
    assert made.tile_expert.tolist() == [0, 1, 3, 3, 4, 4] + [-1] * (len(made.tile_expert) - 6)
    assert expert_counts(ids, 5).tolist() == [2, 3, 0, 6, 8]
    assert tile_rows_in_use(expert_counts(ids, 5), 4) == 6


# Plans made on the device


Popularity = np.ndarray | str | None
"""What a plan orders experts by: given (E,), "counts" of this routing, or None, their numbers."""


def triton_plan(
    ids: np.ndarray, experts: int, block_m: int, popularity: Popularity = None, *, few_slots: int | None = None
) -> Plan:
    """`prepare_kernel` without scaling, into arrays that hold 0x7f bytes beforehand.

    few_slots: up to how many one program plans; None: as it is used.
    """
    import torch

    from backends import torch_triton, triton_launch

    problem = Problem(tokens=ids.shape[0], experts=experts, n=1, k=1, top_k=ids.shape[1])
    launch = torch_triton._launch if HAS_GPU else torch_triton._launch_interpreted
    device = "cuda" if HAS_GPU else "cpu"
    rows = problem.max_tile_rows(block_m)
    sizes = (rows * block_m, rows, 1, 2 * rows)
    made = [torch.full((size,), 0x7F7F7F7F, dtype=torch.int32, device=device) for size in sizes]
    topk_ids = torch.from_numpy(ids).to(device)
    by = popularity if isinstance(popularity, str) else "none" if popularity is None else "given"
    heat = torch.from_numpy(popularity).to(device) if isinstance(popularity, np.ndarray) else topk_ids
    arguments = (topk_ids, heat, topk_ids, *made, topk_ids, topk_ids, problem.slots)
    with pytest.MonkeyPatch.context() as patch:
        if few_slots is not None:
            patch.setattr(triton_launch, "FEW_SLOTS", few_slots)
        constants = triton_launch.prepare_constants(problem, block_m, by, x_stride=1)
        launch("prepare_kernel", triton_launch.prepare_grid(problem), arguments, constants)
    arrays = [array.cpu().numpy() for array in made]
    if by == "none":
        assert np.all(arrays[3] == 0x7F7F7F7F), "only order popular pays for tile_span"
        arrays[3] = plan(ids, experts, block_m).tile_span
    return Plan(*arrays[:3], arrays[3].reshape(-1, 2))


@functools.cache
def _pallas_prepare(problem: Problem, block_m: int, popular: bool, backwards: bool) -> Callable[..., Any]:
    """pallas-triton's `prepare` under jax.jit: (x, topk_ids, popularity) -> arrays by name."""
    import jax

    from backends import pallas_triton_prepare

    def traced(x: Any, ids: Any, popularity: Any) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            if backwards:
                patch.setattr(pallas_triton_prepare, "FEW_SLOTS", 0)
                run_programs_backwards(patch)
            return pallas_triton_prepare.prepare(
                x, ids, popularity, problem, block_m, popular=popular, interpret=not HAS_GPU
            )

    return jax.jit(traced)


def pallas_plan(
    ids: np.ndarray, experts: int, block_m: int, popularity: Popularity = None, *, backwards: bool = False
) -> Plan:
    """pallas-triton's plan, without scaling. backwards: by a program a bucket however few the slots, and the
    interpreter runs them from the last one to the first."""
    import jax

    problem = Problem(tokens=ids.shape[0], experts=experts, n=1, k=1, top_k=ids.shape[1])
    popular = popularity is not None
    heat = jax.numpy.asarray(popularity) if isinstance(popularity, np.ndarray) else None
    x = jax.numpy.zeros((ids.shape[0], 1), "bfloat16")
    made = _pallas_prepare(problem, block_m, popular, backwards)(x, jax.numpy.asarray(ids), heat)
    names = ["sorted_slot", "tile_expert", "tile_rows", *(["tile_span"] if popular else [])]
    assert sorted(made) == sorted([*names, "x"]), "only order popular pays for tile_span"
    span = made["tile_span"] if popular else plan(ids, experts, block_m).tile_span
    return Plan(*(np.asarray(made[name]) for name in names[:3]), np.asarray(span))


def assert_equal(made: Plan, ids: np.ndarray, experts: int, block_m: int, popularity: Popularity = None) -> None:
    heat = expert_counts(ids, experts) if isinstance(popularity, str) else popularity
    assert_plan(made, ids, experts, block_m, heat)
    specified = plan(ids, experts, block_m, heat)
    for name in ("sorted_slot", "tile_expert", "tile_rows", "tile_span"):
        np.testing.assert_array_equal(getattr(made, name), getattr(specified, name), err_msg=name)


Planner = Callable[..., Plan]
"""(ids, experts, block_m, popularity=None)."""
TRITON_PLANNERS = {"triton": triton_plan, "triton-buckets": functools.partial(triton_plan, few_slots=0)}
"""As it is used, and with a program a bucket however few the slots."""
PALLAS_PLANNERS = {
    "pallas": pallas_plan,
    "pallas-backwards": functools.partial(pallas_plan, backwards=True),
}
PLANNERS = {**TRITON_PLANNERS, **PALLAS_PLANNERS}
EVERY_PLANNER = pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS.keys())


@NUMERICS
@pytest.mark.parametrize("planner", TRITON_PLANNERS.values(), ids=TRITON_PLANNERS.keys())
@given(routing=routings(), block_m=BLOCK_M, data=st.data())
@settings(max_examples=40)
def test_triton_plan_equals_specification(
    planner: Planner, routing: tuple[np.ndarray, int], block_m: int, data: st.DataObject
) -> None:
    popularity = data.draw(st.sampled_from([None, "counts"]) | popularities(routing[1]))
    assert_equal(planner(*routing, block_m, popularity), *routing, block_m, popularity)


@NUMERICS
@EVERY_PLANNER
@pytest.mark.parametrize("popularity", [None, "counts", "given"])
@pytest.mark.parametrize("ids", [np.zeros((4, 1), np.int32), np.full((9, 3), -1, np.int32)], ids=["all", "none"])
def test_one_expert_or_none(planner: Planner, ids: np.ndarray, popularity: str | None) -> None:
    heat = np.array([3, 3], np.int32) if popularity == "given" else popularity
    assert_equal(planner(ids, 2, 16, heat), ids, 2, 16, heat)


@NUMERICS
@pytest.mark.parametrize("planner", PALLAS_PLANNERS.values(), ids=PALLAS_PLANNERS.keys())
@given(
    ids=hnp.arrays(np.int32, (6, 3), elements=st.integers(-1, 4))
    | hnp.arrays(np.int32, (40, 1), elements=st.integers(-1, 4)),
    block_m=st.sampled_from([16, 32]),
    popularity=st.sampled_from([None, "counts"]) | popularities(5),
)
@settings(max_examples=40)
def test_pallas_plan_equals_specification(
    planner: Planner, ids: np.ndarray, block_m: int, popularity: Popularity
) -> None:
    assert_equal(planner(ids, 5, block_m, popularity), ids, 5, block_m, popularity)


@NUMERICS
@EVERY_PLANNER
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "reason"),
    [
        (1, 1, 1, "the least of everything"),
        (3, 2, 64, "more experts than slots"),
        (64, 1, 2, "as many slots as one program plans, in more tile rows than experts"),
        (13, 5, 70, "one slot more, and more experts than slots"),
        (129, 1, 5, "one past the chunk in which the kernel reads ids"),
        (1100, 1, 3, "more than one chunk of 1024"),
        (700, 3, 8, "more than two chunks of 1024"),
        (6, 8, 64, "a power of two of experts"),
        (40, 2, 15, "E + 1 a power of two"),
        (40, 2, 16, "E + 1 just past a power of two"),
    ],
)
def test_larger_plans(planner: Planner, tokens: int, top_k: int, experts: int, reason: str) -> None:
    rng = np.random.default_rng(tokens)
    ids = rng.integers(-1, experts, (tokens, top_k)).astype(np.int32)
    assert_equal(planner(ids, experts, 16), ids, experts, 16)
    skewed = np.where(ids % 3 == 0, ids, experts - 1)
    heat = rng.integers(0, 4, experts).astype(np.int32)
    assert_equal(planner(skewed, experts, 32, heat), skewed, experts, 32, heat)


@NUMERICS
@EVERY_PLANNER
@pytest.mark.parametrize("popularity", [None, "counts"])
def test_numbers_that_are_no_expert_go_to_the_last_bucket(planner: Planner, popularity: str | None) -> None:
    ids = np.array([(0, 3), (2**31 - 1, 1), (-7, -(2**31)), (2, 0)], np.int32)
    seen = np.where((ids < 0) | (ids > 2), -1, ids).astype(np.int32)
    assert_equal(planner(ids, 3, 16, popularity), seen, 3, 16, popularity)
