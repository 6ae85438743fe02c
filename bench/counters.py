"""Hardware counters of single launches, read by Nsight Compute (`ncu`) in a child process.

    DRAM bytes read beside the bytes that had to be read, L2 and L1 hit rates, sectors, duration, occupancy and what
    limits it. The child (`bench/counted.py`) makes a point's data, runs its kernel once and checks the result against
    the reference; ncu replays that launch until it has all counters, from flushed caches unless asked otherwise.

A duration under ncu is not a benchmark: it is one launch with ncu's own flush. It is here to be set against the bytes.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import results
from bench.points import Point

ROOT = Path(__file__).parent.parent
CACHE_CONTROLS = ("all", "none")
SECTOR = 32
"""Bytes of an L2 or L1 sector."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """One of ncu's metrics. scale: what ncu's base unit is multiplied with. needed: an old chip may lack the others."""

    name: str
    scale: float = 1.0
    needed: bool = False


METRICS = {
    "dram_read_bytes": Metric("dram__bytes_read.sum", needed=True),
    "dram_write_bytes": Metric("dram__bytes_write.sum"),
    "l2_hit_percent": Metric("lts__t_sector_hit_rate.pct", needed=True),
    "l2_read_sectors": Metric("lts__t_sectors_op_read.sum", needed=True),
    "l1_hit_percent": Metric("l1tex__t_sector_hit_rate.pct"),
    "l1_global_load_sectors": Metric("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"),
    "global_load_instructions": Metric("smsp__sass_inst_executed_op_global_ld.sum"),
    "async_copy_instructions": Metric("smsp__inst_executed_op_ldgsts.sum"),
    "duration_us": Metric("gpu__time_duration.sum", scale=1e-3, needed=True),
    "achieved_occupancy_percent": Metric("sm__warps_active.avg.pct_of_peak_sustained_active"),
    "theoretical_occupancy_percent": Metric("sm__maximum_warps_per_active_cycle_pct"),
    "blocks_per_sm_by_registers": Metric("launch__occupancy_limit_registers"),
    "blocks_per_sm_by_shared_memory": Metric("launch__occupancy_limit_shared_mem"),
    "blocks_per_sm_by_warps": Metric("launch__occupancy_limit_warps"),
    "blocks_per_sm_by_blocks": Metric("launch__occupancy_limit_blocks"),
    "registers": Metric("launch__registers_per_thread"),
    "grid": Metric("launch__grid_size"),
}
"""Our names and ncu's. Percentages are 0 to 100."""
_BESIDE = ("_zero", "_reduce")
"""Endings of the names of split-K's other kernels: counters are those of the GEMM kernel."""
_LIMITS = ("registers", "shared_memory", "warps", "blocks")


class CountersUnavailable(RuntimeError):
    """Counters cannot be read here; the message says why and what to do."""


def find_ncu() -> str:
    """Path of ncu; CountersUnavailable with the remedy where there is none."""
    found = shutil.which("ncu")
    if found is None:
        raise CountersUnavailable(
            "ncu (NVIDIA Nsight Compute) is not on the PATH; it comes with the CUDA toolkit. "
            "Saved output of `ncu --csv --page raw` can be read with --from"
        )
    return found


