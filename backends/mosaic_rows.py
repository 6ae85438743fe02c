"""Before the Mosaic GPU kernel: the rows of x as TMA can read them, and which expert each tile row has.

TMA reads boxes of equally strided rows, so an expert's tokens have to lie one below the other. Two ways:

- More than TOKENS tokens: `sort_rows` copies the rows of x, a row a slot, so that an expert's lie together in as few
  groups of 8 rows as they fill. TMA's boxes start at such a group, so experts of few slots share one, and a tile
  multiplies the others' rows as well, for nothing. Padded to 8 rows or to block_m each, they were a matrix many times
  as large, whose writing back to memory the GEMM had to wait for: 62 MB for 64 tokens of deepseek-v3, 13 now.
- Up to TOKENS tokens: `all_tokens` copies nothing. They are one box, and every active expert's tile multiplies it
  whole: wgmma has 8 columns at least, so the columns of other experts' tokens cost nothing. No slot is ranked.

At decode, what surrounds the kernel counts: XLA launches 14 kernels and more for the first way, four for the second.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from backends import jax_plan
from shared.config import Config
from shared.problem import Problem, ceil_div

TOKENS = 8
"""Tokens that lie in one box, and the rows of that box: wgmma's least number of columns."""
GROUP = 8
"""Rows that TMA's boxes start at a multiple of: the height of wgmma's tiles in shared memory."""
EXPERTS = 1024
"""`all_tokens` counts the active experts before another one in words of 32 bits; up to so many experts."""


class Rows(NamedTuple):
    """What the kernel reads besides the weights. S slots; R tile rows of `tile_height` rows each.

    x           (X, K), the rows of x by expert, or (TOKENS, K), the same for every tile row
    row_scale   float32 (R * height,), or (TOKENS,), or None: activation scale times routing weight of the rows that
                each tile multiplies
    tile_x      (R, 2) int32: first row of x that each tile multiplies, a multiple of GROUP, and how many from there
                until its last slot; None where every tile row has the same rows
    tile_expert (R,) or longer, int32: expert of each tile row
    tile_rows   int32, whose last element is how many tile rows have an expert: the first ones
    tile_span   (R, 2) int32, as in `shared.planning.Plan`, for order "popular"; else None
    position    (S,) int32: row of the kernel's output that holds each slot; of no meaning for slots without an expert
    """

    x: jax.Array
    row_scale: jax.Array | None
    tile_x: jax.Array | None
    tile_expert: jax.Array
    tile_rows: jax.Array
    tile_span: jax.Array | None
    position: jax.Array


def reads_all_tokens(problem: Problem) -> bool:
    """Whether every tile reads all tokens.

    A token in two columns of one tile, with two routing weights, cannot be: so not where top_k weights meet a token.
    """
    one_weight = not problem.routing_weight or problem.top_k == 1
    return problem.tokens <= TOKENS and problem.experts <= EXPERTS and one_weight


def tile_height(problem: Problem, config: Config) -> int:
    """Rows of an output tile."""
    return TOKENS if reads_all_tokens(problem) else config.block_m


def prepare(x, topk_ids, topk_weight, popularity, k: int, problem: Problem, order: str, config: Config) -> Rows:
    """Rows for tokens x (T, K) and topk_ids (T, top_k), x widened with zeros to k columns."""
    x, x_scale = jax_plan.prepare_tokens(x, problem)
    weight = None if topk_weight is None else topk_weight.reshape(-1)
    if reads_all_tokens(problem):
        return all_tokens(x, x_scale, topk_ids, weight, popularity, k, problem, order)
    return sort_rows(x, x_scale, topk_ids, weight, popularity, k, problem, order, config)


