"""Planning and activation quantisation in jax.numpy, for the JAX backends: static shapes, no host synchronisation.

`shared.planning` and `shared.fp8` are the specification; both functions here trace under `jax.jit`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shared.fp8 import FP8_MAX
from shared.problem import Problem

COUNTING_SLOTS = 2048
"""Up to this many slots a slot's rank is counted by comparing all pairs of slots, which XLA fuses into one small
kernel; past it a stable sort is cheaper than the quadratic comparison."""


class Buckets(NamedTuple):
    """Slots by bucket, an expert or E for those of none; all int32.

    bucket (S,)     bucket of each slot
    rank   (S,)     place of each slot among those of its bucket
    counts (E + 1,) slots of each bucket
    """

    bucket: jax.Array
    rank: jax.Array
    counts: jax.Array


class Plan(NamedTuple):
    """Index arrays, all int32. S = T * top_k slots, R = Problem.max_tile_rows(block_m).

    sorted_slot (R * block_m,)  slot of each row of the sorted, padded matrix; S where the row is padding
    tile_expert (R,)            expert of each tile row; -1 for rows of -1 slots, and past the tile rows in use
    tile_rows   (1,)            tile rows in use
    tile_span   (R, 2)          first tile row of the bucket that each tile row belongs to, and how many it has; past
                                the tile rows in use, (the row itself, 1)
    position    (S,)            row of each slot in the sorted, padded matrix: the inverse of sorted_slot
    first_row   (E + 1,)        first tile row of each bucket
    """

    sorted_slot: jax.Array
    tile_expert: jax.Array
    tile_rows: jax.Array
    tile_span: jax.Array
    position: jax.Array
    first_row: jax.Array


def buckets_of(topk_ids: jax.Array, experts: int) -> Buckets:
    """Buckets of topk_ids (T, top_k), int32; T >= 1."""
    slots = topk_ids.size
    ids = topk_ids.reshape(-1).astype(jnp.int32)
    bucket = jnp.where((ids < 0) | (ids >= experts), experts, ids)
    slot = jnp.arange(slots, dtype=jnp.int32)
    counts = jnp.sum(jnp.arange(experts + 1)[:, None] == bucket[None, :], axis=1, dtype=jnp.int32)
    if slots <= COUNTING_SLOTS:
        earlier = (bucket[None, :] == bucket[:, None]) & (slot[None, :] < slot[:, None])
        rank = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    else:
        order = jnp.argsort(bucket, stable=True)
        first_slot = jnp.cumsum(counts, dtype=jnp.int32) - counts
        rank = jnp.zeros(slots, jnp.int32).at[order].set(slot, unique_indices=True) - first_slot[bucket]
    return Buckets(bucket, rank, counts)


def plan(
    topk_ids: jax.Array, experts: int, block_m: int, *, popular: bool = False, popularity: jax.Array | None = None
) -> Plan:
    """Plan for topk_ids (T, top_k), int32, each in [-1, E): `shared.planning.plan` plus the inverse `position`.

    popular: number tile rows by falling popularity of their experts, `popularity` (E,) int32, or with None the slot
             counts of this routing.

    Slots are ranked inside their bucket (an expert, or bucket E for -1) and each bucket starts at a multiple of
    block_m. T >= 1.
    """
    return plan_of(buckets_of(topk_ids, experts), block_m, popular=popular, popularity=popularity)


def plan_of(of_slots: Buckets, block_m: int, *, popular: bool = False, popularity: jax.Array | None = None) -> Plan:
    """As `plan`, for slots whose buckets are known."""
    bucket, rank, counts = of_slots
    slots, experts = bucket.size, counts.size - 1
    max_tile_rows = Problem(tokens=slots, experts=experts, n=1, k=1, top_k=1).max_tile_rows(block_m)
    slot = jnp.arange(slots, dtype=jnp.int32)

    # Sums over the last axis, the running sum over buckets too: XLA fuses each with what leads up to it.
    buckets = jnp.arange(experts + 1, dtype=jnp.int32)
    rows = (counts + (block_m - 1)) // block_m
    before = buckets[None, :] < buckets[:, None]  # [b, other]: other's tile rows come before b's
    if popular:
        heat = counts if popularity is None else jnp.append(popularity.astype(jnp.int32), 0)
        hotter = (heat[None, :] > heat[:, None]) | ((heat[None, :] == heat[:, None]) & before)
        before = jnp.where(buckets[:, None] == experts, before, hotter & (buckets[None, :] < experts))
    first_row = jnp.sum(jnp.where(before, rows[None, :], 0), axis=1, dtype=jnp.int32)
    last_row = first_row + rows

    position = first_row[bucket] * block_m + rank
    sorted_slot = jnp.full(max_tile_rows * block_m, slots, jnp.int32).at[position].set(slot, unique_indices=True)
    row = jnp.arange(max_tile_rows, dtype=jnp.int32)
    holds = (first_row[None, :] <= row[:, None]) & (row[:, None] < last_row[None, :])  # (R, E + 1)
    tile_expert = jnp.sum(jnp.where(holds[:, :experts], buckets[:experts] + 1, 0), axis=1, dtype=jnp.int32) - 1
    tile_rows = jnp.sum(rows, dtype=jnp.int32, keepdims=True)
    span = jnp.stack(
        [jnp.sum(jnp.where(holds, of[None, :], 0), axis=1, dtype=jnp.int32) for of in (first_row, rows)], 1
    )
    unused = jnp.stack([row, jnp.ones_like(row)], 1)
    tile_span = jnp.where((row < tile_rows)[:, None], span, unused)
    return Plan(sorted_slot, tile_expert, tile_rows, tile_span, position, first_row)


def quantise_tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x (T, K), float16 or bfloat16 -> e4m3 (T, K) and float32 scales (T,): the bytes of `shared.fp8.quantise_token`.

    The largest magnitude is taken on the float32 bits, which order as the values do: no flushing of subnormals can
    change a scale. A row with a value that is not finite gets scale NaN and 0 for that value.
    """
    values = x.astype(jnp.float32)
    magnitude = jax.lax.bitcast_convert_type(values, jnp.int32) & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    amax = jnp.max(jnp.where(finite, magnitude, 0), axis=1)
    exponent = (amax >> 23) - 127 - 8 + ((amax & 0x7FFFFF) > 0x600000)
    exponent = jnp.where(amax == 0, 0, jnp.maximum(exponent, -100))
    scaled = jnp.where(finite, values * _power_of_two(-exponent)[:, None], 0)
    q = jnp.clip(scaled, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)
    return q, jnp.where(jnp.all(finite, axis=1), _power_of_two(exponent), jnp.nan)


def scale_tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x (T, K), bfloat16 -> float16 (T, K) and float32 scales (T,): the bytes of `shared.fp8.scale_token`."""
    values = x.astype(jnp.float32)
    magnitude = jax.lax.bitcast_convert_type(values, jnp.int32) & 0x7FFFFFFF
    amax = jnp.max(jnp.where(magnitude < 0x7F800000, magnitude, 0), axis=1)
    exponent = jnp.where(amax == 0, 0, jnp.maximum((amax >> 23) - 127 - 14, -100))
    return (values * _power_of_two(-exponent)[:, None]).astype(jnp.float16), _power_of_two(exponent)


def prepare_tokens(x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array | None]:
    """x as the GEMM kernel reads it, and its scales (T,) where `problem.scales_x`."""
    if problem.quantises_x:
        return quantise_tokens(x)
    return scale_tokens(x) if problem.scales_x else (x, None)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent in float32, exact, for int32 exponents of normal numbers (-126 to 127)."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
