"""The cache model's tables, sentences and picture, made from its committed files alone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from bench import cache_fit, picture, tables
from bench.cache_gpus import MODELS, OTHER_GPUS, TILES, TOKENS, WEIGHTS
from bench.cache_judge import JUDGED, MEDIAN_TARGET, ORDERS_DIFFER, WORST_TARGET, missed, read, times_needed
from bench.tables import Table
from shared.gpus import gpus

PICTURE = JUDGED.parent / "cache-model.svg"


def point_lines(found: dict[str, Any]) -> Table:
    """Every point's prediction beside its measurement."""
    headings = ["point", "", "measured MB", "predicted MB", "error", "x needed", "measured µs", "predicted µs", "error"]
    return headings, [
        [
            point["id"],
            "fitted" if point["fits"] else "judged",
            f"{point['measured_bytes'] / 1e6:.1f}",
            f"{point['predicted_bytes'] / 1e6:.1f}",
            f"{point['predicted_bytes'] / point['measured_bytes'] - 1:+.1%}",
            f"{times_needed(point):.2f}",
            f"{point['measured_us']:.1f}",
            f"{point['predicted_us']:.1f}",
            f"{point['predicted_us'] / point['measured_us'] - 1:+.1%}",
        ]
        for point in found["points"]
    ]


def error_lines(found: dict[str, Any]) -> Table:
    headings = ["points", "number", "DRAM bytes: median error", "worst", "if all were read once: median", "worst"]
    headings += ["time: median error", "worst"]
    numbers = ("median", "worst", "read_once_median", "read_once_worst", "time_median", "time_worst")
    return headings, [
        [row["name"], str(row["points"]), *(f"{row[name]:.1%}" for name in numbers)] for row in found["errors"]
    ]


def errors_block() -> str:
    """The table of errors, and in sentences: targets, orders, parameters."""
    if not JUDGED.exists():
        return "Nothing is judged yet."
    found = read(JUDGED)
    return "\n".join([tables.markdown(error_lines(found)), "", *sentences(found)])


def sentences(found: dict[str, Any]) -> list[str]:
    misses = missed(found)
    judged = found["errors"][0]
    met = "Both targets are met" if not misses else "Missed: " + "; ".join(misses)
    lines = [
        f"{met} (median at most {MEDIAN_TARGET:.0%}, worst at most {WORST_TARGET:.0%}). Worst judged point: "
        f"{judged['worst_point']}.",
        "",
    ]
    compared = found["orders"]["compared"]
    right = [one for one in compared if one["predicted_best_reads"] < ORDERS_DIFFER]
    if compared:
        ratio = [abs(one["predicted_ratio"] / one["ratio"] - 1) for one in compared]
        lines += [
            f"Orders, judged launches: in {len(compared)} the orders' bytes differ by {ORDERS_DIFFER - 1:.0%} or more "
            f"(in {found['orders']['alike']} they do not). The order predicted to read least does, or reads at most "
            f"{ORDERS_DIFFER - 1:.0%} more than the least, in {len(right)} of {len(compared)}. How many times as much "
            f"the worst order reads ({min(one['ratio'] for one in compared):.2f} to "
            f"{max(one['ratio'] for one in compared):.2f} times, measured) is predicted with a median error of "
            f"{statistics.median(ratio):.1%}, at worst {max(ratio):.1%}.",
            "",
        ]
    blocks = [p for p in found["points"] if p["measured_blocks_per_sm"] != p["predicted_blocks_per_sm"]]
    lines += [
        f"Thread blocks per multiprocessor are predicted as counted in {len(found['points']) - len(blocks)} of "
        f"{len(found['points'])} launches{': not in ' + ', '.join(p['id'] for p in blocks) if blocks else ''}."
    ]
    return lines


def parameters_block() -> str:
    """The fitted parameters, and what fits about as well."""
    found = read(cache_fit.PARAMETERS)
    lines = [
        [f"`{name}`", f"{value:g}", *(f"{bound:g}" for bound in found["fits_about_as_well"][name])]
        for name, value in found["values"].items()
    ]
    return tables.markdown((["parameter", "fitted", "about as good from", "to"], lines))


def gpus_block() -> str:
    """What a larger L2 leaves of column order's gain: a summary, sentences, and every case's ratio of bytes."""
    if not OTHER_GPUS.exists():
        return "Nothing is predicted yet."
    rows = read(OTHER_GPUS)["rows"]
    return "\n\n".join([tables.markdown(gpu_summary(rows)), gpu_sentences(rows), tables.markdown(gpu_cases(rows))])


