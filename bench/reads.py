"""What any kernel that reads so many bytes takes: plain reads from a cold L2, from 4 MiB to 4 GiB.

    python -m bench reads [--out FILE]      seconds on one GPU; `compare --set targets` does the same in its run

A floor is bytes over a rate that was measured on 4 GiB. Nothing that reads 25 MB gets there: the first bytes take
DRAM's latency to come, thread blocks take time to start, and the last of them leave the memory idle. How much that is,
a kernel tells that does nothing else. It is timed as the rows are: by the same clock, after the same flush of L2, the
median of its samples. Each sample reads another part of 5 GiB.

There is no one fastest way to read. Several designs are tried at each size; the fastest few are then timed again, and
the best of these medians counts, so that it is not the luckiest of many. A kernel faster than that would disprove the
bound.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import dataclasses
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bench import results

if TYPE_CHECKING:
    import torch

    from bench.machine import Device

MIB = 1 << 20
SIZES = tuple(mib * MIB for mib in (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096))
"""Bytes. The targets set reads 12.6 MB to 4.25 GB."""
BUFFER = 5 << 30
_PLACES = 4096
"""Reads begin at multiples of so many bytes."""
TRIED, FINALISTS, SAMPLES = 3, 3, 11
"""Samples of each design; how many designs are timed again; their samples then."""
KERNEL = "plain_read"
"""Part of the name of every design's kernel."""
_COLUMNS = 32
"""int32 of a row of a descriptor: 128 bytes."""


@dataclasses.dataclass(frozen=True)
class Design:
    """One way to read. elements: int32 per block, in flight at a time.

    kind: "once": a program reads per_program elements and ends; "interleaved", "contiguous": programs_per_sm programs
    on each SM read to the end, `stages` blocks in flight by cp.async; "descriptor": as interleaved, by TMA
    """

    kind: str
    elements: int
    warps: int
    per_program: int = 0
    programs_per_sm: int = 0
    stages: int = 0

    @property
    def name(self) -> str:
        """Such as "interleaved, 2 programs per SM, 6 x 16 KiB in flight"."""
        if self.kind == "once":
            return f"once, {4 * self.per_program >> 10} KiB per program"
        each = f"{self.programs_per_sm} program{'s' if self.programs_per_sm > 1 else ''} per SM"
        return f"{self.kind}, {each}, {self.stages} x {4 * self.elements >> 10} KiB in flight"


DESIGNS = (
    *(Design("once", min(size, 4096), 8 if size > 2048 else 4, per_program=size) for size in (1024, 2048, 4096, 8192)),
    *(Design("once", 8192 if size > 16384 else 4096, 8, per_program=size) for size in (16384, 32768)),
    *(
        Design(kind, elements, warps, programs_per_sm=programs, stages=stages)
        for kind in ("interleaved", "contiguous")
        for programs, elements, warps, stages in ((1, 8192, 8, 6), (2, 4096, 4, 6), (4, 2048, 4, 6))
    ),
    *(
        Design("descriptor", elements, 4, programs_per_sm=programs, stages=6)
        for programs, elements in ((1, 8192), (2, 4096), (4, 2048))
    ),
)
"""Persistent ones have 192 KiB in flight on each SM, of the 227 KiB that Hopper has."""


