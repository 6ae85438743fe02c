"""A made-up run that meets all speed targets, and what breaks it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backends.registry import BACKENDS
from bench import targets
from bench.cases import Row, rows

READ, BF16, FP8 = 4.7e12, 8e14, 1.5e15
RUN: dict[str, Any] = {
    "gpu": "NVIDIA H200", "clock": "cupti", "cache": "cold", "routing": "uniform", "seed": 0, "set": "targets",
    "rounds": 20, "sources": "abc", "date": "2026-01-02T03:04:05Z", "versions": {"torch": "1", "triton": "2"},
    "ceilings": {"read_bytes_per_s": READ, "bf16_flops": BF16, "fp8_flops": FP8},
}  # fmt: skip
PEERS = ("vllm-fused-moe", "triton-kernels-matmul", "torch-grouped-mm", "jax-ragged-dot", "tokamax-ragged-dot")
Found = dict[str, Any]
Launched = list[dict[str, Any]]


@functools.cache
def _rows() -> tuple[dict[str, Any], ...]:
    """Backends at 0.97 of the floor, every peer 1.2 times as slow."""
    read = {layer.name: layer.read_bytes for layer in targets.layers()}
    found = []
    for row in rows("targets"):
        if row.contender in BACKENDS:
            slots = row.problem.slots
            rate = FP8 if row.dtype == "fp8-w8a8" else BF16
            floor = 1e6 * max(read[row.case.name][row.dtype] / READ, 2 * slots * row.problem.n * row.problem.k / rate)
            found.append(_row(row, floor, floor / 0.97))
            if row.contender == BACKENDS[0] and row.dtype != "fp16":
                found += [_row(dataclasses.replace(row, order="own", contender=p), floor, floor * 1.25) for p in PEERS]
            if row.dtype == "fp16" and row.contender == BACKENDS[0]:
                peer = dataclasses.replace(row, order="own", contender="torch-cublas-loop")
                found.append(_row(peer, floor, floor * 1.25))
    return tuple(found)


def _row(row: Row, floor: float, us: float) -> dict[str, Any]:
    return {
        "id": row.id, "case": row.case.name, "dtype": row.dtype, "scale_layout": row.problem.scale_layout,
        "order": row.order, "contender": row.contender, "floor_us": floor, "kernel_us": us,
    }  # fmt: skip


def found() -> Found:
    return {"run": dict(RUN), "rows": [dict(row) for row in _rows()], "pairs": [], "published": [], "skipped": {}}


def launched() -> Launched:
    nothing: dict[str, Any] = {"graph_layer_us": None, "eager_steady_us": None, "jit_layer_us": None}
    lines = []
    for backend in BACKENDS:
        times: dict[str, Any] = {"jit_layer_us": 140.0}
        if backend == "torch-triton":
            times = {"graph_layer_us": 103.0, "eager_steady_us": 119.0}
        lines.append({"backend": backend, "case": "a", "dtype": "fp16", "kernel_us": 100.0, **nothing, **times})
    return lines


def of(found: Found, case: str, dtype: str, contender: str | None = None) -> Iterator[dict[str, Any]]:
    """The backends' rows of a case and dtype, or those of one contender."""
    names = (contender,) if contender else BACKENDS
    yield from (r for r in found["rows"] if (r["case"], r["dtype"]) == (case, dtype) and r["contender"] in names)


def slow(found: Found, case: str, dtype: str, factor: float, contender: str | None = None) -> None:
    for row in of(found, case, dtype, contender):
        row["kernel_us"] *= factor


def missed(found: Found | None, launched: Launched = []) -> set[tuple[str, str]]:  # noqa: B006
    return {(line.target, line.dtype) for line in targets.judge(found, launched) if line.status == "missed"}


def write(path: Path, found: Found, **changes: Any) -> Path:
    """A run's JSON lines."""
    lines = [{"kind": "run", **found["run"], **changes}, *({"kind": "time", **row} for row in found["rows"])]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def shards(found: Found, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Two parts of a run; changes: how the second's first line differs."""
    halves = [{"run": found["run"], "rows": [r for r in found["rows"] if ("/down/" in r["id"]) == d]} for d in (0, 1)]
    first = write(folder / "targets-1of2.jsonl", halves[0], shard="1/2")
    return first, write(folder / "targets-2of2.jsonl", halves[1], shard="2/2", **changes)