def measure(
    points: Sequence[Point],
    *,
    cache: str = "all",
    keep: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    timeout: float = 900,
) -> list[dict[str, Any]]:
    """One row a point: its facts, its counters, and `failed` with the reason where there are none.

    cache: ncu's --cache-control: "all" flushes L1 and L2 before each replay (cold), "none" leaves what came before
    keep:  where to keep ncu's CSV; None: it is dropped
    Raises CountersUnavailable without ncu, without a GPU or without permission to read counters.
    """
    if cache not in CACHE_CONTROLS:
        raise ValueError(f"cache: got {cache!r}; allowed: {', '.join(CACHE_CONTROLS)}")
    ncu = find_ncu()
    with tempfile.TemporaryDirectory() as folder:
        asked, told, table = (Path(folder) / name for name in ("points.json", "told.jsonl", "counters.csv"))
        asked.write_text(json.dumps([point.to_mapping() for point in points]), encoding="utf-8")
        command = [
            ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
            "--cache-control", cache, "--kernel-name", f"regex:{_kernel_pattern(points)}",
            "--metrics", ",".join(available_metrics(ncu)), "--log-file", str(table),
            sys.executable, "-m", "bench.counted", str(asked), str(told),
        ]  # fmt: skip
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert child.stdout is not None
        output = []
        for line in child.stdout:
            output.append(line)
            if line.startswith("point "):
                say(line.rstrip())
        child.wait(timeout)
        text = table.read_text(encoding="utf-8") if table.exists() else ""
        if "ERR_NVGPUCTRPERM" in text or "ERR_NVGPUCTRPERM" in "".join(output):
            raise CountersUnavailable(
                "the driver does not permit this user to read counters (ERR_NVGPUCTRPERM): run as root, or load the "
                "nvidia module with NVreg_RestrictProfilingToAdminUsers=0"
            )
        facts = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
        if not facts:
            raise CountersUnavailable(
                f"the child ended with status {child.returncode}: {''.join(output)[-1500:]}{text[-1500:]}"
            )
        if keep is not None:
            keep.write_text(text, encoding="utf-8")
        return join(points, facts, parse(text), cache)


def _kernel_pattern(points: Iterable[Point]) -> str:
    return "|".join(sorted({_kernel_name(point) for point in points}))  # frameworks add to the name on both sides


def available_metrics(ncu: str) -> list[str]:
    """ncu's names of those METRICS that this ncu and chip have; the needed ones and the launch's own always."""
    known = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=120).stdout
    return [
        metric.name
        for metric in METRICS.values()
        if metric.needed or metric.name.startswith("launch__") or metric.name.split(".")[0] in known
    ]


