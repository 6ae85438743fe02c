"""What the locality cells, the counters and the steps say: sentences, tables and pictures, all computed from them.

A difference is called one where the 95 % interval of the paired ratio excludes 1 and the ratio is off by more than 2 %.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import locality, picture, steps
from bench.locality import Win
from shared.config import Config
from shared.models import models

DTYPES = locality.DTYPES
WORTH = 1.02
MOST_FEW = 5
"""Medians of fewer pairs are not given."""
ROW_BINS = ((1.0, 1.0), (1.0, 1.5), (1.5, 2.5), (2.5, 5.0), (5.0, math.inf))
"""Tile rows per active expert: exactly one, more than one and up to 1.5, and so on."""
HEATMAP, BYTES = "locality-win.svg", "locality-bytes.svg"
Cell = dict[str, Any]


def matters(win: Win) -> int:
    """1: `better` is worth more than WORTH, -1: `worse` is, 0: no difference."""
    if not win.seen or 1 / WORTH <= win.ratio <= WORTH:
        return 0
    return 1 if win.ratio > 1 else -1


def of(cells: Iterable[Cell], **wanted: Any) -> list[Cell]:
    """Cells whose fields have these values; question "order", backend torch-triton, routing uniform unless said."""
    wanted = {"question": "order", "backend": "torch-triton", "routing": "uniform"} | wanted
    return [cell for cell in cells if all(cell[key] == value for key, value in wanted.items())]


def rows_per_expert(cell: Cell, win: Win) -> float:
    return win.tile_rows / max(1, cell["active_experts"])


# Sentences


def answer(cells: Sequence[Cell], counted: Sequence[dict[str, Any]]) -> str:
    """The verdict as a list of sentences."""
    even = of(cells)
    if not even:
        return "Not measured yet."
    lines = [
        _short(even),
        _decode(even),
        _from_where(even),
        _best(even),
        _grouped(even),
        _fp8(even),
        _cause(counted),
        _others(cells),
    ]
    return "\n".join(f"- {line}" for line in lines if line)


def short_answer(cells: Sequence[Cell]) -> str:
    """Three of the sentences of `answer`: the whole in one line, FP8, and the other backends."""
    even = of(cells)
    lines = [_short(even), _fp8(even), _others(cells)] if even else []
    return "\n".join(f"- {line}" for line in lines if line) or "Not measured yet."


def _short(cells: Sequence[Cell]) -> str:
    """The whole in one line, of torch-triton: at decode, at a fixed small tile by layer, and each order at its best."""
    decode = [win.ratio for cell in cells if cell["largest_expert"] <= 16 and (win := _best_win(cell))]
    best = [win for cell in cells if (win := _best_win(cell))]
    largest: dict[str, float] = {}
    for cell in cells:
        if cell["dtype"] == "fp16" and cell["slots_per_active_expert"] >= 16:
            for win in locality.same_tile(cell, "column", "row"):
                if win.config_better.block_m == 16:
                    name = f"{cell['model']} {cell['gemm']}"
                    largest[name] = max(largest.get(name, 0.0), win.ratio)
    if not (decode and best and largest):
        return ""
    ranked = sorted(largest.items(), key=lambda item: -item[1])
    winners = [f"{name} {ratio:.2f}x" for name, ratio in ranked if ratio >= 1.1]
    others = [(name, ratio) for name, ratio in ranked if ratio < 1.1]
    rest = f"; at most {others[0][1]:.2f}x for {', '.join(name for name, _ in others)}" if others else ""
    return (
        f"**In short**, torch-triton: at decode (no expert with more than 16 slots), no (median "
        f"{np.median(decode):.2f}). Held to 16-row tiles with 16 "
        f"slots (routed token copies) an expert or more, column order is, in fp16, up to this many times as fast: "
        f"{', '.join(winners) or 'none above 1.10x'}{rest}. Where each order may have the tile that suits it, between "
        f"{1 / min(win.ratio for win in best):.2f}x for row order and {max(win.ratio for win in best):.2f}x for column "
        "order: row order then picks a tile that costs it little."
    )


def _decode(cells: Sequence[Cell]) -> str:
    """Cells where no expert has more slots than the smallest tile has rows."""
    wins = [win for cell in cells if cell["largest_expert"] <= 16 and (win := _best_win(cell))]
    if not wins:
        return ""
    ratios = [win.ratio for win in wins]
    verdicts = [matters(win) for win in wins]
    return (
        f"**Decode, no expert with more than 16 slots** ({len(wins)} cases and dtypes, each order at its best tile): "
        f"row order takes {min(ratios):.2f} to {max(ratios):.2f} of column order's time, median "
        f"{np.median(ratios):.3f}. Column order wins by more than 2 % in {verdicts.count(1)}, row order in "
        f"{verdicts.count(-1)}, neither in "
        f"{verdicts.count(0)}: each weight is read once in any order."
    )


def _from_where(cells: Sequence[Cell]) -> str:
    """At equal tiles, by tile rows per expert, for experts whose weights are larger than L2 and others."""
    bins = _binned(cells, "fp16", lambda cell: True)
    parts = []
    for (low, high), ratios in bins.items():
        if ratios:
            name = "one" if low == high else f"{low:g} to {high:g}" if high < math.inf else f"more than {low:g}"
            parts.append(f"{name}: {np.median(ratios):.2f} ({max(ratios):.2f})")
    return (
        "**The same tile in both orders**, fp16, row order's time over column order's by tile rows per active expert, "
        f"median (largest): {'; '.join(parts)}."
    )


def _binned(
    cells: Sequence[Cell], dtype: str, wanted: Callable[[Cell], bool]
) -> dict[tuple[float, float], list[float]]:
    bins: dict[tuple[float, float], list[float]] = {bounds: [] for bounds in ROW_BINS}
    for cell in cells:
        if cell["dtype"] != dtype or not wanted(cell):
            continue
        for win in locality.same_tile(cell, "column", "row"):
            rows = rows_per_expert(cell, win)
            for low, high in ROW_BINS:
                if (rows == 1.0) if low == high else low < rows <= high:
                    bins[low, high].append(win.ratio)
    return bins


def _best(cells: Sequence[Cell]) -> str:
    pairs = [(cell, win) for cell in cells if (win := _best_win(cell))]
    verdicts = [matters(win) for _, win in pairs]
    most = max(pairs, key=lambda pair: pair[1].ratio)
    least = min(pairs, key=lambda pair: pair[1].ratio)
    return (
        f"**Each order at its best tile**, {len(pairs)} cases and dtypes, 1 to 2048 tokens: column order wins by more "
        f"than 2 % in {verdicts.count(1)}, row order in {verdicts.count(-1)}, neither in {verdicts.count(0)}. Column "
        f"order's largest win is {_interval(most[1])} ({_name(most[0])}), row order's {_inverse(least[1])} "
        f"({_name(least[0])})."
    )


def _grouped(cells: Sequence[Cell]) -> str:
    pairs = [(cell, win) for cell in cells if (win := locality.best_tiles(cell, "grouped", "column"))]
    verdicts = [matters(win) for _, win in pairs]
    return (
        f"**Grouped against column order**, each at its best tile: grouped wins by more than 2 % in "
        f"{verdicts.count(1)} of {len(pairs)}, column in {verdicts.count(-1)}."
    )


def _fp8(cells: Sequence[Cell]) -> str:
    """How much of fp16's win at a tile of the same block_m each FP8 mode keeps, where fp16 wins at least 1.1."""
    found: dict[str, list[tuple[float, float]]] = {}
    by_key = {(c["model"], c["gemm"], c["tokens"], c["dtype"]): c for c in cells}
    for (name, gemm, tokens, dtype), cell in by_key.items():
        if dtype != "fp16":
            continue
        wide = {win.config_better.block_m: win.ratio for win in locality.same_tile(cell, "column", "row")}
        for narrow in DTYPES[1:]:
            other = by_key.get((name, gemm, tokens, narrow))
            for win in locality.same_tile(other, "column", "row") if other is not None else []:
                ratio = wide.get(win.config_better.block_m, 1.0)
                if ratio >= 1.1:
                    found.setdefault(narrow, []).append((ratio, win.ratio))
    parts = []
    for dtype, pairs in found.items():
        fp16, fp8 = np.median(np.array(pairs), axis=0)
        kept = float(np.median([(b - 1) / (a - 1) for a, b in pairs]))
        parts.append(
            f"of fp16's median {fp16:.2f}x, {dtype} leaves {fp8:.2f}x (it keeps {kept:.0%} of the gain; {len(pairs)} "
            f"tiles, at most {max(b for _, b in pairs):.2f}x)"
        )
    return f"**FP8**, where fp16 gains 1.1x or more at the same block_m: {'; '.join(parts)}." if parts else ""


