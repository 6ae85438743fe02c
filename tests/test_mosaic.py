"""What pallas-mosaic alone does: parts of K in its queue of tiles, all tokens in one box, boxes as tall as needed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import re
from types import SimpleNamespace
from typing import Any

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import backends
from backends import mosaic_config, mosaic_copies, mosaic_rows, pallas_mosaic, xla_compile
from shared import models
from shared.config import REDUCTIONS, Config
from shared.problem import Problem
from tests import cases
from tests.cases import CASES, build
from tests.execute import check, run, run_programs_backwards
from tests.where import HAS_GPU, INTERPRET, NUMERICS

BACKEND = "pallas-mosaic"


SPLITS = [
    ("ragged", "fp16", "row", 2, "two-pass"),  # 3 steps: two and one
    ("scale-blocks", "fp8-w8a8-block", "column", 64, "two-pass"),  # 5 steps: 5 parts, which cut scale blocks in two
    ("scale-blocks", "fp8-w8a16-block", "popular", 3, "atomic-fp32"),
    ("k-tail", "fp16", "grouped", 2, "atomic"),
    ("some-minus-one", "fp8-w8a16-channel", "column", 2, "atomic-fp32"),
]


@NUMERICS
@pytest.mark.parametrize(("name", "variant", "order", "split_k", "reduction"), SPLITS)
def test_split_k(name: str, variant: str, order: str, split_k: int, reduction: str) -> None:
    config = CASES[name].config.replace(split_k=split_k, reduction=reduction)
    data = build(name, variant)
    y = run(BACKEND, data, order, config)
    check(y, data, config.rounded_parts(data.problem.k))


@NUMERICS
def test_two_pass_gives_the_same_bits_every_time_and_in_every_order() -> None:
    data = build("many-rows", "fp16")
    config = CASES["many-rows"].config.replace(split_k=2)
    popular, column = (run(BACKEND, data, order, config) for order in ("popular", "column"))
    check(column, data)
    assert np.array_equal(popular, column)


IDS_OF_8_TOKENS = {
    "one-token": [(6, 2)],  # one row of a box of 8
    "repeated": [(1, 1), (3, 1), (1, 1), (1, 1), (1, 1)],  # 9 slots on an expert: two tile rows in order "popular"
    "minus-one": [(-1, 2), (0, -1), (-1, -1), (2, 0), (1, -1)],
    "none": [(-1, -1)] * 8,
}


@NUMERICS
@pytest.mark.parametrize(
    ("ids", "variant", "order"),
    [
        ("one-token", "fp8-w8a16-channel", "grouped"),
        ("repeated", "fp16", "popular"),
        ("minus-one", "fp8-w8a8-channel", "column"),
        ("none", "fp16", "row"),
    ],
)
def test_all_tokens_in_one_box(ids: str, variant: str, order: str) -> None:
    case = cases.Case(
        name="all-tokens", reason="", ids=np.array(IDS_OF_8_TOKENS[ids], np.int32), experts=8, n=96, k=72,
        routing_weight=False,
    )  # fmt: skip
    assert mosaic_config.reads_all_tokens(case.problem(variant))
    data = cases.data_of(case, variant)
    y = run(BACKEND, data, order, case.config)
    check(y, data)


@given(counts=hnp.arrays(np.int32, st.sampled_from([2, 7, 41]), elements=st.integers(0, 40) | st.integers(0, 9)))
@example(counts=np.full(41, 9, np.int32))  # the most rows a slot
@settings(max_examples=100, deadline=None)
def test_rows_of_an_expert_lie_together_in_few_groups(counts: np.ndarray) -> None:
    """No two experts share a row, those of up to a group's slots lie in one, and all fit what is allocated.

    The last of counts is the bucket of slots without an expert, which begins behind all others' rows.
    """
    buckets = jnp.arange(counts.size, dtype=jnp.int32)
    experts, group = counts.size - 1, mosaic_rows.GROUP
    place = jax.vmap(lambda bucket: mosaic_rows.rows_of_x(buckets, jnp.asarray(counts), bucket, experts))
    first, every_rows = (np.asarray(found) for found in place(buckets))
    rows = every_rows[0, :experts]
    assert first[experts] == rows.sum()
    first, counts = first[:experts], counts[:experts]
    taken = np.concatenate([f + np.arange(c) for f, c in zip(first, counts, strict=True)])
    assert np.unique(taken).size == counts.sum()
    for f, c in zip(first[counts > 0], counts[counts > 0], strict=True):
        assert f % group + c <= group or f % group == 0, (f, c)
    for size in (1, 2, 4, group):
        assert (np.diff(first[np.minimum(rows, group) == size]) > 0).all(), "of each size, the lowest numbers first"
    if slots := int(counts.sum()):
        assert taken.max() < rows.sum()
        problem = Problem.of("fp16", tokens=slots, experts=experts, n=64, k=64, top_k=1)
        assert rows.sum() <= mosaic_rows.most_rows(problem)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("popular", [False, True])
def test_tiles_find_the_rows_of_their_slots(
    popular: bool, gathered: bool, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a tile multiplies, by `tile_x`, or gathers, by `row_slot`, are its slots' tokens; its part of the output is
    where `position` looks, and goes where `row_slot` says.

    Experts of 1, 2, 3, 5, 8, 9, 20 and no slots, and slots of no expert; tiles of 16 rows. backwards: the programs of a
    launch run from the last one to the first, so that nothing hangs on their order.
    """
    if backwards:
        run_programs_backwards(monkeypatch)
    monkeypatch.setattr(mosaic_rows, "gathers", lambda problem, config: gathered)
    counts, block_m = (2, 0, 1, 20, 3, 9, 5, 8), 16
    rng = np.random.default_rng(5)
    ids = rng.permutation(np.repeat(np.arange(-1, len(counts), dtype=np.int32), (4, *counts)))[:, None]
    problem = Problem.of("fp16", tokens=ids.size, experts=len(counts), n=64, k=8, top_k=1)
    x = jnp.tile(jnp.arange(1, ids.size + 1, dtype=jnp.float16)[:, None], (1, problem.k))
    weight = jnp.arange(ids.size, dtype=jnp.float32)
    order = "popular" if popular else "row"
    rows = jax.jit(
        lambda x, ids, weight: mosaic_rows.sort_rows(
            x, ids, weight, None, problem.k, problem, order, Config(block_m=block_m), not HAS_GPU
        )
    )(x, jnp.asarray(ids), weight)
    rows_of_x, row_scale, row_slot = (np.asarray(a) for a in (rows.x, rows.row_scale, rows.row_slot))
    tile_x, expert, position = (np.asarray(a) for a in (rows.tile_x, rows.tile_expert, rows.position))
    tile_rows = sum(-(-count // block_m) for count in counts)
    assert int(rows.tile_rows[-1]) == tile_rows
    assert np.all(tile_x[:, 0] % mosaic_rows.GROUP == 0)
    assert np.all(tile_x[expert < 0] == 0)
    for slot, e in enumerate(ids[:, 0]):
        if e >= 0:
            row, within = divmod(position[slot], block_m)
            assert expert[row] == e
            assert within < tile_x[row, 1] <= block_m
            row_of_x = slot if gathered else tile_x[row, 0] + within
            assert rows_of_x[row_of_x].tolist() == [slot + 1] * problem.k
            assert row_scale[position[slot]] == slot
            assert row_slot[position[slot]] == slot
    assert np.sum(row_slot >= 0) == np.sum(ids >= 0), "no slot a second time"
    assert np.all(row_slot[tile_rows * block_m :] == -1)
    if gathered:
        assert np.all(tile_x[:, 0] == 0)
        assert np.all(row_slot[: tile_rows * block_m : block_m] >= 0), "a tile's rows begin with its first slot's"
        return
    # Nothing that a tile reads lies outside: it reads whole heights.
    in_use = tile_x[expert >= 0]
    heights = mosaic_config.heights_up_to(block_m)
    read = [next(h for h in heights if h >= rows) for rows in in_use[:, 1]]
    assert np.all(in_use[:, 0] + read <= rows.x.shape[0])


@NUMERICS
@pytest.mark.parametrize("unknown", [-1, 3, 2**31 - 1], ids=["some-minus-one", "unchecked-3", "unchecked-most"])
def test_rows_put_in_place_by_xla(unknown: int) -> None:
    """N = 60: rows of y are no multiple of 16 bytes, so tiles are stored whole. Slots of no expert get zeros, too."""
    case = cases.Case(
        name="by-xla", reason="", ids=np.array([(-1, 2), (0, -1), (2, 0), (1, -1), (-1, -1)], np.int32), experts=3,
        n=60, k=72,
    )  # fmt: skip
    data = cases.data_of(case, "fp16")
    assert not mosaic_config.scatters(data.problem, case.config)
    ids = np.where(data.ids < 0, np.int32(unknown), data.ids)
    y = run(BACKEND, dataclasses.replace(data, ids=ids), "row", case.config)
    check(y, data)


@NUMERICS
def test_boxes_end_behind_the_last_slot() -> None:
    """Experts with 1, 8, 9, 16, 17 and 32 slots, tiles of 32 rows: boxes of 8, 16 and 32, each full and one over."""
    counts = (1, 8, 9, 16, 17, 32)
    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    rng = np.random.default_rng(0)
    case = cases.Case(
        name="boxes", reason="", ids=rng.permutation(ids)[:, None], experts=len(counts), n=64, k=40,
        config=cases.SMALL.replace(block_m=32),
    )  # fmt: skip
    data = cases.data_of(case, "fp16")
    y = run(BACKEND, data, "column", case.config)
    check(y, data)


@NUMERICS
@pytest.mark.parametrize(("variant", "order"), [("fp16", "row"), ("fp8-w8a16-channel", "popular")])
def test_tall_tiles_of_two_warp_groups(variant: str, order: str) -> None:
    """Experts with 1, 33, 48 and 100 slots, tiles of 48 rows, which is no power of two and is stored in two chunks."""
    counts = (1, 33, 48, 100)
    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    rng = np.random.default_rng(1)
    case = cases.Case(
        name="tall", reason="", ids=rng.permutation(ids)[:, None], experts=len(counts), n=200, k=72,
        config=Config(block_m=48, block_n=128, block_k=32, num_warps=8, num_stages=2),
    )  # fmt: skip
    data = cases.data_of(case, variant)
    y = run(BACKEND, data, order, case.config)
    check(y, data)


@NUMERICS
@pytest.mark.parametrize(
    ("variant", "order", "stages", "k"),
    [
        ("fp16", "row", 3, 72),  # 3 steps in 3 stages: every tile starts at the same one
        ("fp16", "column", 2, 72),  # an odd number of steps of each stage between one's own tiles
        pytest.param("fp8-w8a16-channel", "popular", 4, 72, marks=pytest.mark.slow),
        pytest.param("fp8-w8a8-block", "grouped", 3, 128, marks=pytest.mark.slow),
        # one step a tile: several tiles in the ring at once
        pytest.param("fp8-w8a8-channel", "row", 5, 32, marks=pytest.mark.slow),
    ],
)
def test_warp_groups_in_turns(variant: str, order: str, stages: int, k: int) -> None:
    """Experts with 1, 33, 48 and 100 slots. Thread blocks have odd and even numbers of tiles."""
    counts = (1, 33, 48, 100)
    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    rng = np.random.default_rng(2)
    case = cases.Case(
        name="turns", reason="", ids=rng.permutation(ids)[:, None], experts=len(counts), n=200, k=k,
        config=Config(block_m=48, block_n=64, block_k=32, num_warps=8, num_stages=stages, ping_pong=True),
    )  # fmt: skip
    data = cases.data_of(case, variant)
    y = run(BACKEND, data, order, case.config)
    check(y, data)


@NUMERICS
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("one-token", "all-minus-one")), "many-rows"]
)
def test_warp_groups_in_turns_with_few_tiles(name: str) -> None:
    """Blocks of one tile, or none: a warp-group whose turn never comes."""
    config = Config(block_m=16, block_n=64, block_k=32, num_warps=8, num_stages=2, ping_pong=True)
    data = build(name, "fp16")
    for order in ("row", "column"):
        y = run(BACKEND, data, order, config)
        check(y, data)


