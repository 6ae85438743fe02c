"""Before the Mosaic GPU kernel: the rows of x as TMA can read them, and which expert each tile row has.

TMA reads boxes of equally strided rows, so an expert's tokens have to lie one below the other. Two ways:

- More than TOKENS tokens: `sort_rows` copies the rows of x, a row a slot, so that an expert's lie together in as few
  groups of 8 rows as they fill. TMA's boxes start at such a group, so experts of few slots share one, and a tile
  multiplies the others' rows as well, for nothing. Padded to 8 rows or to block_m each, they were a matrix many times
  as large, whose writing back to memory the GEMM had to wait for: 62 MB for 64 tokens of deepseek-v3, 13 now. Three
  launches: slots of each bucket counted and x scaled; the rows that each has; the rows of x copied there. Where even
  that copy would be more than L2 keeps, the last is left out, and the GEMM gathers its rows (`mosaic_config.gathers`).
- Up to TOKENS tokens: `all_tokens` sorts nothing. They are one box, and every active expert's tile multiplies it
  whole: wgmma has 8 columns at least, so the columns of other experts' tokens cost nothing. One launch.

At decode, what surrounds the kernel counts. In jax.numpy the same took XLA 17 to 22 kernels and 4 to 7. Mosaic GPU can
neither gather nor scatter by index, so these kernels are lowered through Triton (`backends.pallas_prepare`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from backends.mosaic_config import (
    TOKENS,
    WORD,
    WORDS_OF,
    gathers,
    reads_all_tokens,
    reads_words,
    scatters,
)
from backends.pallas_prepare import (
    Refs,
    bucket_of,
    count_with_scaling,
    counts_of,
    fill,
    for_slots_of,
    launch,
    rows_of_bucket,
    scale_token,
    scatter,
    span_rows,
)
from backends.pallas_triton_ops import load, store
from backends.triton_launch import power_of_two
from shared.config import Config
from shared.problem import Problem, ceil_div

GROUP = 8
"""Rows that TMA's boxes start at a multiple of: the height of wgmma's tiles in shared memory."""
BOX_CHUNK = 64
"""Tile rows whose boxes a program writes down at a time."""
COPY_CHUNK = 8192
"""Values of a row of x that a program copies at a time."""
NAME = "prepare_mosaic"


class Rows(NamedTuple):
    """What the kernel reads besides the weights. S slots; R tile rows of `tile_height` rows each.

    x           (X, K), the rows of x by expert, or (T, K), those of the tokens, where the kernel gathers them, or
                (TOKENS, K), the same for every tile row
    row_scale   float32 (R * height,), or (TOKENS,), or None: activation scale times routing weight of the rows that
                each tile multiplies
    tile_x      (R, 2) int32: first row of x that each tile multiplies, a multiple of GROUP, or 0 where the kernel
                gathers rows, and how many from there until its last slot. None where every tile row has the same rows
    row_slot    (R * height,) int32: slot of each tile row's rows, -1 for none. None where every tile row has all
                tokens, or rows are neither gathered nor scattered
    tile_expert (R,) or longer, int32: expert of each tile row
    tile_rows   int32, whose last element is how many tile rows have an expert: the first ones
    tile_span   (R, 2) int32, as in `shared.planning.Plan`, for order "popular"; else None
    position    (S,) int32: row of the kernel's output that holds each slot; of no meaning for slots without an expert
    """

    x: jax.Array
    row_scale: jax.Array | None
    tile_x: jax.Array | None
    row_slot: jax.Array | None
    tile_expert: jax.Array
    tile_rows: jax.Array
    tile_span: jax.Array | None
    position: jax.Array


def prepare(
    x: jax.Array, topk_ids: jax.Array, topk_weight: jax.Array | None, popularity: jax.Array | None, k: int,
    problem: Problem, order: str, config: Config, interpret: bool,
) -> Rows:  # fmt: skip
    """Rows for tokens x (T, K), topk_ids and topk_weight (T, top_k), x widened with zeros to k columns.

    popularity: (E,) int32, what order "popular" takes experts by, or None: the slots that each has here
    """
    if not problem.routing_weight:
        topk_weight = None
    if not reads_all_tokens(problem):
        return sort_rows(x, topk_ids, topk_weight, popularity, k, problem, order, config, interpret)
    halves_of = halves(problem, config)
    return all_tokens(x, topk_ids, topk_weight, popularity, k, problem, order, interpret, halves_of)


def sort_rows(
    x: jax.Array, topk_ids: jax.Array, topk_weight: jax.Array | None, popularity: jax.Array | None, k: int,
    problem: Problem, order: str, config: Config, interpret: bool,
) -> Rows:  # fmt: skip
    """The rows that an expert's tiles multiply, one per slot, together or as the kernel gathers them. Arguments as
    `prepare`."""
    popular, gathered, block_m = order == "popular", gathers(problem, config), config.block_m
    counted = count_with_scaling(
        x, topk_ids, problem, name=NAME, interpret=interpret, halves_of=halves(problem, config), together=WORD
    )
    x = counted.pop("x")

    tile_rows = problem.max_tile_rows(block_m)
    # A tile reads whole heights, up to block_m rows, from the group on in which its slots begin.
    x_rows = most_rows(problem) + block_m - GROUP
    sizes = {"position": (problem.slots,), "tile_x": (tile_rows, 2), "tile_expert": (tile_rows,), "tile_rows": (1,)}
    if gathered or scatters(problem, config, interpret=interpret):
        sizes["row_slot"] = (tile_rows * block_m,)
    if not gathered:
        sizes["slot_of"] = (x_rows,)
    if popular:
        sizes["tile_span"] = (tile_rows, 2)
    made = {name: jax.ShapeDtypeStruct(size, jnp.int32) for name, size in sizes.items()}
    given = {"topk_ids": topk_ids.reshape(-1), **counted}
    if popularity is not None:
        given["popularity"] = popularity
    if topk_weight is not None:
        given["topk_weight"] = topk_weight.reshape(-1)
    if problem.scales_x or topk_weight is not None:
        made["row_scale"] = jax.ShapeDtypeStruct((tile_rows * block_m,), jnp.float32)

    rows = launch(
        lambda ref, bucket: sort_bucket(ref, bucket, problem, block_m),
        problem.experts + 1, given, made, name=NAME, num_warps=4, interpret=interpret,
    )  # fmt: skip
    if gathered:
        x = pad_to(x, (problem.tokens, k))
    else:
        x = launch(
            lambda ref, row: copy_row(ref, row, lax.div(ref["slot_of"][row], problem.top_k)),
            x_rows, {"x": x, "slot_of": rows["slot_of"]}, {"sorted": jax.ShapeDtypeStruct((x_rows, k), x.dtype)},
            name=NAME, num_warps=4, interpret=interpret,
        )["sorted"]  # fmt: skip
    return Rows(
        x=x,
        row_scale=rows.get("row_scale"),
        tile_x=rows["tile_x"],
        row_slot=rows.get("row_slot"),
        tile_expert=rows["tile_expert"],
        tile_rows=rows["tile_rows"],
        tile_span=rows.get("tile_span"),
        position=rows["position"],
    )


def halves(problem: Problem, config: Config) -> int:
    """`halves_of` of `backends.pallas_prepare.scale_token`."""
    return WORDS_OF if reads_words(problem, config) else 0


def sort_bucket(ref: Refs, bucket: jax.Array, problem: Problem, block_m: int) -> None:
    """A bucket's tile rows, the rows of x that they multiply, and whose rows these are. Bucket E takes what is unused,
    and its slots have no row. Without "slot_of" rows of x are gathered, so that each tile's begin with its own.
    """
    popular, (max_tile_rows,) = "tile_span" in ref, ref["tile_expert"].shape
    first_row, own_rows, own_count = rows_of_bucket(ref, bucket, problem, block_m, popular=popular)
    every, counts = counts_of(ref, problem)
    first, rows = rows_of_x(every, counts, bucket, problem.experts)
    last = bucket == problem.experts
    # Rows of other experts before it in its first group; a bucket without slots has neither.
    shared = jnp.where(last | (own_count == 0), 0, lax.rem(first, GROUP))
    if "slot_of" not in ref:
        shared = jnp.zeros_like(shared)
    first_position = first_row * block_m + shared

    def put(slot: jax.Array, rank: jax.Array, mine: jax.Array) -> None:
        position = first_position + rank
        scatter(ref["position"], slot, jnp.where(last, 0, position), mine)
        mine &= ~last
        if "row_slot" in ref:
            scatter(ref["row_slot"], position, slot, mine)
        if "slot_of" in ref:
            scatter(ref["slot_of"], first + rank, slot, mine)
        if "row_scale" in ref:
            scale = jnp.ones(slot.shape, jnp.float32)
            if "x_scale" in ref:
                scale = plt.load(ref["x_scale"].at[lax.div(slot, problem.top_k)], mask=mine, other=0.0)
            if "topk_weight" in ref:
                scale *= plt.load(ref["topk_weight"].at[slot], mask=mine, other=0.0)
            scatter(ref["row_scale"], position, scale, mine)

    for_slots_of(ref, bucket, problem, put)

    @pl.when(last)
    def _() -> None:
        ref["tile_rows"][0] = first_row  # those of -1 slots come after all others

    end_row = jnp.where(last, max_tile_rows, first_row + own_rows)
    if popular:
        span_rows(ref, first_row, own_rows, end_row, max_tile_rows)
    fill(ref["tile_expert"], first_row, end_row, jnp.where(last, -1, bucket))
    # A row of no slot holds some token's values, which no one reads; nor what is no slot's scale.
    own = jnp.sum(jnp.where(every == bucket, rows, 0))
    if "row_slot" in ref:
        fill(ref["row_slot"], first_row * block_m, first_position, -1)
        fill(ref["row_slot"], first_position + jnp.where(last, 0, own_count), end_row * block_m, -1)
    if "slot_of" in ref:
        (x_rows,) = ref["slot_of"].shape
        fill(ref["slot_of"], first + jnp.where(last, 0, own_count), jnp.where(last, x_rows, first + own), 0)
    if "row_scale" in ref:
        fill(ref["row_scale"], first_row * block_m, first_position, 0.0)
        fill(ref["row_scale"], first_position + jnp.where(last, 0, own_count), end_row * block_m, 0.0)

    def boxes(chunk: jax.Array, _: None) -> None:
        row = first_row + chunk * BOX_CHUNK + lax.iota(jnp.int32, BOX_CHUNK)
        before = (row - first_row) * block_m  # slots of the expert in its earlier tile rows
        begin = first - shared + before if "slot_of" in ref else jnp.zeros_like(before)
        for column, value in enumerate((begin, shared + jnp.minimum(own_count - before, block_m))):
            target = ref["tile_x"].at[row, jnp.full_like(row, column)]
            plt.store(target, jnp.where(last, 0, value), mask=row < end_row)

    lax.fori_loop(0, lax.div(end_row - first_row + (BOX_CHUNK - 1), BOX_CHUNK), boxes, None)


def copy_row(ref: Refs, row: jax.Array, token: jax.Array) -> None:
    """Row `row` of "sorted" is the token's of "x", with zeros past its last column."""
    size, columns = ref["x"].shape[1], ref["sorted"].shape[1]
    chunk = min(COPY_CHUNK, max(128, power_of_two(columns)))
    for start in range(0, columns, chunk):
        k = start + lax.iota(jnp.int32, chunk)
        store(ref["sorted"], (row, k), load(ref["x"], (token, k), k < size), k < columns)


