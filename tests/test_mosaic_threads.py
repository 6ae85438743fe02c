"""pallas-mosaic's rows of x gathered and rows of y scattered by threads, and its weights read by words."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

import backends
from backends import mosaic_config, mosaic_rows, pallas_mosaic
from bench import gathering
from shared import fp8, models
from shared.config import Config
from shared.problem import Problem
from tests import cases
from tests.cases import CASES, build
from tests.execute import check, run
from tests.where import HAS_GPU, INTERPRET, NUMERICS

BACKEND = "pallas-mosaic"
TURNS = {"block_n": 128, "num_warps": 8, "ping_pong": True}


@pytest.fixture
def gathers() -> Iterator[None]:
    """Small problems, too, have more rows of x than L2 keeps."""
    with gathering.forced():
        yield


@NUMERICS
@pytest.mark.parametrize(
    ("name", "variant", "order", "changes"),
    [
        ("ragged", "fp16", "row", {}),
        ("many-rows", "fp8-w8a16-channel", "popular", {"num_stages": 3}),
        ("many-rows", "fp8-w8a8-channel", "column", {"num_stages": 5}),
        ("many-rows", "bf16", "grouped", {"block_m": 32, "num_stages": 4}),
        ("ragged", "fp8-w8a8-block", "grouped", {"num_stages": 4}),
        ("some-minus-one", "fp16", "column", {"num_stages": 3}),
        ("k-odd", "fp16", "row", {"num_stages": 3}),
        ("k-tail", "fp16", "row", {"block_k": 32, "num_stages": 3}),  # 11 steps: several times around the ring
        ("k-tail", "fp8-w8a16-channel", "row", {"block_k": 64, "num_stages": 2}),
        ("k-tail", "fp16", "popular", {"block_k": 32, "num_stages": 6, **TURNS}),
        ("tall-tiles", "fp16", "row", {"num_stages": 2}),
        ("ragged", "fp16", "row", {"split_k": 2}),
        ("some-minus-one", "fp8-w8a16-channel", "column", {"num_stages": 3, "split_k": 2}),
        ("k-tail", "fp16", "column", {"block_k": 256, "num_stages": 2}),  # four columns a step, in pieces
    ],
)
@pytest.mark.usefixtures("gathers")
def test_gathered_rows(name: str, variant: str, order: str, changes: dict[str, object]) -> None:
    case = cases.TALL if name == cases.TALL.name else CASES[name]
    config = case.config.replace(**changes)
    data = cases.data_of(case, variant)
    assert mosaic_config.gathers(data.problem, config)
    y = run(BACKEND, data, order, config)
    check(y, data, config.rounded_parts(data.problem.k))


@pytest.mark.parametrize(
    ("name", "gemm", "tokens", "dtype", "block_m", "gathers"),
    [
        ("deepseek-v3", "gate-up", 128, "fp16", 16, True),  # 14.7 MB of sorted rows
        ("deepseek-v3", "gate-up", 128, "fp8-w8a16", 16, True),
        ("deepseek-v3", "gate-up", 128, "fp8-w8a8", 16, False),  # half as many
        ("deepseek-v3", "gate-up", 256, "fp8-w8a8", 16, True),
        ("deepseek-v3", "gate-up", 64, "fp16", 16, False),
        ("deepseek-v3", "down", 512, "fp16", 32, False),
        ("qwen3-30b-a3b", "gate-up", 512, "fp16", 48, True),  # 16.8 MB
        ("gpt-oss-120b", "gate-up", 512, "fp16", 32, False),  # 11.8 MB
        ("mixtral-8x7b", "down", 512, "fp16", 64, False),  # tall tiles
        ("mixtral-8x7b", "gate-up", 8, "fp16", 16, False),
    ],
)
def test_rows_are_gathered_where_l2_would_not_keep_a_copy(
    name: str, gemm: str, tokens: int, dtype: str, block_m: int, gathers: bool
) -> None:
    problem = models.model(name).problem(gemm, tokens, dtype)
    config = Config(block_m=block_m, num_stages=3)
    assert mosaic_config.gathers(problem, config) == gathers
    # Gathered, x is a row a token in L2, and leaves room for what evicts weights first.
    if gathers:
        assert mosaic_config.evicts_weights_first(problem, config) == (problem.write_bytes() < 22e6)


def test_a_block_that_trades_registers_gathers_nothing() -> None:
    """Its fetching warp-group has given up the registers for that."""
    problem = models.model("deepseek-v3").problem("gate-up", 512, "fp8-w8a16")
    config = Config(block_m=48, block_n=128, block_k=256, num_stages=2)
    assert mosaic_config.registers_of_thread(problem, config) > mosaic_config.REGISTERS_OF_THREE
    assert not mosaic_config.gathers(problem, config)
    assert mosaic_config.gathers(problem, config.replace(block_k=128))


@pytest.mark.compile_only
@pytest.mark.parametrize("stages", [2, 5])
def test_a_gathered_step_is_told_of_before_its_ring_comes_round(stages: int) -> None:
    """For sm_90a: threads copy rows of x, and every barrier is told of them while the ring has a stage to spare.

    With s stages, the fetching warp-group waits for a stage that is free once the step s - 1 before has been seen, so
    that no more than s - 2 may be under way.
    """
    problem = models.model("deepseek-v3").problem("gate-up", 256, "fp16")
    code = backends.load(BACKEND).compile_only(problem, "row", Config(block_k=64, num_stages=stages))
    assert code.spills == 0
    pending = [int(n) for n in re.findall(r"cp\.async\.wait_group (\d+); fence\.proxy\.async", code.ptx)]
    assert max(pending) <= stages - 2
    assert sorted(pending) == list(range(max(pending) + 1)), "one of each: while it goes on, and at its end"
    # Of tiles of 8 and of 16 rows, a row being 128 bytes: one piece of 16 bytes a thread, or one.
    assert len(re.findall(r"cp\.async\.cg\.shared\.global", code.ptx)) == 2


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("n", "split_k", "scatters"), [(512, 1, True), (512, 2, True), (516, 1, False), (516, 2, False)]
)
def test_rows_of_y_go_to_their_slots_by_threads_or_tiles_by_tma(n: int, split_k: int, scatters: bool) -> None:
    problem = Problem.of("fp16", tokens=64, experts=8, n=n, k=256, top_k=2)
    config = Config(block_k=64, num_stages=3, split_k=split_k)
    assert mosaic_config.scatters(problem, config) == scatters
    ptx = backends.load(BACKEND).compile_only(problem, "row", config).ptx
    assert bool(re.search(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared", ptx)) == (not scatters)
    assert ("st.global.v4.b32" in ptx) == scatters


@pytest.mark.compile_only
def test_weights_are_read_by_words_alone() -> None:
    """For sm_90a, fp8-w8a16: ldmatrix, and no load of one or two weights."""
    problem = models.model("mixtral-8x7b").problem("gate-up", 64, "fp8-w8a16")
    ptx = backends.load(BACKEND).compile_only(problem, "row", Config(num_stages=3)).ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
    assert not re.search(r"ld\.shared\S*\.[usb](8|16)\s", ptx)


@pytest.mark.compile_only
@pytest.mark.parametrize(
    "config",
    [
        Config(block_m=64, block_n=128, block_k=256, num_stages=3),
        pytest.param(Config(block_m=64, block_n=256, block_k=64, num_stages=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_are_read_one_by_one_where_words_would_spill(config: Config) -> None:
    problem = Problem.of("fp8-w8a16", tokens=64, experts=8, n=4096, k=4096, top_k=2)
    assert not mosaic_config.reads_words(problem, config)
    assert mosaic_config.reads_words(problem, config.replace(block_m=32))
    assert backends.load(BACKEND).compile_only(problem, "row", config).spills == 0


@NUMERICS
@pytest.mark.parametrize("tokens", [3, 12])
def test_x_comes_in_the_order_of_words(tokens: int) -> None:
    """As its weights do: in both ways of preparing it."""
    problem = Problem.of("fp8-w8a16", tokens=tokens, experts=2, n=64, k=288, top_k=1)
    assert mosaic_config.reads_all_tokens(problem) == (tokens == 3)
    x = np.random.default_rng(0).normal(size=(tokens, problem.k)).astype(cases.float_dtype("bfloat16"))
    ids = jnp.zeros((tokens, 1), jnp.int32)
    rows = mosaic_rows.prepare(jnp.asarray(x), ids, None, None, problem.k, problem, "row", Config(), not HAS_GPU)
    expected, _ = fp8.scale_token(x)
    place = fp8.place_of(np.arange(problem.k), 16, 4)  # what wgmma's depth and ldmatrix make of it
    found = np.asarray(rows.x)[:tokens]
    assert (found[:, place] == expected).all()


@NUMERICS
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("ragged", "fp8-w8a16-channel"),  # K = 72 is no multiple of 16
        ("half-activations", "fp8-w8a16-block"),  # float16 x is not scaled, which would bring it to their order
    ],
)
def test_weights_are_read_one_by_one_where_x_keeps_its_order(name: str, variant: str) -> None:
    data = build(name, variant)
    assert not mosaic_config.reads_words(data.problem, CASES[name].config)
    y = run(BACKEND, data, "row", CASES[name].config)
    check(y, data)


@pytest.mark.skipif(INTERPRET, reason="threads gather, scatter and read words on a GPU alone")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "fp8-w8a16", "fp8-w8a8"])
@pytest.mark.parametrize(
    ("config", "n", "k"),
    [
        (Config(block_m=16, block_n=64, block_k=64, num_stages=2), 2048, 1152),
        (Config(block_m=16, block_n=64, block_k=64, num_stages=3), 2048, 1152),
        (Config(block_m=16, block_n=64, block_k=64, num_stages=7), 2048, 1152),
        (Config(block_m=32, block_n=64, block_k=64, num_stages=2), 2048, 1152),
        (Config(block_m=48, block_n=64, block_k=64, num_stages=4), 2048, 1152),
        # several columns of the widest swizzle in a step, as tuned tiles have them
        (Config(block_m=16, block_n=128, block_k=128, num_stages=4), 2048, 1152),
        (Config(block_m=16, block_n=64, block_k=256, num_stages=3), 2048, 1152),
        (Config(block_m=48, block_n=128, block_k=128, num_warps=8, num_stages=3), 2048, 1152),
        # rows of no whole columns, which come in pieces
        (Config(block_m=16, block_n=64, block_k=256, num_stages=3), 2048, 1168),
        (Config(block_m=48, block_n=128, block_k=128, num_warps=8, num_stages=3), 2048, 1168),
        # whole tiles in turns, several for each thread block
        (Config(block_m=16, block_n=128, block_k=64, num_warps=8, num_stages=3, ping_pong=True), 8192, 1152),
        (Config(block_m=32, block_n=128, block_k=128, num_warps=8, num_stages=4, ping_pong=True), 8192, 1168),
    ],
    ids=str,
)
@pytest.mark.usefixtures("gathers")
def test_rings_of_every_depth_come_round_on_a_gpu(dtype: str, config: Config, n: int, k: int) -> None:
    """Many steps and tiles a block, experts of 0 to 60 slots: a barrier told of too late would stop the kernel."""
    counts = (0, 1, 7, 8, 9, 16, 17, 31, 33, 48, 60, 3)
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts), dtype=np.int32), counts))[:, None]
    case = cases.Case(name="ring", reason="", ids=ids, experts=len(counts), n=n, k=k, config=config)
    data = cases.data_of(case, dtype if dtype == "fp16" else f"{dtype}-channel")
    if pallas_mosaic.unsupported(data.problem, config) is None:
        assert mosaic_config.gathers(data.problem, config)
    y = run(BACKEND, data, "row", config)
    check(y, data)