def _cause(counted: Sequence[dict[str, Any]]) -> str:
    """From counters: bytes row order reads over column order's, and how near each comes to the read ceiling."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for row, column in _order_pairs(counted):
        excess = row["dram_read_bytes"] / column["dram_read_bytes"]
        if excess >= 1.1:
            time = row["duration_us"] / column["duration_us"]
            rates = [r["dram_read_bytes"] / r["duration_us"] / 1e6 for r in (row, column)]
            found.setdefault(row["point"]["dtype"], []).append((excess, time, rates[0], rates[1]))
    parts = []
    for dtype in DTYPES:
        if len(found.get(dtype, ())) >= MOST_FEW:
            excess, time, row_rate, column_rate = np.median(np.array(found[dtype]), axis=0)
            parts.append(
                f"{dtype} {excess:.2f} times the bytes in {time:.2f} times the time ({row_rate:.1f} TB/s in row order, "
                f"{column_rate:.1f} in column order; {len(found[dtype])} pairs)"
            )
    if not parts:
        return ""
    return (
        "**Cause**, by hardware counters, where row order reads 1.1 times column order's DRAM bytes or more (medians): "
        f"{'; '.join(parts)}. The win is what is left of the bytes once column order is no longer bound by reading."
    )


def _others(cells: Sequence[Cell]) -> str:
    parts = []
    for backend in locality.OTHER_BACKENDS:
        wins = [win for cell in of(cells, backend=backend) if (win := _best_win(cell))]
        if wins:
            verdicts = [matters(win) for win in wins]
            ratios = [win.ratio for win in wins]
            parts.append(
                f"{backend} {min(ratios):.2f} to {max(ratios):.2f} (column wins {verdicts.count(1)}, row "
                f"{verdicts.count(-1)}, neither {verdicts.count(0)})"
            )
    return f"**Other backends**, row over column order at their best known tile: {'; '.join(parts)}." if parts else ""


def _best_win(cell: Cell) -> Win | None:
    return locality.best_tiles(cell, "column", "row")


def _interval(win: Win) -> str:
    return f"{win.ratio:.2f} [{win.low:.2f}, {win.high:.2f}]"


def _inverse(win: Win) -> str:
    return f"{1 / win.ratio:.2f} [{1 / win.high:.2f}, {1 / win.low:.2f}]"


def _name(cell: Cell) -> str:
    tokens = f"{cell['tokens']} token{'' if cell['tokens'] == 1 else 's'}"
    return f"{cell['model']} {cell['gemm']}, {tokens}, {cell['dtype']}"


def _order_pairs(counted: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(row order, column order) of the same torch-triton point."""
    by_key: dict[str, dict[str, dict[str, Any]]] = {}
    for row in counted:
        if row.get("launches") and row["point"]["backend"] == "torch-triton":
            key = json.dumps(row["point"] | {"order": ""}, sort_keys=True)
            by_key.setdefault(key, {})[row["point"]["order"]] = row
    return [(found["row"], found["column"]) for found in by_key.values() if {"row", "column"} <= found.keys()]