def parse(text: str) -> list[dict[str, float | str | None]]:
    """The launches of `ncu --csv --page raw --print-units base`, in order: {"kernel", ours of METRICS}.

    Lines before the table ("==PROF== ...") are skipped. A metric that is not there, or not a number, is None.
    Raises ValueError where there is no table.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError('no table in ncu\'s output: a line that starts with "ID" is missing')
    rows = list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))
    found = []
    for row in rows:
        if not row["ID"]:  # the line of units
            _check_units(row)
            continue
        launch: dict[str, float | str | None] = {"kernel": row["Kernel Name"]}
        for ours, metric in METRICS.items():
            launch[ours] = _number(row.get(metric.name), metric.scale)
        found.append(launch)
    return found


def _check_units(row: dict[str, str]) -> None:
    for ours, units in (("dram_read_bytes", ("byte",)), ("duration_us", ("ns", "nsecond"))):
        given = row.get(METRICS[ours].name)
        if given not in units:
            raise ValueError(f"{METRICS[ours].name}: got unit {given!r}; allowed: {units[0]} (ncu --print-units base)")


def _number(text: str | None, scale: float) -> float | None:
    try:
        return None if text is None else float(text.replace(",", "")) * scale
    except ValueError:
        return None


def join(
    points: Sequence[Point], facts: Sequence[dict[str, Any]], launches: Sequence[dict[str, Any]], cache: str
) -> list[dict[str, Any]]:
    """Points with what the child told of them and, in the order of launching, their counters.

    A launch belongs to the next point whose kernel has its name; a point whose launch ncu did not count has `failed`.
    Raises ValueError where a counted launch belongs to no point.
    """
    rows = []
    waiting = [launch for launch in launches if not str(launch["kernel"]).endswith(_BESIDE)]
    for point, fact in zip(points, facts, strict=False):
        row = {"id": point.id, "point": point.to_mapping(), "cache_control": cache, **fact}
        if fact["launches"] and waiting and _kernel_name(point) in str(waiting[0]["kernel"]):
            row |= waiting.pop(0)
            row |= judged(point, row)
        elif fact["launches"]:
            row |= {"launches": 0, "failed": f"ncu counted no launch of {_kernel_name(point)} for it"}
        rows.append(row)
    if waiting:
        raise ValueError(f"ncu counted {len(waiting)} launches of {waiting[0]['kernel']} that belong to no point")
    for point in points[len(facts) :]:
        row = {"id": point.id, "point": point.to_mapping(), "cache_control": cache}
        rows.append(row | {"failed": "the child ended before it", "launches": 0})
    return rows


def _kernel_name(point: Point) -> str:
    from backends.registry import load

    return load(point.backend).KERNEL_NAME


def judged(point: Point, row: dict[str, Any]) -> dict[str, Any]:
    """The bytes that had to be read, the ratio of what was, and which resource limits the blocks on an SM."""
    needed = point.problem.read_bytes(point.expert_counts().tolist())
    limits = {name: row.get(f"blocks_per_sm_by_{name}") for name in _LIMITS}
    known = {name: value for name, value in limits.items() if value is not None}
    limiter = min(known, key=known.__getitem__) if known else None
    return {
        "needed_bytes": needed,
        "dram_read_over_needed": round(row["dram_read_bytes"] / needed, 4),
        "blocks_per_sm": None if limiter is None else int(known[limiter]),
        "occupancy_limiter": limiter,
    }


def environment() -> dict[str, Any]:
    """What a result file says of where it was made."""
    from bench.machine import smi, versions

    name = smi(("name",)).get("name", "unknown")
    return {"gpu": name, "versions": versions()}


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines, for a terminal or a document."""
    headings = [
        "point",
        "cache control",
        "DRAM read MB",
        "needed MB",
        "ratio",
        "L2 hit %",
        "L1 hit %",
        "L2 sectors M",
        "µs",
        "blocks/SM",
    ]
    lines = []
    for row in rows:
        if not row.get("launches"):
            lines.append([row["id"], row["cache_control"], row.get("failed", ""), *[""] * (len(headings) - 3)])
            continue
        lines.append(
            [
                row["id"],
                row["cache_control"],
                _show(row["dram_read_bytes"], 1e6),
                _show(row["needed_bytes"], 1e6),
                f"{row['dram_read_over_needed']:.2f}",
                _show(row["l2_hit_percent"]),
                _show(row["l1_hit_percent"]),
                _show(row["l2_read_sectors"], 1e6),
                _show(row["duration_us"]),
                f"{row['blocks_per_sm']} ({row['occupancy_limiter']})",
            ]
        )
    return headings, lines


def _show(value: float | None, unit: float = 1.0) -> str:
    return "–" if value is None else f"{value / unit:.1f}"


def collect(
    points: Sequence[Point], out: Path, *, say: Callable[[str], None], keep: Path | None = None, cache: str = "all"
) -> int:
    """Counters of the points that `out` does not hold yet with this cache control, as JSON lines behind what it holds;
    how many were added. cache, keep: as `measure` takes them."""
    results.end_at_a_line(out)
    known = {row["id"] for row in read(out, cache) if row.get("launches")} if out.exists() else set()
    missing = [point for point in points if point.id not in known]
    if not missing:
        return 0
    rows = measure(missing, cache=cache, say=say, keep=keep)
    where = environment()
    for row in rows:
        results.append(out, row | where)
    return len(rows)


def read(path: Path, cache: str = "all") -> list[dict[str, Any]]:
    """Rows of a file that `collect` wrote with this cache control; a later row of the same point counts."""
    latest = {row["id"]: row for row in results.json_lines(path, "id") if row["cache_control"] == cache}
    return list(latest.values())


def launch_table(launches: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines for launches of saved output, of which no point is known."""
    headings = ["kernel", "DRAM read MB", "L2 hit %", "L1 hit %", "L2 sectors M", "µs", "registers"]
    return headings, [
        [
            str(launch["kernel"]),
            _show(launch["dram_read_bytes"], 1e6),
            _show(launch["l2_hit_percent"]),
            _show(launch["l1_hit_percent"]),
            _show(launch["l2_read_sectors"], 1e6),
            _show(launch["duration_us"]),
            _show(launch["registers"]),
        ]
        for launch in launches
    ]
