"""The benchmark suite: `pytest bench`. README.md beside this file defines the times and says how to select.

pytest-benchmark's own statistics hold GPU kernel seconds in test_kernel_time*, and the caller's seconds in
test_call_time*: options such as --benchmark-compare-fail act on them.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.cases import Row
from bench.suite import Suite, gpu_kernel_seconds


@pytest.mark.benchmark(timer=gpu_kernel_seconds)
def test_kernel_time(benchmark: Any, suite: Suite, row: Row) -> None:
    """GPU time of the GEMM kernel in an eager call."""
    suite.kernel_time(benchmark, row, captured=False)


@pytest.mark.benchmark(timer=gpu_kernel_seconds)
def test_kernel_time_captured(benchmark: Any, suite: Suite, row: Row) -> None:
    """The same, replayed from a CUDA graph or inside an outer jax.jit."""
    suite.kernel_time(benchmark, row, captured=True)


def test_call_time(benchmark: Any, suite: Suite, row: Row) -> None:
    """What the caller of `backends.moe_gemm` waits for."""
    suite.call_time(benchmark, row, captured=False)


def test_call_time_captured(benchmark: Any, suite: Suite, row: Row) -> None:
    """The same for a CUDA graph's replay, or a call of one outer jax.jit."""
    suite.call_time(benchmark, row, captured=True)


def test_order_pairs(request: pytest.FixtureRequest, suite: Suite, row: Row, other_order: str) -> None:
    """Column order against another, same kernel and config, by interleaved pairs."""
    suite.order_pair(row, other_order, request.node.callspec.id)


def test_published_2024(suite: Suite, published_tokens: int) -> None:
    """What the published column-major kernel writes, and how long that takes."""
    suite.published_2024(published_tokens)