@NUMERICS
def test_popularity_of_earlier_steps_changes_no_result() -> None:
    data = build("many-rows", "fp16")
    popularity = np.array([3, 1, 2**31 - 1], np.int32)
    y = run(BACKEND, data, "popular", CASES["many-rows"].config, popularity=popularity)
    check(y, data)


@NUMERICS
@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize(
    ("variant", "k", "block_k", "pieces"),
    [
        ("fp16", 360, 128, 2),  # columns of 128 bytes
        ("bf16", 328, 64, 1),
        ("fp16", 344, 32, 1),  # of 64
        ("fp8-w8a16-channel", 720, 256, 2),
        ("fp8-w8a8-channel", 720, 256, 2),
        ("fp8-w8a8-channel", 400, 64, 1),  # of 64
        ("fp8-w8a8-block", 336, 128, 1),
        ("fp8-w8a8-channel", 328, 256, 2),  # rows that TMA cannot read: weights are copied to longer ones
        ("fp8-w8a8-channel", 768, 256, 1),
    ],
)
def test_rows_of_no_whole_columns(variant: str, k: int, block_k: int, pieces: int, tokens: int) -> None:
    """Behind a row come the weights of the next one, and behind the last row those of an expert without slots, which
    are NaN: nothing of them is multiplied."""
    config = Config(block_m=16, block_n=64, block_k=block_k, num_stages=3)
    ids = np.array([0, 2], np.int32)[np.arange(tokens) % 2][:, None]
    data = cases.data_of(cases.Case(name="columns", reason="", ids=ids, experts=3, n=72, k=k, config=config), variant)
    assert mosaic_config.weight_pieces(data.problem, config) == pieces
    w = data.w.copy()
    w[1] = np.nan
    y = run(BACKEND, dataclasses.replace(data, w=w), "row", config)
    check(y, data)


