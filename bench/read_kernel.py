"""Triton kernels that read memory and next to nothing else: for flushing L2, the read ceiling, and plain reads by size.

The `plain_read` kernels are several designs of the same thing, of which the fastest counts (reads.py). Each adds up
int32 values, so that no load can be left out, and writes 4 bytes per program.
"""

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


@triton.jit
def plain_read_once(source, sums, length, PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr):
    """bench_read_kernel by another name, as its record must not be taken for that of the flush before it."""
    bench_read_kernel(source, sums, length, PER_PROGRAM, BLOCK)


@triton.jit
def plain_read_persistent(source, sums, length, BLOCK: tl.constexpr, STAGES: tl.constexpr, INTERLEAVED: tl.constexpr):
    """sums[p] = sum of the blocks of BLOCK elements of program p; int32, length elements in all.

    INTERLEAVED: blocks p, p + programs, ...; else a run of neighbouring blocks. STAGES: blocks in flight by cp.async,
    which Triton makes of a load in a loop that asks for stages.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = tl.cdiv(length, BLOCK)
    if INTERLEAVED:
        first, last, step = program, blocks, programs
    else:
        first = (program.to(tl.int64) * blocks // programs).to(tl.int32)
        last = ((program + 1).to(tl.int64) * blocks // programs).to(tl.int32)
        step = 1
    partial = tl.zeros((BLOCK,), tl.int32)
    for block in tl.range(first, last, step, num_stages=STAGES):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        partial += tl.load(source + at, mask=at < length, other=0)
    tl.store(sums + program, tl.sum(partial))


@triton.jit
def plain_read_descriptor(source, sums, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """sums[p] = sum of boxes p, p + programs, ... of a TMA descriptor: (rows, COLUMNS) int32 in boxes of ROWS rows.

    Rows past the last come as zeros. STAGES: boxes in flight.
    """
    program = tl.program_id(0)
    partial = tl.zeros((ROWS, COLUMNS), tl.int32)
    for box in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        partial += source.load([box * ROWS, 0])
    tl.store(sums + program, tl.sum(partial))
