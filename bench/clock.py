"""One GPU clock for every framework: when the GPU started and ended each kernel of this process.

Kernels are timed by the GPU itself through CUPTI's activity records, which do not know which framework launched a
kernel: PyTorch's, Triton's and XLA's kernels come back by name from one call. CUDA events around a single launch
would read the launch gap as well (tens of microseconds, where kernels take ten).

Two ways to the same records: `CuptiClock` through NVIDIA's `cupti-python` (kernels, copies and memsets), `JaxClock`
through the extension that jax ships for its Mosaic profiler (kernels only). One is asked for by name; nothing switches.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

CLOCKS = ("cupti", "jax-cupti")
FLUSH_KERNEL = "bench_read_kernel"
"""Name of the kernel that flushes L2 and measures the read ceiling (read_kernel.py)."""
_BUFFER_BYTES = 1 << 20
_FLUSH_FORCED = 1
_POLL_SECONDS = 0.001
_LATE_POLLS = 100
_QUIET_POLLS = 8


@dataclasses.dataclass(frozen=True)
class KernelRecord:
    """One kernel on the GPU. name: the symbol's name; duration: seconds; copies are named [memcpy] and [memset].

    start: seconds on the GPU's clock, None where the clock does not tell; records are compared without it.
    """

    name: str
    duration: float
    start: float | None = dataclasses.field(default=None, compare=False)


class ClockError(RuntimeError):
    """The clock cannot be used here, or did not record what it should have. The message says what to do."""


class Clock(Protocol):
    """Records GPU work between `reset` and `records`. The caller synchronises the device before `records`."""

    name: str

    def reset(self) -> None:
        """Drop what was recorded and record from here on."""

    def records(self) -> list[KernelRecord]:
        """Everything recorded since `reset` or the last `records`, in the order of execution; recording goes on."""

    def pause(self) -> None:
        """Stop recording until `reset`: recording adds host time to every launch, which call times must not hold."""


def open_clock(name: str = "cupti") -> Clock:
    """The clock of that name, recording. Raises ClockError with the remedy where it cannot be had.

    Open it before CUDA graphs are captured: CUPTI has to be attached when a graph is instantiated to see its kernels.
    """
    if name not in CLOCKS:
        raise ClockError(f"clock: got {name!r}; known: {', '.join(CLOCKS)}")
    return CuptiClock() if name == "cupti" else JaxClock()


def select(records: Iterable[KernelRecord], kernel_name: str | None) -> list[KernelRecord]:
    """The records whose name contains `kernel_name`; all of them for None."""
    return [record for record in records if kernel_name is None or kernel_name in record.name]


def total(records: Iterable[KernelRecord]) -> float:
    """Seconds of GPU time, summed over records."""
    return sum(record.duration for record in records)


def names(records: Iterable[KernelRecord]) -> list[str]:
    """The different names, in order of first appearance."""
    return list(dict.fromkeys(record.name for record in records))


def gather(
    clock: Clock, kernel_name: str | None, at_least: int = 1, *, ignore: str | None = FLUSH_KERNEL
) -> list[KernelRecord]:
    """The records of one call: waits until the kernel is among them and there are `at_least` so many.

    CUPTI hands records over from a thread of its own: now and then one comes a little after the device is idle. This
    polls up to 0.1 s for the call's own; what is missing then is the caller's to notice. The flush before the call may
    be late as well: records named `ignore` are dropped.
    """
    found: list[KernelRecord] = []
    for poll in range(_LATE_POLLS):
        if poll:
            time.sleep(_POLL_SECONDS)
        found += _without(clock.records(), ignore)
        if len(found) >= at_least and select(found, kernel_name):
            break
    return found


def settle(clock: Clock) -> list[KernelRecord]:
    """Everything that comes until nothing more does for 8 ms: for learning how many records a call has."""
    found: list[KernelRecord] = []
    quiet = 0
    for _ in range(_LATE_POLLS):
        new = _without(clock.records(), FLUSH_KERNEL)
        found += new
        quiet = 0 if new else quiet + 1
        if quiet == _QUIET_POLLS:
            break
        time.sleep(_POLL_SECONDS)
    return found


def _without(records: Iterable[KernelRecord], ignore: str | None) -> list[KernelRecord]:
    return [record for record in records if ignore is None or ignore not in record.name]


class CuptiClock:
    """Activity records through `cupti-python`."""

    name = "cupti"

    def __init__(self, cupti: Any = None) -> None:
        """cupti: the module to use; None imports NVIDIA's."""
        self._cupti = _import_cupti() if cupti is None else cupti
        kinds = self._cupti.ActivityKind
        self._names = {kinds.MEMCPY: "[memcpy]", kinds.MEMSET: "[memset]"}
        self._kinds = (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)
        self._found: list[tuple[int, KernelRecord]] = []
        self._on = False
        try:
            self._cupti.activity_register_callbacks(self._buffer_requested, self._buffer_completed)
            self._enable()
        except Exception as error:
            raise ClockError(
                f"CUPTI refused: {error}. Another profiler may be attached (ncu, nsys, torch.profiler: only one at a "
                "time), or CUPTI's version differs from the one that PyTorch pins (pip install 'cupti-python<13.1')"
            ) from error

    def reset(self) -> None:
        self._enable()
        self._cupti.activity_flush_all(_FLUSH_FORCED)
        self._found.clear()

    def records(self) -> list[KernelRecord]:
        self._cupti.activity_flush_all(_FLUSH_FORCED)
        found = sorted(self._found, key=lambda item: item[0])
        self._found.clear()
        return [record for _, record in found]

    def pause(self) -> None:
        if self._on:
            for kind in self._kinds:
                self._cupti.activity_disable(kind)
            self._on = False

    def _enable(self) -> None:
        if not self._on:
            for kind in self._kinds:
                self._cupti.activity_enable(kind)
            self._on = True

    def _buffer_requested(self) -> tuple[int, int]:
        """(bytes, most records per buffer; 0: as many as fit)."""
        return _BUFFER_BYTES, 0

    def _buffer_completed(self, activities: Sequence[Any]) -> None:
        # The buffer is freed after this callback: keep values, no activity objects. An exception would be lost in
        # CUPTI's thread, so only attributes that these three kinds of record have are touched.
        for activity in activities:
            if activity.kind in self._kinds:
                name = self._names.get(activity.kind) or str(activity.name)
                record = KernelRecord(name, (activity.end - activity.start) * 1e-9, activity.start * 1e-9)
                self._found.append((activity.start, record))