@pytest.mark.compile_only
@pytest.mark.parametrize("dtype", ["fp8-w8a16", "fp8-w8a8"])
def test_columns_of_weights_come_in_copies_of_their_own(dtype: str) -> None:
    """For sm_90a, rows of 2880 bytes: two copies of weights a step of 256, which are waited for and freed together."""
    problem = models.model("gpt-oss-120b").problem("gate-up", 8, dtype)
    code = backends.load(BACKEND).compile_only(problem, "row", Config(block_k=256, num_stages=4))
    assert code.spills == 0
    dimensions = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared\S*\.L2::cache_hint", code.ptx)
    others = re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared\S*bytes ", code.ptx)
    assert set(dimensions) == {"3"}, "rows, not tiles"
    assert len(dimensions) == 2 * len(others)
    pending = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", code.ptx)
    assert set(pending) == ({"0"} if dtype == "fp8-w8a16" else {"0", "2"}), "the step before has two"


def test_tokens_of_many_slots_are_not_found_by_a_mask() -> None:
    data = cases.data_of(
        cases.Case(
            name="many-slots", reason="", ids=np.arange(64, dtype=np.int32).reshape(2, 32) % 5, experts=5, n=64, k=32
        ),
        "fp16",
    )
    few = dataclasses.replace(data.problem, top_k=31, routing_weight=False)
    assert mosaic_config.reads_all_tokens(few)
    assert not mosaic_config.reads_all_tokens(dataclasses.replace(few, top_k=32))
    config = Config(block_m=16, block_n=64, block_k=32, num_stages=2)
    check(run(BACKEND, data, "row", config), data)


