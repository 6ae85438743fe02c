"""Variants of the Triton kernel that `python -m bench variants` times: their values, their code, and the runner."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from backends import torch_triton, triton_launch
from backends.arrays import numpy_to_torch
from backends.compiled import Compiled
from bench import evidence, variant_launch, variant_tables, variants
from bench.__main__ import app
from bench.cases import DEFAULT_DTYPES
from bench.contenders import Contender, to_torch
from bench.machine import Rehearsal
from bench.variant_launch import VARIANTS
from shared import fp8
from shared.checks import ArgumentError
from shared.config import Config
from shared.models import model
from shared.problem import Problem
from shared.reference import error_bound
from tests.where import INTERPRET, NUMERICS

every_variant = pytest.mark.parametrize("name", VARIANTS)
SPECIALISED = "tma-persistent-gathered-warp-specialised"


# Values


@NUMERICS
@every_variant
@pytest.mark.parametrize(
    ("dtype", "order", "swap_ab"),
    [("fp16", "column", True), ("bf16", "row", False), ("fp8-w8a16", "row", False), ("fp8-w8a8", "column", True)],
)
def test_values_are_the_shipped_kernels(
    name: str, dtype: str, order: str, swap_ab: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged N and K, an expert with two tile rows, slots without an expert, more tiles than programs."""
    problem = Problem.of(dtype, tokens=12, experts=3, n=72, k=80, top_k=2, routing_weight=True)
    rng = np.random.default_rng(0)
    x = numpy_to_torch(rng.standard_normal((12, 80), np.float32)).to(getattr(torch, problem.activation))
    w, scale = rng.standard_normal((3, 72, 80)).astype(np.float32), None
    weights = numpy_to_torch(w).to(x.dtype)
    if problem.is_fp8:
        weights, scale = map(numpy_to_torch, fp8.quantise_channel(w))
    ids = torch.tensor([[0, 1]] * 5 + [[0, 2]] * 5 + [[0, -1], [0, 0]], dtype=torch.int32)
    routing_weight = torch.rand(12, 2)
    swap_ab = swap_ab or VARIANTS[name].warp_specialise
    config = Config(block_m=16, block_n=64 if swap_ab else 32, block_k=32, num_stages=2, swap_ab=swap_ab)
    given = [
        array if array is None or INTERPRET else array.cuda() for array in (x, weights, ids, scale, routing_weight)
    ]
    options: dict[str, Any] = {"problem": problem, "order": order, "config": config, "interpret": INTERPRET}
    monkeypatch.setattr(variant_launch, "_resident_programs", lambda compiled: variant_launch.INTERPRETED_PROGRAMS)
    expected = torch_triton.moe_gemm(*given, **options)  # type: ignore[arg-type]
    y = variant_launch.moe_gemm(*given, variant=VARIANTS[name], **options)  # type: ignore[arg-type]
    assert (expected != 0).any()
    assert (y[10, 1] == 0).all()
    if INTERPRET:
        assert torch.equal(y, expected)
    difference = (y.double() - expected.double()).norm() / expected.double().norm()
    assert difference <= error_bound(problem)


# Code


def config_of(dtype: str) -> Config:
    return Config(block_m=16, block_n=64, block_k=64 if dtype == "fp16" else 128, num_warps=4, num_stages=4)


@functools.cache
def compiled(name: str, dtype: str) -> Compiled:
    problem, config = model("gpt-oss-120b").problem("down", 8, dtype), config_of(dtype)
    if name == variants.BASE:
        return triton_launch.compile_only(problem, "column", config)
    assert variant_launch.unsupported(problem, VARIANTS[name], config) is None
    return variant_launch.compile_only(problem, "column", config, VARIANTS[name])


