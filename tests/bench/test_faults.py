"""What goes wrong in a run is noticed, said and kept: kernels that fail or lie, a lost GPU, disturbed or coarse clocks.

The suite runs with contenders that answer at once (`instant`), one of which has a fault, on a device that tells of one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

import backends  # noqa: E402
from bench import reads, results, tables, targets, tune, watch  # noqa: E402
from bench import suite as suites  # noqa: E402
from bench.__main__ import app  # noqa: E402
from bench.cases import Row, check_routing  # noqa: E402
from bench.contenders import Contender  # noqa: E402
from bench.data import Data, DataCache, build, to_torch  # noqa: E402
from bench.machine import Rehearsal, versions  # noqa: E402
from bench.turns import Turns  # noqa: E402
from shared.checks import ArgumentError  # noqa: E402
from shared.config import Config  # noqa: E402

ROOT = Path(__file__).parents[2]
ROW = Row.of("tiny", "gate-up", 4, "fp16", "column", "torch-triton")
CALM = {"sm_mhz": 1980.0, "highest_sm_mhz": 1980.0, "clock_reasons": 0}
INTRUDER = {"pid": 7, "name": "python", "mib": 1024}


def right(data: Data) -> Any:
    return data.reference.to(data.x.dtype)


def instant(row: Row, data: Data, answer: Callable[[Data], Any] = right) -> Contender:
    """A contender that answers at once."""
    return Contender(row, "torch", lambda: answer(data), (), to_torch, "moe_gemm_kernel", Config(), 1)


class Machine(Rehearsal):
    """A rehearsal whose state and health are told to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[str, Any] = dict(CALM)
        self.gone: str | None = None

    def state(self) -> dict[str, Any]:
        return dict(self.now)

    def lost(self) -> str | None:
        return self.gone


class Benchmark:
    """pytest-benchmark's fixture as far as the suite uses it. times: seconds to report in place of those measured."""

    def __init__(self, times: list[float] | None = None) -> None:
        self.times, self.group, self.has_error = times, "", False
        self.extra_info: dict[str, Any] = {}
        self.stats: Any = None

    def pedantic(self, target: Any, setup: Any, rounds: int, iterations: int) -> Any:
        data = []
        for _ in range(rounds):
            setup()
            start = suites.gpu_kernel_seconds()
            result = target()
            data.append(suites.gpu_kernel_seconds() - start)
        data = self.times or data
        inner = type("Stats", (), {"data": data, "median": statistics.median(data)})
        self.stats = type("Metadata", (), {"stats": inner})
        return result


@dataclasses.dataclass
class Run:
    suite: suites.Suite
    device: Machine
    path: Path
    said: list[str]

    def compact(self) -> dict[str, Any]:
        return results.compact(results.read(self.path))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(suites, "prepare", lambda row, data, device: instant(row, data))
    device, path, said = Machine(), tmp_path / "run.jsonl", []
    journal = results.Journal(path)
    journal.write("run", gpu=device.gpu, clock="rehearsal", cache="cold", rounds=6, date="2026-01-01T00:00:00Z")
    data = DataCache(lambda case, dtype, layout: build(case, dtype, layout, device="cpu"))
    suite = suites.Suite(
        device=device, journal=journal, data=data, rounds=6, warm=False, total=4, say=said.append, rows=[ROW]
    )
    return Run(suite, device, path, said)


def test_a_calm_run_says_nothing_doubtful(run: Run) -> None:
    run.suite.kernel_time(Benchmark(), ROW, captured=False)
    (row,) = run.compact()["rows"]
    assert row["kernel_us"] > 0
    assert "notices" not in row
    assert (row["sources"], row["harness"]) == (results.sources(), results.harness())
    assert not any("doubtful" in line for line in run.said)
    assert tables.notes(run.compact()) == []


