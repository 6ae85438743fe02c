"""Pallas, lowered by Mosaic GPU: the MoE GEMM on Hopper's bulk copies (TMA) and warp-group matrix instruction (wgmma).

    y_rows[r, n] = row_scale[r] * sum_k x_rows[r, k] * w[expert of r's tile, n, k] * w_scale[...]

Thread blocks live as long as the kernel, one to four an SM, P in all; each takes every P-th tile of the tile order. In
a block, one warp-group fetches and one or two multiply. Its tiles' K steps form one stream through a ring of num_stages
stages in shared memory: the fetching warp-group waits until a stage has been read, and fills it with the next step,
which may belong to the next tile. So loads are in flight during a tile's epilogue too: at decode, where a kernel is as
fast as it reads weights, a pipeline that drained at the end of each tile would lose about a memory latency per tile.

wgmma's left operand has 64 rows at least, its right one a multiple of 8 columns. The weights (block_n x block_k) are
the left one, of which each multiplying warp-group has its share of the channels; the tokens, far fewer, the right one,
read through a transposed view. A tile multiplies the least of a few heights (8, 16, 32 ... rows) that has all its
slots, so a tall tile costs shared memory, not arithmetic: with block_m above an expert's slots, its weights are read
once.

Two warp-groups that multiply share a tile's channels, or (ping_pong) take the block's tiles in turn, whole ones: one
scales and stores its tile while the other multiplies. The ring is one for both. Its stages come in the order of the
tiles, so each starts when the other's last steps are being read, and needs no signal from it. A barrier's waiter has to
see each of its phases, so each warp-group has `filled` barriers of its own for the same stages.

TMA reads and writes boxes of equally strided rows, and the slots of a tile lie anywhere. So its rows of x are put one
below the other beforehand (`mosaic_rows`), or the fetching warp-group's threads gather them where that copy would be
large (`mosaic_threads`): the barrier is told of a step's rows some steps after they were asked for. The multiplying
warp-groups' threads store rows of y to their slots; those of -1 slots, which no tile has, the fetching one clears.
Where N is no multiple of 8, and where parts of K are added in memory, tiles are stored whole instead, and each slot's
row is taken out of them afterwards: by XLA, or the kernel that adds up parts of K.

TMA fills what lies past K with zeros and drops what lies past N. It needs K to be a multiple of 16 bytes, N of 8, and
neither smaller than the block; where they are not so, the weights are copied into a padded array on each call, which is
slow and there for correctness alone. Where K is no multiple of 128 bytes, as gpt-oss's 2880 in FP8, a step's weights
come in several copies, a column of 128 bytes each (`mosaic_copies`), and x, which is copied anyway, is widened.

K split in 2, 4 or 8 parts ("two-pass", tiles of up to 32 rows, N a multiple of 8) is divided among the thread blocks
of a cluster, which take the same tiles, each its own part of K. At a tile's end each block adds up a share of the
channels: it gets all blocks' float32 sums of these in its shared memory (st.async, `mosaic_threads`), adds them in the
order of the parts and stores them to their slots. No sum goes through memory, and none waits for a second kernel.
Before a block sends those of the next tile, every block of the cluster has read what it got of this one.

Any other split K makes each tile several items of the queue: all first parts, then all second parts, and so on. So the
tiles in flight together are those that the order puts together, and the last parts, which may have fewer steps, even
out the queue's end. Float32 parts are stored apart and added by a kernel of their own (`pallas_triton_rows`,
"two-pass"), or TMA adds them to what memory holds.

L2 is told to evict weights first where x and y take little of it (`mosaic_copies`): at decode each is read once.

fp8-w8a16 widens its weights in registers, from where wgmma can read its left operand: they cost no second trip through
shared memory. Each thread reads four at a time, side by side along K, where a matrix instruction wants two: x comes in
the order that makes up for it. Block scales multiply the sum of each step in float32, outside the matrix instruction.

Sources: the CUDA PTX manual (wgmma, cp.async.bulk.tensor, st.async), JAX's Pallas documentation for Mosaic GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from backends import mosaic_config, mosaic_copies, mosaic_interpreter, mosaic_rows, mosaic_threads
from backends.compiled import Compiled
from backends.mosaic_config import (
    COMPUTE_REGISTERS,
    FETCH_REGISTERS,
    REGISTERS_OF_THREE,
    WORD,
    WORDS_OF,
    adds_in_cluster,
    blocks_per_sm,
    column_width,
    evicts_weights_first,
    gathers,
    heights_up_to,
    output_shape,
    reads_all_tokens,
    reads_words,
    registers_of_thread,
    round_up,
    scatters,
    shared_bytes,
    sharing_groups,
    sum_dtype,
    tile_height,
    weight_pieces,
)
from backends.mosaic_rows import GROUP, pad_to
from backends.pallas_prepare import lowering_through_triton, signature_of
from backends.pallas_triton_rows import reduce_parts
from backends.registry import BackendUnavailable
from shared.config import Config
from shared.problem import SCALE_BLOCK, Problem, ceil_div

NAME = "pallas-mosaic"
FRAMEWORK = "jax"
KERNEL_NAME = "moe_gemm_mosaic"

INTERPRETER_BLOCKS = 3
"""Thread blocks in the interpreter: enough that tiles are shared out unevenly, few enough to be quick."""
ROW_ALIGNMENT = 16
"""Bytes: TMA's rows start at multiples of this."""
EARLY_ROWS = 32
"""Rows of a tile whose scales and slots are read before its stream: each thread holds a quarter of the scales
meanwhile, and a slot for every 16 bytes that it is to store."""
_NO_POLICY = mosaic_copies.install()
"""Why weights cannot be evicted first here, nor copied by columns; None where they can."""
_interpreting = threading.Lock()
"""Mosaic's interpreter keeps its memory in one place for the whole process: one call at a time."""


