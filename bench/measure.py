"""How a time is taken. Two kinds that are never mixed: GPU time, by the GPU's clock, and call time, by the host's.

- kernel time:  GPU seconds of the GEMM kernel alone (of all kernels, for a peer)
- GPU total:    GPU seconds of everything that one call launches: planning, quantisation, gather, GEMM, scatter
- call time:    what a caller waits for, from the call until the result is there, host cost included

Each sample is one call after one cache flush; flush and synchronisation lie outside of the timed span.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from bench.clock import Clock, ClockError, KernelRecord, names, select, total
from bench.contenders import Contender, poisoned, wait
from bench.data import Data
from bench.machine import Device
from shared.reference import error_bound


LATE_RECORD_POLLS = 50
LATE_RECORD_SECONDS = 0.001


class WrongResult(AssertionError):
    """A result outside its error bound: it gets no time."""


@dataclasses.dataclass
class GpuTimer:
    """A timer for pytest-benchmark whose seconds are GPU seconds of the kernels that are looked for.

    Each call waits for the device and takes in what was recorded since the last call. pytest-benchmark subtracts two
    readings, around the timed call, so what was recorded before the first (the flush) drops out. `seconds` only grows.
    """

    clock: Clock
    synchronize: Callable[[], None]
    kernel_name: str | None
    seconds: float = 0.0
    last: list[KernelRecord] = dataclasses.field(default_factory=list)
    pending: bool = False

    def __call__(self) -> float:
        self.synchronize()
        self.last = self.clock.records()
        # CUPTI hands records over from a thread of its own: now and then one comes a little after the device is idle.
        for _ in range(LATE_RECORD_POLLS if self.pending else 0):
            if select(self.last, self.kernel_name):
                break
            time.sleep(LATE_RECORD_SECONDS)
            self.last += self.clock.records()
        self.pending = not self.pending
        self.seconds += total(select(self.last, self.kernel_name))
        return self.seconds


@dataclasses.dataclass
class GpuSamples:
    """What the rounds of a kernel-time benchmark recorded beside the kernel: filled by `collect` after each round."""

    timer: GpuTimer
    totals: list[float] = dataclasses.field(default_factory=list)
    kernels: list[str] = dataclasses.field(default_factory=list)

    def collect(self) -> None:
        """Take in the last round. Raises ClockError where the kernel was not among its records."""
        records = self.timer.last
        if not select(records, self.timer.kernel_name):
            wanted = "any kernel" if self.timer.kernel_name is None else f"a kernel named {self.timer.kernel_name!r}"
            raise ClockError(f"the {self.timer.clock.name} clock did not record {wanted}; recorded: {names(records)}")
        self.totals.append(total(records))
        for name in names(records):
            if name not in self.kernels:
                self.kernels.append(name)


def gpu_sample(contender: Contender, device: Device, *, flush: bool = True) -> float:
    """GPU seconds of the kernel in one eager call."""
    if flush:
        device.flush()
    timer = GpuTimer(device.clock, device.synchronize, contender.kernel_name)
    samples = GpuSamples(timer)
    start = timer()
    wait(contender.eager(), contender.framework, device)
    seconds = timer() - start
    samples.collect()
    return seconds


def check(contender: Contender, data: Data, device: Device, call: Callable[[], Any]) -> dict[str, float | None]:
    """Errors of one call into poisoned memory; WrongResult where the result is not within its bound.

    {"error", "error_bound", "quantisation_error"}; the last is None without FP8.
    """
    y = poisoned(contender, data, device, call)
    return _judge(contender, data, y)


def recheck(contender: Contender, data: Data, result: Any) -> None:
    """The same for the result of the last timed call; WrongResult takes the time away."""
    _judge(contender, data, contender.to_y(result))


def _judge(contender: Contender, data: Data, y: Any) -> dict[str, float | None]:
    error, bound = data.error(y), error_bound(data.problem)
    if not error <= bound:
        raise WrongResult(f"{contender.row.id}: error {error:.2e} is above its bound {bound:.2e}: no time is taken")
    return {"error": error, "error_bound": bound, "quantisation_error": data.quantisation_error(y)}


def facts(contender: Contender, data: Data, device: Device) -> dict[str, Any]:
    """What does not depend on the time: bytes, operations, floor, config, where it ran. Units in the names."""
    problem, row = data.problem, contender.row
    counts = data.counts.tolist()
    ceilings = device.ceilings()
    flops = ceilings.get("fp8_flops" if problem.quantises_x else "bf16_flops", ceilings["bf16_flops"])
    floor = problem.floor_seconds(counts, bytes_per_second=ceilings["read_bytes_per_s"], flops_per_second=flops)
    return {
        "id": row.id,
        "case": row.case.name,
        "dtype": row.dtype,
        "scale_layout": problem.scale_layout,
        "order": row.order,
        "contender": row.contender,
        "framework": contender.framework,
        "config": None if contender.config is None else dataclasses.asdict(contender.config),
        "active_experts": int((data.counts > 0).sum()),
        "tile_rows": contender.tile_rows,
        "read_bytes": problem.read_bytes(counts),
        "write_bytes": problem.write_bytes(),
        "operations": problem.operations(counts),
        "floor_us": round(floor * 1e6, 3),
        "read_ceiling_tb_per_s": round(ceilings["read_bytes_per_s"] / 1e12, 4),
        "gpu": device.gpu,
    }


def rates(known: dict[str, Any], kernel_seconds: float) -> dict[str, float]:
    """What a kernel time means: TB/s of the bytes that had to be read, its share of the ceiling, times the floor."""
    tb_per_s = known["read_bytes"] / kernel_seconds / 1e12
    return {
        "tb_per_s": round(tb_per_s, 4),
        "share_of_read_ceiling": round(tb_per_s / known["read_ceiling_tb_per_s"], 4),
        "times_floor": round(kernel_seconds * 1e6 / known["floor_us"], 4),
    }