@pytest.mark.compile_only
@pytest.mark.parametrize("dtype", ["fp16", *(pytest.param(d, marks=pytest.mark.slow) for d in DEFAULT_DTYPES[1:])])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("tma", SPECIALISED) else pytest.mark.slow) for n in VARIANTS]
)
def test_code_has_what_the_variant_is_named_for(name: str, dtype: str) -> None:
    variant, code, config = VARIANTS[name], compiled(name, dtype), config_of(dtype)
    base = compiled(variants.BASE, dtype)
    box = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
    assert box not in base.ptx
    boxes = code.ptx.count(box)
    if not variant.tma:
        assert boxes == 0
    elif variant.warp_specialise:
        assert boxes == 2, "one of w and one of x, in the warp-group that fetches"
    else:  # ahead of the loop a box for each stage but the last, one in the loop
        operands = 2 if variant.gathered else 1
        assert boxes == operands * config.num_stages
    assert ("cp.async.cg" in code.ptx) == (not variant.gathered), "x by pointers, unless it comes by TMA as well"
    assert ("%nctaid.x" in code.ptx) == variant.persistent
    assert "%nctaid.x" not in base.ptx
    assert ("setmaxnreg" in code.ptx) == variant.warp_specialise, "registers go from one warp-group to another"
    if variant.flatten:
        assert code.ptx != compiled(name.removesuffix("-flattened"), dtype).ptx
    assert "wgmma.mma_async" in code.ptx
    assert code.spills == 0
    stages = config.num_stages * config.block_n * config.block_k * (2 if dtype == "fp16" else 1)
    assert code.shared_bytes >= stages, "fewer stages of weights than were asked for"


def test_what_a_variant_cannot_do_is_refused() -> None:
    problem = model("mixtral-8x7b").problem("gate-up", 8, "fp8-w8a8")
    config = config_of("fp8-w8a8")
    cases = [
        (problem, "tma", config.replace(split_k=4), "split_k: got 4"),
        (problem, SPECIALISED, config.replace(block_n=128), "64 rows on the left"),
        (problem, SPECIALISED, config.replace(num_warps=8), "4 warps"),
        (problem, "tma", config.replace(block_n=512, num_stages=2), "at most 256"),
        (problem, "persistent", config.replace(num_stages=16, block_k=512), "bytes of shared memory"),
        (Problem.of("fp16", tokens=1, experts=1, n=64, k=36, top_k=1), "tma", config, "k: got 36"),
        (
            model("mixtral-8x7b").problem("gate-up", 8, "fp8-w8a8", scale_layout="block"),
            "persistent", config, "scale_layout: got block",
        ),
    ]  # fmt: skip
    for refused, name, other, reason in cases:
        assert reason in (variant_launch.unsupported(refused, VARIANTS[name], other) or "accepted"), reason


def test_every_cell_has_configs_for_every_variant() -> None:
    import backends

    cells = list(variants.cells())
    assert len(cells) == 7 * len(DEFAULT_DTYPES)
    for cell in cells:
        tuned = backends.config_for(cell.problem, backend="torch-triton", gpu="NVIDIA H200")
        for name in VARIANTS:
            found = variants.candidates(cell.problem, name, tuned)
            assert 3 <= len(found) <= 9, (cell, name, found)
            assert name == SPECIALISED or variants.in_one_block(tuned) == found[0]


# The runner


def fake(wrong: tuple[str, ...] = (), failing: tuple[str, ...] = ()) -> Any:
    """In place of `variants.contender`: the reference as the result, off by a tenth for some variants."""

    def contender(cell: Any, attempt: Any, data: Any, device: Any) -> Contender:
        def call() -> torch.Tensor:
            if attempt.variant in failing:
                raise RuntimeError("out of luck\nand more")
            return (data.reference * (1.1 if attempt.variant in wrong else 1)).to(data.x.dtype)

        row = cell.row(attempt.variant)
        return Contender(row, "torch", call, (), to_torch, "moe_gemm_kernel", attempt.config, tile_rows=1)

    return contender


def run(out: Path, **options: Any) -> bool:
    given: dict[str, Any] = {"seconds": 60, "say": lambda line: None, "rehearse": True, "keyword": "/fp16/"}
    return variants.run(out, Rehearsal(), **given | options)


