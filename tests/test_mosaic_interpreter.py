"""Mosaic's interpreter gets threads enough not to hang, or is refused. Each in a process that has not used JAX yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends import mosaic_interpreter

ROOT = Path(__file__).parents[1]
USE_JAX = "import jax.numpy as jnp; jnp.zeros(3).block_until_ready(); "
LOAD = "from backends import pallas_mosaic, mosaic_interpreter; "
CALL = """
import numpy as np, backends
from shared.config import Config
rng = np.random.default_rng(2)
x, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((32, 168), (4, 160, 168)))
ids = rng.integers(-1, 4, (32, 6)).astype(np.int32)
config = Config(block_m=64, block_k=32, num_warps=8, num_stages=4, split_k=2, reduction="atomic-fp32")
y = backends.moe_gemm(x, w, ids, order="column", backend="pallas-mosaic", interpret=True, config=config)
print(y.shape)
"""


def in_a_process(code: str, threads: int | None, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"} | {"JAX_PLATFORMS": "cpu"}
    environment |= {} if threads is None else {"NPROC": str(threads)}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.mark.interpret
def test_a_call_that_hung_with_two_threads_comes_back() -> None:
    """On machines of few cores, where nothing says how many threads to have: half of such calls hung."""
    found = in_a_process(CALL, None)
    assert found.stdout == "(32, 6, 160)\n", found.stderr


@pytest.mark.interpret
def test_too_few_threads_are_refused_before_anything_can_hang() -> None:
    found = in_a_process(USE_JAX + CALL, 2)
    assert "BackendUnavailable" in found.stderr
    assert "JAX was first used with 2 threads on the CPU; it needs 4 or more: set NPROC=16" in found.stderr


@pytest.mark.parametrize(
    ("code", "threads", "enough"),
    [(LOAD, None, True), (LOAD, 2, False), (LOAD, 4, True), (USE_JAX + LOAD, 3, False), (USE_JAX + LOAD, 4, True)],
)
def test_threads_are_what_the_environment_says_or_enough(code: str, threads: int | None, enough: bool) -> None:
    found = in_a_process(code + "print(mosaic_interpreter.too_few() is None)", threads)
    assert found.stdout == f"{enough}\n", found.stderr


def test_these_tests_have_enough() -> None:
    assert mosaic_interpreter.too_few() is None
