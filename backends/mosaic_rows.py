"""Before the Mosaic GPU kernel: the rows of x as TMA can read them, and which expert each tile row has.

TMA reads boxes of equally strided rows, so an expert's tokens have to lie one below the other. Two ways:

- More than TOKENS tokens: `sort_rows` copies the rows of x into a matrix sorted by expert, each expert's padded to
  block_m. The kernel reads no more groups of 8 rows of it than hold slots.
- Up to TOKENS tokens: `all_tokens` copies nothing. They are one box, and every active expert's tile multiplies it
  whole: wgmma has 8 columns at least, so the columns of other experts' tokens cost nothing. No slot is ranked.

At decode, what surrounds the kernel counts: XLA launches about ten kernels for the first way, four for the second.
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
EXPERTS = 1024
"""`all_tokens` counts the active experts before another one in words of 32 bits; up to so many experts."""


class Rows(NamedTuple):
    """What the kernel reads besides the weights. S slots; R tile rows of `tile_height` rows each.

    x           (R * height, K), or (TOKENS, K), the same for every tile row
    row_scale   float32, as long as x, or None: activation scale times routing weight
    sorted_slot (R * height,) int32, slot of each row of x, S where it is padding: an expert's slots come first in its
                tile rows; None where every tile row has the same rows
    tile_expert (R,) or longer, int32: expert of each tile row
    tile_rows   int32, whose last element is how many tile rows have an expert: the first ones
    tile_span   (R, 2) int32, as in `shared.planning.Plan`, for order "popular"; else None
    position    (S,) int32: row of the kernel's output that holds each slot; of no meaning for slots without an expert
    """

    x: jax.Array
    row_scale: jax.Array | None
    sorted_slot: jax.Array | None
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
    """One row per slot, sorted by expert and padded. Arguments as `prepare`; x_scale (T,), weight (S,) or None."""
    popular = order == "popular"
    plan = jax_plan.plan(topk_ids, problem.experts, config.block_m, popular=popular, popularity=popularity)
    # A row of padding holds some token's values, which no one reads. Zeros would cost XLA a kernel more.
    token = jnp.minimum(plan.sorted_slot // problem.top_k, problem.tokens - 1)
    return Rows(
        x=pad_to(x, (problem.tokens, k))[token],
        row_scale=_product(None if x_scale is None else x_scale[token], weight, plan.sorted_slot),
        sorted_slot=plan.sorted_slot,
        tile_expert=plan.tile_expert,
        # Tile rows of -1 slots come after all others.
        tile_rows=jnp.sum(plan.tile_expert >= 0, dtype=jnp.int32, keepdims=True),
        tile_span=plan.tile_span if popular else None,
        position=plan.position,
    )


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
        sorted_slot=None,
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
