"""Generated blocks and pictures of the notes that answer why: locality, split-K, steps, the article, performance.

Each block takes a GPU's folder of committed results and the merged results of its benchmark runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import (
    article,
    checked,
    launch_cost,
    launch_tables,
    locality,
    matrix_unit,
    performance,
    tables,
    tile_read_tables,
    variant_tables,
    verdict,
)
from bench.tables import NOT_MEASURED

Found = dict[str, Any]


def _cells_table(make: Callable[[list[Any]], tuple[list[str], list[list[str]]]]) -> Callable[[Path, Found], str]:
    def block(folder: Path, found: Found) -> str:
        headings, lines = make(verdict.load(folder)[0])
        return tables.markdown((headings, lines)) if lines else NOT_MEASURED

    return block


def _steps(folder: Path, found: Found) -> str:
    headings, lines = verdict.steps_table(verdict.load(folder)[2])
    return tables.markdown((headings, lines)) if lines else NOT_MEASURED


def _article(folder: Path, found: Found) -> str:
    cells, counted, _ = verdict.load(folder)
    headings, lines = article.table(found, cells, counted)
    return tables.markdown((headings, lines)) if lines else NOT_MEASURED


def _answer(folder: Path, found: Found) -> str:
    cells, counted, _ = verdict.load(folder)
    return verdict.answer(cells, counted)


def _environment(folder: Path, found: Found) -> str:
    cells, _, _ = verdict.load(folder)
    if not cells:
        return NOT_MEASURED
    cell = cells[-1]
    versions = ", ".join(f"{name} {cell['versions'][name]}" for name in ("torch", "triton", "jax", "jax-triton"))
    rounds = len(cell["combos"][0]["samples_us"]) if cell["combos"] else 0
    return (
        f"{cell['gpu']}, {cell['date']}, cold L2, {len(cells)} cells, {rounds} rounds each; {versions}. Read ceiling "
        f"{cell['ceilings']['read_bytes_per_s'] / 1e12:.2f} TB/s. {locality.sources_told(cells).capitalize()}."
    )


def _one_sign(folder: Path, found: Found) -> str:
    path = folder / "matrix-unit.json"
    return matrix_unit.sentence(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else NOT_MEASURED


def _picture(name: str, alternative: str) -> Callable[[Path, Found], str]:
    def block(folder: Path, found: Found) -> str:
        return f"![{alternative}](../bench/results/{folder.name}/{name})" if (folder / name).exists() else NOT_MEASURED

    return block


BLOCKS: dict[str, Callable[[Path, Found], str]] = {
    "locality-environment": _environment,
    "locality-answer": _answer,
    "locality-short": lambda folder, found: verdict.short_answer(verdict.load(folder)[0]),
    "locality-best": _cells_table(verdict.best_table),
    "locality-same": _cells_table(verdict.same_table),
    "locality-others": _cells_table(verdict.other_table),
    "locality-skew": _cells_table(verdict.skew_table),
    "skew-sentence": lambda folder, found: verdict.skew_sentence(verdict.load(folder)[0]),
    "split-sentence": lambda folder, found: verdict.split_sentence(verdict.load(folder)[0]),
    "steps-sentence": lambda folder, found: verdict.steps_sentence(verdict.load(folder)[2]),
    "locality-heat": _picture(verdict.HEATMAP, "Row order's time over column order's, by slots per expert and block_m"),
    "locality-bytes": _picture(verdict.BYTES, "DRAM bytes read, by order"),
    "split-k": _cells_table(verdict.split_table),
    "steps": _steps,
    "article": _article,
    "one-sign": _one_sign,
    **performance.BLOCKS,
    **checked.BLOCKS,
    "launch-cost": lambda folder, found: launch_tables.tables(launch_cost.read(folder / launch_cost.FILE)),
    "tile-reads": lambda folder, found: tile_read_tables.block(tile_read_tables.read(folder / tile_read_tables.FILE)),
    "variants": lambda folder, found: variant_tables.block(variant_tables.read(folder / variant_tables.FILE)),
}


def pictures(folder: Path) -> dict[str, tuple[list[list[Any]], Callable[[], str]]]:
    """{file name: (what it shows, how to draw it)} of those that there is data for."""
    cells, counted, _ = verdict.load(folder)
    gpu = cells[-1]["gpu"] if cells else ""
    heat, read = verdict.heat_points(cells), verdict.byte_points(counted)
    found: dict[str, tuple[list[list[Any]], Callable[[], str]]] = {}
    if heat:
        title = f"{gpu}, cold L2, torch-triton: row order's time over column order's, same tile"
        found[verdict.HEATMAP] = (heat, lambda: verdict.draw_heat(heat, title))
    if read:
        name = f"{gpu or counted[-1]['gpu']}, mixtral-8x7b, 512 tokens, torch-triton"
        found[verdict.BYTES] = (read, lambda: verdict.draw_bytes(read, name))
    return found | performance.pictures(folder)
