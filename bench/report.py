"""Writes README's generated blocks and the pictures from the committed result files, or checks that they agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import picture, results, tables

README = Path(__file__).parent.parent / "README.md"
PICTURE = "kernel-over-floor.svg"
NO_RESULTS = "No results are committed yet."
_BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end generated -->)", re.DOTALL)

BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kernel-times": lambda found: tables.markdown(tables.kernel_times(found)),
    "call-times": lambda found: tables.markdown(tables.call_times(found)),
    "published": lambda found: tables.markdown(tables.published(found)),
    "environment": lambda found: tables.environment(found["run"]),
    "picture": lambda found: f"![Kernel time over floor]({_picture_path(found)})",
}
"""Block names in README, and what they hold for one GPU's merged results."""


def rewrite(*, check: bool, readme: Path = README, folder: Path = results.RESULTS) -> list[str]:
    """What had to be changed, as sentences; with check, nothing is written. Empty: all agrees.

    Raises ValueError for a block whose name is not in BLOCKS.
    """
    by_gpu = {gpu: tables.merged(runs) for gpu, runs in results.committed(folder).items()}
    changed = []
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        wanted = _BLOCK.sub(lambda match: _block(match, by_gpu), text)
        if wanted != text:
            changed.append(f"{readme.name}: generated blocks differ from the committed results")
            if not check:
                readme.write_text(wanted, encoding="utf-8")
    for gpu, found in by_gpu.items():
        path = folder / gpu / PICTURE
        drawn = picture.points(found)
        if drawn and not (path.exists() and f"data: {picture.digest(drawn)}" in path.read_text(encoding="utf-8")):
            changed.append(f"{path.parent.name}/{path.name}: shows other data than the committed results")
            if not check:
                path.write_text(picture.draw(drawn, title=_title(found)), encoding="utf-8")
    return changed


def _block(match: re.Match[str], by_gpu: dict[str, dict[str, Any]]) -> str:
    name = match["name"]
    if name not in BLOCKS:
        raise ValueError(f"README: got a generated block {name!r}; known: {', '.join(BLOCKS)}")
    parts = [BLOCKS[name](found) for found in by_gpu.values()] or [NO_RESULTS]
    return f"{match[1]}{'\n\n'.join(parts)}\n{match[4]}"


def _title(found: dict[str, Any]) -> str:
    run = found["run"]
    return (
        f"{run['gpu']}, {run['cache']} L2: GPU time of the GEMM kernel over the least time its reads and products take"
    )


def _picture_path(found: dict[str, Any]) -> str:
    from bench.machine import gpu_key

    return f"bench/results/{gpu_key(found['run']['gpu'])}/{PICTURE}"
