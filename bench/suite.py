"""One run of the suite: its machine, its data, and what a benchmark does with a row."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from bench import measure, pairs, peers, published
from bench.cases import Row
from bench.contenders import CannotRun, Contender, capture, prepare, wait
from bench.data import Data, DataCache
from bench.machine import Device, versions
from bench.results import Journal

COMPILE_THREADS = 12
PUBLISHED_TOKENS = (2, 8, 64, 512)
WARMUP_ROUNDS = 3


class _Current:
    """The timer of the benchmark that runs now."""

    timer: measure.GpuTimer | None = None


def gpu_kernel_seconds() -> float:
    """pytest-benchmark's timer in kernel-time benchmarks: GPU seconds of the kernel that is measured, so far."""
    assert _Current.timer is not None
    return _Current.timer()


@dataclasses.dataclass
class Suite:
    """say: prints a progress line; total: tests that were collected; rows, captured_rows: what those measure."""

    device: Device
    journal: Journal
    data: DataCache
    rounds: int
    warm: bool
    total: int
    say: Callable[[str], None]
    rows: list[Row] = dataclasses.field(default_factory=list)
    captured_rows: list[Row] = dataclasses.field(default_factory=list)
    done: int = 0
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
        self._progress(row, f"kernel{suffix.replace('_', ' ')}", seconds, rates)

    def call_time(self, benchmark: Any, row: Row, *, captured: bool) -> None:
        """Seconds that a caller waits, by the host's clock, into pytest-benchmark's own statistics."""
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
        self._progress(row, f"call{suffix.replace('_', ' ')}", seconds, {})

    def order_pair(self, row: Row, other: str, name: str) -> None:
        """Column order against `other`, interleaved, same kernel, config and data."""
        column, data = self.ready(row)
        other_row = dataclasses.replace(row, order=other)
        contender = self._prepared.get(other_row) or prepare(other_row, data, self.device)
        assert contender.config == column.config
        measure.check(contender, data, self.device, contender.eager)
        found = pairs.compare(
            lambda: measure.gpu_sample(column, self.device, flush=not self.warm),
            lambda: measure.gpu_sample(contender, self.device, flush=not self.warm),
            pairs=self.rounds,
        )
        verdict = found.verdict("column", other)
        known = measure.facts(column, data, self.device)
        kept = {key: known[key] for key in ("case", "dtype", "scale_layout", "contender", "config", "tile_rows")}
        self.journal.write(
            "pair", id=name, a="column", b=other, **kept, ratio=found.ratio, low=found.low, high=found.high,
            a_us=_us(found.a), b_us=_us(found.b), pairs=found.pairs, verdict=verdict,
        )  # fmt: skip
        self.done += 1
        self.say(f"[{self.done}/{self.total}] {name}: {verdict} [{found.low:.3f}, {found.high:.3f}]")

    def published_2024(self, tokens: int) -> None:
        """The published kernel beside the right one: time, and the share of the output that it writes."""
        self._forget()
        self.data.free()
        found = published.measure(tokens, self.device)
        self.journal.write("published", id=f"tokens-{tokens}", **found)
        self.done += 1
        self.say(f"[{self.done}/{self.total}] published-2024 at {tokens} tokens: {found}")

    def _data_of(self, row: Row) -> Data:
        key = (row.case, row.dtype, row.scale_layout)
        if key != self.data.key:
            self._forget()
            data = self.data.get(*key)
            self._compile_ahead(data, key)
        return self.data.get(*key)

    def _forget(self) -> None:
        """Let go of the contenders: they and their captured graphs hold the data that they were prepared for."""
        self._prepared.clear()
        self._ready.clear()
        self._errors.clear()

    def _compile_ahead(self, data: Data, key: tuple[object, ...]) -> None:
        """Run the backends of this data once, side by side, as compiling takes longer than measuring.

        What fails here fails again where it is measured, and is reported there.
        """

        def run(row: Row) -> None:
            contender = self._prepared[row] = prepare(row, data, self.device)
            wait(contender.eager(), contender.framework, self.device)
            if contender.framework == "jax" and row in self.captured_rows:
                capture(contender, self.device)

        mine = [r for r in self.rows if (r.case, r.dtype, r.scale_layout) == key and r.contender not in peers.PEERS]
        self.device.clock.pause()  # CUPTI loses records of kernels that several threads launch at once
        with concurrent.futures.ThreadPoolExecutor(1 if self.device.interpret else COMPILE_THREADS) as pool:
            concurrent.futures.wait([pool.submit(run, row) for row in mine])
        self.device.clock.reset()

    def _make_ready(self, row: Row, data: Data) -> Contender | CannotRun | AssertionError:
        try:
            contender = self._prepared.get(row) or prepare(row, data, self.device)
            try:
                self._errors[row] = measure.check(contender, data, self.device, contender.eager)
            except (RuntimeError, ValueError, TypeError) as error:
                if row.contender not in peers.PEERS:
                    raise
                # A peer that its framework does not offer for this dtype or GPU says so when it is called.
                raise CannotRun(f"{row.contender}: {str(error).splitlines()[0][:200]}") from error
        except CannotRun as error:
            self.journal.write("skipped", id=row.id, reason=str(error))
            return error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.journal.write("skipped", id=row.id, reason=f"failed: {reason[:500]}")
            if isinstance(error, AssertionError):
                return error
            self._ready[row] = AssertionError(f"{row.id} failed before: {reason[:500]}")
            raise
        return contender

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
        result = benchmark.pedantic(
            lambda: wait(call(), contender.framework, self.device),
            setup=self.device.synchronize if self.warm else self.device.flush,
            rounds=self.rounds,
            iterations=1,
        )
        try:
            measure.recheck(contender, data, result)
        except AssertionError as error:
            benchmark.has_error = True
            self.journal.write("skipped", id=contender.row.id, reason=str(error))
            raise
        if benchmark.stats is None:
            return None
        return {
            **measure.facts(contender, data, self.device),
            **self._errors[contender.row],
            "cache": "warm" if self.warm else "cold",
            "clock": clock,
            "launch": launch,
            "samples": self.rounds,
            "state_before": before,
            "state_after": self.device.state(),
        }

    def _record(self, benchmark: Any, info: dict[str, Any], *, without: tuple[str, ...] = ()) -> None:
        kept = {key: value for key, value in info.items() if key not in (*without, "launch", "clock", "samples")}
        self.journal.write("time", **kept)
        benchmark.extra_info.update({key: value for key, value in info.items() if not key.startswith("samples_")})
        benchmark.extra_info["versions"] = versions()
        self.done += 1

    def _progress(self, row: Row, what: str, seconds: float, rates: dict[str, float]) -> None:
        rate = ""
        if rates:
            rate = f", {rates['tb_per_s']:.2f} TB/s, {rates['share_of_read_ceiling']:.0%} of the read ceiling"
        self.say(f"[{self.done}/{self.total}] {row.id} {what} {seconds * 1e6:.1f} us{rate}")


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
