"""The tables of notes/launch-cost.md, of what `bench.launch_cost` measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.terminal import Table

COLUMNS = {
    "kernel": "kernel", "gpu_total": "GPU total", "latency": "eager, one call", "issued": "eager, host",
    "steady": "eager, in a row", "captured": "captured, one call", "gaps": "gaps in it",
    "layer_kernel": "kernel in a step", "layer": "layer of a step", "layer_overhead": "layer − kernel",
}  # fmt: skip
PARTS = ("door", "choice", "backend", "allocate", "launch")


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def times(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a cell: COLUMNS in µs. † at a backend: by other sources of the kernels than the newest row's."""
    newest = max((row.get("date", "") for row in rows), default="")
    present = {row.get("sources") for row in rows if row.get("date", "") == newest}
    headings = ["case", "dtype", "backend", *COLUMNS.values()]
    lines = []
    for row in rows:
        us = row.get("us", {})
        cells_ = (
            [row["failed"], *[""] * (len(COLUMNS) - 1)] if "failed" in row else [_shown(us.get(c)) for c in COLUMNS]
        )
        mark = "" if row.get("sources") in present else " †"
        lines.append([row["case"], row["dtype"], row["backend"] + mark, *cells_])
    return headings, lines


def kernels(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a cell: what the GPU runs in one eager call, longest first."""
    lines = []
    for row in rows:
        ran = sorted(row.get("kernels", {}).items(), key=lambda item: -item[1])
        told = ", ".join(f"{name[:60]} {value:.1f}" for name, value in ran)
        lines.append([row["case"], row["dtype"], row["backend"], told])
    return ["case", "dtype", "backend", "kernels of one call, µs"], lines


def host(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a cell: PARTS in µs."""
    lines = [
        [row["case"], row["dtype"], row["backend"], *(_shown(row["host_us"].get(part)) for part in PARTS)]
        for row in rows
        if "host_us" in row
    ]
    return ["case", "dtype", "backend", *PARTS], lines


def host_speed(rows: Sequence[dict[str, Any]]) -> str:
    """How fast the host was, by what is the same work in every cell of a backend: the search for a config."""
    told: dict[str, list[float]] = {}
    for row in rows:
        if choice := row.get("host_us", {}).get("choice"):
            told.setdefault(row["backend"], []).append(choice)
    if not told:
        return ""
    spans = ", ".join(f"{name} {min(us):.0f} to {max(us):.0f}" for name, us in told.items())
    return (
        "The host's speed changes during a run, and with it all columns that its clock takes: *choice*, the same work "
        f"in all cells of a backend, takes from and to, in µs: {spans}."
    )


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of all three; kernels by name for one case alone, as they differ by backend and dtype."""
    from bench.tables import markdown

    if not rows:
        return "Not measured yet."
    last = rows[-1]
    versions = ", ".join(f"{name} {last['versions'][name]}" for name in ("torch", "triton", "jax", "jax-triton"))
    first = [row for row in rows if row["case"] == rows[0]["case"]]
    dates = " and ".join(sorted({row["date"] for row in rows}))
    intro = f"{last['gpu']}, {dates}; {versions}. µs. †: by other sources of the kernels than the newest rows."
    parts = [
        intro, host_speed(rows), markdown(times(rows)), "On the host, µs:", markdown(host(rows)),
        "On the GPU, kernels by name:", markdown(kernels(first)),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)
