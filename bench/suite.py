"""One run of the suite: its machine, its data, and what a benchmark does with a row."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from bench import measure, pairs, peers, published, results, watch
from bench.cases import Row
from bench.contenders import CannotRun, Contender, capture, prepare, wait
from bench.data import Data, DataCache
from bench.machine import Device, versions
from bench.results import Journal
from bench.turns import Turns, beside_others

COMPILE_THREADS = 12
PEERS_AT_ONCE = 4
"""Peers that are compiled side by side: some hold a copy of the weights in a layout of their own."""
WARMUP_ROUNDS = 3
FEWEST_ROUNDS = 7
"""Of a run that stops sampling when it knows enough. With fewer, gaps between samples do not show the clock's tick."""
ENOUGH = 0.005
"""Relative standard error of the mean below which such a run stops."""
PLAIN_READS = "plain-reads"
"""Id under which a failure of the plain reads stands."""
LOST = 7
"""Exit status of a run that a kernel ended by making the GPU unusable for its process."""


class _Current:
    """The timer of the benchmark that runs now."""

    timer: Callable[[], float] | None = None


def gpu_kernel_seconds() -> float:
    """pytest-benchmark's timer in kernel-time benchmarks: GPU seconds of the kernel that is measured, so far."""
    assert _Current.timer is not None
    return _Current.timer()


class _Replay:
    """A timer that says again what was sampled before: read before and after each call, as GpuTimer is."""

    def __init__(self, samples: list[float]) -> None:
        self._left = iter(samples)
        self._seconds = 0.0
        self._in_call = False

    def __call__(self) -> float:
        if self._in_call:
            self._seconds += next(self._left)
        self._in_call = not self._in_call
        return self._seconds


def settled(samples: list[float]) -> bool:
    """Whether so many samples tell the time to ENOUGH."""
    if len(samples) < FEWEST_ROUNDS:
        return False
    return statistics.stdev(samples) / len(samples) ** 0.5 < ENOUGH * statistics.mean(samples)


