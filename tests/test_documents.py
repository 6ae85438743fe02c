"""README and notes: their example runs, and the paths, links and commands they name exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import moe_gemm
from tests.where import HAS_GPU

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "notes").glob("*.md"))]
every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.mark.interpret
def test_readme_examples_run() -> None:
    numpy_example, torch_example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(numpy_example, names)
    x, w, ids, y = (names[name] for name in ("x", "w", "topk_ids", "y"))
    assert isinstance(y, np.ndarray)
    assert y.shape == (4, 2, 512)
    assert (y[3, 0] == 0).all()
    if not HAS_GPU:
        assert np.allclose(y, moe_gemm(x, w, ids, interpret=True), atol=0.1)
    exec(torch_example, names)
    x, w, ids, weight, y = (names[name].float() for name in ("x", "w", "ids", "weight", "y"))
    expected = weight[:, :, None] * (w[ids.long()] @ x[:, None, :, None])[..., 0]
    assert y.shape == (4, 2, 512)
    assert (y - expected).norm() < 0.1 * expected.norm()  # e4m3 has three bits behind the point


@every_document
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if not target.startswith("https://"):
            assert any((base / target).exists() for base in (path.parent, ROOT)), target


@every_document
def test_named_files_exist(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for name in re.findall(r"`((?:backends|bench|shared|tests|notes|tools)/[\w./-]+?)`", text):
        assert (ROOT / name).exists(), name


@every_document
def test_named_tests_exist(path: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text()):
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


@every_document
def test_named_commands_exist(path: Path) -> None:
    from bench.__main__ import app

    verbs = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    text = path.read_text()
    for verb in re.findall(r"python -m bench (\w[\w-]*)", text):
        assert verb in verbs
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE):
        assert target in targets
