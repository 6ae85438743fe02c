"""What `python -m bench tile-reads` wrote, as a table; notes/performance.md shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import results
from bench.tables import NOT_MEASURED, markdown
from bench.terminal import Table
from bench.tile_read_launch import PRODUCT, STEPS
from shared.config import Config

FILE = "tile-reads.jsonl"
PLAIN, SHIPPED = "plain read", "shipped kernel"
COLUMNS = (PLAIN, *STEPS, SHIPPED)
SAMPLES = 15


def sources() -> str:
    """Digest of the code that these times depend on: the shipped kernel's, the steps' and the plain reads'."""
    return results.sources_and("tile_read_kernel", "tile_read_launch", "tile_reads", "read_kernel", "reads")


def read(path: Path) -> list[dict[str, Any]]:
    """The cells of a file; of one measured twice the last. None where there is no file."""
    return results.by_id(path, "bytes") if path.exists() else []


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a cell: bytes, their time at the read ceiling, tiles per SM, and how much longer each step takes, µs."""
    headings = ["case", "dtype", "tile", "MB", "at the read ceiling µs", "tiles per SM", "programs per SM"]
    lines = []
    for row in rows:
        floor = row["bytes"] / row["read_bytes_per_s"] * 1e6
        above = [f"{row['us'][name] - floor:+.1f}" if name in row["us"] else "no time" for name in COLUMNS]
        held = (row["programs_per_sm"].get(step) for step in ("tiles", "with x", PRODUCT))
        lines.append([
            row["case"], row["dtype"], str(Config.from_mapping(row["config"])), f"{row['bytes'] / 1e6:.1f}",
            f"{floor:.1f}", f"{row['tiles'] / row['sms']:.2f}", ", ".join("–" if n is None else str(n) for n in held),
            *above,
        ])  # fmt: skip
    return [*headings, *COLUMNS], lines


def block(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: where and with what, `table`, what has no time."""
    if not rows:
        return f"{NOT_MEASURED} On a GPU: `python -m bench tile-reads`."
    last = rows[-1]
    versions = ", ".join(f"{name} {last['versions'][name]}" for name in ("torch", "triton"))
    intro = (
        f"{last['gpu']}, {last['date']}, cold L2; {versions}. Medians of {SAMPLES}. Programs per SM: as many as fit at "
    )
    intro += f"once, of *tiles*, *with x* and *{PRODUCT}*."
    if last.get("sources") != sources():
        intro += " The kernels' sources, or their tiles, have changed since."
    failed = [f"- {row['id']}, {name}: no time, {why}." for row in rows for name, why in row["failed"].items()]
    return "\n\n".join([intro, markdown(table(rows)), *(["\n".join(failed)] if failed else [])])