class Recorder(Turns):
    """Notes what this process may do on the GPU beside others."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.now = ""

    def alone(self) -> None:
        super().alone()
        self.now = "alone"

    def together(self) -> None:
        super().together()
        self.now = "together"


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_compiled_together_and_timed_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    turns, seen = Recorder(tmp_path / "turns"), []

    def prepare(row: Row, data: Data, device: Machine) -> Contender:
        seen.append(("compiled", turns.now))
        if fails and len(seen) == 1:
            raise RuntimeError("only beside others")
        contender = instant(row, data)
        seen.append(("ready", turns.now))
        return contender

    monkeypatch.setattr(suites, "prepare", prepare)
    monkeypatch.setattr(run.device, "flush", lambda: seen.append(("timed", turns.now)))
    suite = dataclasses.replace(run.suite, turns=turns)
    suite.kernel_time(Benchmark(), ROW, captured=False)
    assert seen[0] == ("compiled", "together")
    assert {now for what, now in seen if what == "timed"} == {"alone"}
    assert [row["id"] for row in run.compact()["rows"]] == [ROW.id]


@pytest.mark.parametrize(
    ("state", "notice"),
    [
        ({"others": [INTRUDER]}, "another process on the GPU: python (pid 7, 1024 MiB)"),
        ({"clock_reasons": 0x4}, "clocks held down: power cap"),
        ({"clock_reasons": 0x20 | 0x1}, "clocks held down: thermal slowdown by software"),
        ({"sm_mhz": 1500.0}, "SM clock 1500 MHz, of 1980 MHz at most"),
    ],
)
def test_a_disturbance_stands_beside_its_result(run: Run, state: dict[str, Any], notice: str) -> None:
    run.device.now |= state
    run.suite.kernel_time(Benchmark(), ROW, captured=False)
    (row,) = run.compact()["rows"]
    assert row["kernel_us"] > 0, "noticed, not left out"
    assert row["notices"] == [f"kernel eager: {notice}"]
    assert f"    doubtful: kernel eager: {notice}" in run.said[-1]
    assert run.suite.noticed.total() == 1
    assert tables.notes(run.compact()) == [f"† kernel eager: {notice} ({ROW.id})"]
    headings, lines = tables.kernel_times(run.compact())
    assert lines[0][headings.index("torch-triton")].strip("*").endswith(" †")
    assert "nan" not in tables.findings(run.compact() | {"run": {"gpu": "x"}})


@pytest.mark.parametrize(
    ("noise", "taken"), [(0.001, suites.FEWEST_ROUNDS), (0.01, suites.FEWEST_ROUNDS), (0.02, 11), (0.3, 20)]
)
def test_sampling_ends_when_the_time_is_settled(
    run: Run, monkeypatch: pytest.MonkeyPatch, noise: float, taken: int
) -> None:
    """A steady kernel is sampled seldom, a noisy one as often as is allowed; what was sampled is what is reported."""
    suite = dataclasses.replace(run.suite, adaptive=True, once=True, rounds=20)
    timed = iter(10e-6 * (1 + noise * (i % 3)) for i in range(100))
    samples: list[float] = []

    class Timer(suites.measure.GpuTimer):
        def _take(self, records: list[Any]) -> None:
            samples.append(next(timed))
            self.seconds += samples[-1]
            self.totals.append(samples[-1])

    monkeypatch.setattr(suites.measure, "GpuTimer", Timer)
    benchmark = Benchmark()
    suite.kernel_time(benchmark, ROW, captured=False)
    assert len(samples) == taken
    assert benchmark.stats.stats.data == pytest.approx(samples)
    (row,) = run.compact()["rows"]
    assert row["samples_us"] == pytest.approx([1e6 * sample for sample in samples], abs=1e-3)
    assert row["kernel_us"] == pytest.approx(1e6 * statistics.median(samples), abs=1e-3)
    assert ROW not in suite._ready, "let go of: a peer's copy of the weights is gigabytes"


def test_a_disturbance_during_an_order_comparison(run: Run) -> None:
    run.device.now |= {"clock_reasons": 0x40}
    name = ROW.id.replace("/column/", "/row-vs-column/")
    run.suite.order_pair(ROW, "row", name)
    assert run.compact()["pairs"][0]["notices"] == ["clocks held down: thermal slowdown by hardware"]
    assert "clocks held down" in tables.notes(run.compact())[0]


def test_an_idle_gpus_low_clock_is_no_disturbance() -> None:
    assert watch.disturbances(CALM | {"clock_reasons": 0x1, "sm_mhz": 345.0}) == []
    assert watch.disturbances(CALM | {"sm_mhz": 1950.0}) == []
    assert watch.disturbances({}) == []


def test_a_coarse_clock_is_noticed(run: Run) -> None:
    ticking = [10e-6, 11e-6, 10e-6, 12e-6, 11e-6, 10e-6]
    run.suite.kernel_time(Benchmark(ticking), ROW, captured=False)
    (row,) = run.compact()["rows"]
    assert row["notices"] == ["kernel eager: the clock ticks every 1000 ns, 9.5% of the time"]


@pytest.mark.parametrize("seed", range(5))
def test_clock_ticks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fine = rng.normal(100e-6, 1e-6, 30)
    assert watch.too_coarse(list(fine), 100e-6) is None
    ticks = np.round(fine / 32e-9) * 32e-9
    assert watch.tick(list(ticks)) == pytest.approx(32e-9)
    jitter = rng.integers(-1, 2, 30) * 1e-9  # of a conversion between clocks
    assert watch.too_coarse(list(ticks + jitter), 100e-6) is None
    assert "32 ns" in (watch.too_coarse(list(ticks - 98e-6), 2e-6) or "")
    assert "same" in (watch.too_coarse([5e-6] * 6, 5e-6) or "")
    assert watch.too_coarse([1e-6, 2e-6], 1.5e-6) is None, "two samples show nothing"


def test_no_committed_time_is_doubtful_by_its_clock() -> None:
    rows = [row for runs in results.committed().values() for found in runs for row in found["rows"]]
    timed = [row for row in rows if row.get("samples_us")]
    assert [watch.too_coarse([us * 1e-6 for us in row["samples_us"]], row["kernel_us"] * 1e-6) for row in timed] == [
        None for _ in timed
    ]


def test_a_wrong_kernel_has_a_status_and_no_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.suite.kernel_time(Benchmark(), ROW, captured=False)
    contender, data = run.suite.ready(ROW)
    contender.call = lambda: right(data) * 1.1  # from now on wrong: what was timed before is not to be trusted either
    with pytest.raises(AssertionError, match="above its bound"):
        run.suite.call_time(Benchmark(), ROW, captured=False)
    found = run.compact()
    (row,) = found["rows"]
    assert "kernel_us" not in row
    assert "call_us" not in row
    assert row["failures"]["call"].startswith("wrong: error 1.0e-01 > ")
    headings, lines = tables.kernel_times(found)
    assert lines[0][headings.index("torch-triton")].startswith("wrong: error 1.0e-01 > ")
    assert "wrong: error 1.0e-01" in tables.notes(found)[0]
    assert any("wrong: error 1.0e-01" in line for line in run.said)
    assert results.measured(found) == {}


def test_a_failing_kernel_leaves_the_others_their_times(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(ROW, contender="jax-triton")

    def fail(data: Data) -> Any:
        raise RuntimeError("out of registers\nadvice")

    monkeypatch.setattr(suites, "prepare", lambda row, data, device: instant(row, data, fail if row == ROW else right))
    with pytest.raises(RuntimeError):
        run.suite.kernel_time(Benchmark(), ROW, captured=False)
    with pytest.raises(AssertionError, match="failed before"):
        run.suite.call_time(Benchmark(), ROW, captured=False)
    run.suite.kernel_time(Benchmark(), other, captured=False)
    headings, lines = tables.kernel_times(run.compact())
    cells = dict(zip(headings, lines[0], strict=True))
    assert cells["torch-triton"] == "failed: RuntimeError: out of registers"
    assert float(cells["jax-triton"].strip("*")) > 0
    assert len(lines) == 1


def test_a_run_goes_on_without_plain_reads_that_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("out of memory\nadvice")

    monkeypatch.setattr(run.device, "plain_reads", fail)
    run.suite.plain_reads()
    run.suite.kernel_time(Benchmark(), ROW, captured=False)
    found = run.compact()
    assert found["rows"][0]["kernel_us"] > 0
    assert "reads" not in found["run"]
    assert "not measured: plain-reads: RuntimeError: out of memory" in tables.skipped(found)
    assert any("plain-reads: failed: RuntimeError: out of memory" in line for line in (*run.said, *run.suite.failed))
    assert any("without the bound of the plain reads" in line for line in run.said)
    assert targets.Times(found).us(ROW.case.name, ("fp16",), "torch-triton"), "a failure that names no row"

    monkeypatch.undo()
    run.suite.plain_reads()
    assert len(run.compact()["run"]["reads"]) == len(reads.SIZES)


def test_plain_reads_that_lose_the_gpu_end_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> Any:
        run.device.gone = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(run.device.gone)

    monkeypatch.setattr(run.device, "plain_reads", crash)
    with pytest.raises(pytest.exit.Exception, match=r"plain-reads left the GPU unusable.*without this one"):
        run.suite.plain_reads()
    line = results.read(run.path)[-1]
    assert (line["id"], line["fatal"]) == (suites.PLAIN_READS, True), "by which a run that goes on leaves them out"


def test_a_lost_gpu_ends_the_run_and_says_how_to_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(data: Data) -> Any:
        run.device.gone = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(run.device.gone)

    run.suite.rows = []  # nothing runs ahead: the crash happens where it is measured
    monkeypatch.setattr(suites, "prepare", lambda row, data, device: instant(row, data, crash))
    with pytest.raises(pytest.exit.Exception, match=r"illegal memory access.*without this one.*--resume \S+l,") as end:
        run.suite.kernel_time(Benchmark(), ROW, captured=False)
    assert end.value.returncode == suites.LOST
    found = run.compact()
    assert (ROW.id, "call") in results.measured(found), "what ended the process is not tried again"
    assert tables.kernel_times(found)[1][0][3].startswith("failed: RuntimeError: CUDA error: an illegal")
    assert "illegal memory access" in tables.notes(found)[0]


def test_a_gpu_lost_while_kernels_ran_side_by_side_blames_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(data: Data) -> Any:
        run.device.gone = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(run.device.gone)

    monkeypatch.setattr(suites, "prepare", lambda row, data, device: instant(row, data, crash))
    with pytest.raises(pytest.exit.Exception, match="one after the other"):
        run.suite.kernel_time(Benchmark(), ROW, captured=False)
    assert results.read(run.path)[1]["one_by_one"] == [ROW.id]
    assert run.compact()["rows"] == []


def test_a_peer_that_loses_the_gpu_is_no_missing_feature(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Row.of("tiny", "gate-up", 4, "bf16", "own", "torch-grouped-mm")

    def crash(data: Data) -> Any:
        run.device.gone = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(run.device.gone)

    run.suite.rows = []
    monkeypatch.setattr(suites, "prepare", lambda row, data, device: instant(row, data, crash))
    with pytest.raises((pytest.exit.Exception, pytest.skip.Exception)) as end:
        run.suite.kernel_time(Benchmark(), peer, captured=False)
    assert end.type is pytest.exit.Exception, "a skip would say that the framework does not offer it"


PLUGIN = """
from bench import results, suite
from tests.bench.test_faults import instant

