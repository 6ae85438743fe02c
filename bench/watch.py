"""What makes a time doubtful, noticed while it is taken: other processes, clocks held down, a clock of coarse ticks.

Nothing is corrected or left out: a notice stands beside the result, in the progress lines, the journal and the tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

IDLE = 0x1
SLOWED = {
    0x2: "application clocks are set",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
"""Bits of NVML's clocks event reasons (before driver 535: clocks throttle reasons) that mean lower clocks."""
CLOCK_SHORTFALL = 0.05
"""Share by which a busy GPU's SM clock may be below its highest before it is said."""
TICK_SHARE = 0.01
"""Share of a time from which on the clock's tick is too coarse for it."""
_FEWEST_SAMPLES = 5
_JITTER = 3e-9
"""Seconds: clocks are converted between units, so that equal ticks differ by a nanosecond or two."""


def disturbances(state: dict[str, Any]) -> list[str]:
    """What a machine's state says against a time that is taken in it; empty: nothing, or nothing is known."""
    found = [
        f"another process on the GPU: {process['name']} (pid {process['pid']}, {_memory(process)})"
        for process in state.get("others", ())
    ]
    mask = state.get("clock_reasons") or 0
    found += [f"clocks held down: {reason}" for bit, reason in SLOWED.items() if mask & bit]
    now, highest = state.get("sm_mhz"), state.get("highest_sm_mhz")
    if now and highest and not mask & IDLE and now < (1 - CLOCK_SHORTFALL) * highest:
        found.append(f"SM clock {now:.0f} MHz, of {highest:.0f} MHz at most")
    return found


def _memory(process: dict[str, Any]) -> str:
    return "memory unknown" if process.get("mib") is None else f"{process['mib']} MiB"


def tick(samples: Sequence[float]) -> float | None:
    """Seconds of one tick of the clock that gave these samples, where they show it; else None: finer than they tell.

    Samples of a clock that ticks coarsely lie whole ticks apart. The least difference between neighbours is a first
    estimate, which each larger one makes more exact.
    """
    steps = sorted(b - a for a, b in itertools.pairwise(sorted(samples)) if b - a > _JITTER)
    if len(samples) < _FEWEST_SAMPLES or not steps:
        return None
    found, seconds, ticks = steps[0], 0.0, 0
    for step in steps:
        count = round(step / found)
        if abs(step - count * found) > max(_JITTER, 0.05 * found):
            return None
        seconds, ticks = seconds + step, ticks + count
        found = seconds / ticks
    return found


def too_coarse(samples: Sequence[float], median: float) -> str | None:
    """A notice where the clock's tick is a noticeable share of the time, or all samples are the same; else None."""
    if len(samples) >= _FEWEST_SAMPLES and max(samples) - min(samples) <= _JITTER:
        return f"all {len(samples)} samples are the same, {median * 1e6:.3f} us: the clock's tick hides their scatter"
    found = tick(samples)
    if found is None or found < TICK_SHARE * median:
        return None
    return f"the clock ticks every {found * 1e9:.0f} ns, {found / median:.1%} of the time"


def parse_processes(text: str) -> list[dict[str, Any]]:
    """Rows of nvidia-smi's --query-compute-apps=pid,process_name,used_memory, csv without heading and units."""
    found = []
    for line in text.strip().splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 3 and parts[0].isdigit():
            mib = int(parts[-1]) if parts[-1].isdigit() else None
            found.append({"pid": int(parts[0]), "name": ",".join(parts[1:-1]).strip(), "mib": mib})
    return found


class Others:
    """Tells this process on the GPU from others, also in a container, where the driver's process ids are the host's.

    baseline: processes before this one used the GPU; what is new once it does is this one, if its id is not ours.
    """

    def __init__(self, pid: int, baseline: Sequence[dict[str, Any]]) -> None:
        self._pid = pid
        self._before = {process["pid"] for process in baseline}
        self._own: set[int] | None = None

    @property
    def own(self) -> set[int]:
        """The driver's ids of this process; empty before `among` was called, or where the driver tells none."""
        return self._own or set()

    def among(self, processes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those that are not this process. Call it first when this process has begun to use the GPU."""
        pids = [process["pid"] for process in processes]
        if self._own is None:
            new = [pid for pid in pids if pid not in self._before]
            self._own = {self._pid} if self._pid in pids else set(new[:1])
        return [process for process in processes if process["pid"] not in self._own]
