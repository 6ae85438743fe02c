"""A Triton kernel that writes down where `locate_tile` of backends/triton_kernel.py sends each program."""

import triton
import triton.language as tl

from backends.triton_kernel import locate_tile  # replaced by its interpreted copy where there is no GPU


@triton.jit
def walk_kernel(
    rows_ptr,  # (tile_rows * tile_cols,) int32
    cols_ptr,  # (tile_rows * tile_cols,) int32
    tile_rows_ptr,  # (1,) int32
    tile_span_ptr,  # (tile_rows, 2) int32
    TILE_COLS: tl.constexpr,
    ORDER: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    pid = tl.program_id(0)
    row, col = locate_tile(pid, tl.load(tile_rows_ptr), TILE_COLS, tile_span_ptr, ORDER, GROUP_M)
    tl.store(rows_ptr + pid, row)
    tl.store(cols_ptr + pid, col)