@dataclasses.dataclass
class Suite:
    """say: prints a progress line; total: tests that were collected; rows, captured_rows: what those measure.

    one_by_one: ids of rows that do not run side by side with others, as one of them ended an earlier run
    turns: where other processes measure on the same GPU: kernels are compiled together, times taken alone
    adaptive: `rounds` are the most; sampling ends when the time is `settled`
    once: each row is measured by one test, so that its contender, and the copies it holds, are let go of after it
    noticed: what disturbed results, and how many; failed: a line for each measurement that failed or was wrong
    """

    device: Device
    journal: Journal
    data: DataCache
    rounds: int
    warm: bool
    total: int
    say: Callable[[str], None]
    rows: list[Row] = dataclasses.field(default_factory=list)
    captured_rows: list[Row] = dataclasses.field(default_factory=list)
    one_by_one: frozenset[str] = frozenset()
    adaptive: bool = False
    once: bool = False
    turns: Turns | None = None
    done: int = 0
    noticed: Counter[str] = dataclasses.field(default_factory=Counter)
    failed: list[str] = dataclasses.field(default_factory=list)
    _prepared: dict[Row, Contender] = dataclasses.field(default_factory=dict)
    _ready: dict[Row, Contender | CannotRun | AssertionError] = dataclasses.field(default_factory=dict)
    _errors: dict[Row, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def ready(self, row: Row) -> tuple[Contender, Data]:
        """The row's contender, checked against the reference, and its data; skips or fails as it did the first time."""
        data = self._data_of(row)
        if row not in self._ready:
            self._ready[row] = self._make_ready(row, data)
        found = self._ready[row]
        if isinstance(found, CannotRun):
            pytest.skip(str(found))
        if isinstance(found, AssertionError):
            raise found
        return found, data

    def kernel_time(self, benchmark: Any, row: Row, *, captured: bool) -> None:
        """GPU seconds of the kernel into pytest-benchmark's own statistics, GPU total beside them."""
        try:
            with self._reported(row, "kernel captured" if captured else "kernel"):
                self._kernel_time(benchmark, row, captured)
        finally:
            if self.once:
                self._prepared.pop(row, None)
                self._ready.pop(row, None)

    def _kernel_time(self, benchmark: Any, row: Row, captured: bool) -> None:
        contender, data = self.ready(row)
        call = self._call_of(contender, data, captured)
        at_least = measure.records_of(contender, self.device, call)  # warms up as well
        again = measure.repetition(contender, self.device, call, flush=not self.warm)
        timer = measure.GpuTimer(self.device.clock, self.device.synchronize, contender.kernel_name, at_least, again)
        _Current.timer = timer

        info = self._run(benchmark, contender, data, call, "kernel", captured)
        if info is None:
            return
        totals = sorted(timer.totals)
        suffix = "_captured" if captured else ""
        seconds = benchmark.stats.stats.median
        times = {
            f"kernel{suffix}_us": _us(seconds),
            f"gpu_total{suffix}_us": _us(totals[len(totals) // 2]),
            f"samples{suffix}_us": [_us(sample) for sample in benchmark.stats.stats.data],
        }
        rates = measure.rates(info, seconds)
        info |= times | rates | {"kernels": timer.kernels, "repeated_samples": timer.repeated}
        if captured:  # the rates in result files are those of the eager kernel time
            self._record(benchmark, info, without=tuple(rates))
        else:
            self._record(benchmark, info)
        self._progress(row, f"kernel{suffix.replace('_', ' ')}", seconds, rates, info.get("notices", []))

    def call_time(self, benchmark: Any, row: Row, *, captured: bool) -> None:
        """Seconds that a caller waits, by the host's clock, into pytest-benchmark's own statistics."""
        with self._reported(row, "call captured" if captured else "call"):
            self._call_time(benchmark, row, captured)

    def _call_time(self, benchmark: Any, row: Row, captured: bool) -> None:
        contender, data = self.ready(row)
        call = self._call_of(contender, data, captured)
        self.device.clock.pause()
        try:
            self._warm_up(contender, call)
            info = self._run(benchmark, contender, data, call, "call", captured)
        finally:
            self.device.clock.reset()
        if info is None:
            return
        suffix = "_captured" if captured else ""
        seconds = benchmark.stats.stats.median
        info[f"call{suffix}_us"] = _us(seconds)
        self._record(benchmark, info)
        self._progress(row, f"call{suffix.replace('_', ' ')}", seconds, {}, info.get("notices", []))

    def order_pair(self, row: Row, other: str, name: str) -> None:
        """Column order against `other`, interleaved, same kernel, config and data."""
        other_row = dataclasses.replace(row, order=other)
        with self._reported(row, f"pair with {other}"):
            column, data = self.ready(row)
        with self._reported(other_row, "pair with column"):
            contender = self._prepared.get(other_row) or prepare(other_row, data, self.device)
            assert contender.config == column.config
            measure.check(contender, data, self.device, contender.eager)
        with self._reported(row, f"pair with {other}"):
            self._compare(column, contender, data, name)

    def _compare(self, column: Contender, contender: Contender, data: Data, name: str) -> None:
        other = contender.row.order
        before = self.device.state()
        found = pairs.compare(
            lambda: measure.gpu_sample(column, self.device, flush=not self.warm),
            lambda: measure.gpu_sample(contender, self.device, flush=not self.warm),
            pairs=self.rounds,
        )
        for each in (column, contender):
            measure.check(each, data, self.device, each.eager)
        verdict = found.verdict("column", other)
        known = measure.facts(column, data, self.device)
        kept = {key: known[key] for key in ("case", "dtype", "scale_layout", "contender", "config", "tile_rows")}
        notices = self._notices(before, self.device.state())
        self.journal.write(
            "pair", id=name, a="column", b=other, **kept, ratio=found.ratio, low=found.low, high=found.high,
            a_us=_us(found.a), b_us=_us(found.b), pairs=found.pairs, verdict=verdict, **results.code(),
            **({"notices": notices} if notices else {}),
        )  # fmt: skip
        self.done += 1
        told = f"{name}: {verdict} [{found.low:.3f}, {found.high:.3f}]"
        self._tell(f"[{self.done}/{self.total}] {told}", notices)

    def plain_reads(self) -> None:
        """Plain reads by size into the journal. One that fails is told as any failure, and the run lacks this bound."""
        try:
            with self._reported(None, PLAIN_READS):
                self.journal.write("reads", sizes=self.device.plain_reads())
        except pytest.exit.Exception:
            raise
        except Exception:
            self.device.clock.reset()  # which they may have left paused
            self.say("the run goes on without the bound of the plain reads")

    def published_2024(self, tokens: int) -> None:
        """The published kernel beside the right one: time, and the share of the output that it writes."""
        self._forget()
        self.data.free()
        with self._reported(None, f"tokens-{tokens}"):
            found = published.measure(tokens, self.device)
        self.journal.write("published", id=f"tokens-{tokens}", **found)
        self.done += 1
        self.say(f"[{self.done}/{self.total}] published-2024 at {tokens} tokens: {found}")

    def _data_of(self, row: Row) -> Data:
        identity = (row.case, row.dtype, row.scale_layout)
        key = self.data.key_of(*identity)
        if key != self.data.key:
            self._forget()
            with beside_others(self.turns):
                self.data.get(*identity)
                self._compile_ahead(key)
        return self.data.get(*identity)

    def _forget(self) -> None:
        """Let go of the contenders: they and their captured graphs hold the data that they were prepared for."""
        self._prepared.clear()
        self._ready.clear()
        self._errors.clear()

    def _compile_ahead(self, key: tuple[object, ...]) -> None:
        """Run what is measured on this data once, side by side, as compiling takes longer than measuring.

        Not JAX's peers: XLA times variants of their products as it compiles them, and is to be alone on the GPU then.
        What fails here fails again where it is measured, and is reported there; unless it leaves the GPU unusable, when
        there is no telling which of them it was.
        """
        few = threading.Semaphore(PEERS_AT_ONCE)

        def run(row: Row) -> None:
            data = self.data.get(row.case, row.dtype, row.scale_layout)
            if row.contender in peers.PEERS:
                with few:
                    peer = prepare(row, data, self.device)
                    wait(peer.eager(), peer.framework, self.device)
                return
            contender = self._prepared[row] = prepare(row, data, self.device)
            wait(contender.eager(), contender.framework, self.device)
            if contender.framework == "jax" and row in self.captured_rows:
                capture(contender, self.device)

        mine = [r for r in self.rows if self.data.key_of(r.case, r.dtype, r.scale_layout) == key]
        mine = [r for r in mine if r.contender not in peers.PEERS or peers.PEERS[r.contender].framework != "jax"]
        mine = [row for row in mine if row.id not in self.one_by_one]
        mine.sort(key=lambda r: r.contender in peers.PEERS)  # last, as few of them run at once
        began = time.monotonic()
        self.device.clock.pause()  # CUPTI loses records of kernels that several threads launch at once
        with concurrent.futures.ThreadPoolExecutor(1 if self.device.interpret else COMPILE_THREADS) as pool:
            concurrent.futures.wait([pool.submit(run, row) for row in mine])
        lost = self.device.lost()
        if lost is not None:
            names = [row.id for row in mine]
            text = f"one of {len(names)} kernels that ran side by side left the GPU unusable ({lost})"
            self.journal.write("notice", text=text, one_by_one=names)
            self._end(f"{text}: {', '.join(names)}", "one after the other, so that the one at fault is named")
        if self.adaptive:
            self.say(f"{len(mine)} kernels compiled side by side in {time.monotonic() - began:.1f} s")
        self.device.clock.reset()

    def _make_ready(self, row: Row, data: Data) -> Contender | CannotRun | AssertionError:
        try:
            contender = self._prepared.get(row) or prepare(row, data, self.device)
            try:
                self._errors[row] = measure.check(contender, data, self.device, contender.eager)
            except (RuntimeError, ValueError, TypeError) as error:
                if row.contender not in peers.PEERS or self.device.lost() is not None:
                    raise
                # A peer that its framework does not offer for this dtype or GPU says so when it is called.
                raise CannotRun(f"{row.contender}: {str(error).splitlines()[0][:200]}") from error
        except CannotRun as error:
            self.journal.write("skipped", id=row.id, reason=str(error))
            return error
        except AssertionError as error:
            return error
        except Exception as error:
            self._ready[row] = AssertionError(f"failed before: {_reason(error)}")
            raise
        return contender

    @contextlib.contextmanager
    def _reported(self, row: Row | None, test: str) -> Iterator[None]:
        """A failure is written to the journal, as one of the row's test, and said; the next test goes on.

        Where the GPU can be used no more, the run ends here and says how to go on. row None: the published kernel or
        the plain reads, with `test` as the id.
        """
        try:
            yield
        except pytest.exit.Exception:
            raise
        except Exception as error:
            if "KeyboardInterrupt" in str(error):  # in a callback of JAX's, which makes an error of its own of it
                raise KeyboardInterrupt from error
            status, reason = "failed", _reason(error)
            if isinstance(error, measure.WrongResult):
                status, reason = "wrong", error.short
            lost = self.device.lost()
            name = test if row is None else f"{row.id} {test}"
            facts = {"id": test} if row is None else {"id": row.id, **_identity(row), **results.code()}
            fatal = {} if lost is None else {"fatal": True}
            self.journal.write("failed", **facts, test=test, status=status, reason=reason, **fatal)
            self.failed.append(f"{name}: {status}: {reason}")
            self.say(f"{name}: {status}: {reason}")
            if lost is not None:
                self._end(f"{name} left the GPU unusable for this process ({lost})", "without this one")
            raise

    def _end(self, why: str, how: str) -> NoReturn:
        pytest.exit(
            f"{why}; what was measured before is in {self.journal.path}. To measure the rest, {how}: "
            f"python -m bench compare --resume {self.journal.path}, with the same options",
            returncode=LOST,
        )

    def _notices(self, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        """What disturbed a measurement between two states of the machine."""
        return list(dict.fromkeys((*watch.disturbances(before), *watch.disturbances(after))))

    def _tell(self, line: str, notices: list[str]) -> None:
        self.noticed.update(notices)
        self.say("".join((line, *(f"\n    doubtful: {notice}" for notice in notices))))

    def _call_of(self, contender: Contender, data: Data, captured: bool) -> Callable[[], Any]:
        if not captured:
            return contender.eager
        try:
            call = capture(contender, self.device)
        except CannotRun as error:
            pytest.skip(str(error))
        measure.check(contender, data, self.device, call)
        return call

    def _warm_up(self, contender: Contender, call: Callable[[], Any]) -> None:
        for _ in range(WARMUP_ROUNDS):
            wait(call(), contender.framework, self.device)

    def _run(
        self, benchmark: Any, contender: Contender, data: Data, call: Callable[[], Any], kind: str, captured: bool,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Run the rounds; the row's facts, or None where pytest-benchmark is disabled."""
        clock = self.device.clock.name if kind == "kernel" else "host"
        launch = "captured" if captured else "eager"
        benchmark.group = f"{contender.row.case.name} {kind} time, {launch} ({clock} clock)"
        before = self.device.state()
        result = self._rounds(benchmark, contender, call, until_settled=self.adaptive and kind == "kernel")
        try:
            measure.recheck(contender, data, result)
        except AssertionError:
            benchmark.has_error = True
            raise
        if benchmark.stats is None:
            return None
        after = self.device.state()
        notices = self._notices(before, after)
        stats = benchmark.stats.stats
        if coarse := watch.too_coarse(list(stats.data), stats.median):
            notices.append(coarse)
        return {
            **measure.facts(contender, data, self.device),
            **self._errors[contender.row],
            "cache": "warm" if self.warm else "cold",
            "clock": clock,
            "launch": launch,
            "samples": len(stats.data),
            "state_before": before,
            "state_after": after,
            **results.code(),
            **({"notices": [f"{kind} {launch}: {notice}" for notice in notices]} if notices else {}),
        }

    def _rounds(self, benchmark: Any, contender: Contender, call: Callable[[], Any], *, until_settled: bool) -> Any:
        """Take the samples into pytest-benchmark's statistics; the result of the last call.

        until_settled: pytest-benchmark has no rounds that end early, so what is sampled here is said to it again.
        """
        before = self.device.synchronize if self.warm else self.device.flush

        def once() -> Any:
            return wait(call(), contender.framework, self.device)

        if not until_settled:
            return benchmark.pedantic(once, setup=before, rounds=self.rounds, iterations=1)
        timer = _Current.timer
        assert timer is not None
        samples: list[float] = []
        result = None
        while len(samples) < self.rounds and not settled(samples):
            result = None  # its memory goes back before the next call asks for some
            before()
            start = timer()
            result = once()
            samples.append(timer() - start)
        _Current.timer = _Replay(samples)
        return benchmark.pedantic(lambda: result, setup=lambda: None, rounds=len(samples), iterations=1)

    def _record(self, benchmark: Any, info: dict[str, Any], *, without: tuple[str, ...] = ()) -> None:
        kept = {key: value for key, value in info.items() if key not in (*without, "launch", "clock", "samples")}
        self.journal.write("time", **kept)
        benchmark.extra_info.update({key: value for key, value in info.items() if not key.startswith("samples_")})
        benchmark.extra_info["versions"] = versions()
        self.done += 1

    def _progress(self, row: Row, what: str, seconds: float, rates: dict[str, float], notices: list[str]) -> None:
        rate = ""
        if rates:
            rate = f", {rates['tb_per_s']:.2f} TB/s, {rates['share_of_read_ceiling']:.0%} of the read ceiling"
        self._tell(f"[{self.done}/{self.total}] {row.id} {what} {seconds * 1e6:.1f} us{rate}", notices)


def _identity(row: Row) -> dict[str, Any]:
    """What names a row in a table, as `measure.facts` has it."""
    layout = row.problem.scale_layout
    return {
        "case": row.case.name, "dtype": row.dtype, "scale_layout": layout, "order": row.order,
        "contender": row.contender,
    }  # fmt: skip


def _reason(error: Exception) -> str:
    """One line of an exception: a CUDA error brings a paragraph of advice along."""
    if isinstance(error, AssertionError) and str(error).startswith("failed before: "):
        return str(error)
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first}"[:300]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