class Tile(NamedTuple):
    """An output tile, or one part of its K; each an int32."""

    row: jax.Array
    col: jax.Array
    part: jax.Array  # which of the parts of K
    expert: jax.Array
    x_row: jax.Array  # first row of x
    height: jax.Array  # index of the least of the kernel's heights that has all its slots


def unavailable(*, interpret: bool) -> str | None:
    """None where the backend can run; else why not, and what to do about it."""
    if interpret:
        return mosaic_interpreter.too_few()
    if _NO_POLICY:
        return _NO_POLICY
    try:
        return _not_hopper(jax.devices("gpu")[0])
    except RuntimeError:
        return "JAX sees no GPU: install jax[cuda13] on a machine with a Hopper GPU, or pass interpret=True"


def _not_hopper(device: jax.Device) -> str | None:
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        return (
            f"{device.device_kind} has compute capability {capability} and this kernel's wgmma instructions exist on "
            "9.0 (Hopper) alone: use another backend or a Hopper GPU"
        )
    return None


def unsupported(problem: Problem, config: Config) -> str | None:
    return mosaic_config.unsupported(problem, config)


def moe_gemm(
    x: jax.Array,
    w: jax.Array,
    topk_ids: jax.Array,
    w_scale: jax.Array | None,
    topk_weight: jax.Array | None,
    *,
    problem: Problem,
    order: str,
    config: Config,
    interpret: bool = False,
    fill: float | None = None,
    popularity: jax.Array | None = None,
) -> jax.Array:
    """y (T, top_k, N) in the dtype of x; arguments as in `shared.problem`, checked by the caller, T >= 1.

    fill:       what the kernel's output buffer holds beforehand (tests pass NaN, so that an unwritten element shows).
                Where the parts of a split K are added up in that buffer, it holds zeros and nothing else.
    popularity: (E,) int32, read by order "popular" alone; None: the slot counts of this call.
    Traceable by `jax.jit`; plans, gathers and, for fp8-w8a8, quantises x on the device.
    """
    refusal = mosaic_interpreter.too_few() if interpret else _NO_POLICY
    if refusal:
        raise BackendUnavailable(f"backend {NAME} cannot run: {refusal}")
    if not interpret and not isinstance(x, jax.core.Tracer) and (refusal := _not_hopper(next(iter(x.devices())))):
        raise BackendUnavailable(f"backend {NAME} cannot run on {next(iter(x.devices()))}: {refusal}")
    blocks = INTERPRETER_BLOCKS if interpret else _sms(x) * blocks_per_sm(problem, config)
    # As an array: a NaN equals nothing, so as a static argument it would be traced anew on every call.
    fill_value = None if fill is None else jnp.asarray(fill, x.dtype)
    arrays = x, w, topk_ids, w_scale, topk_weight, popularity, fill_value
    filled, given = fill is not None, popularity is not None
    with lowering_through_triton(signature_of(x, NAME, problem, order, config, blocks, filled, given)):
        if interpret and not isinstance(x, jax.core.Tracer):
            with _interpreting:
                return jax.block_until_ready(_moe_gemm(*arrays, problem, order, config, interpret, blocks))
        return _moe_gemm(*arrays, problem, order, config, interpret, blocks)