# Tables


def best_table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Row order's time over column order's, each at its best tile; bold where it differs by more than 2 %."""
    tokens = sorted({cell["tokens"] for cell in of(cells)})
    lines = []
    for name, gemm, dtype in itertools.product(models(), ("gate-up", "down"), DTYPES):
        mine = {cell["tokens"]: cell for cell in of(cells, model=name, gemm=gemm, dtype=dtype)}
        if mine:
            lines.append([f"{name} {gemm}", dtype, *(_ratio_of(mine.get(batch), _best_win) for batch in tokens)])
    return ["layer", "dtype", *(str(batch) for batch in tokens)], lines


def same_table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Row over column order at the same tile: median and largest, by dtype and tile rows per active expert."""
    even = of(cells)
    headings = ["dtype", "one tile row an expert", "1 to 1.5", "1.5 to 2.5", "2.5 to 5", "more"]
    lines = []
    for dtype in DTYPES:
        bins = _binned(even, dtype, lambda cell: True)
        lines.append(
            [dtype, *(f"{np.median(r):.2f}, up to {max(r):.2f} ({len(r)})" if r else "–" for r in bins.values())]
        )
    return headings, lines


def other_table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """The backends side by side: row over column, and grouped over column, at each backend's best known tile."""
    lines = []
    for name, tokens, dtype in itertools.product(locality.OTHERS[0], locality.OTHERS[1], DTYPES):
        line = [f"{name}, {tokens} token{'' if tokens == 1 else 's'}", dtype]
        for backend in ("torch-triton", *locality.OTHER_BACKENDS):
            found = of(cells, backend=backend, model=name, tokens=tokens, dtype=dtype, gemm="gate-up")
            cell = found[0] if found else None
            line += [_ratio_of(cell, _known_tile), _ratio_of(cell, _known_tile_grouped)]
        lines.append(line)
    names = ("torch-triton", *locality.OTHER_BACKENDS)
    return ["case", "dtype", *(f"{n} {what}" for n in names for what in ("row", "grouped"))], lines


