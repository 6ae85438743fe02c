"""What runs by default, what needs a GPU, and how many tests ran where."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.where import HAS_GPU, NEEDS_GPU

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # test processes, and PyTorch, share the GPU

# Tests start pytest of their own, which is no process of this run: pytest-benchmark would not measure in one.
for _name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
    os.environ.pop(_name, None)

# No deadline: a first example compiles. Derandomised: a red run is the same everywhere.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

_PLACES = {"compile_only": "compile-only", "gpu": "GPU", "interpret": "interpreter"}


_LONG = (
    "test_moe_gemm.py", "test_compile_only.py", "test_reports.py", "test_mosaic.py", "test_suite.py",
    "test_transforms.py", "test_fuzz.py", "test_streams.py", "test_determinism.py", "test_faults.py",
    "test_commands.py",
)  # fmt: skip
"""Files that take minutes, the longest first: begun last, one would keep a process busy after the other has ended.
pytest-xdist keeps this order with --no-loadscope-reorder alone; by itself it begins those with most tests."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG))
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))
    asked_for_slow = "slow" in (config.option.markexpr or "") or any("::" in argument for argument in config.args)
    if not asked_for_slow:
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(autouse=True)
def _interpreters_are_compiled_without_optimisation(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests of JAX's interpreters, which compile for seconds and run for milliseconds: about half the time.

    Kernels compiled for a GPU keep all optimisations: registers and spills are read off them.
    """
    if "jax" not in sys.modules or request.node.get_closest_marker("interpret") is None:
        yield
        return
    config = sys.modules["jax"].config
    config.update("jax_disable_most_optimizations", True)
    yield
    config.update("jax_disable_most_optimizations", False)


_finished = itertools.count(1)


@pytest.fixture(autouse=True)
def _compiled_programs_given_back() -> Iterator[None]:
    """Every 50 tests JAX forgets what it compiled.

    A program of the interpreters holds about 140 memory mappings, of which Linux allows a process 65,530 by default:
    in a run of the whole matrix, XLA's compiler died with a segmentation fault after some 500 of them.
    """
    yield
    if next(_finished) % 50 == 0 and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


def _place(report: pytest.TestReport) -> str:
    return next((place for mark, place in _PLACES.items() if mark in report.keywords), "plain CPU")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    ran: Counter[str] = Counter()
    wanting = 0
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            if outcome == "skipped" and NEEDS_GPU in str(report.longrepr):
                wanting += 1
            elif outcome in ("passed", "failed") and report.when == "call":
                ran[_place(report)] += 1
    places = ("interpreter", "compile-only", "GPU", "plain CPU")
    line = "ran: " + ", ".join(f"{place} {ran[place]}" for place in places)
    terminalreporter.write_line(line + (f"; skipped for want of a GPU: {wanting}" if wanting else ""))
