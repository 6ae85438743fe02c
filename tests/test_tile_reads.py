"""`python -m bench tile-reads`: each step gives what it must, its code is the GEMM kernel's, and the table adds up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import backends
from backends import triton_launch
from bench import data, evidence, tile_read_launch, tile_read_tables, tile_reads
from bench.__main__ import app
from bench.cases import Case
from bench.machine import Rehearsal
from bench.tile_read_launch import PRODUCT, STEPS, Reader
from shared.checks import ArgumentError
from shared.config import Config
from shared.models import Model, model
from tests.where import INTERPRET, NUMERICS

RAGGED = Model(name="ragged", hidden=144, intermediate=48, experts=7, top_k=2, tp=1, source="made up: K = 144")
every_step = pytest.mark.parametrize("step", STEPS)


# Values


def reader(dtype: str, block_k: int) -> Reader:
    made = data.build(Case(RAGGED, "gate-up", 3), dtype, "channel", device="cpu" if INTERPRET else "cuda")
    config = Config(block_m=16, block_n=32, block_k=block_k, num_warps=4, num_stages=3, swap_ab=True)
    return Reader(made, config, INTERPRET)


@NUMERICS
@every_step
@pytest.mark.parametrize(("dtype", "block_k"), [("fp16", 64), ("fp8-w8a8", 128)])
def test_a_step_gives_what_torch_gives(step: str, dtype: str, block_k: int) -> None:
    """K is no multiple of BLOCK_K; not all experts are active, so a plan's experts are not 0, 1, 2, ..."""
    one = reader(dtype, block_k)
    one.check(step)
    assert one.rows < RAGGED.experts
    if step == PRODUCT:
        return
    rows, columns = one.expected(step).view(one.tile_cols, one.rows).T.shape
    assert (rows, columns) == (one.rows, 3)
    assert len(one.expected(step).unique()) == rows * columns, "sums do not tell tiles apart"
    others = [other for other in STEPS if other not in (step, PRODUCT) and STEPS[other]["PLANNED"]]
    if STEPS[step]["PLANNED"]:
        assert not any(torch.equal(one.expected(step), one.expected(other)) for other in others)


