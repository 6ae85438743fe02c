"""The steps of the kernels, cut out of their source under the headings that they share, for notes/porting.md."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
STEPS = ("Locate tile", "Gather rows", "Stream K", "Scale", "Store")
KERNELS = {
    "Triton": ("backends/triton_kernel.py", "moe_gemm_kernel"),
    "Pallas, Triton lowering": ("backends/pallas_triton.py", "_kernel"),
    "Pallas, Mosaic GPU": ("backends/pallas_mosaic.py", "_kernel"),
}
_HEADING = re.compile(rf"^\s*# ({'|'.join(STEPS)})\b", re.MULTILINE)


def steps(kernel: str) -> dict[str, str]:
    """Source of each step of a kernel, by heading, dedented. ValueError where the headings are not STEPS, in order."""
    path, function = KERNELS[kernel]
    text = (ROOT / path).read_text(encoding="utf-8")
    node = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == function)
    source = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
    found = list(_HEADING.finditer(source))
    if tuple(match[1] for match in found) != STEPS:
        raise ValueError(f"{path}: {function} has the steps {[match[1] for match in found]}; expected: {STEPS}")
    ends = [match.start() for match in found[1:]] + [len(source)]
    return {match[1]: _dedent(source[match.start() : end].strip("\n")) for match, end in zip(found, ends, strict=True)}


def markdown(step: str) -> str:
    """One step in every kernel, as code blocks under the kernels' names."""
    parts = []
    for kernel, (path, function) in KERNELS.items():
        parts.append(f"**{kernel}** (`{path}`, `{function}`)\n\n```python\n{steps(kernel)[step]}\n```")
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
