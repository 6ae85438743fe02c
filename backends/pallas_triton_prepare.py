"""What comes before the GEMM kernel of `pallas_triton`: the plan and, where `Problem.scales_x`, the scaling of x.

    few slots   one launch:   program 0 plans (`plan_slots`), the others scale a token each (`scale_token`)
    more        two launches: a program a bucket counts its slots (`count_bucket`), beside those that scale tokens;
                              then a program a bucket lists them (`plan_bucket`)

backends/triton_prepare.py is the same in Triton, in the same order of steps; there, programs count all buckets again
instead of waiting for a launch that has, by a histogram, which Pallas does not lower to Triton. Written in jax.numpy,
all this took XLA 7 to 17 kernels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from backends.pallas_prepare import (
    FILL_CHUNK,
    Refs,
    bucket_of,
    count_with_scaling,
    fill,
    for_slots_of,
    launch,
    launch_with_scaling,
    rows_of_bucket,
    scatter,
    span_rows,
)
from backends.triton_launch import FEW_SLOTS, power_of_two
from shared.problem import Problem

NAME = "prepare_pallas_triton"


def prepare(
    x: jax.Array, topk_ids: jax.Array, popularity: jax.Array | None, problem: Problem, block_m: int, *,
    popular: bool, interpret: bool, halves_of: int = 0,
) -> dict[str, jax.Array]:  # fmt: skip
    """What the GEMM kernel reads of x (T, K) and topk_ids (T, top_k) int32, by name.

    sorted_slot, tile_expert, tile_rows, with `popular` also tile_span: as in shared/planning.py. x (T, K) as the kernel
    reads it, and x_scale float32 (T,) where the problem scales x.

    popular: tile rows come by falling popularity of their experts: `popularity` (E,) int32, or None: the slot counts.
    halves_of: block_k where the kernel multiplies even and odd values of K apart, or 0: as `scale_token` has it.
    """
    rows = problem.max_tile_rows(block_m)
    sizes: dict[str, tuple[int, ...]] = {"sorted_slot": (rows * block_m,), "tile_expert": (rows,), "tile_rows": (1,)}
    if popular:
        sizes["tile_span"] = (rows, 2)
    plan = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in sizes.items()}
    if problem.slots <= FEW_SLOTS and not popular:
        return launch_with_scaling(
            lambda ref, _: plan_slots(ref, problem, block_m, interpret),
            1, plan, x, topk_ids, problem, name=NAME, num_warps=8, interpret=interpret, halves_of=halves_of,
        )  # fmt: skip
    counted = count_with_scaling(x, topk_ids, problem, name=NAME, interpret=interpret, halves_of=halves_of)
    given = {"topk_ids": topk_ids.reshape(-1), "counts": counted.pop("counts")}
    if popularity is not None:
        given["popularity"] = popularity
    planned = launch(
        lambda ref, bucket: plan_bucket(ref, bucket, problem, block_m),
        problem.experts + 1, given, plan, name=NAME, num_warps=4, interpret=interpret,
    )  # fmt: skip
    return counted | planned


def plan_slots(ref: Refs, problem: Problem, block_m: int, interpret: bool) -> None:
    """The whole plan by one program, from comparisons [other slot, this slot].

    A slot's rank is how many earlier ones share its bucket. A rank that is a multiple of block_m opens a tile row, so a
    bucket's first tile row is how many slots of the buckets before it open one.
    """
    slots, experts, max_tile_rows = problem.slots, problem.experts, problem.max_tile_rows(block_m)
    slot = lax.iota(jnp.int32, max(16, power_of_two(slots)))
    valid = slot < slots
    ids = plt.load(ref["topk_ids"].at[slot], mask=valid, other=-1)

    # All padding and all that is unused while the ids are on their way; the barrier keeps what is stored later on top.
    plt.store(ref["tile_expert"].at[slot], jnp.full_like(slot, -1), mask=slot < max_tile_rows)  # no more than slots
    for start in range(0, max_tile_rows * block_m, FILL_CHUNK):
        place = start + lax.iota(jnp.int32, FILL_CHUNK)
        plt.store(ref["sorted_slot"].at[place], jnp.full_like(place, slots), mask=place < max_tile_rows * block_m)
    if not interpret:  # whose stores come one after the other
        plt.debug_barrier()

    bucket = bucket_of(ids, experts)
    earlier = (bucket[:, None] == bucket[None, :]) & (slot[:, None] < slot[None, :])
    rank = jnp.sum(earlier.astype(jnp.int32), axis=0)
    opens = valid & (lax.rem(rank, block_m) == 0)
    opener = jnp.where(opens, bucket, experts + 1)
    first_row = jnp.sum((opener[:, None] < bucket[None, :]).astype(jnp.int32), axis=0)

    row = first_row + lax.div(rank, block_m)
    scatter(ref["sorted_slot"], row * block_m + lax.rem(rank, block_m), slot, valid)
    scatter(ref["tile_expert"], row, jnp.where(bucket == experts, -1, bucket), opens)
    ref["tile_rows"][0] = jnp.sum(opens.astype(jnp.int32))


def plan_bucket(ref: Refs, bucket: jax.Array, problem: Problem, block_m: int) -> None:
    """Counting sort of slots by bucket: this bucket's rows. Bucket E takes the -1 slots, and what is unused.

    Slots keep their order, so the plan is the same in every run.
    """
    popular, max_tile_rows = "tile_span" in ref, problem.max_tile_rows(block_m)
    first_row, own_rows, own_count = rows_of_bucket(ref, bucket, problem, block_m, popular=popular)
    first = first_row * block_m

    def place(slot: jax.Array, rank: jax.Array, mine: jax.Array) -> None:
        scatter(ref["sorted_slot"], first + rank, slot, mine)

    for_slots_of(ref, bucket, problem, place)

    last = bucket == problem.experts

    @pl.when(last)
    def _() -> None:
        ref["tile_rows"][0] = first_row + own_rows

    end_row: Any = jnp.where(last, max_tile_rows, first_row + own_rows)
    if popular:
        span_rows(ref, first_row, own_rows, end_row, max_tile_rows)
    fill(ref["tile_expert"], first_row, end_row, jnp.where(last, -1, bucket))
    fill(ref["sorted_slot"], first + own_count, end_row * block_m, problem.slots)