def sort_rows(x, x_scale, topk_ids, weight, popularity, k, problem: Problem, order: str, config: Config) -> Rows:
    """One row per slot, those of an expert together. Arguments as `prepare`; x_scale (T,), weight (S,) or None."""
    popular, block_m = order == "popular", config.block_m
    buckets = jax_plan.buckets_of(topk_ids, problem.experts)
    plan = jax_plan.plan_of(buckets, block_m, popular=popular, popularity=popularity)
    first = first_rows(buckets.counts[:-1])
    # A tile reads whole heights, up to block_m rows, from the group on in which its slots begin.
    x_rows = most_rows(problem) + block_m - GROUP
    slot = jnp.arange(problem.slots, dtype=jnp.int32)
    first_of_slot = first[jnp.minimum(buckets.bucket, problem.experts - 1)]  # of no meaning without an expert
    x_row = jnp.where(buckets.bucket < problem.experts, first_of_slot + buckets.rank, x_rows + slot)
    # A row of no slot holds some token's values, which no one reads. Zeros would cost XLA a kernel more.
    slot_of = jnp.zeros(x_rows, jnp.int32).at[x_row].set(slot, mode="drop", unique_indices=True)

    tile_row = jnp.arange(plan.tile_expert.size, dtype=jnp.int32)
    expert = jnp.maximum(plan.tile_expert, 0)
    before = (tile_row - plan.first_row[expert]) * block_m  # slots of the expert in its earlier tile rows
    from_row = first[expert] // GROUP * GROUP + before
    used = first[expert] % GROUP + jnp.minimum(buckets.counts[expert] - before, block_m)
    tile_x = jnp.where((plan.tile_expert >= 0)[:, None], jnp.stack([from_row, used], 1), 0)
    row_scale = None
    if x_scale is not None or weight is not None:
        rows = tile_x[:, :1] + jnp.arange(block_m, dtype=jnp.int32)
        slots = slot_of[jnp.minimum(rows, x_rows - 1)].reshape(-1)
        row_scale = _product(None if x_scale is None else x_scale[slots // problem.top_k], weight, slots)
    return Rows(
        x=pad_to(x, (problem.tokens, k))[slot_of // problem.top_k],
        row_scale=row_scale,
        tile_x=tile_x,
        tile_expert=plan.tile_expert,
        # Tile rows of -1 slots come after all others.
        tile_rows=jnp.sum(plan.tile_expert >= 0, dtype=jnp.int32, keepdims=True),
        tile_span=plan.tile_span if popular else None,
        position=plan.position + first_of_slot % GROUP,
    )


def first_rows(counts: jax.Array) -> jax.Array:
    """Row at which the slots of each expert begin, for `counts` (E,) of them: int32.

    Experts have 0, 1, 2, 4 rows or a multiple of GROUP, and those of most come first: so each begins at a multiple of
    what it has, and none of up to GROUP slots is in two groups.
    """
    rows = (counts + (GROUP - 1)) & -GROUP
    for few in (4, 2, 1, 0):
        rows = jnp.where(counts <= few, few, rows)
    # Of each size, those of the lowest numbers first.
    place = jnp.minimum(rows, GROUP) * counts.size - jnp.arange(counts.size, dtype=jnp.int32)
    return jnp.sum(jnp.where(place[None, :] > place[:, None], rows[None, :], 0), axis=1, dtype=jnp.int32)


def most_rows(problem: Problem) -> int:
    """Rows that `first_rows` gives out at most, a multiple of GROUP: 16 for 9 slots is the worst ratio, and none of the
    experts has GROUP rows more than slots."""
    experts = min(problem.experts, problem.slots)
    return ceil_div(min(16 * problem.slots // 9, problem.slots + (GROUP - 1) * experts), GROUP) * GROUP


def all_tokens(x, x_scale, topk_ids, weight, popularity, k, problem: Problem, order: str) -> Rows:
    """The tokens themselves, for every active expert; in order "popular", those with the most slots first."""
    token = jnp.arange(problem.slots, dtype=jnp.int32) // problem.top_k
    if order == "popular":
        # An expert that a token names twice may get a second tile row here: the same tokens, so either will do.
        plan = jax_plan.plan(topk_ids, problem.experts, TOKENS, popular=True, popularity=popularity)
        tile_expert, tile_span, tile_row = plan.tile_expert, plan.tile_span, plan.position // TOKENS
        tile_rows = jnp.sum(tile_expert >= 0, dtype=jnp.int32, keepdims=True)
    else:
        tile_expert, tile_row = active_experts(topk_ids.reshape(-1), problem.experts)
        tile_rows, tile_span = tile_expert, None
    scale = _product(x_scale, weight, jnp.arange(problem.tokens))
    return Rows(
        x=pad_to(x, (TOKENS, k)),
        row_scale=None if scale is None else pad_to(scale, (TOKENS,)),
        tile_x=None,
        tile_expert=tile_expert,
        tile_rows=tile_rows,
        tile_span=tile_span,
        position=tile_row * TOKENS + token,
    )


def active_experts(ids: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """Experts that have slots, by number, and each slot's place among them. ids (S,); others than 0 to E - 1 are none.

    Returns (R + 1,) int32, R = min(E, S): the active experts, -1 past them, and how many they are in the last element;
    and (S,) int32. The active experts are bits of E / 32 words, so that any expert's place is found by counting bits,
    which XLA fuses with what reads it: two kernels in all, where sums over experts would be one kernel each.
    """
    ids = ids.astype(jnp.int32)
    valid = (ids >= 0) & (ids < experts)
    ids = jnp.where(valid, ids, 0)
    words = jnp.arange(ceil_div(experts, 32), dtype=jnp.int32)
    here = valid[None, :] & (ids[None, :] // 32 == words[:, None])
    bits = jnp.bitwise_or.reduce(jnp.where(here, jnp.uint32(1) << (ids % 32).astype(jnp.uint32), 0), axis=1)

    def active_before(expert: jax.Array | int) -> jax.Array:
        total = jnp.zeros(jnp.shape(expert), jnp.int32)
        for word in range(words.size):
            first = jnp.clip(jnp.asarray(expert, jnp.int32) - 32 * word, 0, 32)  # so many of its bits, the lowest
            below = jnp.where(
                first == 32, jnp.uint32(0xFFFFFFFF), (jnp.uint32(1) << (first % 32).astype(jnp.uint32)) - 1
            )
            total += jax.lax.population_count(bits[word] & below).astype(jnp.int32)
        return total

    place = active_before(ids)
    row = jnp.arange(min(experts, ids.size) + 1, dtype=jnp.int32)[:, None]
    last = row == row.size - 1
    here = jnp.where(last, place + 1, jnp.where(place == row, ids, -1))
    return jnp.max(jnp.where(valid, here, jnp.where(last, 0, -1)), axis=1), place


def pad_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """array with zeros appended up to `shape`; the array itself where nothing is missing."""
    if array.shape == shape:
        return array
    return jnp.pad(array, [(0, size - have) for size, have in zip(shape, array.shape, strict=True)])


def _product(scale: jax.Array | None, weight: jax.Array | None, slots: jax.Array) -> jax.Array | None:
    """scale times the weights of these slots, either of which may be missing."""
    if weight is None:
        return scale
    weight = weight[jnp.minimum(slots, weight.size - 1)]
    return weight if scale is None else scale * weight