def _known_tile(cell: Cell) -> Win | None:
    """At the cell's first tile, the best known one."""
    wins = locality.same_tile(cell, "column", "row")
    return wins[0] if wins else None


def _known_tile_grouped(cell: Cell) -> Win | None:
    wins = locality.same_tile(cell, "column", "grouped")
    return wins[0] if wins else None


def skew_table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Skewed routing, each order at its best tile against column order: times of the others over its own."""
    lines = []
    for cell in cells:
        if cell["question"] == "order" and cell["routing"] != "uniform":
            wins = [locality.best_tiles(cell, "column", order) for order in ("row", "grouped", "popular")]
            lines.append([_name(cell), cell["routing"], str(cell["largest_expert"]), *(_show(win) for win in wins)])
    return ["case", "routing", "largest expert's slots", "row", "grouped", "popular"], lines


def skew_sentence(cells: Sequence[Cell]) -> str:
    """Whether `popular` helps within one GEMM."""
    skewed = [c for c in cells if c["question"] == "order" and c["routing"] != "uniform"]
    wins = [win for cell in skewed if (win := locality.best_tiles(cell, "popular", "column"))]
    if not wins:
        return "Not measured yet."
    verdicts = [matters(win) for win in wins]
    ratios = [1 / win.ratio for win in wins]
    return (
        f"In {len(wins)} skewed batches popular order takes {min(ratios):.2f} to {max(ratios):.2f} of column order's "
        f"time: faster by more than 2 % in {verdicts.count(1)}, slower in {verdicts.count(-1)}."
    )


def split_sentence(cells: Sequence[Cell]) -> str:
    """Where splitting K is worth more than 2 %, by backend and reduction."""
    parts = []
    for backend in ("torch-triton", "pallas-mosaic"):
        mine = [c for c in cells if c["question"] == "split-k" and c["backend"] == backend]
        for reduction in (None, "two-pass"):
            wins = [win for cell in mine if (win := locality.best_split(cell, reduction))]
            if wins:
                verdicts = [matters(win) for win in wins]
                name = "its best reduction" if reduction is None else "the deterministic two-pass"
                parts.append(
                    f"{backend} with {name} is faster by more than 2 % in {verdicts.count(1)} of {len(wins)} cases, "
                    f"slower in {verdicts.count(-1)} (best {max(win.ratio for win in wins):.2f}x)"
                )
    return f"{'; '.join(parts)}." if parts else "Not measured yet."


def steps_sentence(rows: Sequence[dict[str, Any]]) -> str:
    """What stays in L2 between steps, and whether an order helps it."""
    if not rows:
        return "Not measured yet."
    none, least = steps.BETWEEN[0], steps.BETWEEN[1]
    kept = {
        row["id"]: float(np.mean(row["us"][str(least)]["row"][1:]) / np.mean(row["us"][str(none)]["row"][1:]))
        for row in rows
    }
    most = max(kept, key=kept.__getitem__)
    same = sum(ratio < WORTH for ratio in kept.values())
    faster = sum(
        steps.compare(row, between, "row", order).high < 1
        for row in rows
        for between in steps.BETWEEN
        for order in ("popular", "coldest")
    )
    return (
        f"With nothing between the steps, a step is up to {kept[most]:.2f} times as fast as with {least >> 20} MiB of "
        f"other weights in between ({most}), and the same within 2 % in {same} of "
        f"{len(kept)} sequences. Walking experts by popularity, hottest first or last, is faster than row order in "
        f"{faster} of {len(rows) * len(steps.BETWEEN) * 2} comparisons."
    )


def split_table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """The best whole tile's time over the best with K in parts, by reduction: above 1, splitting wins."""
    headings = ["case", "backend", "best whole µs", "best split", "two-pass", "atomic-fp32", "atomic", "best parts"]
    lines = []
    for cell in cells:
        if cell["question"] != "split-k":
            continue
        wins = [locality.best_split(cell, reduction) for reduction in (None, "two-pass", "atomic-fp32", "atomic")]
        if wins[0] is None:
            continue
        whole = [
            float(np.median(combo["samples_us"]))
            for combo in cell["combos"]
            if Config.from_mapping(combo["config"]) == wins[0].config_worse
        ]
        lines.append(
            [_name(cell), cell["backend"], f"{whole[0]:.1f}", *(_show(win) for win in wins), str(wins[0].config_better)]
        )
    return headings, lines


