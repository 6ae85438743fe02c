"""What the compilers make of the tuned kernels: registers, shared memory, spills, instructions by kind. Needs no GPU.

python -m bench.disassembly bench/results/disassembly.json      the rows of CASES; notes/performance.md shows them
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import backends
from backends.compiled import Compiled
from bench import results
from bench.cases import DEFAULT_DTYPES, TARGET_ORDER
from bench.terminal import Table
from shared.models import model

COMPILED = results.RESULTS / "disassembly.json"
GPU = "NVIDIA H200"
CASES = (("mixtral-8x7b", "gate-up", 8), ("mixtral-8x7b", "gate-up", 512))
BACKENDS = ("torch-triton", "pallas-triton", "pallas-mosaic")
"""jax-triton launches torch-triton's kernel."""
KINDS = {
    "matrix instructions": r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.(m\d+n\d+k\d+)",
    "bulk copies (TMA)": r"\bcp\.async\.bulk\.tensor\.\dd\.shared",
    "16-byte copies": r"\bcp\.async\.c[ag]\.shared",
    "e4m3 pairs widened": r"\bcvt\.\S*e4m3x2",
    "barriers of the thread block": r"\bbar\.sync\s+0;",
}


def rows() -> list[dict[str, Any]]:
    """One a case, dtype and backend: config, registers, spills, bytes of shared memory, PTX instructions by kind."""
    found = []
    for name, gemm, tokens in CASES:
        layer = model(name)
        for dtype in DEFAULT_DTYPES:
            problem = layer.problem(gemm, tokens, dtype)
            for backend in BACKENDS:
                config = backends.config_for(problem, backend=backend, gpu=GPU)
                code = backends.load(backend).compile_only(problem, TARGET_ORDER, config)
                facts = {"case": layer.case(gemm, tokens), "dtype": dtype, "backend": backend, "config": str(config)}
                found.append({**facts, **read(code)})
    return found


def read(code: Compiled) -> dict[str, Any]:
    """Figures of one kernel; instructions as they stand in the code, not as often as they run."""
    shapes = Counter(re.findall(KINDS["matrix instructions"], code.ptx))
    counts = {kind: len(re.findall(pattern, code.ptx)) for kind, pattern in KINDS.items()}
    figures = {"registers": code.registers, "spills": code.spills, "shared_bytes": code.shared_bytes}
    return {**figures, "instructions": counts, "shapes": dict(sorted(shapes.items()))}


def table(found: list[dict[str, Any]]) -> Table:
    headings = ["case", "dtype", "backend", "config", "registers", "spilled bytes", "shared KB", *KINDS, "shapes"]
    lines = [
        [
            row["case"], row["dtype"], row["backend"], row["config"], str(row["registers"]), str(row["spills"]),
            f"{row['shared_bytes'] / 1024:.0f}", *(str(row["instructions"][kind]) for kind in KINDS),
            ", ".join(row["shapes"]),
        ]
        for row in found
    ]  # fmt: skip
    return headings, lines


if __name__ == "__main__":
    from bench.machine import versions

    Path(sys.argv[1]).write_text(results.dump({"versions": versions(), "rows": rows()}), encoding="utf-8")
