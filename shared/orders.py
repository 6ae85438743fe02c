"""Tile orders: program id -> (tile row, tile column), the specification that every kernel language is held to.

The output is cut into tile_rows x tile_cols tiles. A GPU starts thread blocks roughly in the order of their program
ids, so the order decides which tiles are in flight together, and so which reads may be served by L2.

- row:     along a tile row first. Neighbours share rows of x and read different weights.
- column:  along a tile column first. Neighbours share weights (where their tile rows have the same expert).
- grouped: bands of group_m tile rows, each walked column by column. group_m = 1 is row, group_m >= tile_rows is column.
- popular: expert by expert, the one with the most slots first, each expert's tile rows walked column by column. The
           tile rows are numbered so by the plan (`shared.planning.plan(..., popularity=...)`), and a tile's place
           depends on how many tile rows each expert has: `expert_rows`.

`published_2024` is the column-major mapping of the article "Accelerating MoE model inference with Locality-Aware
Kernel Design" (PyTorch blog, 2024) as its code had it: the two divisors are exchanged, so most tiles are never visited.
It is a counter-example. Reports: meta-pytorch/applied-ai issue 25, pull request 33.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.checks import ArgumentError, check_name

GRID_ORDERS = ("row", "column", "grouped")
"""Orders that need only the size of the grid."""
ORDERS = (*GRID_ORDERS, "popular")
Tile = tuple[int, int]


def tile(
    order: str,
    pid: int,
    tile_rows: int,
    tile_cols: int,
    group_m: int = 8,
    expert_rows: Sequence[int] | None = None,
) -> Tile:
    """(tile row, tile column) of program `pid`, 0 <= pid < tile_rows * tile_cols.

    expert_rows: for `popular`, how many tile rows each expert fills, in the order of the tile rows; they add up to
                 tile_rows. None: one each, which makes it `row`.
    """
    check_name("order", order, ORDERS)
    if not 0 <= pid < tile_rows * tile_cols:
        raise ArgumentError(f"pid: got {pid}; allowed: 0 to {tile_rows * tile_cols - 1} ({tile_rows}x{tile_cols})")
    if group_m < 1:
        raise ArgumentError(f"group_m: got {group_m}; allowed: 1 or more")
    if order == "row":
        return pid // tile_cols, pid % tile_cols
    if order == "column":
        return pid % tile_rows, pid // tile_rows
    if order == "popular":
        rows_of = [1] * tile_rows if expert_rows is None else list(expert_rows)
        if sum(rows_of) != tile_rows or min(rows_of) < 1:
            raise ArgumentError(f"expert_rows: got {rows_of}; allowed: positive numbers that add up to {tile_rows}")
        first_row = 0
        for rows in rows_of:
            if pid < (first_row + rows) * tile_cols:
                break
            first_row += rows
        within = pid - first_row * tile_cols
        return first_row + within % rows, within // rows
    band = group_m * tile_cols
    first_row = pid // band * group_m
    rows = min(group_m, tile_rows - first_row)
    return first_row + pid % band % rows, pid % band // rows


def walk(
    order: str, tile_rows: int, tile_cols: int, group_m: int = 8, expert_rows: Sequence[int] | None = None
) -> Iterator[Tile]:
    """The tiles of a grid in the order in which programs are numbered."""
    for pid in range(tile_rows * tile_cols):
        yield tile(order, pid, tile_rows, tile_cols, group_m, expert_rows)


def published_2024(pid: int, grid_m: int, grid_n: int) -> Tile:
    """The article's column-major mapping: right would be pid % grid_m, pid // grid_m."""
    return pid % grid_n, pid // grid_m


def published_2024_grid(tokens: int, top_k: int, experts: int, n: int, block_m: int, block_n: int) -> tuple[int, int]:
    """Its grid: grid_m spans the padded worst case, not the tile rows in use."""
    slots = tokens * top_k
    return -(-(slots + experts * (block_m - 1)) // block_m), -(-n // block_n)


def published_2024_coverage(
    tokens: int, top_k: int, experts: int, n: int, tile_rows: int, block_m: int, block_n: int
) -> float:
    """Share of the tiles in use, tile_rows x ceil(n / block_n), that the published kernel visits.

    A program whose row lies past the tile rows in use returns at once, as does the kernel's.
    """
    grid_m, grid_n = published_2024_grid(tokens, top_k, experts, n, block_m, block_n)
    visited = {published_2024(pid, grid_m, grid_n) for pid in range(grid_m * grid_n)}
    return sum(row < tile_rows and col < grid_n for row, col in visited) / (tile_rows * grid_n)