def read(source: torch.Tensor, sums: torch.Tensor, design: Design, sms: int) -> int:
    """Read all of `source` (int32; a multiple of 32 elements for a descriptor) once. Gives the number of programs.

    sums: their sums, int32; at least ceil(elements / per_program) or programs_per_sm * sms of them
    """
    from bench import read_kernel

    length = source.numel()
    if design.kind == "once":
        programs = -(-length // design.per_program)
        read_kernel.plain_read_once[(programs,)](
            source, sums, length, design.per_program, design.elements, num_warps=design.warps
        )
        return programs
    programs = design.programs_per_sm * sms
    if design.kind == "descriptor":
        from triton.tools.tensor_descriptor import TensorDescriptor

        box = [design.elements // _COLUMNS, _COLUMNS]
        rows = length // _COLUMNS
        described = TensorDescriptor(source, [rows, _COLUMNS], [_COLUMNS, 1], box)
        read_kernel.plain_read_descriptor[(programs,)](
            described, sums, rows, *box, design.stages, num_warps=design.warps
        )
    else:
        interleaved = design.kind == "interleaved"
        read_kernel.plain_read_persistent[(programs,)](
            source, sums, length, design.elements, design.stages, interleaved, num_warps=design.warps
        )
    return programs


def measure(device: Device) -> list[dict[str, Any]]:
    """{"bytes", "us", "design", "samples_us", "tried_us"} of each of SIZES. tried_us: each design's first median.

    Without TMA (before Hopper) descriptors are left out, as tried_us shows.
    """
    import torch

    properties = torch.cuda.get_device_properties(0)
    sms = properties.multi_processor_count
    designs = [design for design in DESIGNS if design.kind != "descriptor" or properties.major >= 9]
    buffer = torch.randint(-100, 100, (BUFFER // 4,), dtype=torch.int32, device="cuda")
    programs = max(programs_of(design, max(SIZES), sms) for design in designs)
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")

    def run(design: Design, at: int, size: int) -> int:
        return read(buffer[at // 4 : (at + size) // 4], sums, design, sms)

    device.clock.pause()  # CUPTI loses records of kernels that several threads launch at once
    with concurrent.futures.ThreadPoolExecutor(len(designs)) as pool:  # compiles
        list(pool.map(lambda design: run(design, 0, min(SIZES)), designs))
    device.synchronize()
    device.clock.reset()
    found = best_of(designs, sampler(device, run))
    return found


def lines(device: Device, clock: str) -> list[dict[str, Any]]:
    """The lines of a result file with the plain reads alone: a part of a run about the targets, without rows."""
    from bench.machine import versions

    run = {
        "kind": "run", "gpu": device.gpu, "set": "targets", "clock": clock, "cache": "cold", "routing": "uniform",
        "seed": 0, "rounds": SAMPLES, "versions": versions(), **results.code(),
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "ceilings": device.ceilings(), "state": device.state(),
    }  # fmt: skip
    return [run, {"kind": "reads", "sizes": device.plain_reads()}]


def programs_of(design: Design, size: int, sms: int) -> int:
    """How many programs read `size` bytes."""
    return -(-size // 4 // design.per_program) if design.kind == "once" else design.programs_per_sm * sms


Sampler = Callable[[Design, int], float]


def sampler(device: Device, run: Callable[[Design, int, int], object], seed: int = 0) -> Sampler:
    """A function that gives the GPU seconds of one flushed read of so many bytes. run: reads (design, place, size)."""
    from bench.measure import GpuTimer

    places = random.Random(seed)

    def sample(design: Design, size: int) -> float:
        at = places.randrange((BUFFER - size) // _PLACES) * _PLACES

        def call() -> None:
            device.flush()
            run(design, at, size)

        timer = GpuTimer(device.clock, device.synchronize, KERNEL, 1, call)
        device.flush()
        start = timer()
        run(design, at, size)
        return timer() - start

    return sample


def best_of(designs: Sequence[Design], sample: Sampler, sizes: Iterable[int] = SIZES) -> list[dict[str, Any]]:
    """What `measure` gives, of samples in seconds."""
    found = []
    for size in sizes:
        tried = {design: statistics.median(sample(design, size) for _ in range(TRIED)) for design in designs}
        again = {
            design: [sample(design, size) for _ in range(SAMPLES)]
            for design in sorted(tried, key=tried.__getitem__)[:FINALISTS]
        }
        best = min(again, key=lambda design: statistics.median(again[design]))
        found.append(
            {
                "bytes": size,
                "us": _us(statistics.median(again[best])),
                "design": best.name,
                "samples_us": [_us(seconds) for seconds in again[best]],
                "tried_us": {design.name: _us(seconds) for design, seconds in tried.items()},
            }
        )
    return found


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


class PlainReads:
    """The least time in which a run's plain reads read so many bytes. Several runs (shards): the fastest of them."""

    def __init__(self, found: dict[str, Any] | None) -> None:
        """found: compact results, of which each run may have "reads"."""
        runs = [run["reads"] for run in results.history(found["run"]) if run.get("reads")] if found else []
        self._curves = [sorted((float(one["bytes"]), float(one["us"])) for one in run) for run in runs]

    def __bool__(self) -> bool:
        return bool(self._curves)

    def us(self, size: float) -> float | None:
        """µs for so many bytes; None where no run measured smaller and larger sizes: nothing is extrapolated.

        Between two sizes a straight line in bytes, as a time is a start and then bytes over a rate; sizes are so near
        each other that a straight line in the logarithms would differ by less than 1 %.
        """
        known = [us for curve in self._curves if (us := _between(curve, size)) is not None]
        return min(known, default=None)


def _between(curve: Sequence[tuple[float, float]], size: float) -> float | None:
    if not curve or not curve[0][0] <= size <= curve[-1][0]:
        return None
    if len(curve) == 1:
        return curve[0][1]
    place = min(max(bisect.bisect_right(curve, (size, float("inf"))), 1), len(curve) - 1)
    (less, before), (more, after) = curve[place - 1], curve[place]
    return before + (after - before) * (size - less) / (more - less)


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Every size of the run, of several runs the fastest: µs, rate, share of the read ceiling, fastest design."""
    best: dict[int, tuple[float, float, str]] = {}
    for run in results.history(found["run"]):
        for one in run.get("reads", ()):
            share = one["bytes"] / run["ceilings"]["read_bytes_per_s"] / one["us"] * 1e6
            best[one["bytes"]] = min(best.get(one["bytes"], (float("inf"), 0.0, "")), (one["us"], share, one["design"]))
    lines = [
        [f"{size / 1e6:.1f}", f"{us:.2f}", f"{size / us / 1e6:.2f}", f"{share:.3f}", design]
        for size, (us, share, design) in sorted(best.items())
    ]
    return ["MB", "µs", "TB/s", "floor ÷ time", "fastest design"], lines