@pytest.mark.parametrize("experts", [1, 15, 16, 24, 257])
def test_active_experts(experts: int) -> None:
    """The experts that 24 slots of three tokens name, by number, and where each slot's row of y is."""
    rng = np.random.default_rng(experts)
    draws = [rng.integers(-2, experts + 2, 24), np.full(24, -1), np.full(24, experts - 1), np.arange(24) % experts]
    problem = Problem.of("fp16", tokens=3, experts=experts, n=64, k=8, top_k=8)
    x = jnp.arange(24, dtype=jnp.float16).reshape(3, 8)
    rows_of = jax.jit(lambda ids: mosaic_rows.all_tokens(x, ids, None, None, 16, problem, "row", not HAS_GPU))
    for ids in draws:
        rows = rows_of(jnp.asarray(ids, jnp.int32).reshape(3, 8))
        found, (place, token) = np.asarray(rows.tile_expert), np.divmod(np.asarray(rows.position), mosaic_config.TOKENS)
        valid = (ids >= 0) & (ids < experts)
        active = np.unique(ids[valid])
        assert found.size == min(experts, 24) + 1
        assert found[-1] == rows.tile_rows[-1] == active.size
        assert np.array_equal(found[: active.size], active)
        assert np.all(found[active.size : -1] == -1)
        assert np.array_equal(active[place[valid]], ids[valid])
        assert np.all((place >= 0) & (place < found.size - 1))
        assert np.array_equal(token, np.repeat(np.arange(3), 8))
        assert np.array_equal(rows.x, np.pad(np.asarray(x), ((0, 5), (0, 8))))


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("dtype", "layout", "reduction"),
    [("fp16", "channel", "two-pass"), ("fp8-w8a16", "channel", "atomic-fp32"), ("fp8-w8a8", "block", "atomic")],
)
def test_parts_of_k_compile(dtype: str, layout: str, reduction: str) -> None:
    """For sm_90a: reductions add in the copy engine, two-pass stores; nothing spills."""
    problem = models.model("deepseek-v3").problem("gate-up", 64, dtype, scale_layout=layout)
    config = Config(num_stages=5, split_k=3, reduction=reduction)
    module = backends.load(BACKEND)
    assert module.unsupported(problem, config) is None
    code = module.compile_only(problem, "popular", config)
    adding = set(re.findall(r"cp\.reduce\.async\.bulk\.tensor\.\dd\.global\.shared::cta\.(\w+)\.tile", code.ptx))
    assert adding == (set() if reduction == "two-pass" else {"add"})
    assert code.spills == 0
    assert columns_of(code.ptx) == {"8", "16"}