class JaxClock:
    """Kernel records through `jax.experimental.mosaic.gpu.profiler`'s CUPTI extension: durations, no copies."""

    name = "jax-cupti"

    def __init__(self, extension: Any = None) -> None:
        """extension: the module to use; None imports jax's."""
        self._extension = _import_jax_extension() if extension is None else extension
        self._on = False
        try:
            self.reset()
        except Exception as error:
            raise ClockError(f"jax's CUPTI extension refused: {error}. Another profiler may be attached") from error

    def reset(self) -> None:
        self.pause()
        self._extension._cupti_init()
        self._on = True

    def records(self) -> list[KernelRecord]:
        # The extension returns records only by stopping; False keeps CUPTI attached, as captured graphs need it.
        found = self._extension._cupti_get_timings(False)
        self._on = False
        self.reset()
        return [KernelRecord(name, milliseconds * 1e-3) for name, milliseconds in found]

    def pause(self) -> None:
        if self._on:
            self._extension._cupti_get_timings(False)
            self._on = False


def _import_cupti() -> Any:
    try:
        import torch  # noqa: F401  # loads the CUPTI that PyTorch pins, so that the process holds one copy
        from cupti import cupti
    except ImportError as error:
        raise ClockError(
            f"cannot import cupti-python ({error}): pip install 'cupti-python>=13.0,<13.1', "
            "or use jax's CUPTI extension with --clock jax-cupti"
        ) from error
    return cupti


def _import_jax_extension() -> Any:
    try:
        from jax._src.lib import mosaic_gpu

        extension = mosaic_gpu._mosaic_gpu_ext
        extension._cupti_init  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ClockError(
            f"this jax has no CUPTI extension ({error}): pip install 'jax[cuda13]>=0.11,<0.12', or use --clock cupti"
        ) from error
    return extension
