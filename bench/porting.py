"""The steps of the kernels, cut out of their source under the headings that they share, for notes/porting.md."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
STEPS = ("Locate tile", "Gather rows", "Stream K", "Scale", "Store")
KERNELS = {
    "Triton": ("backends/triton_kernel.py", ("moe_gemm_kernel", "gemm_tile")),
    "Pallas, Triton lowering": ("backends/pallas_triton.py", ("_kernel",)),
    "Pallas, Mosaic GPU": ("backends/pallas_mosaic.py", ("_kernel",)),
}
"""File, and the functions that have the steps between them, the first ones first."""
_HEADING = re.compile(rf"^\s*# ({'|'.join(STEPS)})\b", re.MULTILINE)


def steps(kernel: str) -> dict[str, str]:
    """Source of each step of a kernel, by heading, dedented. ValueError where the headings are not STEPS, in order."""
    path, functions = KERNELS[kernel]
    text = (ROOT / path).read_text(encoding="utf-8")
    nodes = {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    found: dict[str, str] = {}
    for function in functions:
        source = "\n".join(text.splitlines()[nodes[function].lineno - 1 : nodes[function].end_lineno])
        headings = list(_HEADING.finditer(source))
        ends = [heading.start() for heading in headings[1:]] + [len(source)]
        for heading, end in zip(headings, ends, strict=True):
            if heading[1] in found:
                raise ValueError(f"{path}: {function} has the step {heading[1]} again; expected: once")
            found[heading[1]] = _dedent(source[heading.start() : end].strip("\n"))
    if tuple(found) != STEPS:
        raise ValueError(f"{path}: {', '.join(functions)} has the steps {list(found)}; expected: {list(STEPS)}")
    return found


def markdown(step: str) -> str:
    """One step in every kernel, as code blocks under the kernels' names."""
    parts = []
    for kernel, (path, functions) in KERNELS.items():
        parts.append(f"**{kernel}** (`{path}`, `{'`, `'.join(functions)}`)\n\n```python\n{steps(kernel)[step]}\n```")
    return "\n\n".join(parts)


def _dedent(code: str) -> str:
    """A step's last lines may close an outer block and stand further left than its heading: they end it."""
    lines = code.splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    for number, line in enumerate(lines):
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            lines = lines[:number]
            break
    return textwrap.dedent("\n".join(lines)).rstrip()
