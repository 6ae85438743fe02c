"""How a time is taken. Two kinds that are never mixed: GPU time, by the GPU's clock, and call time, by the host's.

- kernel time:  GPU seconds of the GEMM kernel alone (of all kernels, for a peer). Where K is split, the kernels that
                clear what parts are added to and that make y of float32 sums carry the GEMM kernel's name in theirs
                and count in; of pallas-mosaic's atomic additions XLA's do, so all kernels of its call count then
- GPU total:    GPU seconds of everything that one call launches: planning, quantisation, gather, GEMM, scatter
- call time:    what a caller waits for, from the call until the result is there, host cost included

Each sample is one call after one cache flush; flush and synchronisation lie outside of the timed span.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from bench.clock import Clock, ClockError, KernelRecord, gather, names, select, settle, total
from bench.contenders import Contender, poisoned, wait
from bench.data import Data
from bench.machine import Device
from shared.reference import error_bound

REPETITIONS = 3


class WrongResult(AssertionError):
    """A result outside its error bound: it gets no time. short: such as "error 3.1e-02 > 4.2e-04"."""

    def __init__(self, row_id: str, error: float, bound: float) -> None:
        self.short = f"error {error:.1e} > {bound:.1e}"
        super().__init__(f"{row_id}: error {error:.2e} is above its bound {bound:.2e}: no time is taken")


@dataclasses.dataclass
class GpuTimer:
    """A timer for pytest-benchmark whose seconds are GPU seconds of the kernels that are looked for.

    pytest-benchmark reads it before and after the timed call and subtracts. The first reading drops what the GPU did
    before (the flush), the second waits for the device and adds what the call's records say. `seconds` only grows.
    Raises ClockError where the records of a call are not complete.

    at_least: how many records one call has, so that a late one is waited for
    again:    does the call once more, flushed: CUPTI loses a record now and then, and that call is then repeated
    totals:   GPU total of each call, seconds
    kernels:  names of all that the calls ran
    repeated: calls that had to be repeated
    """

    clock: Clock
    synchronize: Callable[[], None]
    kernel_name: str | None
    at_least: int = 1
    again: Callable[[], object] | None = None
    seconds: float = 0.0
    totals: list[float] = dataclasses.field(default_factory=list)
    kernels: list[str] = dataclasses.field(default_factory=list)
    repeated: int = 0
    in_call: bool = False

    def __call__(self) -> float:
        self.synchronize()
        if self.in_call:
            self._take(self._complete())
        else:
            self.clock.records()
        self.in_call = not self.in_call
        return self.seconds

    def _complete(self) -> list[KernelRecord]:
        """The records of this call, or of a repetition, once they are all there."""
        records = gather(self.clock, self.kernel_name, self.at_least)
        for _ in range(0 if self.again is None else REPETITIONS):
            if self._all_there(records):
                break
            assert self.again is not None
            self.repeated += 1
            self.clock.reset()
            self.again()
            self.synchronize()
            records = gather(self.clock, self.kernel_name, self.at_least)
        if self._all_there(records):
            return records
        wanted = "any name" if self.kernel_name is None else f"the name {self.kernel_name!r}"
        raise ClockError(
            f"the {self.clock.name} clock should have recorded {self.at_least} kernels or more, one of them with "
            f"{wanted}; recorded: {names(records)}"
        )

    def _all_there(self, records: list[KernelRecord]) -> bool:
        return len(records) >= self.at_least and bool(select(records, self.kernel_name))

    def _take(self, records: list[KernelRecord]) -> None:
        self.seconds += total(select(records, self.kernel_name))
        self.totals.append(total(records))
        self.kernels += [name for name in names(records) if name not in self.kernels]


def records_of(contender: Contender, device: Device, call: Callable[[], Any]) -> int:
    """How many records one call of this contender has: the fewest of three calls, each waited for at length."""
    counts = []
    for _ in range(3):
        device.synchronize()
        device.clock.reset()
        wait(call(), contender.framework, device)
        counts.append(len(settle(device.clock)))
    return max(1, min(counts))


def gpu_sample(contender: Contender, device: Device, *, flush: bool = True, whole: bool = False) -> float:
    """GPU seconds of the kernel in one eager call; whole: of all kernels that the call launches."""
    if contender.records is None:
        contender.records = records_of(contender, device, contender.eager)
    if flush:
        device.flush()
    again = repetition(contender, device, contender.eager, flush=flush)
    timer = GpuTimer(device.clock, device.synchronize, contender.kernel_name, contender.records, again)
    start = timer()
    wait(contender.eager(), contender.framework, device)
    seconds = timer() - start
    return timer.totals[-1] if whole else seconds


def repetition(contender: Contender, device: Device, call: Callable[[], Any], *, flush: bool) -> Callable[[], object]:
    """One more call, flushed as the first was: what GpuTimer does where CUPTI lost a record."""

    def again() -> object:
        if flush:
            device.flush()
        return wait(call(), contender.framework, device)

    return again


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
    config, problem = contender.config, data.problem
    error = data.error(y)
    bound = error_bound(problem, 1 if config is None else config.rounded_parts(problem.k))
    if not error <= bound:
        raise WrongResult(contender.row.id, error, bound)
    return {"error": error, "error_bound": bound, "quantisation_error": data.quantisation_error(y)}


def facts(contender: Contender, data: Data, device: Device) -> dict[str, Any]:
    """What does not depend on the time: bytes, operations, floor, config, where it ran. Units in the names."""
    problem, row = data.problem, contender.row
    counts = data.counts.tolist()
    ceilings = device.ceilings()
    return {
        "id": row.id,
        "case": row.case.name,
        "dtype": row.dtype,
        "scale_layout": problem.scale_layout,
        "order": row.order,
        "contender": row.contender,
        "framework": contender.framework,
        "config": None if contender.config is None else dataclasses.asdict(contender.config),
        **({} if contender.about is None else {"about": contender.about}),
        "active_experts": int((data.counts > 0).sum()),
        "tile_rows": contender.tile_rows,
        "read_bytes": problem.read_bytes(counts),
        "write_bytes": problem.write_bytes(),
        "operations": problem.operations(counts),
        "floor_us": floor_us(data, device),
        "read_ceiling_tb_per_s": round(ceilings["read_bytes_per_s"] / 1e12, 4),
        "gpu": device.gpu,
    }


def floor_us(data: Data, device: Device) -> float:
    """The least time in µs that this device's ceilings leave the data's GEMM."""
    problem, ceilings = data.problem, device.ceilings()
    flops = ceilings.get("fp8_flops" if problem.quantises_x else "bf16_flops", ceilings["bf16_flops"])
    bandwidth = ceilings["read_bytes_per_s"]
    seconds = problem.floor_seconds(data.counts.tolist(), bytes_per_second=bandwidth, flops_per_second=flops)
    return round(seconds * 1e6, 3)


def rates(known: dict[str, Any], kernel_seconds: float) -> dict[str, float]:
    """What a kernel time means: TB/s of the bytes that had to be read, its share of the ceiling, times the floor."""
    tb_per_s = known["read_bytes"] / kernel_seconds / 1e12
    return {
        "tb_per_s": round(tb_per_s, 4),
        "share_of_read_ceiling": round(tb_per_s / known["read_ceiling_tb_per_s"], 4),
        "times_floor": round(kernel_seconds * 1e6 / known["floor_us"], 4),
    }