@pytest.mark.parametrize(
    ("n", "config", "adds"),
    [
        (512, Config(split_k=2), True),
        (512, Config(split_k=8), True),
        (512, Config(block_k=512, split_k=5), False),  # 14 steps: 5 parts
        (512, Config(block_k=512, split_k=9), False),  # 7 parts
        (512, Config(block_k=1024, split_k=5), True),  # 7 steps: 4 parts
        (512, Config(split_k=16), False),
        (512, Config(split_k=1), False),
        (512, Config(split_k=2, reduction="atomic"), False),
        (512, Config(block_m=32, split_k=2), True),
        (512, Config(block_m=48, split_k=2), False),  # stored in two chunks
        (516, Config(split_k=2), False),
    ],
)
@pytest.mark.parametrize("tokens", [1, 64])
def test_parts_of_k_that_a_cluster_adds(tokens: int, n: int, config: Config, adds: bool) -> None:
    """K = 7168. Whether it does is the config's matter, not the batch's, so that a row keeps its bits."""
    problem = Problem.of("fp16", tokens=tokens, experts=256, n=n, k=7168, top_k=8)
    assert mosaic_config.adds_in_cluster(problem, config) == adds
    assert mosaic_config.scatters(problem, config) == (n == 512 and (adds or config.split_k == 1))
    assert mosaic_config.scatters(problem, config, interpret=True) == (n == 512 and config.split_k == 1)


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("dtype", "layout", "tokens", "config"),
    [
        ("fp16", "channel", 1, Config(block_n=64, num_stages=6, split_k=2)),
        ("fp8-w8a16", "channel", 1, Config(block_n=64, block_k=256, num_stages=4, split_k=4)),
        ("fp8-w8a8", "block", 64, Config(block_n=64, num_stages=5, split_k=8)),
        pytest.param("bf16", "channel", 64, Config(num_stages=4, split_k=2), marks=pytest.mark.slow),
        pytest.param("fp8-w8a8", "channel", 1, Config(num_warps=8, split_k=4), marks=pytest.mark.slow),
        pytest.param(
            "fp16", "channel", 256, Config(block_m=32, block_n=64, block_k=64, split_k=8), marks=pytest.mark.slow
        ),
        pytest.param("fp8-w8a16", "block", 1, Config(block_n=64, num_stages=6, split_k=2), marks=pytest.mark.slow),
    ],
)
def test_a_cluster_adds_parts_of_k(dtype: str, layout: str, tokens: int, config: Config) -> None:
    """For sm_90a: as many blocks a cluster as parts, sums sent to their shared memory, no tile stored by TMA.

    For each height of a tile, a barrier is told how many bytes come, and sums are sent by 8; no fence or release at the
    scope of the cluster or the GPU, which would wait for what was stored to memory.
    """
    problem = models.model("deepseek-v3").problem("gate-up", tokens, dtype, scale_layout=layout)
    assert pallas_mosaic.unsupported(problem, config) is None
    code = backends.load(BACKEND).compile_only(problem, "row", config)
    parts, groups = config.split_k, config.num_warps // 4
    assert re.findall(r"\.reqnctapercluster (\d+)", code.ptx) == [str(parts)]
    assert not re.search(r"cp\.(reduce\.)?async\.bulk\.tensor\.\dd\.global", code.ptx)
    heights = [8] if tokens == 1 else mosaic_config.heights_up_to(config.block_m)
    sums = [h * config.block_n // groups for h in heights]
    sending = re.findall(r"st\.async\.shared::cluster\.mbarrier::complete_tx::bytes\.v2\.f32", code.ptx)
    assert len(sending) == sum(sums) // (2 * 128)
    told = re.findall(r"mbarrier\.arrive\.expect_tx\.shared\.b64 _, \[%r\d+\], (%r\d+);", code.ptx)
    expected = [re.findall(rf"mov\.b32\s+{register}, (\d+);", code.ptx) for register in told]
    assert sorted(int(bytes_of[-1]) for bytes_of in expected) == sorted(4 * n for n in sums)
    ordering = re.findall(r"\S+\.(?:release|acquire|acq_rel|sc)\.(?:cluster|gpu|sys)\b", code.ptx)
    assert set(ordering) == {"fence.mbarrier_init.release.cluster"}
    # Each block tells every block that it has read what it got.
    start, _, _ = code.ptx.partition("barrier.cluster.arrive")
    counts = re.findall(r"mbarrier\.init\.shared\.b64 \[%r\d+\], (%r\d+);", start)
    assert len(counts) == groups
    assert all(re.search(rf"mov\.b32\s+{register}, {parts};", start) for register in counts)
    assert code.spills == 0
    blocks = mosaic_config.blocks_per_sm(problem, config)
    assert blocks * (32 * config.num_warps + 128) * -(-code.registers // 8) * 8 <= 65536


@pytest.mark.skipif(INTERPRET, reason="clusters add parts of K on a GPU alone")
@pytest.mark.gpu
@pytest.mark.parametrize("split_k", [2, 4, 8])
@pytest.mark.parametrize("variant", list(cases.VARIANTS))
@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        ("few", {}),
        ("few", {"block_n": 128, "num_warps": 8, "num_stages": 3}),
        ("many", {}),
        ("many", {"block_m": 32, "block_n": 128, "num_stages": 5}),
        ("many", {"block_n": 128, "num_warps": 8}),
    ],
)
def test_a_cluster_adds_parts_of_k_on_a_gpu(
    tokens: str, changes: dict[str, Any], variant: str, split_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """23 steps: the last part has fewer; N = 200 or 1000 ends within a tile. -1 slots, and a buffer of NaN.

    few: tokens of one box, which go to their slots by token. many: experts with 1 to 40 slots. On all SMs, where a
    cluster has one tile or none, and on 8, where each has several: a barrier told too early or never would give wrong
    sums or stop the kernel. The same bits each time, in every order.
    """
    config = Config(block_m=16, block_n=64, block_k=32, num_stages=4, split_k=split_k).replace(**changes)
    if tokens == "few":
        ids = np.array([*IDS_OF_8_TOKENS["minus-one"], (5, 3), (7, 7)], np.int32)
    else:
        counts = (1, 8, 9, 17, 33, 40, 0, 3)
        slots = np.concatenate([np.repeat(np.arange(8, dtype=np.int32), counts), np.full(9, -1, np.int32)])
        ids = np.random.default_rng(3).permutation(slots)[:, None]
    case = cases.Case(
        name="cluster", reason="", ids=ids, experts=8, n=200 if tokens == "few" else 1000, k=736,
        routing_weight=tokens == "many",
    )  # fmt: skip
    data = cases.data_of(case, variant)
    assert mosaic_config.adds_in_cluster(data.problem, config)
    assert mosaic_config.reads_all_tokens(data.problem) == (tokens == "few")
    y = run(BACKEND, data, "row", config)
    check(y, data)
    monkeypatch.setattr(pallas_mosaic, "_sms", lambda x: 8)
    for order in ("row", "column", "row"):
        assert np.array_equal(run(BACKEND, data, order, config), y)


@pytest.mark.skipif(INTERPRET, reason="clusters add parts of K on a GPU alone")
@pytest.mark.gpu
@pytest.mark.parametrize("split_k", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_cluster_gives_the_same_bits_in_every_call(tokens: int, split_k: int) -> None:
    """A layer of DeepSeek-V3's with 12 experts: no bit differs in 50 calls."""
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(12)[:8] for _ in range(tokens)]).astype(np.int32)
    case = cases.Case(name="deepseek", reason="", ids=ids, experts=12, n=512, k=7168, routing_weight=False)
    data = cases.data_of(case, "bf16")
    config = Config(block_n=64, num_stages=5, split_k=split_k)
    assert mosaic_config.adds_in_cluster(data.problem, config)
    y = run(BACKEND, data, "row", config)
    check(y, data)
    for _ in range(50):
        assert np.array_equal(run(BACKEND, data, "row", config), y)


