"""The report: whether all is clean, as text, and kept in a file while the run goes on."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backends.registry import BACKENDS
from bench.results import dump
from bench.sanitize.matrix import TOOLS
from bench.sanitize.sanitizer import Sanitizer


def missed(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [plant for plant in report["plants"] if plant["caught"] is None]


def passed(report: dict[str, Any]) -> bool:
    """Every plant caught, everything run, and nothing found."""
    bad = [r for r in report["results"] if r["status"] not in ("clean", "refused")]
    return bool(report["complete"] and report["results"] and not bad and not missed(report))


def text(report: dict[str, Any]) -> str:
    """The matrix tool x backend, then each plant that was missed and each variant that is neither clean nor refused."""
    lines = [f"compute-sanitizer {report.get('compute_sanitizer', '')} on {report.get('gpu', 'an unknown GPU')}"]
    for plant in report["plants"]:
        verdict = f"caught: {plant['caught']}" if plant["caught"] else f"MISSED: {plant['reason']}"
        lines.append(f"  {plant['tool']:<10} {plant['what']}: {verdict}")
    if missed(report):
        return "\n".join(
            [*lines, "A planted fault was missed, so a clean result would mean nothing: nothing else was run."]
        )
    for control in report.get("controls", []):
        seen = "reported though nothing is wrong" if control["reported"] else "not reported"
        lines.append(f"  {control['tool']:<10} {control['what']}: {seen}")
    names = [name for name in BACKENDS if any(r["backend"] == name for r in report["results"])]
    lines.append(f"{'':<12}" + "".join(f"{name:<28}" for name in names))
    for tool in TOOLS:
        cells = []
        for name in names:
            mine = [r["status"] for r in report["results"] if (r["tool"], r["backend"]) == (tool, name)]
            counts = [(status, mine.count(status)) for status in dict.fromkeys(sorted(mine))]
            cells.append(", ".join(f"{count} {status}" for status, count in counts) or "–")
        if any(cell != "–" for cell in cells):
            lines.append(f"{tool:<12}" + "".join(f"{cell:<28}" for cell in cells))
    for r in report["results"]:
        if r["status"] not in ("clean", "refused"):
            lines.append(f"{r['tool']} {r['variant']}: {r['status']} ({r['count']}): {r['reason']}")
    refusals = sorted({f"{r['backend']}: {r['reason']}" for r in report["results"] if r["status"] == "refused"})
    lines += [f"refused by {line}" for line in refusals]
    others = sorted({line for r in report["results"] for line in r["elsewhere"]})
    lines += [f"in a kernel of the framework, not counted: {line}" for line in others[:10]]
    if not report["complete"]:
        lines.append("Not complete: the run was stopped.")
    return "\n".join(lines)


def started(sanitizer: Sanitizer) -> dict[str, Any]:
    """What a report says of where it was made."""
    from bench import results
    from bench.machine import smi, versions

    return {
        "compute_sanitizer": sanitizer.version,
        "sources": results.sources(),
        "gpu": smi(("name",)).get("name"),
        "driver": smi(("driver_version",)).get("driver_version"),
        "versions": versions(),
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    }


class Keeper:
    """Writes the report to a file, whole each time, and at once."""

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self.path, self.about, self.since = path, about, time.monotonic()
        self.report: dict[str, Any] = {}

    def __call__(self, report: dict[str, Any]) -> None:
        self.report = {**self.about, "seconds": round(time.monotonic() - self.since, 1), **report}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(dump(self.report), encoding="utf-8")
            part.replace(self.path)