@functools.partial(jax.jit, static_argnames=("problem", "order", "config", "interpret", "blocks"))
def _moe_gemm(x, w, topk_ids, w_scale, topk_weight, popularity, fill, problem, order, config, interpret, blocks):
    k = max(round_up(problem.k, ROW_ALIGNMENT // problem.w_itemsize), config.block_k)
    n = max(round_up(problem.n, 8), config.block_n)
    x_columns = k
    if interpret:
        x_columns = round_up(k, config.block_k)  # whose rows end with the last step
    elif not gathers(problem, config):  # TMA's end with the last column
        x_columns = round_up(k, column_width(config.block_k, problem.x_itemsize) // problem.x_itemsize)
    rows = mosaic_rows.prepare(x, topk_ids, topk_weight, popularity, x_columns, problem, order, config, interpret)
    w = pad_to(w, (problem.experts, n, k))
    if problem.scale_layout == "channel":
        w_scale = pad_to(w_scale, (problem.experts, problem.tile_cols(config.block_n) * config.block_n))
    gemm = _kernel(problem, order, config, blocks, interpret)
    scattered = scatters(problem, config, interpret=interpret)
    y_rows = gemm(*rows[:-1], w, w_scale, topk_ids.reshape(-1) if scattered else None, fill=fill)
    if scattered:
        return y_rows[:, : problem.n].reshape(problem.tokens, problem.top_k, problem.n)
    if config.reduction_of(problem.k) == "two-pass":
        arrays = {"sums": y_rows, "position": rows.position, "topk_ids": topk_ids.reshape(-1)}
        y_before = None if fill is None else jnp.full((problem.slots, problem.n), fill, problem.activation)
        y = reduce_parts(arrays, problem, y_before, interpret, name=f"{KERNEL_NAME}_reduce")
        return y.reshape(problem.tokens, problem.top_k, problem.n)
    # One matrix, or in the interpreter one for each part of K.
    slot_rows = [part[rows.position, : problem.n] for part in y_rows.reshape(-1, *y_rows.shape[-2:])]
    y = functools.reduce(jnp.add, slot_rows).astype(problem.activation)
    y = y.reshape(problem.tokens, problem.top_k, problem.n)
    has_expert = (topk_ids >= 0) & (topk_ids < problem.experts)
    return jnp.where(has_expert[:, :, None], y, 0)


def _kernel(problem: Problem, order: str, config: Config, blocks: int, interpret: bool) -> Callable:
    """The GEMM by `blocks` thread blocks, in whole clusters: (*`Rows` but its position, w, w_scale, ids) -> y_rows.
    R tile rows, S slots.

    w (E, N, K)   N a multiple of 8, K of 16 bytes, no less than block_n and block_k
    w_scale       float32 or None: (E, tile_cols * block_n) or (E, ceil(N/128), ceil(K/128))
    ids           (S,) int32, the slots' experts, where the kernel scatters; else None
    y_rows        (S, N), each slot's row, where the kernel scatters. Else (R * height, >=N), or, of parts of K that are
                  kept apart, (parts, R * height, >=N): there, what lies past N and rows of no slot are not to be read
    """
    block_n, block_k, stages = config.block_n, config.block_k, config.num_stages
    pieces = weight_pieces(problem, config)
    depth = block_k // pieces
    height = tile_height(problem, config)
    heights = [height] if reads_all_tokens(problem) else heights_up_to(height)
    output = groups, slots, output_rows, group_n = output_shape(problem, config)
    sharers = sharing_groups(config)
    turns = groups // sharers  # tiles in work at once, each by warp-groups of its own
    k_steps = ceil_div(problem.k, block_k)
    tile_cols = problem.tile_cols(block_n)
    parts, steps_per_part = config.parts(problem.k), config.k_steps_per_split(problem.k)
    gathered, scattered = gathers(problem, config), scatters(problem, config, interpret=interpret)
    tile_dtype = sum_dtype(problem, config)
    y_dtype = jnp.dtype(problem.activation) if scattered else tile_dtype
    clustered = adds_in_cluster(problem, config) and not interpret
    members = parts if clustered else 1
    clusters = max(1, blocks // members)
    stored_n = group_n // members  # of a warp-group's channels, those that it stores
    adds_up = parts > 1 and config.reduction != "two-pass"
    # Pallas's interpreter has no adding store. There, parts are kept apart in y_dtype and added afterwards.
    apart = parts > 1 and not clustered and (interpret or not adds_up)
    store_op: Literal["add"] | None = "add" if adds_up else None
    block_scaled = problem.scale_layout == "block"
    widens = problem.dtype == "fp8-w8a16"
    y_transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]
    # A gathered step is told to be there once so many more are under way. The stage of the step that is fetched then is
    # free once the next one has been waited for (wgmma_wait(pieces)), so that one must have been told of.
    lag = 0 if interpret else min(stages // 2, stages - 2)
    trades_registers = registers_of_thread(problem, config) > REGISTERS_OF_THREE

    def body(inputs, y_gmem, x_smem, w_smem, y_smem, filled, freed, *more):
        x_gmem, row_scale_gmem, tile_x_gmem, slot_gmem, expert_gmem, rows_gmem, span_gmem, *others = inputs
        w_gmem, w_scale_gmem, ids_gmem = others
        parts_there, parts_read = more if clustered else (None, None)
        wide_smem = more[0] if widens and interpret else None
        x_transforms, w_transforms = _transforms(block_k, x_gmem), _transforms(depth, w_gmem)
        tile_rows = rows_gmem[rows_gmem.shape[0] - 1]
        tiles = tile_rows * tile_cols
        cluster = lax.axis_index("cluster")
        member = lax.axis_index("part") if clustered else jnp.int32(0)
        group = lax.axis_index("group")
        turn = lax.rem(group, jnp.int32(turns))  # of the tiles that take turns, which is this warp-group's first
        channel = group * group_n if sharers > 1 else 0  # of a tile, the first of this warp-group's
        items = tiles if clustered else tiles * parts
        my_tiles = lax.div(items - cluster + (clusters - 1), jnp.int32(clusters))

        # Locate tile
        def locate(i: jax.Array) -> Tile:
            pid, part = cluster + i * clusters, member
            if parts > 1 and not clustered:
                part = lax.div(pid, tiles)
                pid -= part * tiles
            row, col = _tile(order, pid, tile_rows, tile_cols, config.group_m, span_gmem)
            if early:
                row = jnp.minimum(row, expert_gmem.shape[0] - 1)
            x_row = needed = jnp.int32(0)
            if tile_x_gmem is not None:
                x_row, rows = tile_x_gmem[row, 0], tile_x_gmem[row, 1]
                for h in heights[:-1]:
                    needed += (rows > h).astype(jnp.int32)
            return Tile(row, col, part, expert_gmem[row], x_row, needed)

        # Nothing hides a kernel's first loads. In row order a tile's row does not depend on how many there are, so
        # both are asked for at once. The second condition holds for every tile; it needs the loads, so that the
        # compiler cannot move them behind the branch.
        early = order == "row" and (parts == 1 or clustered)
        first = locate(turn) if early else None
        any_tiles = my_tiles > turn
        if first is not None:
            any_tiles &= first.expert + first.x_row >= first.height - (len(heights) - 1)

        def for_each_tile(
            work: Callable[[jax.Array, Tile, jax.Array], jax.Array], every: int, begin: jax.Array,
            finish: Callable[[jax.Array], None] = lambda at: None,
        ) -> None:  # fmt: skip
            """at = work(i, tile, at) for my tiles, from the turn-th, one of `every`, then finish(at), if there are any.
            The next one is looked up before the work on this one, so that nobody waits for it."""

            def one(step, carry):
                tile, at = carry
                i = turn + step * every
                following = locate(jnp.minimum(i + every, my_tiles - 1))
                return following, work(i, tile, at)

            @pl.when(any_tiles)
            def _():
                count = lax.div(my_tiles - turn + (every - 1), jnp.int32(every))
                _, at = lax.fori_loop(0, count, one, (locate(turn) if first is None else first, begin))
                finish(at)

        def is_filled(i: jax.Array, stage: jax.Array):
            """Barrier of a stage with a K step of the i-th tile."""
            return filled.at[stage if turns == 1 else lax.rem(i, jnp.int32(turns)) * stages + stage]

        def with_height(tile: Tile, do: Callable[[int], jax.Array | None]):
            """do(h) for the least of `heights` that has all slots of the tile: what lies below them is padding."""
            return lax.switch(tile.height, [functools.partial(do, h) for h in heights])

        def x_row(tile: Tile) -> jax.Array | int:
            return 0 if tile_x_gmem is None else pl.multiple_of(tile.x_row, GROUP)

        def scale_row(tile: Tile) -> jax.Array | int:
            return 0 if tile_x_gmem is None else tile.row * height

        def first_step(tile: Tile) -> jax.Array | int:
            return tile.part * steps_per_part if parts > 1 else 0

        def steps_of(tile: Tile) -> jax.Array | int:
            return jnp.minimum(steps_per_part, k_steps - first_step(tile)) if parts > 1 else k_steps

        # Gather rows
        def fetch_tile(i, tile, n):
            """Fill one stage after another with the K steps of a tile, each as soon as it is free; n: steps before."""

            def step(s, n):
                stage = lax.rem(n, jnp.int32(stages))
                k_first = (first_step(tile) + s) * block_k
                k_slice = pl.ds(k_first, block_k)
                columns = pl.ds(tile.col * block_n, block_n)
                plgpu.barrier_wait(freed.at[stage])
                barrier = is_filled(i, stage)
                for c in range(pieces):
                    w_slice = w_gmem.at[tile.expert, columns, pl.ds(k_first + c * depth, depth)]
                    plgpu.copy_gmem_to_smem(w_slice, w_smem.at[stage, c], barrier)

                def copy_x(h: int) -> None:
                    source = x_gmem.at[pl.ds(x_row(tile), h), k_slice]
                    plgpu.copy_gmem_to_smem(source, x_smem.at[stage, pl.ds(0, h)], barrier)

                def gather_x(h: int) -> None:
                    if interpret:

                        def copy_row(r, _):
                            slot = jnp.maximum(slot_gmem[scale_row(tile) + r], 0)
                            x_smem[stage, r] = x_gmem[lax.div(slot, jnp.int32(problem.top_k)), k_slice]

                        lax.fori_loop(0, h, copy_row, None)
                        return
                    first_byte = k_first * x_gmem.dtype.itemsize
                    mosaic_threads.copy_rows(
                        x_gmem, slot_gmem, x_smem.at[stage], scale_row(tile), first_byte, h, problem.top_k, x_transforms
                    )

                with_height(tile, gather_x if gathered else copy_x)
                if gathered:
                    wait_for_rows(n, lag)
                return n + 1

            return lax.fori_loop(0, steps_of(tile), step, n)

        def wait_for_rows(n, pending: int) -> None:
            """The rows of x of all steps up to n but the last `pending` are there: the next in turn is told to be."""
            if not interpret:
                mosaic_threads.commit_and_wait(pending)

            @pl.when(n >= pending)
            def _():
                there = n - pending
                tile = lax.div(there, jnp.int32(k_steps)) if turns > 1 else jnp.int32(0)
                plgpu.barrier_arrive(is_filled(tile, lax.rem(there, jnp.int32(stages))))

        def wait_for_all_rows(n) -> None:
            if gathered:
                for pending in reversed(range(lag)):
                    wait_for_rows(n - 1, pending)

        # Widen
        def widened(weights) -> jax.Array:
            """float16; each WORDS_OF values of K in the order in which a thread reads words of them: as x has them."""
            if not reads_words(problem, config):
                return weights[...].astype(jnp.float16)
            if not interpret:
                return mosaic_threads.load_words(weights, w_transforms)
            halves = weights[...].astype(jnp.float16).reshape(group_n, -1, WORDS_OF // WORD, 2, WORD // 2)
            return halves.transpose(0, 1, 3, 2, 4).reshape(group_n, depth)

        def multiply(acc, stage, h):
            """acc (group_n, h) += this warp-group's rows of the weights times the tile's rows of x, one K step."""
            plgpu.barrier_wait(is_filled(turn, stage))
            for c in range(pieces):
                weights = w_smem.at[stage, c, pl.ds(channel, group_n)]
                if widens:
                    weights = widened(weights)  # in registers, where wgmma can read its left operand
                    if wide_smem is not None:
                        wide_smem[group] = weights
                        plgpu.commit_smem()
                        weights = wide_smem.at[group]
                x_piece = x_smem.at[stage, pl.ds(0, h), pl.ds(c * depth, depth)]
                plgpu.wgmma(acc, weights, x_piece.transpose((1, 0)))

        # Stream K
        def stream(acc, tile, stage, h):
            def step(s, carry):
                stage, previous = carry
                multiply(acc, stage, h)
                if widens:
                    plgpu.wgmma_wait(0)  # the registers with the weights are about to be overwritten
                    plgpu.barrier_arrive(freed.at[stage])
                else:
                    plgpu.wgmma_wait(pieces)  # the previous step's are done: its stage is free. The first has none.

                    @pl.when(s > 0)
                    def _():
                        plgpu.barrier_arrive(freed.at[previous])

                return _next_stage(stage, stages), stage

            stage, last = lax.fori_loop(0, steps_of(tile), step, (stage, stage))
            total = acc[...]
            if not widens:
                plgpu.barrier_arrive(freed.at[last])
            return total, stage

        def stream_block_scaled(tile, stage, h):
            """Sums of one 128-wide block of K are scaled and added in float32 outside the matrix instruction."""

            def step(s, carry):
                total, stage = carry
                n, k = tile.col * block_n + channel, (first_step(tile) + s) * block_k
                scale = w_scale_gmem[tile.expert, lax.div(n, SCALE_BLOCK), lax.div(k, SCALE_BLOCK)]

                def partial_sum(acc):
                    multiply(acc, stage, h)
                    return acc[...]

                total += pl.run_scoped(partial_sum, plgpu.ACC((group_n, h))) * scale
                plgpu.barrier_arrive(freed.at[stage])
                return total, _next_stage(stage, stages)

            zeros = plgpu.layout_cast(jnp.zeros((group_n, h), jnp.float32), plgpu.Layout.WGMMA)
            return lax.fori_loop(0, steps_of(tile), step, (zeros, stage))

        def compute_tile(i, tile, stage):
            stage = with_height(tile, lambda h: compute_rows(i, tile, stage, h))
            others = (turns - 1) * k_steps  # steps of the tiles until this warp-group's next one
            return lax.rem(stage + others, jnp.int32(stages)) if turns > 1 else stage

        def compute_rows(i, tile, stage, h):
            columns = pl.ds(tile.col * block_n + channel, group_n)

            # Load scales and slots: after the stream, the tile's end would wait for memory. Those of many rows take
            # registers.
            def row_scales():
                return _load_vector(row_scale_gmem.at[pl.ds(scale_row(tile), h)], plgpu.Layout.WGMMA.reduce(0))

            w_scale = row_scale = None
            if w_scale_gmem is not None and not block_scaled:
                w_scale = _load_vector(w_scale_gmem.at[tile.expert, columns], plgpu.Layout.WGMMA.reduce(1))
            if row_scale_gmem is not None and h <= EARLY_ROWS:
                row_scale = row_scales()
            slots_found = find_slots(tile, 0, h) if scattered and h <= EARLY_ROWS else None

            if block_scaled:
                total, stage = stream_block_scaled(tile, stage, h)
            else:
                total, stage = pl.run_scoped(lambda acc: stream(acc, tile, stage, h), plgpu.ACC((group_n, h)))

            # Scale
            if w_scale is not None:
                total *= lax.broadcast_in_dim(w_scale, (group_n, h), (0,))
            if row_scale_gmem is not None:
                row_scale = row_scales() if row_scale is None else row_scale
                total *= lax.broadcast_in_dim(row_scale, (group_n, h), (1,))

            # Store
            if tile_dtype == jnp.float32:  # two-byte values are transposed by the instruction that stores them
                total = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
            total = total.astype(tile_dtype)
            if clustered:
                add_parts(i, total, slots_found, columns.start + member * stored_n)
                return stage
            for i, first in enumerate(range(0, h, output_rows)):
                rows = min(output_rows, h - first)
                # What was stored from this slot has left it: the chunk before the last, or all of the previous tile.
                plgpu.wait_smem_to_gmem(min(i, 1), wait_read_only=True)
                y_chunk = y_smem.at[group, i % slots, pl.ds(0, rows)]
                y_chunk.transpose((1, 0))[...] = total[:, first : first + rows]
                if scattered:
                    found = find_slots(tile, first, rows) if slots_found is None else slots_found
                    store_rows(tile, first, rows, found, columns.start, y_chunk, total[:, first : first + rows])
                    continue
                plgpu.commit_smem()
                window = pl.ds(tile.row * height + first, rows), columns
                target = y_gmem.at[tile.part, *window] if apart else y_gmem.at[*window]
                plgpu.copy_smem_to_gmem(y_chunk, target, reduction_op=None if apart else store_op)
            return stage

        # Add parts
        def add_parts(i, total, found, first_column) -> None:
            """This block's part of K of its i-th tile to the blocks of its cluster, and its share of all parts, added
            up, to slots. The warp-groups of a block have channels and barriers of their own."""
            there = parts_there.at[group]
            plgpu.barrier_wait(parts_read.at[group])  # those of the tile before, by every block
            mosaic_threads.send_parts(total, y_smem.at[group, 0], there, parts)
            mosaic_threads.store_sums(
                y_smem.at[group, 0], there, lax.rem(i, jnp.int32(2)), y_gmem, found, first_column, total.shape[1],
                parts=parts, top_k=top_k,
            )  # fmt: skip
            plgpu.barrier_arrive(parts_read.at[group])

        # Scatter rows
        by_token = slot_gmem is None
        top_k = problem.top_k if by_token else None

        def find_slots(tile, first: int, rows: int) -> jax.Array | None:
            """Where rows of the tile belong, from the first on."""
            if interpret:
                return None
            numbers, place = (ids_gmem, jnp.int32(first)) if by_token else (slot_gmem, tile.row * height + first)
            return mosaic_threads.find_slots(
                numbers, place, rows, stored_n, slots=problem.slots, top_k=top_k, expert=tile.expert
            )

        def store_rows(tile, first: int, rows: int, found, first_column, y_chunk, values) -> None:
            """Rows of the tile, from the first on, to their slots."""
            first_row = tile.row * height + first
            if not interpret:
                place = jnp.int32(first)
                mosaic_threads.store_rows(y_chunk, y_gmem, found, place, first_column, rows, y_transforms, top_k=top_k)
                return

            def store_row(slot, own, r) -> None:
                row = lax.dynamic_index_in_dim(values, r, axis=1, keepdims=False)

                def store():
                    y_gmem[slot, pl.ds(first_column, group_n)] = row

                pl.when(own)(store)

            def store_to_slots(r, _):
                if not by_token:
                    slot = slot_gmem[first_row + r]
                    store_row(slot, slot >= 0, r)
                    return
                for i in range(problem.top_k):
                    slot = jnp.minimum((first + r) * problem.top_k + i, problem.slots - 1)
                    store_row(slot, (first + r < problem.tokens) & (ids_gmem[slot] == tile.expert), r)

            lax.fori_loop(0, rows, store_to_slots, None)

        def zero_rows() -> None:
            """Of slots that have no expert."""
            block = cluster * members + member
            if not interpret:
                mosaic_threads.zero_rows(ids_gmem, y_gmem, block, clusters * members, problem.experts)
                return

            def zero_row(i, _):
                slot = block + i * blocks

                def store_zeros():
                    y_gmem[slot] = jnp.zeros(y_gmem.shape[1], y_dtype)

                pl.when((ids_gmem[slot] < 0) | (ids_gmem[slot] >= problem.experts))(store_zeros)

            lax.fori_loop(0, lax.div(problem.slots - block + (blocks - 1), jnp.int32(blocks)), zero_row, None)

        @pl.when(group == groups)
        def _():
            if trades_registers and not interpret:
                plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            for_each_tile(fetch_tile, 1, jnp.int32(0), wait_for_all_rows)
            if scattered:
                zero_rows()
            for stage in range(stages):
                plgpu.barrier_wait(freed.at[stage])

        @pl.when(group < groups)
        def _():
            if trades_registers and not interpret:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

            @pl.when(turn == 0)
            def _():
                for stage in range(stages):
                    plgpu.barrier_arrive(freed.at[stage])

            if clustered:
                mosaic_threads.start_barrier(parts_there.at[group])
                plgpu.barrier_arrive(parts_read.at[group])  # of no tile; and others may send parts from here on
            for_each_tile(compute_tile, turns, lax.rem(turn * k_steps, jnp.int32(stages)))
            if clustered:  # a block ends when the others have told its barrier all that they will
                plgpu.barrier_wait(parts_read.at[group])
            else:
                plgpu.wait_smem_to_gmem(0)

    def call(*arrays, fill=None):
        x, tile_expert, w = arrays[0], arrays[4], arrays[7]
        y_shape = tile_expert.shape[0] * height, max(round_up(problem.n, 64), block_n)
        if scattered:
            y_shape = problem.slots, tile_cols * block_n if interpret else problem.n
        y_type = jax.ShapeDtypeStruct((parts, *y_shape) if apart else y_shape, y_dtype)
        before = jnp.zeros((), y_dtype) if adds_up and not apart else fill
        given = [i for i, array in enumerate(arrays) if array is not None]

        def with_optional(*refs):
            inputs = [None] * len(arrays)
            for i, ref in zip(given, refs, strict=False):
                inputs[i] = ref
            body(inputs, *refs[len(given) :])

        scratch = [
            _operand((stages, height, block_k), x),  # also of x_transforms
            _operand((stages, pieces, block_n, depth), w),
            plgpu.SMEM(output, tile_dtype, transforms=y_transforms if scattered and not clustered else ()),
            plgpu.Barrier(num_arrivals=1 + pieces, num_barriers=turns * stages),
            plgpu.Barrier(num_arrivals=sharers, num_barriers=stages),
        ]
        if clustered:
            scratch.append(plgpu.SMEM((groups, 2), jnp.int32))
            scratch.append(plgpu.ClusterBarrier(collective_axes=("part",), num_barriers=groups))
        if widens and interpret:  # the interpreter's wgmma reads shared memory only
            scratch.append(plgpu.SMEM((groups, group_n, depth), jnp.float16))
        evicts = evicts_weights_first(problem, config)
        name = mosaic_copies.evict_first(KERNEL_NAME) if evicts else KERNEL_NAME
        kernel = plgpu.kernel(
            with_optional,
            out_type=y_type if before is None else (),
            scratch_types=scratch,
            grid=(clusters,),
            grid_names=("cluster",),
            cluster=(members,) if clustered else (),
            cluster_names=("part",) if clustered else (),
            num_threads=groups + 1,
            thread_name="group",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
            kernel_name=name,
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )
        operands = [arrays[i] for i in given]
        if before is None:
            return kernel(*operands)
        # Not jax.new_ref, whose effect a caller's jit cannot take out of the custom_jvp_call around this.
        return pl.run_state(lambda y: kernel(*operands, y))(jnp.full(y_type.shape, before, y_type.dtype))

    return call


def _tile(
    order: str, pid: jax.Array, tile_rows: jax.Array, tile_cols: int, group_m: int, tile_span: jax.Ref | None
) -> tuple[jax.Array, jax.Array]:
    """(tile row, tile column) of a program id: `shared.orders.tile` on int32 values, none negative."""
    if order == "row":
        return lax.div(pid, jnp.int32(tile_cols)), lax.rem(pid, jnp.int32(tile_cols))
    if order == "column":
        return lax.rem(pid, tile_rows), lax.div(pid, tile_rows)
    if order == "popular":
        assert tile_span is not None
        row = lax.div(pid, jnp.int32(tile_cols))
        first_row, rows = tile_span[row, 0], tile_span[row, 1]
        within = pid - first_row * tile_cols
        return first_row + lax.rem(within, rows), lax.div(within, rows)
    band = jnp.int32(group_m * tile_cols)
    first_row = lax.div(pid, band) * group_m
    rows = jnp.minimum(group_m, tile_rows - first_row)
    in_band = lax.rem(pid, band)
    return first_row + lax.rem(in_band, rows), lax.div(in_band, rows)


def _operand(shape: tuple[int, ...], source: jax.Array):
    """Shared memory for stages of a matrix operand (stages, ..., rows, columns) that TMA fills from source (..., K)."""
    return plgpu.SMEM(shape, source.dtype, transforms=_transforms(shape[-1], source))


def _transforms(depth: int, source: Any):
    """Of `depth` values of K of its rows in shared memory: tiles of 8 rows and the widest column."""
    itemsize = source.dtype.itemsize
    width = column_width(depth, itemsize)
    return plgpu.TilingTransform((8, width // itemsize)), plgpu.SwizzleTransform(width)  # type: ignore[abstract]


def _load_vector(ref, layout) -> jax.Array:
    """A vector from global memory, each thread reading the elements that `layout` gives it."""
    return plgpu.load(ref, layout=layout, optimized=False)


def _next_stage(stage: jax.Array, stages: int) -> jax.Array:
    return jnp.where(stage + 1 == stages, 0, stage + 1)


def _sms(x: jax.Array) -> int:
    """SMs of the device that x is on. Under a trace, which does not know it yet: of the abstract device while compiling
    without a GPU, else of the first GPU."""
    if not isinstance(x, jax.core.Tracer):
        return next(iter(x.devices())).core_count
    if abstract := jax.sharding.get_abstract_mesh().abstract_device:
        return abstract.num_cores
    return jax.devices("gpu")[0].core_count


def compile_only(problem: Problem, order: str, config: Config) -> Compiled:
    """The kernel compiled for sm_90a with no device: its PTX, machine code, registers and spills.

    Raises RuntimeError where no C compiler or no CUDA plugin of JAX is installed, or the compiler refuses the kernel.
    """
    from backends import mosaic_compile, xla_compile

    call = functools.partial(moe_gemm, problem=problem, order=order, config=config)
    arguments = xla_compile.argument_types(problem)
    return mosaic_compile.compile_kernel(call, arguments, KERNEL_NAME, shared_bytes(problem, config))