def steps_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Decode steps in a row: µs a step in row order, and the others' times over it."""
    headings = ["steps of", "routing", "layer MB", "a step's MB", "same experts", "MB between", "row µs"]
    headings += [f"{order} / row" for order in steps.ORDERS[1:]]
    lines = []
    for row in rows:
        for between in steps.BETWEEN:
            row_us = float(np.mean(row["us"][str(between)]["row"][1:]))
            line = [f"{row['case']} {row['dtype']}", f"zipf-{row['exponent']}", f"{row['layer_bytes'] / 1e6:.0f}"]
            line += [f"{row['step_bytes'] / 1e6:.0f}", f"{row['repeated_experts']:.0%}"]
            line += [f"{between / 1e6:.0f}", f"{row_us:.1f}"]
            for order in steps.ORDERS[1:]:
                found = steps.compare(row, between, "row", order)
                line.append(f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]")
            lines.append(line)
    return headings, lines


def _ratio_of(cell: Cell | None, win_of: Callable[[Cell], Win | None]) -> str:
    return "–" if cell is None else _show(win_of(cell))


def _show(win: Win | None) -> str:
    if win is None:
        return "–"
    text = f"{win.ratio:.2f}"
    return f"**{text}**" if matters(win) else text


# Pictures


def heat_points(cells: Sequence[Cell]) -> list[list[Any]]:
    """[dtype, block_m, slots per active expert, row over column at the same tile] of every torch-triton cell."""
    return [
        [cell["dtype"], win.config_better.block_m, cell["slots_per_active_expert"], round(win.ratio, 3)]
        for cell in of(cells)
        for win in locality.same_tile(cell, "column", "row")
    ]