def rows_of_x(every: jax.Array, counts: jax.Array, bucket: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """Row of x at which the slots of `bucket` begin, and how many rows each has, for the `counts` of buckets `every`.

    Experts have 0, 1, 2, 4 rows or a multiple of GROUP, and those of most come first: so each begins at a multiple of
    what it has, and none of up to GROUP slots is in two groups. Bucket E, `experts`, begins behind them.
    """
    rows = (counts + (GROUP - 1)) & -GROUP
    for few in (4, 2, 1, 0):
        rows = jnp.where(counts <= few, few, rows)
    place = jnp.minimum(rows, GROUP) * experts - every  # of each size, those of the lowest numbers first
    earlier = place > jnp.sum(jnp.where(every == bucket, place, 0))
    return jnp.sum(jnp.where((every < experts) & ((bucket == experts) | earlier), rows, 0)), rows


def most_rows(problem: Problem) -> int:
    """Rows that `rows_of_x` gives out at most, a multiple of GROUP: 16 for 9 slots is the worst ratio, and none of the
    experts has GROUP rows more than slots."""
    experts = min(problem.experts, problem.slots)
    return ceil_div(min(16 * problem.slots // 9, problem.slots + (GROUP - 1) * experts), GROUP) * GROUP


def all_tokens(
    x: jax.Array, topk_ids: jax.Array, topk_weight: jax.Array | None, popularity: jax.Array | None, k: int,
    problem: Problem, order: str, interpret: bool, halves_of: int = 0,
) -> Rows:  # fmt: skip
    """The tokens themselves, for every active expert. Arguments as `prepare`."""
    popular, experts = order == "popular", min(problem.experts, problem.slots)
    given = {"topk_ids": topk_ids.reshape(-1)}
    made = {
        "tile_expert": jax.ShapeDtypeStruct((experts + 1,), jnp.int32),
        "position": jax.ShapeDtypeStruct((problem.slots,), jnp.int32),
    }
    if popular:
        made["tile_span"] = jax.ShapeDtypeStruct((experts, 2), jnp.int32)
        if popularity is not None:
            given["popularity"] = popularity
    copies = problem.scales_x or x.shape != (TOKENS, k)
    if topk_weight is not None:
        given["topk_weight"] = topk_weight.reshape(-1)
    if copies:
        given["x"] = x
        x_name = "scaled" if problem.scales_x else "sorted"
        made[x_name] = jax.ShapeDtypeStruct((TOKENS, k), jnp.dtype(problem.kernel_x_dtype))
    scales = problem.scales_x or topk_weight is not None
    if scales:
        made["row_scale"] = jax.ShapeDtypeStruct((TOKENS,), jnp.float32)

    def kernel(ref: Refs, program: jax.Array) -> None:
        pl.when(program == 0)(lambda: find_active(ref, problem))
        if copies or scales:
            pl.when(program > 0)(lambda: token_row(ref, program - 1, problem, halves_of))

    programs = 1 + (TOKENS if copies or scales else 0)
    rows = launch(kernel, programs, given, made, name=NAME, num_warps=8, interpret=interpret)
    return Rows(
        x=rows[x_name] if copies else x,
        row_scale=rows.get("row_scale"),
        tile_x=None,
        row_slot=None,
        tile_expert=rows["tile_expert"],
        tile_rows=rows["tile_expert"],
        tile_span=rows.get("tile_span"),
        position=rows["position"],
    )


def find_active(ref: Refs, problem: Problem) -> None:
    """The experts that have slots, by number, then -1, and how many they are in the last element of "tile_expert"; the
    row of each slot's token in its expert's tile. From comparisons [other slot, this slot].

    With a "tile_span" experts come by falling popularity. Each has one tile row.
    """
    slots, experts, rows = problem.slots, problem.experts, ref["tile_expert"].shape[0] - 1
    slot = lax.iota(jnp.int32, max(16, power_of_two(slots)))
    valid = slot < slots
    bucket = bucket_of(plt.load(ref["topk_ids"].at[slot], mask=valid, other=-1), experts)
    earlier = (bucket[:, None] == bucket[None, :]) & (slot[:, None] < slot[None, :])
    opens = (bucket < experts) & (jnp.sum(earlier.astype(jnp.int32), axis=0) == 0)
    before = bucket[:, None] < bucket[None, :]
    if "tile_span" in ref:
        heat = jnp.sum((bucket[:, None] == bucket[None, :]).astype(jnp.int32), axis=0)
        if "popularity" in ref:
            heat = plt.load(ref["popularity"].at[bucket], mask=bucket < experts, other=0)
        hotter = (heat[:, None] > heat[None, :]) | ((heat[:, None] == heat[None, :]) & before)
        before = hotter | (bucket[None, :] == experts)
    place = jnp.sum((opens[:, None] & before).astype(jnp.int32), axis=0)
    active = jnp.sum(opens.astype(jnp.int32))
    scatter(ref["tile_expert"], place, bucket, opens)
    row = lax.iota(jnp.int32, max(16, power_of_two(rows + 1)))
    unused = jnp.where(row == rows, active, -1)
    scatter(ref["tile_expert"], row, unused, (row >= active) & (row < rows) | (row == rows))
    if "tile_span" in ref:
        for column, value in enumerate((row, jnp.ones_like(row))):
            plt.store(ref["tile_span"].at[row, jnp.full_like(row, column)], value, mask=row < rows)
    # Slots without an expert have no row; theirs is one that there is.
    position = jnp.minimum(place, rows - 1) * TOKENS + lax.div(slot, problem.top_k)
    scatter(ref["position"], slot, position, valid)


def token_row(ref: Refs, row: jax.Array, problem: Problem, halves_of: int = 0) -> None:
    """A row of the box of all tokens, and its scale: activation scale times routing weight. Zeros behind the last."""
    used = row < problem.tokens

    @pl.when(used)
    def _() -> None:
        scale: Any = scale_token(ref, row, problem, halves_of, WORD) if problem.scales_x else jnp.float32(1)
        if "sorted" in ref:
            copy_row(ref, row, row)
        if "topk_weight" in ref:
            scale *= ref["topk_weight"][row]
        if "row_scale" in ref:
            ref["row_scale"][row] = scale

    @pl.when(jnp.logical_not(used))
    def _() -> None:
        for name in ("scaled", "sorted"):
            if name in ref:
                columns = ref[name].shape[1]
                k = lax.iota(jnp.int32, power_of_two(columns))
                plt.store(ref[name].at[row, k], jnp.zeros(k.shape, ref[name].dtype), mask=k < columns)
        if "row_scale" in ref:
            ref["row_scale"][row] = jnp.float32(0)


def pad_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """array with zeros appended up to `shape`; the array itself where nothing is missing."""
    if array.shape == shape:
        return array
    return jnp.pad(array, [(0, size - have) for size, have in zip(shape, array.shape, strict=True)])