def prepare(row, data, device):
    assert row.contender in ("torch-triton", "pallas-mosaic"), "the others are in the file already"
    return instant(row, data)

suite.prepare = prepare
results.sources = lambda: "as they are"
"""


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    """pallas-triton was measured, torch-triton was wrong, jax-triton ended the process: pallas-mosaic is left."""
    path = tmp_path / "run.jsonl"
    device = Rehearsal()
    journal = results.Journal(path)
    journal.write(
        "run", gpu=device.gpu, clock="rehearsal", cache="cold", routing="uniform", seed=0, rounds=2,
        date="2026-01-01T00:00:00Z", versions=versions(), sources="as they are", ceilings=device.ceilings(),
    )  # fmt: skip
    facts: dict[str, Any] = {
        "case": ROW.case.name, "dtype": "fp16", "scale_layout": None, "order": "column", "floor_us": 1.0,
    }  # fmt: skip
    name = ROW.id.removesuffix("torch-triton")
    config = dataclasses.asdict(backends.config_for(ROW.problem, backend="pallas-triton"))
    done = {"contender": "pallas-triton", "config": config, "kernel_us": 3.0, "times_floor": 3.0, **facts}
    journal.write("time", id=f"{name}pallas-triton", **done)
    for contender, how in (
        ("torch-triton", {"status": "wrong", "reason": "error 1 > 0"}),
        ("jax-triton", {"status": "failed", "reason": "misaligned address", "fatal": True}),
    ):
        journal.write("failed", id=f"{name}{contender}", contender=contender, test="kernel", **facts, **how)
    with path.open("a") as file:
        file.write('{"kind": "time", "id": "cut o')

    (tmp_path / "instant_plugin.py").write_text(PLUGIN)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_ADDOPTS": "-p instant_plugin"}
    command = [sys.executable, "-m", "bench", "compare", "--rehearse", "--rounds=2", f"--resume={path}"]
    command += ["-k", "fp16 and kernel_time[ and column and not cublas"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "2 of 4 measurements were in" in found.stdout
    rows = {row["contender"]: row for row in results.load(path)["rows"]}
    assert rows["pallas-triton"]["kernel_us"] == 3.0
    assert rows["pallas-mosaic"]["kernel_us"] > 0
    assert rows["torch-triton"]["kernel_us"] > 0
    assert "failures" not in rows["torch-triton"], "it was measured again, and right"
    assert "misaligned address" in rows["jax-triton"]["failures"]["kernel"]
    assert results.load(path)["run"]["runs"][0]["date"] == "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rounds": 20}, "rounds: 30 and 20"),
        ({"sources": "b"}, "sources: a and b"),
        ({"harness": "b"}, "harness: a and b"),
        ({"cache": "warm"}, "cache: cold and warm"),
        ({"versions": {"torch": "2"}}, "torch: 1 and 2; triton: 2 and None"),
        ({}, None),
    ],
)
def test_a_run_does_not_go_on_in_the_file_of_another(tmp_path: Path, change: dict[str, Any], named: str | None) -> None:
    from bench.conftest import lines_to_go_on_with

    path = write_run(tmp_path / "a.jsonl")
    settings = {key: value for key, value in results.read(path)[0].items() if key in (*results.RESUMED, "versions")}
    del settings["gpu"]
    if named is None:
        assert len(lines_to_go_on_with(path, settings)) == 2
    else:
        with pytest.raises(results.UnusableFile, match=named):
            lines_to_go_on_with(path, settings | change)


def write_run(path: Path, **changes: Any) -> Path:
    run = {"kind": "run", "gpu": "NVIDIA H200", "clock": "cupti", "cache": "cold", "routing": "uniform", "seed": 0}
    run |= {"rounds": 30, "versions": {"torch": "1", "triton": "2", "jax": "3", "jax-triton": "4"}, "sources": "a"}
    run |= {"harness": "a"}
    run |= {"date": "2026-01-01", "ceilings": {"read_bytes_per_s": 4e12, "bf16_flops": 8e14}}
    config = {"block_m": changes.pop("block_m", 16)}
    row = {
        "kind": "time", "id": ROW.id, "case": ROW.case.name, "dtype": "fp16", "scale_layout": None, "order": "column",
        "contender": "torch-triton", "config": config, "kernel_us": changes.pop("us", 100.0), "floor_us": 50.0,
        "times_floor": 2.0,
    }  # fmt: skip
    path.write_text(json.dumps(run | changes) + "\n" + json.dumps(row) + "\n")
    return path


def invoke(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def test_two_files_side_by_side_say_what_differs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a.jsonl")
    b = write_run(tmp_path / "b.jsonl", gpu="NVIDIA H100", us=150.0, block_m=32, versions={"torch": "2"})
    code, text = invoke("compare", "--from", a, "--from", b)
    assert code == 0
    assert "b differs from a in gpu: NVIDIA H200 and NVIDIA H100; torch: 1 and 2" in text
    assert "1.500 (config 16x128x128" in " ".join(text.split())
    _, text = invoke("compare", "--from", a, "--from", a)
    assert "nothing: GPU, versions, settings and sources agree" in text


def test_one_file_holds_no_runs_that_differ(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a.jsonl"), write_run(tmp_path / "b.jsonl", gpu="NVIDIA H100")
    a.write_text(a.read_text() + b.read_text())
    code, text = invoke("compare", "--from", a)
    assert code == 2
    assert "one file holds runs that differ in gpu: NVIDIA H200 and NVIDIA H100" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "--from", "nothing.jsonl"),
        ("compare", "--from", __file__),
        ("compare", "--resume", "nothing.jsonl"),
        ("compare", "--routing", "zipf"),
        ("compare", "--routing", "nothing.npy"),
        ("compare", "--rounds", "0"),
        ("report", "--add", "nothing.jsonl"),
        ("tune", "--backend", "torch-tritn"),
        ("tune", "--shard", "3/2"),
        ("tune", "--shard", "1/9"),
        ("tune", "--near", "--from-best", "nothing.jsonl"),
        ("tune", "--collect", "nothing.jsonl"),
        ("tune", "--collect", __file__),
        ("report", "--add", __file__, "--into", "h200"),
        ("report", "--add", __file__, "--check"),
        ("compare", "--from", __file__, "-k", "fp16", "--warm"),
        ("launch", "--from", __file__, "--rehearse"),
        ("variants", "--from", __file__, "--out", "b.jsonl"),
        ("order", "--order", "row", "--tile-rows", "100000", "--tile-cols", "100000"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments: tuple[str, ...]) -> None:
    code, text = invoke(*arguments)
    assert code == 2
    assert len(text.strip().splitlines()) == 1, text


def test_what_only_prints_says_beside_what(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.jsonl")
    assert invoke("compare", "--from", path)[0] == 0
    code, text = invoke("compare", "--from", path, "--set", "targets", "--rounds", "5")
    assert (code, "got it beside --set, --rounds" in text) == (2, True)
    before = path.read_bytes()
    for config in ('{"block_m": 16, "later": 1}', '{"block_m": 17}'):
        other = tmp_path / "other.jsonl"
        other.write_bytes(before.replace(b'{"block_m": 16}', config.encode()))
        code, text = invoke("compare", "--from", other)
        assert (code, len(text.splitlines())) == (2, 1), text
    code, text = invoke("report", "--check", "--add", path)
    assert (code, "--check: changes nothing" in text) == (2, True)
    assert path.read_bytes() == before


def test_tuning_goes_on_behind_its_finished_cases(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    here: dict[str, Any] = {"gpu": "NVIDIA H200", "versions": {"torch": "1"}}
    assert tune.finished(path, **here) == set()
    entry = {"backend": "torch-triton", "case": "a", "dtype": "fp16", "order": "row", "times": [], **here}
    path.write_text(json.dumps(entry) + "\n" + json.dumps(entry)[:40])
    assert tune.finished(path, **here) == {("torch-triton", "a", "fp16", "row")}
    assert path.read_text() == json.dumps(entry) + "\n", "the line that was cut off is gone"
    for change, named in (
        ({"gpu": "NVIDIA H100"}, "gpu: NVIDIA H200"),
        ({"versions": {"torch": "2"}}, "torch: 1 and 2"),
    ):
        with pytest.raises(ArgumentError, match=named):
            tune.finished(path, **here | change)


def test_routing_names() -> None:
    assert check_routing("zipf-1.2") is None
    with pytest.raises(ArgumentError, match="allowed: uniform, zipf-EXPONENT"):
        check_routing("zipf")


def test_ignored_options_are_named_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import __main__ as command

    monkeypatch.setattr(command, "has_gpu", lambda: False)
    monkeypatch.setattr(command, "_run", lambda *_, **__: 0)
    _, text = invoke("compare", "-k", "mixtral", "--rounds", "5")
    assert "ignored, as they are about benchmarks: -k, --rounds" in text
    _, text = invoke("compare")
    assert "ignored" not in text


def test_this_process_is_told_from_others() -> None:
    def process(pid: int) -> dict[str, Any]:
        return {"pid": pid, "name": "python", "mib": None}

    plain = watch.Others(10, [])
    assert plain.among([process(10)]) == []
    assert plain.among([process(10), process(11)]) == [process(11)]
    contained = watch.Others(10, [process(500)])  # a container: the driver numbers processes as the host does
    assert contained.among([process(500), process(901)]) == [process(500)]
    assert contained.among([process(901)]) == []
    assert watch.Others(10, []).among([]) == []


def test_nvidia_smi_lists_processes() -> None:
    assert watch.parse_processes("7, python, 1024\n 12, /usr/bin/a, b, [N/A]\nNo running processes found\n") == [
        INTRUDER, {"pid": 12, "name": "/usr/bin/a,b", "mib": None}
    ]  # fmt: skip
