"""Planning: slots sorted by expert, each expert's padded to block_m, and the tile rows listed.

This NumPy version is the specification; the backends plan on the device, with the same static shapes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from shared.problem import Problem, ceil_div


@dataclasses.dataclass(frozen=True)
class Plan:
    """Index arrays, all int32. S = T * top_k slots, R = Problem.max_tile_rows(block_m).

    sorted_slot (R * block_m,)  slot of each row of the sorted, padded matrix; S where the row is padding
    tile_expert (R,)            expert of each tile row; -1 for rows of -1 slots, and past the tile rows in use
    tile_rows   (1,)            tile rows in use
    tile_span   (R, 2)          first tile row of the expert (or of the -1 slots) that each tile row belongs to, and how
                                many it has; past the tile rows in use, (the row itself, 1)
    """

    sorted_slot: np.ndarray
    tile_expert: np.ndarray
    tile_rows: np.ndarray
    tile_span: np.ndarray


def plan(topk_ids: np.ndarray, experts: int, block_m: int, popularity: np.ndarray | None = None) -> Plan:
    """Plan for topk_ids (T, top_k), int, each in [-1, E). Within an expert, slots keep their order; -1 slots come last.

    popularity: (E,) int32, for tile order `popular`: experts come by falling popularity, equal ones by number. Slot
                counts of this routing (`expert_counts`) or of earlier steps. None: experts come by number.
    Tile rows of -1 slots are in use: they are where the output's zero rows are written.
    """
    ids = topk_ids.reshape(-1)
    slots = ids.size
    max_tile_rows = _max_tile_rows(slots, experts, block_m)
    sorted_slot = np.full(max_tile_rows * block_m, slots, np.int32)
    tile_expert = np.full(max_tile_rows, -1, np.int32)
    tile_span = np.stack([np.arange(max_tile_rows), np.ones(max_tile_rows)], axis=1).astype(np.int32)
    by_popularity = range(experts) if popularity is None else np.argsort(-popularity.astype(np.int64), kind="stable")
    row = 0
    for bucket in [*by_popularity, -1]:
        members = np.flatnonzero(ids == bucket)
        sorted_slot[row * block_m : row * block_m + members.size] = members
        rows = ceil_div(members.size, block_m)
        tile_expert[row : row + rows] = bucket
        tile_span[row : row + rows] = row, rows
        row += rows
    return Plan(sorted_slot, tile_expert, np.array([row], np.int32), tile_span)


def expert_counts(topk_ids: np.ndarray, experts: int) -> np.ndarray:
    """Slots per expert, (E,), int64; -1 slots are not counted."""
    ids = topk_ids.reshape(-1)
    return np.bincount(ids[ids >= 0], minlength=experts)


def tile_rows_in_use(counts: np.ndarray, block_m: int) -> int:
    """Tile rows that experts with these slot counts fill."""
    return int(np.sum(-(-np.asarray(counts) // block_m)))


def _max_tile_rows(slots: int, experts: int, block_m: int) -> int:
    return Problem(tokens=slots, experts=experts, n=1, k=1, top_k=1).max_tile_rows(block_m)
