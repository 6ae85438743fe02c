"""What both Pallas backends do before their GEMM kernel: count the slots of a bucket, say which rows it has, scale x.

Parts of kernels, lowered through Triton, as Mosaic GPU can neither gather nor scatter by index. In XLA the same takes
a kernel for nearly every line. A kernel has the refs it works on as a dict by name; bucket b is expert b, and what has
no expert goes to bucket E.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from backends.pallas_triton_ops import load, store
from backends.triton_launch import ROW_CHUNK, power_of_two
from shared.fp8 import FP8_MAX
from shared.problem import Problem, ceil_div

Refs = dict[str, Any]
FILL_CHUNK = 1024
"""Elements that a program fills at a time."""


_lowered: set[Hashable] = set()


@contextlib.contextmanager
def lowering_through_triton(signature: Hashable = None) -> Iterator[None]:
    """Without JAX 0.11's warning, at every lowering, that it deprecates Pallas's lowering through Triton.

    Nothing else is silenced. A caller's own jax.jit lowers after a call of ours has returned, and shows it. signature:
    what calls share that are lowered once, as a later one should not touch what warnings the process shows; None: such
    calls may be lowered anew.
    """
    if signature in _lowered:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        yield
    if signature is not None:
        _lowered.add(signature)


def signature_of(x: jax.Array, *what: Hashable) -> Hashable:
    """Of a call with `what` in which x is: `lowering_through_triton`'s; None where JAX traces it."""
    return None if isinstance(x, jax.core.Tracer) else (x.sharding, *what)


def launch(
    kernel: Callable[[Refs, jax.Array], None], programs: int, given: dict[str, jax.Array],
    made: dict[str, jax.ShapeDtypeStruct], *, name: str, num_warps: int, interpret: bool,
) -> dict[str, jax.Array]:  # fmt: skip
    """`kernel(refs by name, program)` by so many programs; what it made by name."""
    names = [*given, *made]

    def body(*refs: Any) -> None:
        kernel(dict(zip(names, refs, strict=True)), program_of(programs))

    found = pl.pallas_call(
        body,
        out_shape=list(made.values()),
        grid=(programs,),
        compiler_params=plt.CompilerParams(num_warps=num_warps),
        interpret=interpret,
        name=name,
    )(*given.values())
    return dict(zip(made, found, strict=True))


def launch_with_scaling(
    planner: Callable[[Refs, jax.Array], None], planners: int, made: dict[str, jax.ShapeDtypeStruct], x: jax.Array,
    topk_ids: jax.Array, problem: Problem, *, name: str, num_warps: int, interpret: bool, halves_of: int = 0,
    together: int = 2,
) -> dict[str, jax.Array]:  # fmt: skip
    """So many programs of `planner`, which read "topk_ids", and behind them, where the problem scales x, one a token.

    What was made by name; "x" is x (T, K) as the GEMM kernel reads it, beside "x_scale" float32 (T,) if it was scaled.
    halves_of: as `scale_token` has it.
    """
    given = {"topk_ids": topk_ids.reshape(-1)}
    tokens = 0
    if problem.scales_x:
        given["x"], tokens, num_warps = x, problem.tokens, 8
        made = made | {
            "scaled": jax.ShapeDtypeStruct(x.shape, jnp.dtype(problem.kernel_x_dtype)),
            "x_scale": jax.ShapeDtypeStruct((tokens,), jnp.float32),
        }

    def kernel(ref: Refs, program: jax.Array) -> None:
        pl.when(program < planners)(lambda: planner(ref, program))
        if tokens:

            @pl.when(program >= planners)
            def _() -> None:
                ref["x_scale"][program - planners] = scale_token(ref, program - planners, problem, halves_of, together)

    found = launch(kernel, planners + tokens, given, made, name=name, num_warps=num_warps, interpret=interpret)
    return found | {"x": found.pop("scaled", x)}


def count_with_scaling(
    x: jax.Array, topk_ids: jax.Array, problem: Problem, *, name: str, interpret: bool, halves_of: int = 0,
    together: int = 2,
) -> dict[str, jax.Array]:  # fmt: skip
    """As `launch_with_scaling`, of planners that count: "counts" (E + 1,) int32, the slots of each bucket."""
    buckets = problem.experts + 1
    return launch_with_scaling(
        lambda ref, bucket: count_bucket(ref, bucket, problem),
        buckets, {"counts": jax.ShapeDtypeStruct((buckets,), jnp.int32)}, x, topk_ids, problem,
        name=name, num_warps=4, interpret=interpret, halves_of=halves_of, together=together,
    )  # fmt: skip


