"""The picture of the targets' results: floor over time, case by case, and by bytes beside what a plain read reaches."""

from __future__ import annotations

from typing import Any

from bench import picture, results, targets
from bench.target_lines import PLAIN

_LOWEST = 0.5
"""Floor over time at the dark end of the scale."""


def points(found: dict[str, Any]) -> list[list[Any]]:
    """What is drawn: [layer, tokens, dtype group, floor over time of the fastest backend, MB to read] of each case.

    Then the plain reads, floor over time of the fastest run: [PLAIN, None, None, floor over time, MB] of each size.
    """
    times = targets.Times(found)
    drawn: list[list[Any]] = []
    for layer in targets.layers(found["run"].get("seed", 0)):
        for group, dtypes in targets.GROUPS.items():
            row = times.best_backend(layer.name, dtypes)
            if layer.has(group) and row is not None:
                name = f"{layer.case.model.name} {layer.case.gemm}"
                size = round(layer.read_bytes[row["dtype"]] / 1e6, 1)
                drawn.append([name, layer.case.tokens, group, round(targets.share(row), 3), size])
    curve: dict[float, float] = {}
    for run in results.history(found["run"]):
        for one in run.get("reads", ()):
            size = round(one["bytes"] / 1e6, 1)
            share = round(one["bytes"] / run["ceilings"]["read_bytes_per_s"] / one["us"] * 1e6, 3)
            curve[size] = max(curve.get(size, 0.0), share)
    return drawn + [[PLAIN, None, None, share, size] for size, share in sorted(curve.items())] if drawn else []


def draw(drawn: list[list[Any]], title: str) -> str:
    """SVG text. A panel per dtype: a row per layer, a column per batch, each cell says and shows floor over time.

    Below, the same by bytes: decode filled, more tokens hollow, and a line through the plain reads.
    """
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    import numpy as np

    curve = [(size, share) for name, _, _, share, size in drawn if name == PLAIN]
    cases = [point for point in drawn if point[0] != PLAIN]
    names = list(dict.fromkeys(point[0] for point in cases))
    batches = sorted({point[1] for point in cases})
    height = 1.8 + 0.34 * len(names)
    with matplotlib.rc_context(picture.SETTINGS):
        figure, panels = plt.subplots(
            2, len(targets.GROUPS), sharey="row", figsize=(14, height + 3.2), layout="constrained",
            height_ratios=(height, 2.8),
        )  # fmt: skip
        image = None
        for panel, below, group in zip(*panels, targets.GROUPS, strict=True):
            grid = np.full((len(names), len(batches)), np.nan)
            for name, tokens, of, value, _ in cases:
                if of == group:
                    grid[names.index(name), batches.index(tokens)] = value
            image = panel.imshow(grid, cmap="viridis", vmin=_LOWEST, vmax=1, aspect="auto")
            for (i, j), value in np.ndenumerate(grid):
                if not np.isnan(value):
                    colour = "white" if value < (1 + _LOWEST) / 2 else "black"
                    panel.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
            panel.set_title(group)
            panel.set_xticks(range(len(batches)), batches)
            panel.set_xlabel("tokens")
            for decode, face in ((True, "#0072b2"), (False, "none")):
                mine = [p for p in cases if p[2] == group and (p[1] <= targets.DECODE_TOKENS) == decode]
                told = f"{'up to' if decode else 'above'} {targets.DECODE_TOKENS} tokens"
                below.scatter(
                    [p[4] for p in mine], [p[3] for p in mine], 14, facecolors=face, edgecolors="#0072b2", label=told
                )
            if curve:
                below.plot([size for size, _ in curve], [share for _, share in curve], color="#d55e00", label=PLAIN)
            below.axhline(1, color="black", linewidth=1)
            below.set_xscale("log")
            below.set_xlabel("MB to read")
            below.grid(color="#dddddd", linewidth=0.6)
        panels[0][0].set_yticks(range(len(names)), names)
        panels[1][0].set_ylabel("floor ÷ kernel time")
        panels[1][-1].legend(loc="lower right", frameon=False)
        assert image is not None
        figure.colorbar(image, ax=panels[0], label="floor ÷ kernel time", shrink=0.9)
        figure.suptitle(title)
        return picture.svg(figure, drawn)