def draw_heat(drawn: list[list[Any]], title: str) -> str:
    """SVG: a panel a dtype, slots per expert across, block_m up; each square the median of its cells."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    edges = [2.0**i for i in range(11)]
    block_ms = (16, 32, 64, 128)
    with matplotlib.rc_context(picture.SETTINGS):
        figure, panels = plt.subplots(1, len(DTYPES), sharey=True, figsize=(11, 2.9), layout="constrained")
        for panel, dtype in zip(panels, DTYPES, strict=True):
            grid = np.full((len(block_ms), len(edges)), np.nan)
            for (row, block_m), (col, edge) in itertools.product(enumerate(block_ms), enumerate(edges)):
                ratios = [
                    point[3]
                    for point in drawn
                    if point[:2] == [dtype, block_m] and (edge / 2 < point[2] <= edge or (col == 0 and point[2] <= 1))
                ]
                if ratios:
                    grid[row, col] = np.median(ratios)
                    panel.text(col, row, f"{grid[row, col]:.2f}", ha="center", va="center", fontsize=7)
            image = panel.imshow(grid, cmap="RdBu_r", vmin=0.5, vmax=1.5, aspect="auto", origin="lower")
            panel.set_xticks(range(len(edges)), [f"{edge:g}" for edge in edges])
            panel.set_title(dtype)
            panel.set_xlabel("slots per active expert, up to")
        panels[0].set_yticks(range(len(block_ms)), [str(block_m) for block_m in block_ms])
        panels[0].set_ylabel("block_m")
        figure.colorbar(image, ax=panels, label="row ÷ column time", shrink=0.8)
        figure.suptitle(title)
        return picture.svg(figure, drawn)


def byte_points(counted: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """[label, order, DRAM bytes read, bytes needed] of a few Mixtral points: three dtypes, two tiles, 512 tokens."""
    drawn = []
    for row in counted:
        point = row["point"]
        chosen = row.get("launches") and point["backend"] == "torch-triton" and point["routing"] == "uniform"
        if not chosen or point["tokens"] != 512 or point["order"] not in ("row", "column", "grouped"):
            continue
        if point["model"] == "mixtral-8x7b" and point["tp"] is None and point["config"]["block_n"] == 128:
            label = f"{point['gemm']} {point['dtype']} block_m {point['config']['block_m']}"
            drawn.append([label, point["order"], row["dram_read_bytes"], row["needed_bytes"]])
    return drawn


def draw_bytes(drawn: list[list[Any]], title: str) -> str:
    """SVG: DRAM bytes read by order, beside the bytes that had to be read."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(point[0] for point in drawn))
    colours = {"row": "#d55e00", "column": "#0072b2", "grouped": "#009e73"}
    with matplotlib.rc_context(picture.SETTINGS):
        figure, panel = plt.subplots(figsize=(11, 1.2 + 0.45 * len(labels)), layout="constrained")
        for number, (order, colour) in enumerate(colours.items()):
            mine = [(labels.index(p[0]), p[2] / p[3]) for p in drawn if p[1] == order]
            places = [place + (number - 1) * 0.27 for place, _ in mine]
            panel.barh(places, [ratio for _, ratio in mine], height=0.25, color=colour, label=order)
            for place, (_, ratio) in zip(places, mine, strict=True):
                panel.text(ratio, place, f" {ratio:.2f}", va="center", fontsize=7)
        panel.axvline(1, color="black", linewidth=1)
        panel.set_yticks(range(len(labels)), labels)
        panel.invert_yaxis()
        panel.set_xlabel("DRAM bytes read ÷ bytes that had to be read")
        panel.legend(frameon=False)
        figure.suptitle(title)
        return picture.svg(figure, drawn)


# Files


def load(folder: Path) -> tuple[list[Cell], list[dict[str, Any]], list[dict[str, Any]]]:
    """Cells, counters and steps that a GPU's folder holds; empty lists where it holds none."""
    from bench import counters

    found = []
    for name, read in (
        ("locality.jsonl", locality.read),
        ("counters.jsonl", counters.read),
        ("steps.jsonl", steps.read),
    ):
        path = folder / name
        found.append(read(path) if path.exists() else [])
    return found[0], found[1], found[2]
