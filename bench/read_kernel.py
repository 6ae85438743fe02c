"""A Triton kernel that reads memory and next to nothing else: for flushing L2 and for measuring the read ceiling."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bench_read_kernel(source, sums, length, PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr):
    """sums[p] = sum of source[p * PER_PROGRAM : (p + 1) * PER_PROGRAM]; int32. Every element is read once."""
    first = tl.program_id(0).to(tl.int64) * PER_PROGRAM
    offsets = first + tl.arange(0, BLOCK)
    partial = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(0, PER_PROGRAM // BLOCK):
        at = offsets + step * BLOCK
        partial += tl.load(source + at, mask=at < length, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(partial))
