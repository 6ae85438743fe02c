"""Plain reads by size: every design reads every element once, and the median of the best is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench import measure, reads
from bench.__main__ import app
from bench.clock import FLUSH_KERNEL, KernelRecord
from bench.reads import Design

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import torch
from bench import measure, reads
chosen = json.loads(sys.argv[1])
for name, fields, length in chosen:
    design = reads.Design(**fields)
    source = torch.randint(-100, 100, (length,), dtype=torch.int32)
    marked = torch.full((length,), 2, dtype=torch.int32)
    sums = torch.full((64,), 7, dtype=torch.int32)
    for values in (source, marked):  # the second tells an element that is read twice from one that is left out
        programs = reads.read(values, sums, design, 3)
        assert int(sums[:programs].sum()) == int(values.sum()), (name, sums, values.sum())
    assert (sums[programs:] == 7).all(), name
    print(name)
"""
SMALL = {
    "once": ({"elements": 1024, "warps": 4, "per_program": 2048}, 50_001),
    "interleaved": ({"elements": 512, "warps": 4, "programs_per_sm": 2, "stages": 3}, 20_001),
    "contiguous": ({"elements": 512, "warps": 4, "programs_per_sm": 2, "stages": 3}, 20_001),
    "descriptor": ({"elements": 1024, "warps": 4, "programs_per_sm": 2, "stages": 3}, 1024 * 17 + 32 * 5),
}


def test_every_design_reads_every_element_once() -> None:
    pytest.importorskip("triton")
    assert set(SMALL) == {design.kind for design in reads.DESIGNS}
    chosen = [(kind, {"kind": kind, **fields}, length) for kind, (fields, length) in SMALL.items()]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(chosen)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == list(SMALL), found.stderr


def test_every_sample_is_of_a_cold_l2() -> None:
    """Flush, then read, in this order, in each sample and in each repetition of one whose record was lost."""
    did: list[str] = []
    lost = [True, False, False]

    class Clock:
        name = "fake"

        def reset(self) -> None: ...

        def records(self) -> list[KernelRecord]:
            if did and did[-1] == "read":
                did.append("looked")
                return [] if lost.pop(0) else [KernelRecord(reads.KERNEL, 1e-6, 0.0)]
            return []

    device = types.SimpleNamespace(clock=Clock(), synchronize=lambda: None, flush=lambda: did.append("flush"))
    sample = reads.sampler(device, lambda *_: did.append("read"))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "gather", lambda clock, *_: clock.records())
        assert sample(reads.DESIGNS[0], 1 << 22) == pytest.approx(1e-6)
        assert sample(reads.DESIGNS[0], 1 << 22) == pytest.approx(1e-6)
    assert [step for step in did if step != "looked"] == ["flush", "read"] * 3


def test_designs_fit_and_have_names_of_their_own() -> None:
    assert len({design.name for design in reads.DESIGNS}) == len(reads.DESIGNS)
    assert FLUSH_KERNEL not in reads.KERNEL
    for design in reads.DESIGNS:
        assert 4 * design.elements * design.stages * max(design.programs_per_sm, 1) <= 192 << 10, "bytes on an SM"
        assert design.per_program % design.elements == 0
        sizes = [4 * design.elements] if design.kind == "descriptor" else []
        assert all(size % unit == 0 for size in reads.SIZES for unit in sizes)
    assert reads.DESIGNS[0].name == "once, 4 KiB per program"
    assert reads.DESIGNS[-1].name == "descriptor, 4 programs per SM, 6 x 8 KiB in flight"
    assert list(reads.SIZES) == sorted(reads.SIZES)
    assert max(reads.SIZES) < reads.BUFFER


def test_the_best_median_counts_and_not_the_luckiest_try() -> None:
    """The second design is lucky as it is tried, and slower than the first when it is timed again."""
    slow, lucky, even = (Design("once", 1024, 4, per_program=1024 * n) for n in (1, 2, 3))
    calls = dict.fromkeys((slow, lucky, even), 0)

    def sample(design: Design, size: int) -> float:
        calls[design] += 1
        if design == slow:
            return 9e-6
        if design == lucky:
            return 1e-6 if calls[design] <= reads.TRIED else 4e-6
        return (2e-6, 3e-6, 9e-6)[calls[design] % 3]

    (one,) = reads.best_of([slow, lucky, even], sample, sizes=[1000])
    assert (one["bytes"], one["us"], one["design"]) == (1000, 3.0, even.name)
    assert one["tried_us"] == {slow.name: 9.0, lucky.name: 1.0, even.name: 3.0}
    assert len(one["samples_us"]) == reads.SAMPLES


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text("")
    refused = CliRunner().invoke(app, ["reads", "--out", str(kept)])
    assert refused.exit_code == 2
    assert "allowed: a new file" in refused.output
    refused = CliRunner().invoke(app, ["reads", "--clock", "sundial"])
    assert refused.exit_code == 2
    assert "--clock: got 'sundial'" in refused.output
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        assert "no NVIDIA GPU" in CliRunner().invoke(app, ["reads"]).output


@pytest.mark.compile_only
def test_designs_compile_to_wide_loads_that_are_in_flight_together() -> None:
    """16 bytes a load; cp.async and TMA copies of all stages but one before the first wait; no spills."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from backends.compiled import compile_ptx
    from bench import read_kernel

    def compiled(kernel: Any, pointer: str, constants: dict[str, Any]) -> str:
        names = kernel.arg_names
        kinds = dict(zip(names, (pointer, "*i32", "i32"), strict=False))
        divisible = [(i,) for i, name in enumerate(names[:3]) if not kinds[name].startswith("tensordesc")]
        source = ASTSource(
            fn=kernel,
            signature=kinds | dict.fromkeys(constants, "constexpr"),
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={place: [["tt.divisibility", 16]] for place in divisible},
        )
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        assert compile_ptx(made.asm["ptx"], made.metadata.shared).spills == 0
        return str(made.asm["ptx"])

    once = compiled(read_kernel.plain_read_once, "*i32", {"PER_PROGRAM": 8192, "BLOCK": 4096})
    assert once.count("ld.global.v4.b32") == 2 * 4096 // 4 // 128
    for interleaved in (True, False):
        constants = {"BLOCK": 2048, "STAGES": 6, "INTERLEAVED": interleaved}
        ptx = compiled(read_kernel.plain_read_persistent, "*i32", constants)
        assert "ld.global" not in ptx
        assert ptx.count("cp.async.cg.shared.global") == 6 * 2048 // 4 // 128
    ptx = compiled(
        read_kernel.plain_read_descriptor, "tensordesc<i32[64, 32]>", {"ROWS": 64, "COLUMNS": 32, "STAGES": 6}
    )
    assert ptx.count("cp.async.bulk.tensor.2d") == 6
