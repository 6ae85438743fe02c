"""A cold L2 before each timed call, and the ceilings of this GPU, measured in the same run as the results.

In a model, the other layers have passed through L2 since this layer's weights were last read, so a decode step finds
none of them there. Benchmarks that replay one buffer measure the cache instead wherever the weights fit in it.

The flush *reads* a buffer of several times L2. A flush that writes would fill L2 with dirty lines, and their write-back
would be charged to the next kernel: the one that is timed.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.clock import FLUSH_KERNEL, Clock, ClockError, gather, select, total

if TYPE_CHECKING:
    import torch

L2_MULTIPLE = 4
FLUSH_PER_PROGRAM = 16384
CEILING_BYTES = 4 << 30
CEILING_REPEATS = 15
MATMUL_SIZE = 8192
_BLOCKS = ((4096, 4096), (8192, 4096), (16384, 4096), (32768, 8192), (65536, 8192))
"""(elements per program, elements per load) tried for the read ceiling; the best median counts."""


class Flush:
    """Evicts L2 by reading: call it, then synchronise, before the timed span."""

    def __init__(self, l2_bytes: int) -> None:
        import torch

        self.source = torch.randint(-100, 100, (L2_MULTIPLE * l2_bytes // 4,), dtype=torch.int32, device="cuda")
        self.sums = torch.empty(-(-self.source.numel() // FLUSH_PER_PROGRAM), dtype=torch.int32, device="cuda")

    def __call__(self) -> None:
        read(self.source, self.sums, FLUSH_PER_PROGRAM, 4096)


def read(source: torch.Tensor, sums: torch.Tensor, per_program: int, block: int) -> None:
    """Read all of `source` (int32, CUDA) once; sums: at least ceil(elements / per_program) int32."""
    from bench.read_kernel import bench_read_kernel

    length = source.numel()
    bench_read_kernel[(-(-length // per_program),)](source, sums, length, per_program, block, num_warps=8)


def measure_ceilings(clock: Clock) -> dict[str, float]:
    """What this GPU reaches now: {"read_bytes_per_s", "bf16_flops", "fp8_flops"}; fp8_flops is left out without FP8.

    read: reading 4 GiB once; bf16 and fp8: 8192^3 products of random data through cuBLAS. Medians of
    CEILING_REPEATS, by the same clock as the results.
    """
    import torch

    ceilings = {"read_bytes_per_s": _read_ceiling(clock)}
    operations = 2 * MATMUL_SIZE**3
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ceilings["bf16_flops"] = operations / _median_seconds(clock, lambda: a @ b.T)
    if torch.cuda.get_device_capability() >= (8, 9):
        qa, qb = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        ceilings["fp8_flops"] = operations / _median_seconds(
            clock, lambda: torch._scaled_mm(qa, qb.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        )
    return ceilings


def _read_ceiling(clock: Clock) -> float:
    """Bytes per second of the best block size."""
    import torch

    source = torch.randint(-100, 100, (CEILING_BYTES // 4,), dtype=torch.int32, device="cuda")
    sums = torch.empty(-(-source.numel() // _BLOCKS[0][0]), dtype=torch.int32, device="cuda")
    seconds = []
    for per_program, block in _BLOCKS:
        call = functools.partial(read, source, sums, per_program, block)
        seconds.append(_median_seconds(clock, call, FLUSH_KERNEL))
    return CEILING_BYTES / min(seconds)


def _median_seconds(clock: Clock, call: Callable[[], object], kernel_name: str | None = None) -> float:
    """Median GPU seconds of one call, kernels by that name or all."""
    import torch

    for _ in range(3):
        call()
    samples = []
    for _ in range(CEILING_REPEATS):
        torch.cuda.synchronize()
        clock.reset()
        call()
        torch.cuda.synchronize()
        samples.append(total(select(gather(clock, kernel_name, ignore=None), kernel_name)))
    if not all(samples):
        raise ClockError(f"the {clock.name} clock recorded no kernel while the ceilings were measured")
    return statistics.median(samples)
