"""Tile orders: bijections for any grid, and every kernel language's implementation equal to shared/orders.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import backends
from shared import orders
from shared.checks import ArgumentError
from shared.orders import GRID_ORDERS, Tile
from tests.where import HAS_GPU, NUMERICS

SIZES = st.integers(1, 60)
SMALL_SIZES = st.integers(1, 7)  # a grid of up to 49 programs, which the Triton interpreter runs one by one
EXPERT_ROWS = st.lists(st.integers(1, 12), min_size=1, max_size=8)
"""Tile rows of each expert, in the order of the tile rows."""

Walk = Callable[..., list[Tile]]
"""(order, tile_rows, tile_cols, group_m, expert_rows=()) -> tiles, in the order of programs."""


def span_of(expert_rows: Sequence[int], length: int) -> np.ndarray:
    """tile_span (length, 2) of `shared.planning.Plan`."""
    rows = np.array(expert_rows, np.int32)
    used = np.stack([np.repeat(np.cumsum(rows) - rows, rows), np.repeat(rows, rows)], axis=1)
    unused = np.arange(len(used), length)
    return np.concatenate([used, np.stack([unused, np.ones_like(unused)], axis=1)]).astype(np.int32)


def assert_bijection(tiles: list[Tile], tile_rows: int, tile_cols: int) -> None:
    """Each tile of the grid exactly once."""
    assert len(tiles) == tile_rows * tile_cols
    assert set(tiles) == {(row, col) for row in range(tile_rows) for col in range(tile_cols)}


@pytest.mark.parametrize("order", GRID_ORDERS)
@given(tile_rows=SIZES, tile_cols=SIZES, group_m=st.integers(1, 70))
@example(tile_rows=1, tile_cols=8, group_m=8)  # the four grids of a public report on the published mapping
@example(tile_rows=2, tile_cols=3, group_m=2)
@example(tile_rows=4, tile_cols=2, group_m=3)
@example(tile_rows=3, tile_cols=3, group_m=2)
def test_bijection(order: str, tile_rows: int, tile_cols: int, group_m: int) -> None:
    assert_bijection(list(orders.walk(order, tile_rows, tile_cols, group_m)), tile_rows, tile_cols)


@given(tile_rows=SIZES, tile_cols=SIZES)
def test_neighbours_share_what_the_order_is_named_for(tile_rows: int, tile_cols: int) -> None:
    """row walks along a row, column along a column; grouped is row at group_m 1 and column from group_m = rows on."""
    row = list(orders.walk("row", tile_rows, tile_cols))
    column = list(orders.walk("column", tile_rows, tile_cols))
    assert row == sorted(row)
    assert column == sorted(column, key=lambda tile: (tile[1], tile[0]))
    assert list(orders.walk("grouped", tile_rows, tile_cols, 1)) == row
    assert list(orders.walk("grouped", tile_rows, tile_cols, tile_rows)) == column


@given(tile_rows=SIZES, tile_cols=SIZES, group_m=st.integers(1, 20))
def test_grouped_walks_bands(tile_rows: int, tile_cols: int, group_m: int) -> None:
    """Bands of group_m rows one after the other, each column by column."""
    tiles = list(orders.walk("grouped", tile_rows, tile_cols, group_m))
    assert tiles == sorted(tiles, key=lambda tile: (tile[0] // group_m, tile[1], tile[0]))


@given(expert_rows=EXPERT_ROWS, tile_cols=st.integers(1, 12))
@example(expert_rows=[1], tile_cols=1)
@example(expert_rows=[3, 1, 2], tile_cols=5)
def test_popular_walks_expert_by_expert(expert_rows: list[int], tile_cols: int) -> None:
    """A bijection for any number of tile rows an expert; one expert after the other, each down its columns."""
    tiles = list(orders.walk("popular", sum(expert_rows), tile_cols, expert_rows=expert_rows))
    assert_bijection(tiles, sum(expert_rows), tile_cols)
    expert = np.repeat(np.arange(len(expert_rows)), expert_rows)
    assert tiles == sorted(tiles, key=lambda tile: (expert[tile[0]], tile[1], tile[0]))


def test_walks_by_hand() -> None:
    assert list(orders.walk("row", 2, 3)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert list(orders.walk("column", 2, 3)) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    grouped = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert list(orders.walk("grouped", 3, 2, group_m=2)) == grouped
    popular = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert list(orders.walk("popular", 3, 2, expert_rows=[2, 1])) == popular
    assert list(orders.walk("popular", 3, 2)) == list(orders.walk("row", 3, 2)), "one tile row an expert"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("row", -1, 2, 3), "pid: got -1; allowed: 0 to 5"),
        (("column", 6, 2, 3), "pid: got 6; allowed: 0 to 5"),
        (("grouped", 0, 2, 3, 0), "group_m: got 0"),
        (("rows", 0, 2, 3), "order: got 'rows'; known: row, column, grouped, popular; did you mean 'row'"),
        (("popular", 0, 2, 3, 8, [1]), "expert_rows: got [1]; allowed: positive numbers that add up to 2"),
        (("popular", 0, 2, 3, 8, [2, 0]), "expert_rows: got [2, 0]; allowed: positive numbers that add up to 2"),
    ],
)
def test_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        orders.tile(*arguments)
    assert message in str(caught.value)


# The mapping published in 2024


def published(tile_rows: int, tile_cols: int) -> list[Tile]:
    return [orders.published_2024(pid, tile_rows, tile_cols) for pid in range(tile_rows * tile_cols)]


@pytest.mark.parametrize(("tile_rows", "tile_cols", "visited"), [(1, 8, 1), (2, 3, 4), (4, 2, 4)])
def test_published_mapping_is_rejected(tile_rows: int, tile_cols: int, visited: int) -> None:
    tiles = published(tile_rows, tile_cols)
    inside = {(row, col) for row, col in tiles if row < tile_rows and col < tile_cols}
    assert len(inside) == visited
    with pytest.raises(AssertionError):
        assert_bijection(tiles, tile_rows, tile_cols)


@given(size=st.integers(1, 40))
def test_published_mapping_hides_on_square_grids(size: int) -> None:
    assert_bijection(published(size, size), size, size)


@given(tile_rows=SIZES, tile_cols=SIZES)
def test_published_mapping_is_wrong_on_every_other_grid(tile_rows: int, tile_cols: int) -> None:
    right = sorted(published(tile_rows, tile_cols)) == sorted(orders.walk("row", tile_rows, tile_cols))
    assert right == (tile_rows == tile_cols)


@pytest.mark.parametrize(
    ("tokens", "tile_rows", "block_m", "block_n", "percent"),
    [(2, 4, 16, 32, 1.79), (8, 8, 16, 64, 4.02), (64, 13, 64, 64, 4.46), (512, 20, 64, 64, 10.71)],
)
def test_published_coverage(tokens: int, tile_rows: int, block_m: int, block_n: int, percent: float) -> None:
    """E=8, top_k=2, N=14336: what the published kernel wrote of an output filled with NaN, counted here.

    The percentages are those of GPU runs of the kernel as published; tile_rows are the rows in use there.
    """
    experts, n = 8, 14336
    coverage = orders.published_2024_coverage(tokens, 2, experts, n, tile_rows, block_m, block_n)
    assert round(100 * coverage, 2) == percent

    # The same count as a loop over programs and tiles, without sets of pairs.
    grid_m = -(-(tokens * 2 + experts * (block_m - 1)) // block_m)
    grid_n = n // block_n
    seen = np.zeros((tile_rows, grid_n), bool)
    for pid in range(grid_m * grid_n):
        row, col = pid % grid_n, pid // grid_m
        if row < tile_rows and col < grid_n:
            seen[row, col] = True
    assert seen.mean() == pytest.approx(coverage, abs=1e-12)


# Implementations in kernel languages


def triton_walk(
    order: str, tile_rows: int, tile_cols: int, group_m: int, expert_rows: Sequence[int] = ()
) -> list[Tile]:
    """`locate_tile` of backends/triton_kernel.py, inside a kernel that writes down each program's tile."""
    import torch

    from tests import walk_kernel

    count = tile_rows * tile_cols
    device = "cuda" if HAS_GPU else "cpu"
    rows, cols = torch.full((2, count), -1, dtype=torch.int32, device=device)
    rows_in_use = torch.tensor([tile_rows], dtype=torch.int32, device=device)
    span = torch.from_numpy(span_of(expert_rows, tile_rows)).to(device)
    arguments = (rows, cols, rows_in_use, span)
    constants = {"TILE_COLS": tile_cols, "ORDER": order, "GROUP_M": group_m}
    if HAS_GPU:
        walk_kernel.walk_kernel[(count,)](*arguments, **constants)
    else:
        from triton.runtime.interpreter import InterpretedFunction

        from backends import triton_interpreter

        compiled = walk_kernel.locate_tile
        with triton_interpreter.interpreting():
            walk_kernel.locate_tile = triton_interpreter.shipped().locate_tile
            try:
                InterpretedFunction(walk_kernel.walk_kernel.fn)[(count,)](*arguments, **constants)
            finally:
                walk_kernel.locate_tile = compiled
    return list(zip(rows.tolist(), cols.tolist(), strict=True))


