"""Options, the machine and the shared data of the benchmark suite. README.md beside this file says how to run it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

# JAX would otherwise take three quarters of the GPU's memory at its first use, and torch shares the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import published, results, selection, watch
from bench.cases import PARAMETERS, SETS, Case, Row, check_routing, check_shard, order_pairs, rows
from bench.clock import CLOCKS, ClockError
from bench.data import BatchCache, Data, DataCache, build, build_batches
from bench.machine import Device, Machine, Rehearsal, gpu_uuid, versions, without_gpu_jax_stays_on_the_cpu
from bench.suite import LOST, PLAIN_READS, Suite
from bench.turns import Turns, place
from shared.checks import ArgumentError
from shared.problem import ScaleLayout

without_gpu_jax_stays_on_the_cpu()

_TOTAL = pytest.StashKey[int]()
_SUITE = pytest.StashKey[Suite]()
_GONE_ON = pytest.StashKey[tuple[int, int]]()
"""(tests that the results file has already, tests selected)"""
_EARLIER = pytest.StashKey[list[dict[str, Any]]]()
ROUNDS = {"targets": 20}
"""Samples per benchmark where --rounds does not say: the most, in the targets set, which stops at a settled time."""
_ROUNDS = 30
_TESTS = {
    "test_kernel_time": "kernel",
    "test_kernel_time_captured": "kernel captured",
    "test_call_time": "call",
    "test_call_time_captured": "call captured",
    "test_order_pairs": "pair",
    "test_published_2024": "published",
}
"""Name of each test's measurement in results.measured."""
NO_GPU = (
    "no NVIDIA GPU that PyTorch can use: timings need one. `pytest bench --rehearse` walks through the suite on the "
    "CPU, `python -m bench doctor` says what is missing"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bench", "MoE GEMM benchmarks")
    group.addoption("--set", choices=SETS, help="cases to measure (default: default)")
    group.addoption("--full", action="store_true", help="--set full: every model, GEMM, batch, dtype, order (hours)")
    group.addoption("--shard", default="1/1", help="I/N: the I-th of N parts of the set, for N GPUs side by side")
    group.addoption("--take-turns", action="store_true", help="other shards run on this GPU: compile beside them")
    group.addoption("--rehearse", action="store_true", help="a tiny case on the CPU; times mean nothing")
    group.addoption("--results", type=Path, help="JSON-lines file; one that exists is gone on with")
    group.addoption("--rounds", type=int, help="samples per benchmark (default 30; targets: at most 20)")
    group.addoption("--warm", action="store_true", help="do not flush L2 between samples")
    group.addoption("--routing", default="uniform", help="uniform, zipf-EXPONENT, one-expert, or a .npy file")
    group.addoption("--seed", type=int, default=0, help="of data and routing")
    group.addoption("--clock", choices=CLOCKS, default="cupti", help="GPU clock (default cupti)")


def _which(config: pytest.Config) -> str:
    if config.getoption("--rehearse"):
        return "rehearsal"
    return config.getoption("--set") or ("full" if config.getoption("--full") else "default")


def _for_targets(config: pytest.Config) -> bool:
    """Kernel times alone, sampled until they are settled, all batches of a layer on one draw of weights."""
    return config.getoption("--set") == "targets"


def _shard(config: pytest.Config) -> tuple[int, int]:
    return check_shard(config.getoption("--shard"), _which(config))


def _rounds(config: pytest.Config) -> int:
    given: int | None = config.getoption("--rounds")
    return ROUNDS.get(config.getoption("--set"), _ROUNDS) if given is None else given


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    which, shard = _which(metafunc.config), _shard(metafunc.config)
    targets = _for_targets(metafunc.config)
    if "other_order" in metafunc.fixturenames:
        pairs = [] if targets else order_pairs(which, shard)
        ids = [row.id.replace("/column/", f"/{other}-vs-column/") for row, other in pairs]
        values: list[tuple[object, ...]] = [(*row.parameters, other) for row, other in pairs]
        metafunc.parametrize((*PARAMETERS, "other_order"), values, ids=ids)
    elif "row" in metafunc.fixturenames:
        found = rows(which, shard)
        if targets and metafunc.function.__name__ != "test_kernel_time":
            found = []
        if "captured" in metafunc.function.__name__ and which == "default":
            found = [row for row in found if row.captured_by_default]
        metafunc.parametrize(PARAMETERS, [row.parameters for row in found], ids=[row.id for row in found])
    elif "published_tokens" in metafunc.fixturenames:
        batches: tuple[int, ...] = published.TOKENS if which != "rehearsal" else published.TOKENS[:1]
        batches = () if targets or shard[0] > 1 else batches
        metafunc.parametrize("published_tokens", batches, ids=[f"tokens-{tokens}" for tokens in batches])


def _settings(config: pytest.Config) -> dict[str, Any]:
    """What a run is told, and by which code: the part of its first line that is known before the machine is."""
    option = config.getoption
    return {
        **({"set": "targets"} if _for_targets(config) else {}),
        "clock": "rehearsal" if option("--rehearse") else option("--clock"),
        "cache": "warm" if option("--warm") else "cold",
        "routing": option("--routing"),
        "seed": option("--seed"),
        "rounds": _rounds(config),
        "versions": versions(),
        **results.code(),
    }


def pytest_configure(config: pytest.Config) -> None:
    """Wrong options end the run before it begins; the lines of a results file that exists are read."""
    try:
        check_routing(config.getoption("--routing"))
        _shard(config)
        if config.getoption("--full") and config.getoption("--set") not in (None, "full"):
            raise ArgumentError(f"--set: got {config.getoption('--set')} beside --full; allowed: one of them")
        path = config.getoption("--results")
        if path is not None and path.exists():
            config.stash[_EARLIER] = lines_to_go_on_with(path, _settings(config))
    except (ArgumentError, results.UnusableFile) as error:
        raise pytest.UsageError(str(error)) from error


def lines_to_go_on_with(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of an earlier part of this run; UnusableFile where it was another run. The GPU is compared later."""
    lines = results.read(path)
    earlier = results.compact(lines)["run"]
    differing = results.differences(earlier, {"gpu": earlier.get("gpu"), **settings}, results.RESUMED)
    if lines and differing:
        raise results.UnusableFile(
            f"{path} cannot be gone on with, as that run and this one differ in {'; '.join(differing)}. Give the same "
            "options, or another --results file"
        )
    return lines


@pytest.fixture
def row(model_name: str, gemm: str, tokens: int, dtype: str, order: str, contender: str) -> Row:
    return Row.of(model_name, gemm, tokens, dtype, order, contender)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All tests of one case and dtype together, in the order of the cases: they share gigabytes of data."""
    place: dict[object, int] = {}
    for row in rows(_which(config), _shard(config)):
        place.setdefault((*row.parameters[:4], row.contender), len(place))

    def position(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        params: dict[str, Any] = callspec.params if callspec is not None else {}
        key = (*(params.get(name) for name in PARAMETERS[:4]), params.get("contender"))
        return place.get(key, len(place))

    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    others = [item for item in items if item.path.parent != Path(__file__).parent]
    if _for_targets(config):  # a test without rows is still an item, with nothing in it
        ours = [item for item in ours if getattr(item, "originalname", "") == "test_kernel_time"]
    if config.option.keyword and not ours and not others:
        ids = [row.id for row in rows(_which(config), _shard(config))]
        raise pytest.UsageError(str(selection.nothing("-k", config.option.keyword, ids)))
    left = _routed(config, _not_measured(config, ours))
    if dropped := [item for item in ours if item not in left]:
        config.hook.pytest_deselected(items=dropped)
    items[:] = others + sorted(left, key=position)
    config.stash[_TOTAL] = len(left)


def _row_of(item: pytest.Item) -> Row | None:
    callspec = getattr(item, "callspec", None)
    params: dict[str, Any] = callspec.params if callspec is not None else {}
    return Row.of(*(params[name] for name in PARAMETERS)) if "model_name" in params else None


def _routed(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Those whose shape a recorded routing has; all of them where the routing is drawn."""
    shape = check_routing(config.getoption("--routing"))
    if shape is None or not items:
        return items
    found = []
    for item in items:
        row = _row_of(item)
        if row is not None and (row.problem.tokens, row.problem.top_k) == shape:
            found.append(item)
    if not found:
        raise pytest.UsageError(
            f"routing: {config.getoption('--routing')} has (T, top_k) = {shape}, which none of the selected cases has"
        )
    return found


def _not_measured(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Those that the results file does not have yet, or has with another config than would be taken now."""
    lines = config.stash.get(_EARLIER, [])
    if not lines:
        return items
    earlier = results.compact(lines)
    done = results.measured(earlier)
    left = [item for item in items if not _is_measured(item, done, earlier["run"]["gpu"])]
    config.stash[_GONE_ON] = (len(items) - len(left), len(items))
    return left


def _is_measured(item: pytest.Item, done: dict[tuple[str, str], dict[str, Any]], gpu: str) -> bool:
    import backends

    row, name, test = _row_of(item), item.callspec.id, _TESTS[item.function.__name__]  # type: ignore[attr-defined]
    known = done.get((name, test))
    if known is None or row is None:
        return known is not None
    if row.contender not in backends.BACKENDS or known.get("fatal"):
        return True
    return results.config_of(known) == backends.config_for(row.problem, backend=row.contender, gpu=gpu)


def _teller(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line now, not with the captured output of a failing test."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    assert reporter is not None
    assert capture is not None

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.write_line(line)

    return say


@pytest.fixture(scope="session")
def turns(request: pytest.FixtureRequest) -> Iterator[Turns | None]:
    """With --take-turns this process's place among those that share the GPU, which is its alone at first."""
    try:
        with place(request.config.getoption("--take-turns"), gpu_uuid, _teller(request)) as turns:
            yield turns
    except ArgumentError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest, turns: Turns | None) -> Device:
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
        return Machine(request.config.getoption("--clock"), turns)
    except ClockError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


def _rows_of(items: list[pytest.Item]) -> list[Row]:
    """The different rows that these tests measure, an order comparison's other order among them."""
    found: dict[Row, None] = {}
    for item in items:
        row = _row_of(item)
        if row is not None:
            found[row] = None
            other = item.callspec.params.get("other_order")  # type: ignore[attr-defined]
            if other is not None:
                found[dataclasses.replace(row, order=other)] = None
    return list(found)


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest, machine: Device, turns: Turns | None) -> Iterator[Suite]:
    option, say = request.config.getoption, _teller(request)
    earlier = request.config.stash.get(_EARLIER, [])
    before = results.compact(earlier)["run"].get("gpu", machine.gpu)
    if before != machine.gpu:
        pytest.exit(
            f"{option('--results')} cannot be gone on with, as that run and this one differ in gpu: {before} and "
            f"{machine.gpu}. Give another --results file",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )
    targets = _for_targets(request.config)
    journal = results.Journal(option("--results") or results.default_path())
    state = machine.state()
    journal.write(
        "run",
        gpu=machine.gpu,
        **_settings(request.config),
        shard=option("--shard"),
        **({"take_turns": True} if turns is not None else {}),
        date=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        ceilings=machine.ceilings(),
        state=state,
    )
    say(f"\nresults are appended to {journal.path}")
    for notice in watch.disturbances(state):
        journal.write("notice", text=f"at the start: {notice}")
        say(f"doubtful: {notice}")

    def make(case: Case, dtype: str, scale_layout: ScaleLayout) -> Data:
        device = machine.torch_device
        return build(case, dtype, scale_layout, device=device, seed=option("--seed"), route=option("--routing"))

    def make_batches(cases: list[Case], dtype: str, scale_layout: ScaleLayout) -> dict[Case, Data]:
        device = machine.torch_device
        return build_batches(
            cases, dtype, scale_layout, device=device, seed=option("--seed"), route=option("--routing")
        )

    selected = _rows_of(request.session.items)
    suite = Suite(
        device=machine,
        journal=journal,
        data=BatchCache(make_batches, selected) if targets else DataCache(make),
        rounds=_rounds(request.config),
        adaptive=targets,
        once=targets,
        turns=turns,
        warm=option("--warm"),
        total=request.config.stash[_TOTAL],
        rows=selected,
        captured_rows=_rows_of([item for item in request.session.items if "_captured[" in item.name]),
        say=say,
        one_by_one=frozenset(name for line in earlier for name in line.get("one_by_one", ())),
    )
    request.config.stash[_SUITE] = suite
    ended_by_them = any(line.get("id") == PLAIN_READS and line.get("fatal") for line in earlier)
    if targets and not option("--warm") and not ended_by_them:
        suite.plain_reads()
    yield suite
    suite.data.free()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that finds everything measured already has succeeded, though pytest calls it one without tests."""
    had, selected = session.config.stash.get(_GONE_ON, (0, 0))
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and had == selected > 0:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    say = terminalreporter.write_line
    if _GONE_ON in config.stash:
        had, selected = config.stash[_GONE_ON]
        say(f"{had} of {selected} measurements were in {config.getoption('--results')} already")
    suite = config.stash.get(_SUITE, None)
    if suite is None:
        return
    path = suite.journal.path
    for line in suite.failed:
        say(line)
    for notice, count in suite.noticed.most_common():
        say(f"doubtful, {count} results: {notice}")
    say(f"{suite.journal.count} results in {path}; `python -m bench compare --from {path}` prints the table")
    if exitstatus in (pytest.ExitCode.INTERRUPTED, LOST):
        say(f"the run was cut short; `python -m bench compare --resume {path}` with the same options goes on with it")
