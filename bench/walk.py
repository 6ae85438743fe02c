"""The walk of a tile grid, as data and as a picture."""

from __future__ import annotations

from shared import orders
from shared.checks import ArgumentError, check_name

ORDERS = (*orders.ORDERS, "published-2024")
MOST_TILES = 1 << 20
"""Of a grid to be listed: more than any GEMM of the tables here has, a second's work."""


def walk(
    order: str, tile_rows: int, tile_cols: int, group_m: int, expert_rows: list[int] | None = None
) -> list[tuple[int, int]]:
    """(row, column) of each program in turn. published-2024: also tiles outside of the grid, which it skips.

    expert_rows: needed by popular and by no other order: tile rows of each expert, hottest first.
    """
    check_name("order", order, ORDERS)
    if (expert_rows is None) == (order == "popular"):
        raise ArgumentError(
            f"expert-rows: got {expert_rows} with order {order}; "
            f"allowed: {f'numbers that add up to {tile_rows}, as 3,1,1' if order == 'popular' else 'none'}"
        )
    for name, value in (("tile-rows", tile_rows), ("tile-cols", tile_cols), ("group-m", group_m)):
        if value < 1:
            raise ArgumentError(f"{name}: got {value}; allowed: 1 or more")
    if tile_rows * tile_cols > MOST_TILES:
        raise ArgumentError(f"tile-rows: got {tile_rows} with tile-cols {tile_cols}; allowed: {MOST_TILES} tiles")
    if order == "published-2024":
        return [orders.published_2024(pid, tile_rows, tile_cols) for pid in range(tile_rows * tile_cols)]
    return list(orders.walk(order, tile_rows, tile_cols, group_m, expert_rows))


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{name}: got {text!r}; allowed: whole numbers separated by commas, as 3,1,1") from None


def picture(tiles: list[tuple[int, int]], tile_rows: int, tile_cols: int) -> str:
    """The grid with each tile's first program number; a dot where no program comes."""
    first: dict[tuple[int, int], int] = {}
    for pid, tile in enumerate(tiles):
        first.setdefault(tile, pid)
    width = max(len(str(tile_rows * tile_cols - 1)), len(str(tile_cols - 1)))
    margin = len(f"row {tile_rows - 1}")
    lines = [" " * margin + "".join(f"  {col:>{width}}" for col in range(tile_cols)) + "   (tile column)"]
    for row in range(tile_rows):
        cells = "".join(f"  {first.get((row, col), '.'):>{width}}" for col in range(tile_cols))
        lines.append(f"{f'row {row}':<{margin}}{cells}")
    skipped = tile_rows * tile_cols - sum(row < tile_rows and col < tile_cols for row, col in first)
    if skipped:
        outside = sum(row >= tile_rows or col >= tile_cols for row, col in tiles)
        lines.append(
            f"{skipped} of {tile_rows * tile_cols} tiles are never visited (dots); {outside} programs land outside of "
            f"the grid and return at once, {len(tiles) - outside - len(first.keys() & _inside(tile_rows, tile_cols))} "
            "repeat a tile"
        )
    return "\n".join(lines)


def _inside(tile_rows: int, tile_cols: int) -> set[tuple[int, int]]:
    return {(row, col) for row in range(tile_rows) for col in range(tile_cols)}