def jax_walk(locate: Callable[..., Any]) -> Walk:
    def walk(order: str, tile_rows: int, tile_cols: int, group_m: int, expert_rows: Sequence[int] = ()) -> list[Tile]:
        import jax
        import jax.numpy as jnp

        count = tile_rows * tile_cols
        with jax.default_device(jax.devices("cpu")[0]):
            # Always the same lengths, so that JAX compiles each operation once for all grids.
            span = jnp.asarray(span_of(expert_rows, 100))
            one = lambda pid: locate(order, pid, jnp.int32(tile_rows), tile_cols, group_m, span)  # noqa: E731
            rows, cols = jax.vmap(one)(jnp.arange(60 * 60, dtype=jnp.int32))
        return list(zip(rows[:count].tolist(), cols[:count].tolist(), strict=True))

    return walk


def pallas_triton_walk(order: str, *grid: Any) -> list[Tile]:
    locate = backends.load("pallas-triton").locate_tile  # type: ignore[attr-defined]
    return jax_walk(lambda o, pid, rows, cols, g, span: locate(pid, rows, cols, o, g, span))(order, *grid)


def pallas_mosaic_walk(order: str, *grid: Any) -> list[Tile]:
    return jax_walk(backends.load("pallas-mosaic")._tile)(order, *grid)  # type: ignore[attr-defined]