def test_a_wrong_or_failing_variant_gets_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "contender", fake(wrong=("tma",), failing=("persistent",)))
    out = tmp_path / "variants.jsonl"
    assert run(out)
    rows = {row["variant"]: row for row in variants.read(out)}
    assert list(rows) == [variants.BASE, *VARIANTS]
    for name, reason in (("tma", "above its bound"), ("persistent", "RuntimeError: out of luck")):
        row = rows[name]
        assert reason in row["error"]
        assert "\n" not in row["error"]
        assert "us" not in row
        assert row["times"] == []
        assert all(reason in why for why in row["failed"].values())
    good = rows["tma-persistent"]
    assert good["us"] == good["times"][0]["us"] > 0
    assert good["base_us"] == rows[variants.BASE]["us"]
    assert good["failed"] == {}
    text = variant_tables.block(variants.read(out))
    assert "no time: WrongResult" in text
    assert "- tma: no time in any of 1 cells." in text
    assert evidence.BLOCKS["variants"](tmp_path, {}) == text
    assert "python -m bench variants" in evidence.BLOCKS["variants"](tmp_path / "none", {})


def test_a_run_goes_on_with_what_its_file_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "contender", fake())
    out, measured = tmp_path / "variants.jsonl", []
    of_cell = variants.measure

    def seen(cell: Any, names: Any, *rest: Any) -> Any:
        measured.append((cell.dtype, tuple(names)))
        return of_cell(cell, names, *rest)

    monkeypatch.setattr(variants, "measure", seen)
    assert run(out, names=("tma",))
    assert run(out, names=("tma", "persistent"))
    assert measured == [("fp16", ("tma",)), ("fp16", ("persistent",))]
    assert run(out, names=("tma", "persistent"))
    assert len(measured) == 2, "measured again"
    assert {row["variant"] for row in variants.read(out)} == {"base", "tma", "persistent"}
    monkeypatch.setattr(variants, "sources", lambda: "other code")
    with out.open("a") as file:
        file.write('{"id": "cut o')
    assert run(out, names=("tma",))
    assert measured[2:] == [("fp16", ("tma",))]
    assert all(json.loads(line) for line in out.read_text().splitlines())
    assert not run(tmp_path / "none.jsonl", seconds=-1)


def test_ratios_are_of_the_base_measured_beside_it() -> None:
    one = {"case": "c", "dtype": "fp16", "order": "column", "gpu": "g", "date": "d"}
    config = {"block_m": 16}
    rows = [
        one | {"id": "a", "variant": "base", "us": 50.0, "base_us": 50.0, "config": config},
        one | {"id": "b", "variant": "tma", "us": 45.0, "base_us": 60.0, "config": config},
        one | {"id": "c", "variant": "persistent", "us": 48.0, "base_us": 50.0, "config": config},
    ]
    headings, (line,) = variant_tables.table(rows)
    assert len(headings) == len(line)
    assert line[3:6] == ["50.0", "**45.0 (0.750)**", "48.0 (0.960)"]
    assert line[-1].startswith("tma 16x")
    told = variant_tables.summary(rows)[0]
    assert told.startswith("- tma: median 0.750 of base's time (0.750 to 0.750); more than 1% faster in 1, slower in 0")


def test_the_command_refuses_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.machine.smi", lambda fields: {})
    for arguments, reason in (
        ([], "no NVIDIA GPU here"),
        (["--order", "grouped"], "--order: got 'grouped'"),
        (["--variant", "tmma"], "--variant: got 'tmma'"),
        (["--from", str(tmp_path / "none")], "does not exist"),
        (["--rehearse"], "--out: got none"),
    ):
        refused = CliRunner().invoke(app, ["variants", *arguments])
        assert refused.exit_code == 2, arguments
        assert reason in refused.stderr


def test_orders_that_the_variants_do_not_know_are_refused() -> None:
    problem = Problem.of("fp16", tokens=1, experts=1, n=64, k=64, top_k=1)
    with pytest.raises(ArgumentError, match="order: got 'grouped'"):
        variant_launch.moe_gemm(
            torch.zeros(1, 64), torch.zeros(1, 64, 64), torch.zeros(1, 1, dtype=torch.int32),
            problem=problem, order="grouped", config=Config(), variant=VARIANTS["tma"],
        )  # fmt: skip
