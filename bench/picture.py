"""The picture of a GPU's results: kernel time over floor, every contender of a case on one line."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

from backends.registry import BACKENDS

DTYPES = ("fp16", "fp8-w8a16", "fp8-w8a8")
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00")
_MARKERS = ("o", "s", "^", "D")
_PEER_MARKERS = ("x", "+", "1", "2", "3")


SETTINGS: Any = {"svg.hashsalt": "moe", "svg.fonttype": "none", "font.size": 9}
"""matplotlib's, for text that stays text and files that are the same for the same data."""


def points(found: dict[str, Any]) -> list[list[Any]]:
    """[case, dtype, contender, kernel time over floor]: what is drawn. bf16 peers stand in fp16's panel."""
    best: dict[tuple[str, str, str], float] = {}
    for row in found["rows"]:
        if not row.get("times_floor") or row["scale_layout"] == "block":
            continue
        peer = row["contender"] not in BACKENDS
        dtype = "fp16" if peer and row["dtype"] == "bf16" else row["dtype"]
        if dtype in DTYPES:
            key = (row["case"], dtype, row["contender"])
            best[key] = min(best.get(key, float("inf")), round(row["times_floor"], 3))
    return [[*key, times] for key, times in best.items()]


def digest(drawn: list[list[Any]]) -> str:
    """Says which data a picture shows; it stands in the file, as renderings differ between matplotlib versions."""
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16]


def draw(drawn: list[list[Any]], title: str) -> str:
    """SVG text, the same for the same data and matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

    cases = list(dict.fromkeys(point[0] for point in drawn))
    peers = sorted({point[2] for point in drawn} - set(BACKENDS))
    with matplotlib.rc_context(SETTINGS):
        figure, panels = plt.subplots(
            1, len(DTYPES), sharey=True, sharex=True, figsize=(11, 1.6 + 0.3 * len(cases)), layout="constrained"
        )
        for panel, dtype in zip(panels, DTYPES, strict=True):
            panel.axvline(1, color="black", linewidth=1)
            panel.grid(axis="y", color="#dddddd", linewidth=0.6)
            for number, name in enumerate((*BACKENDS, *peers)):
                mine = [(point[3], cases.index(point[0])) for point in drawn if point[1:3] == [dtype, name]]
                backend = name in BACKENDS
                panel.scatter(
                    [x for x, _ in mine],
                    [y for _, y in mine],
                    color=_COLOURS[number] if backend else "#777777",
                    marker=_MARKERS[number] if backend else _PEER_MARKERS[(number - len(BACKENDS)) % 5],
                    s=26,
                    label=name,
                    zorder=3,
                )
            panel.set_title(dtype)
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(FixedLocator([1, 1.5, 2, 3, 5, 10, 20, 50]))
            panel.xaxis.set_major_formatter(FormatStrFormatter("%g"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xlabel("kernel time ÷ floor (1: nothing left)")
        panels[0].set_yticks(range(len(cases)), cases)
        panels[0].invert_yaxis()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
        figure.suptitle(title)
        return svg(figure, drawn)


def svg(figure: Any, drawn: list[list[Any]]) -> str:
    """SVG text of a figure made under SETTINGS, with the digest of what it shows; closes the figure."""
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
    return text.replace("<svg ", f"<!-- data: {digest(drawn)} -->\n<svg ", 1) + "\n"


def shows(path: Path, drawn: list[list[Any]]) -> bool:
    """Whether the file is a picture of just this data."""
    return path.exists() and f"data: {digest(drawn)}" in path.read_text(encoding="utf-8")