WALKS: dict[str, Walk] = {
    "torch-triton": triton_walk,
    "jax-triton": triton_walk,
    "pallas-triton": pallas_triton_walk,
    "pallas-mosaic": pallas_mosaic_walk,
}


def test_every_backend_has_its_order_tested() -> None:
    assert set(WALKS) == set(backends.BACKENDS)


@NUMERICS
@pytest.mark.parametrize("order", GRID_ORDERS)
@given(tile_rows=SMALL_SIZES, tile_cols=SMALL_SIZES, group_m=st.integers(1, 9))
@example(tile_rows=1, tile_cols=8, group_m=8)
@example(tile_rows=2, tile_cols=3, group_m=2)
@example(tile_rows=4, tile_cols=2, group_m=3)
@settings(max_examples=15)
def test_triton_equals_specification(order: str, tile_rows: int, tile_cols: int, group_m: int) -> None:
    assert triton_walk(order, tile_rows, tile_cols, group_m) == list(orders.walk(order, tile_rows, tile_cols, group_m))


@pytest.mark.parametrize("backend", ["pallas-triton", "pallas-mosaic"])
@pytest.mark.parametrize("order", GRID_ORDERS)
@given(tile_rows=SIZES, tile_cols=SIZES, group_m=st.integers(1, 70))
@example(tile_rows=1, tile_cols=8, group_m=8)
@settings(max_examples=25)
def test_pallas_equals_specification(backend: str, order: str, tile_rows: int, tile_cols: int, group_m: int) -> None:
    walked = WALKS[backend](order, tile_rows, tile_cols, group_m)
    assert walked == list(orders.walk(order, tile_rows, tile_cols, group_m))


@NUMERICS
@given(expert_rows=st.lists(st.integers(1, 4), min_size=1, max_size=4), tile_cols=st.integers(1, 4))
@example(expert_rows=[3, 1, 2], tile_cols=3)
@settings(max_examples=15)
def test_triton_equals_specification_of_popular(expert_rows: list[int], tile_cols: int) -> None:
    assert_popular(triton_walk, expert_rows, tile_cols)


@pytest.mark.parametrize("backend", ["pallas-triton", "pallas-mosaic"])
@given(expert_rows=EXPERT_ROWS, tile_cols=st.integers(1, 30))
@example(expert_rows=[3, 1, 2], tile_cols=3)
@settings(max_examples=25)
def test_pallas_equals_specification_of_popular(backend: str, expert_rows: list[int], tile_cols: int) -> None:
    assert_popular(WALKS[backend], expert_rows, tile_cols)


def assert_popular(walk: Walk, expert_rows: list[int], tile_cols: int) -> None:
    tile_rows = sum(expert_rows)
    specified = list(orders.walk("popular", tile_rows, tile_cols, expert_rows=expert_rows))
    assert walk("popular", tile_rows, tile_cols, 1, expert_rows) == specified


@NUMERICS
@pytest.mark.parametrize(("tile_rows", "tile_cols"), [(1, 8), (2, 3), (4, 2), (3, 3)])
def test_triton_has_the_published_mapping_as_it_was(tile_rows: int, tile_cols: int) -> None:
    assert triton_walk("published-2024", tile_rows, tile_cols, 1) == published(tile_rows, tile_cols)
