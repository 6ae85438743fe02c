"""The GPU clock, with stand-ins for CUPTI."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest

from bench.clock import ClockError, CuptiClock, JaxClock, KernelRecord, names, open_clock, select, settle, total
from bench.measure import GpuTimer


class Kind(enum.IntEnum):
    CONCURRENT_KERNEL = 1
    MEMCPY = 2
    MEMSET = 3
    OVERHEAD = 4


class FakeCupti:
    """cupti-python's activity functions; `launch` plays a kernel, delivered at the next flush."""

    ActivityKind = Kind

    def __init__(self) -> None:
        self.enabled: set[Kind] = set()
        self.pending: list[SimpleNamespace] = []
        self.now = 0

    def activity_register_callbacks(self, requested, completed) -> None:
        assert requested()[0] > 0
        self.completed = completed

    def activity_enable(self, kind: Kind) -> None:
        self.enabled.add(kind)

    def activity_disable(self, kind: Kind) -> None:
        self.enabled.discard(kind)

    def activity_flush_all(self, flag: int) -> None:
        pending, self.pending = self.pending, []
        self.completed(list(reversed(pending)))  # CUPTI promises no order

    def launch(self, name: str, nanoseconds: int, kind: Kind = Kind.CONCURRENT_KERNEL) -> None:
        start, self.now = self.now, self.now + nanoseconds
        if kind in self.enabled:
            self.pending.append(SimpleNamespace(kind=kind, name=name, start=start, end=self.now))


def test_cupti_clock_gives_names_and_seconds_in_order() -> None:
    cupti = FakeCupti()
    clock = CuptiClock(cupti)
    cupti.launch("before", 5)
    clock.reset()
    cupti.launch("prepare_kernel", 1500)
    cupti.launch("", 500, Kind.MEMSET)
    cupti.launch("moe_gemm_kernel", 57000)
    records = clock.records()
    assert names(records) == ["prepare_kernel", "[memset]", "moe_gemm_kernel"]
    assert total(select(records, "moe_gemm")) == pytest.approx(57e-6)
    assert total(records) == pytest.approx(59e-6)
    assert clock.records() == []


def test_cupti_clock_pauses() -> None:
    cupti = FakeCupti()
    clock = CuptiClock(cupti)
    clock.pause()
    assert not cupti.enabled
    cupti.launch("unseen", 5)
    clock.reset()
    cupti.launch("seen", 5)
    assert names(clock.records()) == ["seen"]


def test_cupti_refusal_names_the_remedy() -> None:
    class Refusing(FakeCupti):
        def activity_enable(self, kind: Kind) -> None:
            raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    with pytest.raises(ClockError, match=r"MULTIPLE_SUBSCRIBERS.*profiler may be attached"):
        CuptiClock(Refusing())


class FakeExtension:
    """jax's CUPTI extension: milliseconds, handed out when it is stopped."""

    def __init__(self) -> None:
        self.active = False
        self.timings: list[tuple[str, float]] = []

    def _cupti_init(self) -> None:
        assert not self.active
        self.active, self.timings = True, []

    def _cupti_get_timings(self, finalize: bool) -> list[tuple[str, float]]:
        assert self.active
        assert not finalize
        self.active = False
        return self.timings


def test_jax_clock_reads_milliseconds_and_goes_on() -> None:
    extension = FakeExtension()
    clock = JaxClock(extension)
    extension.timings.append(("kernel", 0.25))
    assert clock.records() == [KernelRecord("kernel", 0.25e-3)]
    assert clock.records() == []
    clock.pause()
    clock.pause()
    assert not extension.active
    clock.reset()
    assert extension.active


def test_unknown_clock() -> None:
    with pytest.raises(ClockError, match="known: cupti, jax-cupti"):
        open_clock("events")


def test_timer_counts_the_kernel_alone_and_leaves_the_flush_out() -> None:
    cupti = FakeCupti()
    timer = GpuTimer(CuptiClock(cupti), lambda: None, "moe_gemm")
    cupti.launch("bench_read_kernel", 60000)
    start = timer()
    cupti.launch("prepare_kernel", 2000)
    cupti.launch("moe_gemm_kernel", 57000)
    assert timer() - start == pytest.approx(57e-6)
    assert timer.totals == [pytest.approx(59e-6)]
    assert timer.kernels == ["prepare_kernel", "moe_gemm_kernel"]


def test_timer_of_a_peer_counts_all_its_kernels() -> None:
    cupti = FakeCupti()
    timer = GpuTimer(CuptiClock(cupti), lambda: None, None)
    cupti.launch("bench_read_kernel", 60000)
    start = timer()
    cupti.launch("cutlass_a", 1000)
    cupti.launch("cutlass_b", 2000)
    assert timer() - start == pytest.approx(3e-6)


def test_a_kernel_that_was_not_recorded_is_an_error() -> None:
    cupti = FakeCupti()
    timer = GpuTimer(CuptiClock(cupti), lambda: None, "moe_gemm")
    timer()
    cupti.launch("other", 10)
    with pytest.raises(ClockError, match=r"'moe_gemm'; recorded: \['other'\]"):
        timer()


class LateCupti(FakeCupti):
    """Delivers what was launched only at the second flush after it."""

    def activity_flush_all(self, flag: int) -> None:
        late, self.held = getattr(self, "held", []), self.pending
        self.pending = []
        self.completed(late)


def test_late_records_are_waited_for_and_a_late_flush_is_left_out() -> None:
    cupti = LateCupti()
    timer = GpuTimer(CuptiClock(cupti), lambda: None, "moe_gemm", at_least=2)
    for _ in range(2):
        cupti.launch("bench_read_kernel", 60000)
        start = timer()
        cupti.launch("prepare_kernel", 2000)
        cupti.launch("moe_gemm_kernel", 57000)
        assert timer() - start == pytest.approx(57e-6)
    assert timer.totals == pytest.approx([59e-6, 59e-6])


def test_settle_gathers_everything_that_is_late() -> None:
    cupti = LateCupti()
    clock = CuptiClock(cupti)
    cupti.launch("a", 1)
    cupti.launch("b", 1)
    assert names(settle(clock)) == ["a", "b"]


def test_a_call_whose_record_was_lost_is_repeated() -> None:
    cupti = FakeCupti()
    again = lambda: cupti.launch("moe_gemm_kernel", 57000)  # noqa: E731
    timer = GpuTimer(CuptiClock(cupti), lambda: None, "moe_gemm", again=again)
    start = timer()  # the call's record never comes
    assert timer() - start == pytest.approx(57e-6)
    assert timer.repeated == 1
