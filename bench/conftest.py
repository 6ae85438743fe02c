"""Options, the machine and the shared data of the benchmark suite. README.md beside this file says how to run it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

# JAX would otherwise take three quarters of the GPU's memory at its first use, and torch shares the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import results
from bench.cases import PARAMETERS, Case, Row, order_pairs, rows
from bench.clock import CLOCKS, ClockError
from bench.data import Data, DataCache, build
from bench.machine import Device, Machine, Rehearsal, versions
from bench.suite import PUBLISHED_TOKENS, Suite
from shared.problem import ScaleLayout

_TOTAL = pytest.StashKey[int]()
_SUITE = pytest.StashKey[Suite]()
NO_GPU = (
    "no NVIDIA GPU that PyTorch can use: timings need one. `pytest bench --rehearse` walks through the suite on the "
    "CPU, `python -m bench doctor` says what is missing"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bench", "MoE GEMM benchmarks")
    group.addoption("--full", action="store_true", help="every model, GEMM, batch, dtype and order (hours)")
    group.addoption("--rehearse", action="store_true", help="a tiny case on the CPU; times mean nothing")
    group.addoption("--results", type=Path, help="JSON-lines file to append to; default: a new one in .benchmarks/moe")
    group.addoption("--rounds", type=int, default=30, help="samples per benchmark (default 30)")
    group.addoption("--warm", action="store_true", help="do not flush L2 between samples")
    group.addoption("--routing", default="uniform", help="uniform, zipf-EXPONENT, one-expert, or a .npy file")
    group.addoption("--seed", type=int, default=0, help="of data and routing")
    group.addoption("--clock", choices=CLOCKS, default="cupti", help="GPU clock (default cupti)")


def _which(config: pytest.Config) -> str:
    if config.getoption("--rehearse"):
        return "rehearsal"
    return "full" if config.getoption("--full") else "default"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    which = _which(metafunc.config)
    if "other_order" in metafunc.fixturenames:
        pairs = order_pairs(which)
        ids = [row.id.replace("/column/", f"/{other}-vs-column/") for row, other in pairs]
        values: list[tuple[object, ...]] = [(*row.parameters, other) for row, other in pairs]
        metafunc.parametrize((*PARAMETERS, "other_order"), values, ids=ids)
    elif "row" in metafunc.fixturenames:
        found = rows(which)
        if "captured" in metafunc.function.__name__ and which == "default":
            found = [row for row in found if row.captured_by_default]
        metafunc.parametrize(PARAMETERS, [row.parameters for row in found], ids=[row.id for row in found])
    elif "published_tokens" in metafunc.fixturenames:
        batches = PUBLISHED_TOKENS if which != "rehearsal" else PUBLISHED_TOKENS[:1]
        metafunc.parametrize("published_tokens", batches, ids=[f"tokens-{tokens}" for tokens in batches])


@pytest.fixture
def row(model_name: str, gemm: str, tokens: int, dtype: str, order: str, contender: str) -> Row:
    return Row.of(model_name, gemm, tokens, dtype, order, contender)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All tests of one case and dtype together, in the order of the cases: they share gigabytes of data."""
    place: dict[object, int] = {}
    for row in rows(_which(config)):
        place.setdefault((*row.parameters[:4], row.contender), len(place))

    def position(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        params: dict[str, Any] = callspec.params if callspec is not None else {}
        key = (*(params.get(name) for name in PARAMETERS[:4]), params.get("contender"))
        return place.get(key, len(place))

    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    others = [item for item in items if item.path.parent != Path(__file__).parent]
    items[:] = others + sorted(ours, key=position)
    config.stash[_TOTAL] = len(ours)


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> Device:
    """The GPU with its clock, or a skip that says what is missing; with --rehearse, the CPU."""
    if request.config.getoption("--rehearse"):
        return Rehearsal()
    try:
        import torch
    except ImportError as error:
        pytest.skip(f"{error}: pip install torch")
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    try:
        return Machine(request.config.getoption("--clock"))
    except ClockError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


def _rows_of(items: list[pytest.Item]) -> list[Row]:
    """The different rows that these tests measure, an order comparison's other order among them."""
    found: dict[Row, None] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        params: dict[str, Any] = callspec.params if callspec is not None else {}
        if "model_name" in params:
            row = Row.of(*(params[name] for name in PARAMETERS))
            found[row] = None
            if "other_order" in params:
                found[dataclasses.replace(row, order=params["other_order"])] = None
    return list(found)


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest, machine: Device) -> Iterator[Suite]:
    option = request.config.getoption
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    assert reporter is not None
    assert capture is not None

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():  # shown now, not with the captured output of a failing test
            reporter.write_line(line)

    journal = results.Journal(option("--results") or results.default_path())
    journal.write(
        "run",
        gpu=machine.gpu,
        clock=machine.clock.name,
        cache="warm" if option("--warm") else "cold",
        routing=option("--routing"),
        seed=option("--seed"),
        rounds=option("--rounds"),
        date=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        versions=versions(),
        ceilings=machine.ceilings(),
        state=machine.state(),
    )
    say(f"\nresults are appended to {journal.path}")

    def make(case: Case, dtype: str, scale_layout: ScaleLayout) -> Data:
        device = machine.torch_device
        return build(case, dtype, scale_layout, device=device, seed=option("--seed"), route=option("--routing"))

    suite = Suite(
        device=machine,
        journal=journal,
        data=DataCache(make),
        rounds=option("--rounds"),
        warm=option("--warm"),
        total=request.config.stash[_TOTAL],
        rows=_rows_of(request.session.items),
        captured_rows=_rows_of([item for item in request.session.items if "_captured[" in item.name]),
        say=say,
    )
    request.config.stash[_SUITE] = suite
    yield suite
    suite.data.free()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    suite = config.stash.get(_SUITE, None)
    if suite is not None:
        terminalreporter.write_line(
            f"{suite.journal.count} results in {suite.journal.path}; "
            f"`python -m bench compare --from {suite.journal.path}` prints the table"
        )
