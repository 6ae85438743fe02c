"""Writes the generated blocks of README and notes, and the pictures, from committed results and sources.

With check, nothing is written and what differs is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import cache_tables, evidence, picture, porting, results, tables

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "notes").glob("*.md")))
PICTURE = "kernel-over-floor.svg"
NO_RESULTS = "No results are committed yet."
_BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end generated -->)", re.DOTALL)

BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kernel-times": lambda found: _kernel_times(found),
    "kernel-times-short": lambda found: _kernel_times(tables.short(found)),
    "call-times": lambda found: tables.markdown(tables.call_times(found)),
    "gpu-totals": lambda found: tables.markdown(tables.gpu_totals(found)),
    "published": lambda found: tables.markdown(tables.published(found)),
    "findings": lambda found: tables.findings(found),
    "framework-findings": lambda found: tables.framework_findings(found),
    "environment": lambda found: tables.environment(found["run"]),
    "picture": lambda found: f"![Kernel time over floor]({_picture_path(found)})",
}
"""Block names, and what they hold for one GPU's merged results."""
SOURCE_BLOCKS = {f"step-{step.lower().replace(' ', '-')}": step for step in porting.STEPS}
"""Block names, and the step of the kernels whose source they hold."""

MODEL_BLOCKS: dict[str, Callable[[], str]] = {
    "cache-model-errors": cache_tables.errors_block,
    "cache-model-parameters": cache_tables.parameters_block,
    "cache-model-gpus": cache_tables.gpus_block,
}
"""Block names, and what they hold of the cache model's committed files."""


def rewrite(*, check: bool, documents: Sequence[Path] = DOCUMENTS, folder: Path = results.RESULTS) -> list[str]:
    """What had to be changed, as sentences; with check, nothing is written. Empty: all agrees.

    Raises ValueError for a block whose name is not known.
    """
    by_gpu = {gpu: tables.merged(runs) for gpu, runs in results.committed(folder).items()}
    changed = []
    for document in documents:
        text = document.read_text(encoding="utf-8")
        wanted = _BLOCK.sub(lambda match: _block(match, by_gpu, folder), text)
        if wanted != text:
            changed.append(f"{document.name}: generated blocks differ from the committed results or sources")
            if not check:
                document.write_text(wanted, encoding="utf-8")
    for gpu, found in by_gpu.items():
        path = folder / gpu / PICTURE
        drawn = picture.points(found)
        if drawn and not picture.shows(path, drawn):
            changed.append(f"{path.parent.name}/{path.name}: shows other data than the committed results")
            if not check:
                path.write_text(picture.draw(drawn, title=_title(found)), encoding="utf-8")
        for name, (shown, draw) in evidence.pictures(folder / gpu).items():
            path = folder / gpu / name
            if not picture.shows(path, shown):
                changed.append(f"{gpu}/{name}: shows other data than the committed results")
                if not check:
                    path.write_text(draw(), encoding="utf-8")
    if folder == results.RESULTS and cache_tables.picture_differs():
        changed.append(f"{cache_tables.PICTURE.name}: shows other data than the committed judgement")
        if not check:
            cache_tables.PICTURE.write_text(cache_tables.picture_now(), encoding="utf-8")
    return changed


def _block(match: re.Match[str], by_gpu: dict[str, dict[str, Any]], folder: Path) -> str:
    name = match["name"]
    if name in SOURCE_BLOCKS:
        return f"{match[1]}{porting.markdown(SOURCE_BLOCKS[name])}\n{match[4]}"
    if name in MODEL_BLOCKS:
        return f"{match[1]}{MODEL_BLOCKS[name]()}\n{match[4]}"
    if name in evidence.BLOCKS:
        parts = [evidence.BLOCKS[name](folder / gpu, found) for gpu, found in by_gpu.items()]
    elif name in BLOCKS:
        parts = [BLOCKS[name](found) for found in by_gpu.values()]
    else:
        known = ", ".join([*BLOCKS, *evidence.BLOCKS, *SOURCE_BLOCKS, *MODEL_BLOCKS])
        raise ValueError(f"got a generated block {name!r}; known: {known}")
    parts = parts or [NO_RESULTS]
    return f"{match[1]}{'\n\n'.join(parts)}\n{match[4]}"


def _kernel_times(found: dict[str, Any]) -> str:
    """The table, and below it what it cannot show."""
    table = tables.markdown(tables.kernel_times(found))
    notes = [*tables.notes(found), *tables.other_tiles(found)]
    if tables.OTHER_SOURCES in table:
        notes.append(f"{tables.OTHER_SOURCES} measured with other sources of the kernels than the time beside it")
    return "\n".join([table, *(f"\n{note}" for note in notes)])


def _title(found: dict[str, Any]) -> str:
    run = found["run"]
    return (
        f"{run['gpu']}, {run['cache']} L2: GPU time of the GEMM kernel over the least time its reads and products take"
    )


def _picture_path(found: dict[str, Any]) -> str:
    from bench.machine import gpu_key

    return f"bench/results/{gpu_key(found['run']['gpu'])}/{PICTURE}"