@NUMERICS
@every_step
def test_bytes_that_are_not_read_are_noticed(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is told of a shorter K, or of one that ends its loop a block early."""
    one, of_step = reader("fp16", 16), tile_read_launch.constants

    def shorter(problem: Any, config: Any, name: str) -> dict[str, Any]:
        found = of_step(problem, config, name)
        return found | {"K": found["K"] - found["BLOCK_K"]}

    one.check(step)
    monkeypatch.setattr(tile_read_launch, "constants", shorter)
    with pytest.raises(AssertionError, match=r"sums|error"):
        one.check(step)


# Code


@pytest.mark.compile_only
@every_step
@pytest.mark.parametrize(
    ("name", "gemm", "dtype"),
    [
        ("mixtral-8x7b", "gate-up", "fp16"),
        pytest.param("gpt-oss-120b", "down", "fp8-w8a8", id="k-is-no-multiple-of-a-block"),
    ],
)
def test_loads_are_the_gemm_kernels(step: str, name: str, gemm: str, dtype: str) -> None:
    """16-byte copies, as many a stage and as many stages as the shipped kernel's."""
    problem = model(name).problem(gemm, 8, dtype)
    config = backends.config_for(problem, backend="torch-triton", gpu="NVIDIA H200")
    code = tile_read_launch.compile_only(problem, config, step)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)", code.ptx)
    assert {int(size, 0) for size in copies} == {16}
    threads = 32 * config.num_warps
    of_w = config.block_n * config.block_k * problem.w_itemsize // 16 // threads
    of_x = -(-config.block_m * config.block_k * problem.x_itemsize // 16 // threads)
    a_stage = of_w + (of_x if STEPS[step]["GATHER_X"] else 0)
    assert len(copies) == a_stage * config.num_stages, (
        "ahead of the loop a block for each stage but the last, one in it"
    )
    assert code.spills == 0
    assert ("wgmma.mma_async" in code.ptx) == (step == PRODUCT)
    if step == PRODUCT:
        shipped = triton_launch.compile_only(problem, "column", config)
        assert code.shared_bytes == shipped.shared_bytes
        assert len(copies) == len(re.findall(r"cp\.async\.c[ag]\.shared\.global", shipped.ptx))


def test_every_cell_can_be_read_at_its_config() -> None:
    rows = list(tile_reads.cells())
    assert len(rows) == 7 * len(tile_reads.DTYPES)
    for row in rows:
        config = tile_reads.config_of(row, "NVIDIA H200")
        assert tile_read_launch.unsupported(row.problem, config) is None, row.id
        if row.case.model.name == "balanced":
            assert row.problem.n // config.block_n * 2 % 132 == 0, "not as many tiles on every SM"


def test_what_the_steps_cannot_do_is_refused() -> None:
    problem, config = model("mixtral-8x7b").problem("gate-up", 8, "fp16"), Config(swap_ab=True)
    for other, changed, reason in (
        (problem, config.replace(swap_ab=False), "weights on the left"),
        (problem, config.replace(block_m=96), "a power of two"),
        (problem, config.replace(split_k=2), "K in one part"),
        (model("gpt-oss-120b").problem("down", 8, "fp16"), config.replace(block_n=128), "a divisor of N = 2880"),
        (model("mixtral-8x7b").problem("gate-up", 8, "fp8-w8a16"), config, "x as wide as w"),
    ):
        assert reason in (tile_read_launch.unsupported(other, changed) or "accepted"), reason
    made = data.build(Case(RAGGED, "gate-up", 3), "fp16", "channel", device="cpu")
    with pytest.raises(ArgumentError, match="a divisor of N = 96"):
        Reader(made, config.replace(block_n=64), True)


# The runner and its table


def run(out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[bool, list[str]]:
    """With `measure` made up; the ids that were measured."""
    measured: list[str] = []

    def measure(row: Any, made: Any, device: Any) -> dict[str, Any]:
        measured.append(f"{row.case.name}/{row.dtype}")
        return {"id": measured[-1], "bytes": 1, "us": {"tiles": 1.0}, "failed": {}}

    monkeypatch.setattr(tile_reads, "measure", measure)
    given: dict[str, Any] = {"seconds": 60, "say": lambda line: None, "rehearse": True}
    return tile_reads.run(out, Rehearsal(), **given | options), measured


def test_a_run_goes_on_with_what_its_file_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, tiny = tmp_path / "tile-reads.jsonl", "tiny/gate-up/tp1/tokens-4"
    assert run(out, monkeypatch, keyword="fp16") == (True, [f"{tiny}/fp16"])
    with out.open("a") as file:
        file.write('{"id": "cut o')
    assert run(out, monkeypatch, seconds=-1) == (False, [])
    assert run(out, monkeypatch) == (True, [f"{tiny}/fp8-w8a8"])
    assert run(out, monkeypatch) == (True, [])
    monkeypatch.setattr(tile_reads, "sources", lambda: "other code")
    assert len(run(out, monkeypatch)[1]) == 2


def test_a_wrong_step_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: Reader, step: str) -> None:
        assert step != "tiles", "3 of 8 tiles have other sums than torch's"

    def call(self: Reader, step: str) -> torch.Tensor:
        if step == "with x":
            raise RuntimeError("out of luck\nand more")
        return self.sums

    monkeypatch.setattr(Reader, "check", check)
    monkeypatch.setattr(Reader, "__call__", call)
    row = next(tile_reads.cells(rehearse=True))
    found = tile_reads.measure(row, data.build(row.case, row.dtype, "channel", device="cpu"), Rehearsal())
    assert set(found["us"]) == {*STEPS, tile_read_tables.SHIPPED} - {"tiles", "with x"}
    assert found["failed"].keys() == {"tiles", "with x"}
    assert "3 of 8 tiles" in found["failed"]["tiles"]
    assert found["failed"]["with x"] == "RuntimeError: out of luck"


def test_the_table_tells_what_is_above_the_bytes_time(tmp_path: Path) -> None:
    row = {
        "id": "c/fp16", "case": "c", "dtype": "fp16", "config": {"block_m": 16}, "bytes": 235_000_000, "tiles": 224,
        "sms": 132, "read_bytes_per_s": 4.7e12, "us": {"plain read": 51.6, "tiles": 53.04, "shipped kernel": 56.5},
        "programs_per_sm": {"tiles": 3, PRODUCT: 2}, "failed": {"with x": "error 3"}, "gpu": "g", "date": "d",
        "versions": {"torch": "1", "triton": "2"},
    }  # fmt: skip
    headings, (line,) = tile_read_tables.table([row])
    told = dict(zip(headings, line, strict=True))
    assert (told["MB"], told["at the read ceiling µs"], told["tiles per SM"]) == ("235.0", "50.0", "1.70")
    assert (told["plain read"], told["tiles"], told["shipped kernel"]) == ("+1.6", "+3.0", "+6.5")
    assert told["programs per SM"] == "3, –, 2"
    assert told["with x"] == "no time"
    text = tile_read_tables.block([row])
    assert "- c/fp16, with x: no time, error 3." in text
    assert "have changed since" in text
    assert "have changed since" not in tile_read_tables.block([row | {"sources": tile_read_tables.sources()}])
    assert "python -m bench tile-reads" in evidence.BLOCKS["tile-reads"](tmp_path, {})


def test_the_command_refuses_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.machine.smi", lambda fields: {})
    for arguments, reason in (
        ([], "no NVIDIA GPU here"),
        (["--from", str(tmp_path / "none")], "does not exist"),
        (["--rehearse"], "--out: got none"),
    ):
        refused = CliRunner().invoke(app, ["tile-reads", *arguments])
        assert refused.exit_code == 2, arguments
        assert reason in refused.stderr