@pytest.mark.compile_only
def test_eight_tokens_are_eight_columns() -> None:
    """For sm_90a, up to 8 tokens: the narrowest warp-group instruction, one box of x with no choice of heights."""
    problem = Problem.of("fp16", tokens=8, experts=64, n=1536, k=2048, top_k=8)
    code = backends.load(BACKEND).compile_only(problem, "column", Config(num_stages=5))
    assert columns_of(code.ptx) == {"8"}


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("dtype", "config", "blocks"),
    [
        ("fp16", Config(block_m=16, block_n=64, num_stages=2), 4),
        pytest.param("fp16", Config(block_m=64, block_k=64, num_stages=4), 2, marks=pytest.mark.slow),
        ("fp8-w8a16", Config(block_m=16, num_stages=5), 2),
        # tall tiles, whose rows have many scales
        ("fp8-w8a8", Config(block_m=160, block_n=64, block_k=32, num_stages=3), 1),
        pytest.param("fp8-w8a8", Config(block_m=80, block_n=64, block_k=32, num_stages=10), 2, marks=pytest.mark.slow),
        pytest.param(
            "fp8-w8a16", Config(block_m=64, block_k=32, num_warps=8, num_stages=10), 1, marks=pytest.mark.slow
        ),
    ],
)
def test_registers_leave_room_for_the_thread_blocks_that_are_launched(dtype: str, config: Config, blocks: int) -> None:
    problem = models.model("mixtral-8x7b").problem("gate-up", 64, dtype)
    code = backends.load(BACKEND).compile_only(problem, "row", config)
    assert mosaic_config.blocks_per_sm(problem, config) == blocks
    assert code.spills == 0
    assert blocks * (32 * config.num_warps + 128) * -(-code.registers // 8) * 8 <= 65536


@pytest.mark.compile_only
@pytest.mark.parametrize(("tokens", "loads"), [(8, 2), pytest.param(64, 4, marks=pytest.mark.slow)])
def test_in_row_order_the_first_loads_wait_for_nothing(tokens: int, loads: int) -> None:
    """For sm_90a: how many tile rows there are, the first tile's expert and its height (two slots of a tile of 32 rows)
    are asked for before the first branch. `loads`: of them."""
    problem = models.model("mixtral-8x7b").problem("gate-up", tokens, "fp16")
    code = backends.load(BACKEND).compile_only(problem, "row", Config(block_m=32, num_stages=3))
    start, _, _ = code.ptx[code.ptx.rindex("bar.sync \t0;") :].partition("bra")
    assert start.count("ld.global") == loads


@pytest.mark.parametrize(
    ("name", "gemm", "tokens", "dtype", "block_m", "first"),
    [
        ("mixtral-8x7b", "gate-up", 8, "fp16", 16, True),
        ("qwen3-30b-a3b", "gate-up", 256, "fp16", 32, True),  # 8.4 MB of x, 6.3 of y
        ("deepseek-v3", "gate-up", 128, "fp16", 64, False),  # 14.7 MB of x, sorted
        ("deepseek-v3", "gate-up", 128, "fp16", 16, True),  # gathered: 1.8 MB, and 1 of y
        ("deepseek-v3", "gate-up", 128, "fp8-w8a8", 64, True),  # half as many
        ("deepseek-v3", "down", 128, "fp16", 16, True),  # 14.7 MB of y, which appear meanwhile
        ("deepseek-v3", "down", 512, "fp16", 16, False),
    ],
)
def test_weights_are_evicted_first_where_little_else_is_in_l2(
    name: str, gemm: str, tokens: int, dtype: str, block_m: int, first: bool
) -> None:
    problem = models.model(name).problem(gemm, tokens, dtype)
    assert mosaic_config.evicts_weights_first(problem, Config(block_m=block_m)) == first


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("problem", "evicted"),
    [
        (Problem.of("fp16", tokens=64, experts=8, n=128, k=64, top_k=2), True),  # one column of shared memory deep
        (Problem.of("fp16", tokens=64, experts=1, n=128, k=128, top_k=1), True),  # an array of one matrix
        (Problem.of("fp16", tokens=4096, experts=8, n=4096, k=128, top_k=2), False),
    ],
    ids=["one-column", "one-expert", "much-of-x-and-y"],
)
def test_copies_of_weights_alone_have_the_policy(problem: Problem, evicted: bool) -> None:
    """For sm_90a: an L2 policy for each copy of weights and none of x, which has one of these for each height; and no
    policy in a kernel that is not to have it, though Mosaic's lowering asks `mosaic_copies` for each."""
    config = Config(block_k=64, num_stages=3)
    assert mosaic_config.evicts_weights_first(problem, config) == evicted
    ptx = backends.load(BACKEND).compile_only(problem, "row", config).ptx
    copies = re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared\S*", ptx)
    with_policy = [copy for copy in copies if copy.endswith(".L2::cache_hint")]
    heights = mosaic_config.heights_up_to(config.block_m)
    assert len(copies) % (1 + len(heights)) == 0
    assert len(with_policy) == (len(copies) // (1 + len(heights)) if evicted else 0)
    policies = re.findall(r"\.L2::cache_hint [^;]*\], (%rd\d+);", ptx)
    assert len(policies) == len(with_policy)
    for policy in policies:  # what createpolicy.fractional.L2::evict_first makes, by CUTLASS
        assert re.search(rf"mov\.b64\s+{policy}, {0x12F0 << 48};", ptx)


class _Mosaic:
    """A stand-in for JAX's `launch_context`, whose copy is lowered by nvvm."""

    class nvvm:
        @staticmethod
        def cp_async_bulk_tensor_shared_cluster_global(l2_cache_hint: object = None) -> object:
            return l2_cache_hint

    def __init__(self) -> None:
        mosaic = self

        class LaunchContext:
            def async_copy(self, *, src_ref: object) -> None:
                mosaic.nvvm.cp_async_bulk_tensor_shared_cluster_global()

        self.LaunchContext: Any = LaunchContext


@pytest.mark.parametrize("lacking", ["nvvm", "copy", "operand", "LaunchContext", "async_copy", "lowering by it"])
def test_a_lowering_that_would_leave_the_policy_out_is_refused(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of it is replaced, so that asking again says the same; a call says what to install."""
    mosaic: Any = _Mosaic()
    if lacking == "nvvm":
        mosaic.nvvm = None
    elif lacking == "copy":
        mosaic.nvvm = object()
    elif lacking == "operand":
        mosaic.nvvm = SimpleNamespace(cp_async_bulk_tensor_shared_cluster_global=lambda: None)
    elif lacking == "LaunchContext":
        del mosaic.LaunchContext
    elif lacking == "async_copy":
        del mosaic.LaunchContext.async_copy
    else:
        mosaic.LaunchContext.async_copy = lambda self, *, src_ref: None
    before = mosaic.nvvm
    monkeypatch.setattr(mosaic_copies, "launch_context", mosaic)
    for _ in range(2):
        reason = mosaic_copies.install()
        assert reason is not None
        assert "install jax[cuda13]" in reason
        assert mosaic.nvvm is before

    monkeypatch.setattr(pallas_mosaic, "_NO_POLICY", reason)
    assert pallas_mosaic.unavailable(interpret=False) == reason
    assert pallas_mosaic.unavailable(interpret=True) is None
    with pytest.raises(backends.BackendUnavailable, match=r"install jax\[cuda13\]"):
        pallas_mosaic.compile_only(models.model("mixtral-8x7b").problem("down", 8, "fp16"), "row", Config(num_stages=3))


def test_the_policy_is_put_in_once_and_for_the_thread_that_lowers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the module is imported, as for two checkouts in one process; another thread's copies have none."""
    mosaic: Any = _Mosaic()
    monkeypatch.setattr(mosaic_copies, "launch_context", mosaic)
    assert mosaic_copies.install() is None
    lowering = mosaic.LaunchContext.async_copy
    anew = importlib.util.module_from_spec(mosaic_copies.__spec__)
    mosaic_copies.__spec__.loader.exec_module(anew)
    anew.launch_context = mosaic
    assert anew.install() is None
    assert mosaic.LaunchContext.async_copy is lowering

    monkeypatch.setattr(mosaic_copies._lowering, "evicts_first", True)
    number = SimpleNamespace(get_signless=lambda bits: bits)
    monkeypatch.setattr(mosaic_copies, "ir", SimpleNamespace(IntegerType=number))
    monkeypatch.setattr(mosaic_copies.utils, "c", lambda value, of: value)
    copy = "cp_async_bulk_tensor_shared_cluster_global"
    assert getattr(mosaic.nvvm, copy)() == mosaic_copies._EVICT_FIRST
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: getattr(mosaic.nvvm, copy)()).result() is None


def test_the_policy_is_taken_back_after_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one that fails to lower: the next kernel's copies are its own."""
    mosaic: Any = _Mosaic()
    monkeypatch.setattr(mosaic_copies, "launch_context", mosaic)
    assert mosaic_copies.install() is None
    monkeypatch.setattr(mosaic_copies, "ir", SimpleNamespace(MemRefType=lambda of: SimpleNamespace(rank=of)))
    monkeypatch.setattr(mosaic_copies, "_kernel_name", lambda: mosaic_copies.evict_first("kernel"))
    seen = []

    def fail(*_: object, **__: object) -> None:
        seen.append(mosaic_copies._lowering.evicts_first)
        raise ZeroDivisionError

    monkeypatch.setattr(mosaic_copies, "_copy", fail)
    with pytest.raises(ZeroDivisionError):
        mosaic.LaunchContext().async_copy(src_ref=SimpleNamespace(type=3))
    assert (seen, mosaic_copies._lowering.evicts_first) == ([True], False)
    mosaic.LaunchContext().async_copy(src_ref=SimpleNamespace(type=2))
    assert len(seen) == 1


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_callers_jit_takes_a_split_k(reduction: str) -> None:
    """Lowered for a GPU through the public door, whose custom derivatives stand around the backend's call."""
    problem = models.model("mixtral-8x7b").problem("down", 8, "fp16")
    config = Config(num_stages=3, split_k=2, reduction=reduction)

    def call(x: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
        return backends.moe_gemm(x, w, ids, mode="fp16", order="row", config=config, backend=BACKEND)

    x, w, ids, *_ = xla_compile.argument_types(problem)
    module = xla_compile.lower(call, [x, w, ids]).compiler_ir()
    names = [str(call.attributes["call_target_name"]) for call in xla_compile.custom_calls(module)]
    assert sum("mosaic_gpu" in name for name in names) == 1


@pytest.mark.compile_only
def test_tiles_have_instructions_of_every_height() -> None:
    problem = models.model("mixtral-8x7b").problem("gate-up", 512, "fp16")
    config = Config(block_m=48, block_k=64, num_warps=8, num_stages=3)
    code = backends.load(BACKEND).compile_only(problem, "row", config)
    assert columns_of(code.ptx) == {"8", "16", "32", "48"}
    assert code.spills == 0


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("dtype", "block_k"),
    [
        ("fp16", 64),
        pytest.param("fp8-w8a8", 128, marks=pytest.mark.slow),
        pytest.param("fp8-w8a16", 64, marks=pytest.mark.slow),
    ],
)
def test_whole_tiles_in_the_registers_of_one_warp_group(dtype: str, block_k: int) -> None:
    """For sm_90a: 160 sums a thread, nothing spills; each K step multiplies all 128 channels by two instructions."""
    problem = models.model("mixtral-8x7b").problem("gate-up", 512, dtype)
    config = Config(block_m=160, block_k=block_k, num_warps=8, num_stages=4, ping_pong=True)
    assert pallas_mosaic.unsupported(problem, config) is None
    code = backends.load(BACKEND).compile_only(problem, "row", config)
    assert code.spills == 0
    assert f"setmaxnreg.inc.sync.aligned.u32 {mosaic_config.COMPUTE_REGISTERS}" in code.ptx
    depth = block_k // (32 if dtype == "fp8-w8a8" else 16)
    assert len(re.findall(r"wgmma\.mma_async\S*\.m64n160k", code.ptx)) % (2 * depth) == 0


def columns_of(ptx: str) -> set[str]:
    """Columns of the warp-group matrix instructions."""
    return set(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k", ptx))
