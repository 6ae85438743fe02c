"""Results: one JSON line each while a run goes on, one compact file per run afterwards.

A line is written the moment its result is there, so that a run cut short keeps what it measured. The first line
says where and with what the run was made (`kind: "run"`); the others are `kind: "time"` (a benchmark), `"pair"` (an
order comparison), `"published"` and `"skipped"`. Times are in microseconds in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RUNS = Path(".benchmarks/moe")
RESULTS = Path(__file__).parent / "results"
TIMES = ("kernel_us", "gpu_total_us", "call_us", "kernel_captured_us", "gpu_total_captured_us", "call_captured_us")


class Journal:
    """Appends results to a JSON-lines file as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, **values: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}, default=str) + "\n")
        self.count += kind != "run"


def default_path() -> Path:
    """A new file, named by the time in UTC."""
    return RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%S}.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a run; a last line that was cut off in the middle is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines) - 1:
                raise
    return found


def compact(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """{"run", "rows", "pairs", "published", "skipped"}: the times of one row together, by id.

    A row has the facts of `measure.facts`, the errors, and those of TIMES that were measured; `samples_us` are its
    kernel times. Where an id was measured twice, the last counts.
    """
    run: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    pairs: dict[str, dict[str, Any]] = {}
    published: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for line in lines:
        values = {key: value for key, value in line.items() if key != "kind"}
        if line["kind"] == "run":
            run = values
        elif line["kind"] == "time":
            rows.setdefault(values["id"], {}).update(values)
        elif line["kind"] == "pair":
            pairs[values["id"]] = values
        elif line["kind"] == "published":
            published[values["id"]] = values
        else:
            skipped[values["id"]] = values["reason"]
    return {
        "run": run,
        "rows": list(rows.values()),
        "pairs": list(pairs.values()),
        "published": list(published.values()),
        "skipped": skipped,
    }


def add(run: Path, *, results: Path = RESULTS, name: str | None = None) -> Path:
    """Turn a run's JSON lines into the compact file <results>/<gpu>/<name>.json; name None: the date of the run.

    Raises ValueError for a rehearsal, whose times mean nothing, and for a file without a run's first line.
    """
    from bench.machine import gpu_key

    found = compact(read(run))
    if "gpu" not in found["run"]:
        raise ValueError(f"{run}: not a file of this suite: no line of kind 'run'")
    if found["run"]["clock"] == "rehearsal":
        raise ValueError(f"{run}: a rehearsal on the CPU; its times mean nothing and are not kept")
    path = results / gpu_key(found["run"]["gpu"]) / f"{name or found['run']['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(found), encoding="utf-8")
    return path


def dump(found: dict[str, Any]) -> str:
    """JSON with one row per line, so that diffs are readable."""
    parts = []
    for key, value in found.items():
        if isinstance(value, list):
            body = ",\n".join(json.dumps(item) for item in value)
            parts.append(f'"{key}": [\n{body}\n]')
        else:
            parts.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def committed(results: Path = RESULTS) -> dict[str, list[dict[str, Any]]]:
    """Compact results by GPU folder, oldest first; other files (pytest-benchmark's) are left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(results.glob("*/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "run" in content:
            found.setdefault(path.parent.name, []).append(content)
    return found