def gpu_summary(rows: Sequence[dict[str, Any]]) -> Table:
    """Per GPU and weights: the most that row order reads and takes over column order, at both tiles."""
    headings = ["GPU (L2 MB)", "weights"]
    for tile in ("16-row tile", "tile that fits the batch"):
        headings += [
            f"{tile}: most bytes, row ÷ column",
            "time there",
            "most time, row ÷ column",
            "cases of 5 % and more",
        ]
    lines = []
    for key, weights in itertools.product(gpus(), WEIGHTS):
        line = [f"{key} ({gpus()[key].l2_bytes / 1e6:.0f})", weights]
        for tile in TILES:
            mine = [row for row in rows if (row["gpu"], row["weights"], row["tile"]) == (key, weights, tile)]
            most = max(mine, key=gain)
            line += [
                f"{gain(most):.2f} ({most['model']}, {most['tokens']} tokens)",
                f"{time_gain(most):.2f}",
                f"{max(map(time_gain, mine)):.2f}",
                f"{sum(gain(row) >= ORDERS_DIFFER for row in mine)} of {len(mine)}",
            ]
        lines.append(line)
    return headings, lines


def gpu_sentences(rows: Sequence[dict[str, Any]]) -> str:
    """The answer in words, from the rows."""
    largest = max(gpus().values(), key=lambda one: one.l2_bytes)
    parts = []
    for tile, words in zip(TILES, ("the fixed 16-row tile", "the tile that fits the batch"), strict=True):
        for key in (cache_fit.GPU, largest.key):
            mine = [row for row in rows if (row["gpu"], row["tile"]) == (key, tile)]
            over = sum(gain(row) >= ORDERS_DIFFER for row in mine)
            parts.append(
                f"on {key} at {words} row order reads up to {max(map(gain, mine)):.2f} times column order's bytes and "
                f"takes up to {max(map(time_gain, mine)):.2f} times its time, with {ORDERS_DIFFER - 1:.0%} "
                f"more bytes or worse in {over} of {len(mine)} cases"
            )
    fewer = [row for row in rows if gain(row) <= 1 / ORDERS_DIFFER]
    least = min(rows, key=gain)
    return (
        f"Predicted: {'; '.join(parts)}. In {len(fewer)} of all {len(rows)} cases column order is the one that reads "
        f"{ORDERS_DIFFER - 1:.0%} more or worse (row ÷ column at least {gain(least):.2f}: {least['gpu']}, "
        f"{least['weights']}, {least['model']}, {least['tokens']} tokens, {least['tile']} tile)."
    )


def gpu_cases(rows: Sequence[dict[str, Any]]) -> Table:
    """Row order's bytes over column order's: 16-row tile / fitting tile. Batches where all are 1 are left out."""
    by_case = {
        (row["gpu"], row["weights"], row["model"], row["tile"], row["tokens"]): f"{gain(row):.2f}" for row in rows
    }
    batches = [
        tokens for tokens in TOKENS if any(f"{gain(row):.2f}" != "1.00" for row in rows if row["tokens"] == tokens)
    ]
    lines = [
        [*case, *(" / ".join(by_case[*case, tile, tokens] for tile in TILES) for tokens in batches)]
        for case in itertools.product(gpus(), WEIGHTS, MODELS)
    ]
    return ["GPU", "weights", "model", *(f"{tokens} tokens" for tokens in batches)], lines


def gain(row: dict[str, Any]) -> float:
    return row["row"] / row["column"]


def time_gain(row: dict[str, Any]) -> float:
    return row["row_us"] / row["column_us"]


def drawn(found: dict[str, Any]) -> list[list[Any]]:
    """What the picture shows: [fits, measured over needed bytes, predicted over measured bytes]."""
    return [
        [
            point["fits"],
            round(times_needed(point), 4),
            round(point["predicted_bytes"] / point["measured_bytes"], 4),
        ]
        for point in found["points"]
    ]


def draw(found: dict[str, Any]) -> str:
    """SVG text, the same for the same data and matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    points = drawn(found)
    with matplotlib.rc_context(picture.SETTINGS):
        figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
        panel.axhline(1, color="black", linewidth=1)
        panel.axhspan(1 - WORST_TARGET, 1 + WORST_TARGET, color="#eeeeee", label=f"target: within {WORST_TARGET:.0%}")
        for fits, colour, marker, label in ((True, "#e69f00", "o", "fitted"), (False, "#0072b2", "^", "judged")):
            mine = [point for point in points if point[0] == fits]
            panel.scatter(
                [x for _, x, _ in mine], [y for _, _, y in mine], s=22, color=colour, marker=marker, label=label,
                zorder=3,
            )  # fmt: skip
        panel.set_xscale("log")
        panel.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        panel.minorticks_off()
        panel.set_xlabel("measured DRAM bytes ÷ bytes that had to be read")
        panel.set_ylabel("predicted ÷ measured DRAM bytes")
        panel.set_title(f"Cache model against counters of one {found['gpu']}")
        panel.legend(frameon=False)
        return picture.svg(figure, points)


def picture_now() -> str:
    """The picture of the committed judgement."""
    return draw(read(JUDGED))


def picture_differs() -> bool:
    """Whether the committed picture shows other data than the committed judgement."""
    return JUDGED.exists() and not picture.shows(PICTURE, drawn(read(JUDGED)))
