"""What `python -m bench variants` wrote, as text and tables; notes/performance.md shows them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import results
from bench.tables import NOT_MEASURED, markdown
from bench.terminal import Table
from bench.variant_launch import VARIANTS, Variant
from shared.config import Config

FILE = "variants.jsonl"
BASE = "base"
"""The shipped kernel with tiles of one block of rows."""
TWO_BLOCKS = "two-blocks"
"""The shipped kernel with tiles of two blocks of rows, where they are its tuned ones."""
SAME = 0.01
"""Share of base's time within which a variant is called neither faster nor slower."""


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; of one measured twice the last. None where there is no file."""
    return results.by_id(path, "variant", "base_us") if path.exists() else []


def sources() -> str:
    """Digest of the code that these times depend on: the shipped kernel's and the variants'."""
    return results.sources_and("variant_kernels", "variant_launch")


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a cell: base's time in µs, each variant's and its ratio to base, the fastest one's config."""
    names = [name for name in (TWO_BLOCKS, *VARIANTS) if any(row["variant"] == name for row in rows)]
    groups: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["dtype"], row["order"]), {})[row["variant"]] = row
    lines = []
    for (case, dtype, order), by_name in groups.items():
        right = [row for row in by_name.values() if "us" in row]
        best = min(right, key=_ratio) if right else None
        fastest = "–" if best is None else f"{best['variant']} {Config.from_mapping(best['config'])}"
        cells_ = [_shown(by_name.get(name), best) for name in (BASE, *names)]
        lines.append([case, dtype, order, *cells_, fastest])
    return ["case", "dtype", "order", "base µs", *(f"{name} µs (÷ base)" for name in names), "fastest"], lines


def _ratio(row: dict[str, Any]) -> float:
    return row["us"] / row["base_us"] if row["base_us"] else math.inf


def _shown(row: dict[str, Any] | None, best: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if "us" not in row:
        return f"no time: {row['error'][:60]}"
    ratio = "" if row["variant"] == BASE or not row["base_us"] else f" ({_ratio(row):.3f})"
    return f"**{row['us']:.1f}{ratio}**" if row is best else f"{row['us']:.1f}{ratio}"


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line a variant: median and range of its ratios to base, and how often it is faster or slower."""
    lines = []
    for name, variant in {TWO_BLOCKS: Variant(), **VARIANTS}.items():
        mine = [row for row in rows if row["variant"] == name]
        ratios = sorted(_ratio(row) for row in mine if "us" in row and row["base_us"])
        if not mine:
            continue
        if not ratios:
            lines.append(f"- {name}: no time in any of {len(mine)} cells.")
            continue
        faster, slower = sum(r < 1 - SAME for r in ratios), sum(r > 1 + SAME for r in ratios)
        text = (
            f"- {name}: median {statistics.median(ratios):.3f} of base's time ({ratios[0]:.3f} to {ratios[-1]:.3f}); "
        )
        text += f"more than {SAME:.0%} faster in {faster}, slower in {slower} of {len(mine)}"
        text += f"; no time in {len(mine) - len(ratios)}" if len(ratios) < len(mine) else ""
        lines.append(text + ("; x gathered beforehand, not in its time." if variant.gathered else "."))
    return lines


def block(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: where and with what, `summary`, `table`."""
    if not rows:
        return f"{NOT_MEASURED} On a GPU: `python -m bench variants`."
    last = rows[-1]
    versions = ", ".join(f"{name} {last['versions'][name]}" for name in ("torch", "triton"))
    intro = f"{last['gpu']}, {last['date']}, cold L2; {versions}. Kernel time."
    rows = [row for row in rows if row.get("sources") == last.get("sources")]
    if last.get("sources") != sources():
        intro += " The kernels' sources have changed since."
    return "\n\n".join([intro, "\n".join(summary(rows)), markdown(table(rows))])