def program_of(programs: int) -> jax.Array:
    """This program's number. Programs may run in any order; tests have the interpreter's take theirs the other way."""
    del programs
    return pl.program_id(0)


def bucket_of(ids: jax.Array, experts: int) -> jax.Array:
    """Expert number -> bucket: -1, and what is no expert's number at all, to bucket E, whose rows of y are zeros."""
    return jnp.where((ids < 0) | (ids >= experts), experts, ids)


def slots_at_once(problem: Problem) -> int:
    """Slots that a bucket's program looks at at a time."""
    return 128 if problem.slots <= 128 else 1024


def chunk_of_slots(ref: Refs, chunk: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Numbers of a chunk of slots, and their buckets; bucket -1 past the last slot."""
    slot = chunk * slots_at_once(problem) + lax.iota(jnp.int32, slots_at_once(problem))
    in_range = slot < problem.slots
    ids = plt.load(ref["topk_ids"].at[slot], mask=in_range, other=-1)
    return slot, jnp.where(in_range, bucket_of(ids, problem.experts), -1)


def for_slots_of(
    ref: Refs, bucket: jax.Array, problem: Problem, do: Callable[[jax.Array, jax.Array, jax.Array], None]
) -> None:
    """do(slot, rank, mine) for all slots, some at a time: those of `bucket` are `mine`, and their rank in it."""

    def step(chunk: jax.Array, before: jax.Array) -> jax.Array:
        slot, bucket_of_slot = chunk_of_slots(ref, chunk, problem)
        mine = (bucket_of_slot == bucket).astype(jnp.int32)
        do(slot, before + jnp.cumsum(mine) - 1, mine > 0)
        return before + jnp.sum(mine)

    lax.fori_loop(0, ceil_div(problem.slots, slots_at_once(problem)), step, jnp.int32(0))


def scatter(ref: Any, place: jax.Array, value: jax.Array, mask: jax.Array) -> None:
    """ref[place] = value where the mask is true; places of such elements differ.

    Pallas's interpreter writes masked elements, too: what was there before. So their places must be no others'.
    """
    plt.store(ref.at[jnp.where(mask, place, ref.size)], value.astype(ref.dtype), mask=mask)


def fill(ref: Any, first: jax.Array, end: jax.Array, value: Any) -> None:
    """ref[first:end] = value."""

    def step(chunk: jax.Array, _: None) -> None:
        place = first + chunk * FILL_CHUNK + lax.iota(jnp.int32, FILL_CHUNK)
        plt.store(ref.at[place], jnp.full(FILL_CHUNK, value, ref.dtype), mask=place < end)

    lax.fori_loop(0, lax.div(end - first + (FILL_CHUNK - 1), FILL_CHUNK), step, None)


def count_bucket(ref: Refs, bucket: jax.Array, problem: Problem) -> None:
    """counts[bucket]: this bucket's number of slots."""

    def count(chunk: jax.Array, counted: jax.Array) -> jax.Array:
        _, bucket_of_slot = chunk_of_slots(ref, chunk, problem)
        return counted + jnp.sum((bucket_of_slot == bucket).astype(jnp.int32))

    ref["counts"][bucket] = lax.fori_loop(0, ceil_div(problem.slots, slots_at_once(problem)), count, jnp.int32(0))


def counts_of(ref: Refs, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Numbers of the buckets, a power of two of them, and how many slots each has; 0 past the last bucket."""
    bucket = lax.iota(jnp.int32, max(16, power_of_two(problem.experts + 1)))
    return bucket, plt.load(ref["counts"].at[bucket], mask=bucket <= problem.experts, other=0)


def rows_of_bucket(
    ref: Refs, bucket: jax.Array, problem: Problem, block_m: int, *, popular: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A bucket's first tile row, number of tile rows and number of slots.

    popular: buckets come by falling popularity, ref["popularity"], or where there is none their slots; else by number.
    Bucket E comes last.
    """
    experts = problem.experts
    every, counts = counts_of(ref, problem)
    rows = lax.div(counts + (block_m - 1), block_m)
    before = every < bucket
    if popular:
        heat = counts
        if "popularity" in ref:
            heat = plt.load(ref["popularity"].at[every], mask=every < experts, other=0)
        own_heat = jnp.sum(jnp.where(every == bucket, heat, 0))
        hotter = (heat > own_heat) | ((heat == own_heat) & before)
        before = (every < experts) & ((bucket == experts) | hotter)
    own = every == bucket
    first_row = jnp.sum(jnp.where(before, rows, 0))
    return first_row, jnp.sum(jnp.where(own, rows, 0)), jnp.sum(jnp.where(own, counts, 0))


def span_rows(ref: Refs, first_row: jax.Array, own_rows: jax.Array, end: jax.Array, most: int) -> None:
    """tile_span of the tile rows from first_row to `end`: a bucket's, and behind the last one's those not in use.

    most: tile rows that there are at most
    """

    def step(chunk: jax.Array, _: None) -> None:
        row = first_row + chunk * FILL_CHUNK + lax.iota(jnp.int32, FILL_CHUNK)
        used = row < first_row + own_rows
        for column, value in enumerate((jnp.where(used, first_row, row), jnp.where(used, own_rows, 1))):
            plt.store(ref["tile_span"].at[row, jnp.full_like(row, column)], value, mask=row < end)

    lax.fori_loop(0, ceil_div(most, FILL_CHUNK), step, None)


def scale_token(ref: Refs, token: jax.Array, problem: Problem, halves_of: int = 0, together: int = 2) -> jax.Array:
    """A row of x to e4m3 or float16 by a power of two, ref["x"] to ref["scaled"], whose columns past K become zeros;
    its scale. shared/fp8.py's quantise_token or scale_token, bit for bit.

    A row of one chunk stays in registers; a longer one is read twice. halves_of: 0, or how many values of K, a divisor
    of it, a kernel takes in two products, `together` of its weights at a time: as shared/fp8.py's `place_of`.
    """
    to_fp8, columns = problem.quantises_x, ref["scaled"].shape[1]
    chunk = min(ROW_CHUNK, max(256, power_of_two(columns)))
    k = lax.iota(jnp.int32, chunk)

    def values(start: int) -> jax.Array:
        return load(ref["x"], (token, start + k), start + k < problem.k).astype(jnp.float32)

    starts = range(0, columns, chunk)
    largest = jnp.zeros(chunk, jnp.int32)  # the bits of float32 magnitudes, which order as the values do
    not_finite = jnp.zeros(chunk, jnp.int32)
    for start in starts:
        x = values(start)
        magnitude = _magnitude(x)
        finite = magnitude < 0x7F800000
        largest = jnp.maximum(largest, jnp.where(finite, magnitude, 0))
        not_finite = jnp.where(finite, not_finite, 1)
    amax = jnp.max(largest)

    # For e4m3 the least power of two with amax / scale <= 448 = 1.75 * 2**8, for float16 the one that takes amax to
    # [2**14, 2**15).
    exponent = lax.shift_right_logical(amax, 23) - 127
    exponent += ((amax & 0x7FFFFF) > 0x600000).astype(jnp.int32) - 8 if to_fp8 else -14
    exponent = jnp.where(amax == 0, 0, jnp.maximum(exponent, -100))
    scale = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    inverse = lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)

    for start in starts:
        if len(starts) > 1:
            x = values(start)
        scaled = x * inverse
        if to_fp8:
            scaled = jnp.where(_magnitude(x) < 0x7F800000, jnp.clip(scaled, -FP8_MAX, FP8_MAX), 0.0)
        scaled = scaled.astype(ref["scaled"].dtype)
        if halves_of:
            half = halves_of // 2
            first = start + halves_of * lax.iota(jnp.int32, chunk // halves_of)
            own = together // 2
            for parity, part in enumerate(lax.split(scaled.reshape(chunk // together, 2, own), (1, 1), axis=1)):
                place = first[:, None] + (parity * half + lax.iota(jnp.int32, half))[None, :]
                store(ref["scaled"], (token, place), part.reshape(place.shape), place < columns)
        else:
            store(ref["scaled"], (token, start + k), scaled, start + k < columns)
    if to_fp8:  # e4m3 has no infinity: a row that is not finite becomes NaN by its scale
        scale = jnp.where(jnp.max(not_finite) > 0, jnp.nan, scale)
    return scale


def _magnitude(x: jax.Array) -> jax.Array:
    """The bits of a float32 magnitude."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
