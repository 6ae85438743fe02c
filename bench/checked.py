"""Generated blocks of notes/guarantees.md: what the sanitizers and fuzzing found, from the committed reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.registry import BACKENDS
from bench import results, tables
from bench.sanitize.matrix import TOOLS
from bench.tables import NOT_MEASURED
from bench.terminal import Table


def sanitizer_table(report: dict[str, Any]) -> Table:
    """A row a tool, a column a backend: launches by how they ended."""
    lines = []
    for tool in TOOLS:
        cells = []
        for backend in BACKENDS:
            ends = [r["status"] for r in report["results"] if (r["tool"], r["backend"]) == (tool, backend)]
            cells.append(", ".join(f"{ends.count(end)} {end}" for end in sorted(set(ends))) or "–")
        caught = [plant["what"] for plant in report["plants"] if plant["tool"] == tool and plant["caught"]]
        lines.append([tool, *cells, "; ".join(caught)])
    return ["tool", *BACKENDS, "planted faults that it caught"], lines


def sanitizer_text(report: dict[str, Any]) -> str:
    about = f"compute-sanitizer {report['compute_sanitizer'].split()[1]} on one {report['gpu']}, {report['date'][:10]}"
    total = f"{len(report['results'])} launches in {report['seconds']:.0f} s"
    end = "" if report["complete"] else "; the run was stopped before its end"
    return f"{about}: {total}{end}.{_SINCE[_of_present_sources(report)]}\n\n{tables.markdown(sanitizer_table(report))}"


_SINCE = {
    "yes": "",
    "no": " The kernels' sources, or their tiles, have changed since.",
    "not recorded": " It does not say of which sources of the kernels.",
}


def _of_present_sources(report: dict[str, Any]) -> str:
    """Whether a report is of the kernels as they are: a key of _SINCE."""
    if "sources" not in report:
        return "not recorded"
    return "yes" if report["sources"] == results.sources() else "no"


def fuzz_table(reports: list[dict[str, Any]]) -> Table:
    """A row a run; examples and failures of each backend; whether its kernels were those of today's sources."""
    lines = []
    for report in sorted(reports, key=lambda r: r["date"]):
        failed = [failure["example"].split()[0] for failure in report["failures"]]
        drawn = report["examples"]  # of the backends that were asked for
        cells = [f"{drawn[b]} ({failed.count(b)} failed)" if b in drawn else "–" for b in BACKENDS]
        seconds = f"{report['seconds']:.0f}"
        lines.append([report["date"][:8], str(report["seed"]), *cells, seconds, _of_present_sources(report)])
    return ["date", "seed", *BACKENDS, "seconds", "of the present sources"], lines


def fuzz_text(reports: list[dict[str, Any]]) -> str:
    failures = [f"- seed {r['seed']}: {f['example']}: {f['text']}" for r in reports for f in r["failures"]]
    return "\n".join([tables.markdown(fuzz_table(reports)), *([""] if failures else []), *failures])


def _sanitizer(folder: Path, merged: dict[str, Any]) -> str:
    """Every run of the folder, the latest first."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("sanitizer*.json")]
    reports.sort(key=lambda report: report["date"], reverse=True)
    return "\n\n".join(sanitizer_text(report) for report in reports) or NOT_MEASURED


def _fuzz(folder: Path, merged: dict[str, Any]) -> str:
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("fuzz-*.json"))]
    return fuzz_text(reports) if reports else NOT_MEASURED


BLOCKS: dict[str, Callable[[Path, dict[str, Any]], str]] = {"sanitizers": _sanitizer, "fuzzing": _fuzz}
