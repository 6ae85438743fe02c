"""Pallas, lowered by Mosaic GPU: the MoE GEMM on Hopper's bulk copies (TMA) and warp-group matrix instruction (wgmma).

    y_rows[r, n] = row_scale[r] * sum_k x_rows[r, k] * w[expert of r's tile, n, k] * w_scale[...]

One thread block of one warp-group per SM (two where shared memory allows) lives as long as the kernel and takes every
P-th tile of the tile order, P such blocks in all. Its tiles' K steps form one stream: step s reads stage s % num_stages
of shared memory, and as soon as the matrix instructions of step s - 1 are done, its stage is filled for step
s - 1 + num_stages, which may belong to the next tile. So the memory system has work during a tile's epilogue too: at
decode, where a kernel is as fast as it reads weights, a pipeline that drained at the end of each tile would lose about
a memory latency per tile.

wgmma's left operand has 64 rows at least, its right one 8 columns or more. The weights (block_n x block_k) are the left
one; the tokens, far fewer, the right one, read through a transposed view. The accumulator is (block_n, block_m).

TMA reads boxes of equally strided rows, so XLA gathers the rows of x beforehand (`x_rows`, sorted by expert and padded
to block_m) and takes each slot's row out of the kernel's output afterwards. That last gather also puts the zero rows of
-1 slots: their tile rows are not computed. TMA fills what lies past K with zeros and drops what lies past N. It needs K
to be a multiple of 32 bytes (better 128), N of 8, and neither smaller than the block; where they are not so, the
weights are copied into a padded array on each call, which is slow and there for correctness alone.

fp8-w8a16 widens its weights in registers, from where wgmma can read its left operand: they cost no second trip through
shared memory. Block scales multiply the sum of each step in float32, outside the matrix instruction.

Sources: the CUDA PTX manual (wgmma, cp.async.bulk.tensor), JAX's Pallas documentation for Mosaic GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from backends import jax_plan
from backends.compiled import Compiled
from backends.registry import BackendUnavailable
from shared.config import Config
from shared.problem import SCALE_BLOCK, Problem, ceil_div

NAME = "pallas-mosaic"
FRAMEWORK = "jax"
KERNEL_NAME = "moe_gemm_mosaic"

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one thread block can have on Hopper."""
SHARED_MEMORY_PER_SM = 228 * 1024
"""Bytes of shared memory that the thread blocks of one SM have together, 1 KiB of each taken by the system."""
INTERPRETER_BLOCKS = 3
"""Thread blocks in the interpreter: enough that tiles are shared out unevenly, few enough to be quick."""
SWIZZLES = (128, 64, 32)
"""Bytes: widths of the column in which wgmma's operands lie in shared memory, 8 rows high, the widest the best. TMA
copies whole columns, so a row of w and of x is a multiple of the width."""
SHARED_ALIGNMENT = 1024
"""Bytes: each shared-memory array starts at a multiple of this (the period of the 128-byte swizzle)."""

Tile = tuple[jax.Array, jax.Array, jax.Array]


def unavailable(*, interpret: bool) -> str | None:
    """None where the backend can run; else why not, and what to do about it."""
    if interpret:
        return None
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
    """None where problem and config can be honoured; else the reason, with what is allowed."""
    if not config.swap_ab:
        return "config.swap_ab: got False; allowed: True (the weights are always wgmma's left operand here)"
    if config.num_warps != 4:
        return f"config.num_warps: got {config.num_warps}; allowed: 4 (one warp-group per thread block)"
    if not 64 <= config.block_n <= 256:
        return f"config.block_n: got {config.block_n}; allowed: 64, 128, 256 (wgmma's 64 rows; a TMA box's 256)"
    if config.block_m > 256:
        return f"config.block_m: got {config.block_m}; allowed: up to 256 (wgmma's columns)"
    if config.num_stages < 2:
        return "config.num_stages: got 1; allowed: 2 or more (one stage is read while another is filled)"
    if config.block_k * problem.w_itemsize < 32:
        return f"config.block_k: got {config.block_k}; allowed: {32 // problem.w_itemsize} or more (one wgmma's depth)"
    if config.split_k > 1:
        return f"config.split_k: got {config.split_k}; allowed: 1 (this backend does not split K yet)"
    accumulator = config.block_n * config.block_m // 128
    if accumulator > 128:
        return f"config {config} needs {accumulator} accumulator registers a thread; allowed: 128 (128x128)"
    if problem.dtype == "fp8-w8a16" and config.block_n * config.block_k > 2**15:
        return f"config {config}: block_n * block_k is {config.block_n * config.block_k}; allowed with fp8-w8a16: 32768"
    if problem.scale_layout == "block":
        for name, value in (("block_n", config.block_n), ("block_k", config.block_k)):
            if value > SCALE_BLOCK:
                return f"config.{name}: got {value}; allowed with block scales: up to {SCALE_BLOCK}, one scale per step"
    needed = shared_bytes(problem, config)
    if needed > SHARED_MEMORY:
        return f"config {config} needs {needed} bytes of shared memory; allowed on Hopper: {SHARED_MEMORY}"
    return None


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory of a thread block: the stages of x and w, the output tile, one barrier per stage."""
    arrays = (
        config.num_stages * config.block_m * config.block_k * problem.x_itemsize,
        config.num_stages * config.block_n * config.block_k * problem.w_itemsize,
        config.block_m * config.block_n * 2,
    )
    return sum(_round_up(size, SHARED_ALIGNMENT) for size in arrays) + _round_up(8 * config.num_stages, 128)


def blocks_per_sm(problem: Problem, config: Config) -> int:
    """2 where two thread blocks fit the SM's shared memory, else 1; num_stages decides.

    Two hide each other's latencies: one widens weights or stores its tile while the other multiplies. They have
    registers enough: two blocks of 128 threads with the most a thread can have, 255.
    """
    return 2 if 2 * (shared_bytes(problem, config) + 1024) <= SHARED_MEMORY_PER_SM else 1


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
) -> jax.Array:
    """y (T, top_k, N) in the dtype of x; arguments as in `shared.problem`, checked by the caller, T >= 1.

    fill: what the kernel's output buffer holds beforehand (tests pass NaN, so that an unwritten element shows).
    Traceable by `jax.jit`; plans, gathers and, for fp8-w8a8, quantises x on the device.
    """
    if not interpret and not isinstance(x, jax.core.Tracer) and (refusal := _not_hopper(next(iter(x.devices())))):
        raise BackendUnavailable(f"backend {NAME} cannot run on {next(iter(x.devices()))}: {refusal}")
    blocks = INTERPRETER_BLOCKS if interpret else _sms(x) * blocks_per_sm(problem, config)
    # As an array: a NaN equals nothing, so as a static argument it would be traced anew on every call.
    fill_value = None if fill is None else jnp.asarray(fill, x.dtype)
    return _moe_gemm(x, w, topk_ids, w_scale, topk_weight, fill_value, problem, order, config, interpret, blocks)


@functools.partial(jax.jit, static_argnames=("problem", "order", "config", "interpret", "blocks"))
def _moe_gemm(x, w, topk_ids, w_scale, topk_weight, fill, problem, order, config, interpret, blocks):
    plan = jax_plan.plan(topk_ids, problem.experts, config.block_m)
    x, x_scale = jax_plan.prepare_tokens(x, problem)
    row_scale = None if x_scale is None else _gather(x_scale, plan.sorted_slot // problem.top_k)
    if topk_weight is not None:
        row_weight = _gather(topk_weight.reshape(-1), plan.sorted_slot)
        row_scale = row_weight if row_scale is None else row_scale * row_weight

    k = max(_round_up(problem.k, SWIZZLES[-1] // problem.w_itemsize), config.block_k)
    n = max(_round_up(problem.n, 8), config.block_n)
    x = _pad_to(x, (problem.tokens, k))
    w = _pad_to(w, (problem.experts, n, k))
    if problem.scale_layout == "channel":
        w_scale = _pad_to(w_scale, (problem.experts, problem.tile_cols(config.block_n) * config.block_n))

    x_rows = _gather(x, plan.sorted_slot // problem.top_k)
    # Tile rows of -1 slots come after all others, and the gather below puts their zeros.
    tile_rows = jnp.sum(plan.tile_expert >= 0, dtype=jnp.int32, keepdims=True)
    gemm = _kernel(problem, order, config, blocks, interpret)
    y_rows = gemm(tile_rows, plan.tile_expert, x_rows, w, row_scale, w_scale, fill=fill)
    y = y_rows[plan.position, : problem.n].reshape(problem.tokens, problem.top_k, problem.n)
    has_expert = (topk_ids >= 0) & (topk_ids < problem.experts)
    return jnp.where(has_expert[:, :, None], y, 0)


def _kernel(problem: Problem, order: str, config: Config, blocks: int, interpret: bool) -> Callable:
    """The GEMM by `blocks` thread blocks: (tile_rows, tile_expert, x_rows, w, row_scale, w_scale) -> y_rows.

    tile_rows (1,) int32      tile rows with an expert: the first ones; others are not touched
    tile_expert (R,) int32    expert of each tile row
    x_rows (R * block_m, K)   rows of x sorted by expert
    w (E, N, K)               N a multiple of 8, K of 32 bytes, no less than block_n and block_k
    row_scale (R * block_m,)  float32 or None: activation scale times routing weight
    w_scale                   float32 or None: (E, tile_cols * block_n) or (E, ceil(N/128), ceil(K/128))
    y_rows (R * block_m, >=N) what lies past N is not to be read
    """
    block_m, block_n, block_k, stages = config.block_m, config.block_n, config.block_k, config.num_stages
    k_steps = ceil_div(problem.k, block_k)
    tile_cols = problem.tile_cols(block_n)
    y_dtype = jnp.dtype(problem.activation)
    block_scaled = problem.scale_layout == "block"
    widens = problem.dtype == "fp8-w8a16"

    def body(inputs, y_gmem, x_smem, w_smem, y_smem, filled, wide_smem=None):
        rows_gmem, expert_gmem, x_gmem, w_gmem, row_scale_gmem, w_scale_gmem = inputs
        tile_rows = rows_gmem[0]
        block = lax.axis_index("block")
        my_tiles = lax.div(tile_rows * tile_cols - block + (blocks - 1), jnp.int32(blocks))

        # Locate tile
        def locate(i: jax.Array) -> Tile:
            row, col = _tile(order, block + i * blocks, tile_rows, tile_cols, config.group_m)
            return row, col, expert_gmem[row]

        # Gather rows (of the matrix that XLA gathered: TMA reads equally strided rows)
        def fetch(stage, ahead):
            """Fill `stage` for the K step that `ahead` = (tile, K step, row, col, expert) names, and name the next."""
            tile, step, row, col, expert = ahead
            k_slice = pl.ds(step * block_k, block_k)
            rows, columns = pl.ds(row * block_m, block_m), pl.ds(col * block_n, block_n)
            plgpu.copy_gmem_to_smem(x_gmem.at[rows, k_slice], x_smem.at[stage], filled.at[stage])
            plgpu.copy_gmem_to_smem(w_gmem.at[expert, columns, k_slice], w_smem.at[stage], filled.at[stage])

            def next_tile():
                here = row, col, expert
                return tile + 1, jnp.int32(0), *lax.cond(tile + 1 < my_tiles, lambda: locate(tile + 1), lambda: here)

            return lax.cond(step + 1 < k_steps, lambda: (tile, step + 1, row, col, expert), next_tile)

        def fetch_if_any(stage, ahead):
            return lax.cond(ahead[0] < my_tiles, lambda: fetch(stage, ahead), lambda: ahead)

        def multiply(acc, stage):
            plgpu.barrier_wait(filled.at[stage])
            weights = w_smem.at[stage]
            if widens:
                weights = w_smem[stage].astype(jnp.float16)  # in registers, from where wgmma can read its left operand
                if wide_smem is not None:
                    wide_smem[...] = weights
                    plgpu.commit_smem()
                    weights = wide_smem
            plgpu.wgmma(acc, weights, x_smem.at[stage].transpose((1, 0)))

        # Stream K
        def stream(acc, tile, state):
            def step(i, state):
                stage, previous, ahead = state
                multiply(acc, stage)
                if widens:
                    plgpu.wgmma_wait(0)  # the registers with the weights are about to be overwritten
                    ahead = fetch_if_any(stage, ahead)
                else:
                    plgpu.wgmma_wait(1)  # the previous step's are done: its stage is free. There is none in the first.
                    ahead = lax.cond(tile + i > 0, lambda: fetch_if_any(previous, ahead), lambda: ahead)
                return _next_stage(stage, stages), stage, ahead

            state = lax.fori_loop(0, k_steps, step, state)
            return acc[...], state

        def stream_block_scaled(row, col, expert, state):
            """Sums of one 128-wide block of K are scaled and added in float32 outside the matrix instruction."""

            def step(i, carry):
                total, (stage, _, ahead) = carry
                scale = w_scale_gmem[expert, lax.div(col * block_n, SCALE_BLOCK), lax.div(i * block_k, SCALE_BLOCK)]

                def partial_sum(acc):
                    multiply(acc, stage)
                    return acc[...]

                total += pl.run_scoped(partial_sum, plgpu.ACC((block_n, block_m))) * scale
                return total, (_next_stage(stage, stages), stage, fetch_if_any(stage, ahead))

            zeros = plgpu.layout_cast(jnp.zeros((block_n, block_m), jnp.float32), plgpu.Layout.WGMMA)
            return lax.fori_loop(0, k_steps, step, (zeros, state))

        def compute_tile(i, state):
            row, col, expert = locate(i)
            if block_scaled:
                total, state = stream_block_scaled(row, col, expert, state)
            else:
                accumulator = plgpu.ACC((block_n, block_m))
                total, state = pl.run_scoped(lambda acc: stream(acc, i, state), accumulator)

            # Scale
            if w_scale_gmem is not None and not block_scaled:
                of_channel = w_scale_gmem.at[expert, pl.ds(col * block_n, block_n)]
                scale = _load_vector(of_channel, plgpu.Layout.WGMMA.reduce(1))
                total *= lax.broadcast_in_dim(scale, (block_n, block_m), (0,))
            if row_scale_gmem is not None:
                of_row = row_scale_gmem.at[pl.ds(row * block_m, block_m)]
                scale = _load_vector(of_row, plgpu.Layout.WGMMA.reduce(0))
                total *= lax.broadcast_in_dim(scale, (block_n, block_m), (1,))

            # Store
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left y_smem
            y_smem.transpose((1, 0))[...] = total.astype(y_dtype)
            plgpu.commit_smem()
            rows, columns = pl.ds(row * block_m, block_m), pl.ds(col * block_n, block_n)
            plgpu.copy_smem_to_gmem(y_smem, y_gmem.at[rows, columns])
            return state

        @pl.when(my_tiles > 0)
        def _():
            ahead = jnp.int32(0), jnp.int32(0), *locate(jnp.int32(0))
            ahead = lax.fori_loop(0, stages, fetch_if_any, ahead)
            lax.fori_loop(0, my_tiles, compute_tile, (jnp.int32(0), jnp.int32(0), ahead))
            plgpu.wait_smem_to_gmem(0)

    def call(*arrays, fill=None):
        x_rows, w = arrays[2:4]
        y_type = jax.ShapeDtypeStruct((x_rows.shape[0], max(_round_up(problem.n, 64), block_n)), y_dtype)
        given = [i for i, array in enumerate(arrays) if array is not None]

        def with_optional(*refs):
            inputs = [None] * len(arrays)
            for i, ref in zip(given, refs, strict=False):
                inputs[i] = ref
            body(inputs, *refs[len(given) :])

        scratch = [
            _operand((stages, block_m, block_k), x_rows),
            _operand((stages, block_n, block_k), w),
            plgpu.SMEM((block_m, block_n), y_dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ]
        if widens and interpret:  # the interpreter's wgmma reads shared memory only
            scratch.append(plgpu.SMEM((block_n, block_k), jnp.float16))
        kernel = plgpu.kernel(
            with_optional,
            out_type=y_type if fill is None else (),
            scratch_types=scratch,
            grid=(blocks,),
            grid_names=("block",),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
            kernel_name=KERNEL_NAME,
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )
        operands = [arrays[i] for i in given]
        if fill is None:
            return kernel(*operands)
        y = jax.new_ref(jnp.full(y_type.shape, fill, y_type.dtype))
        kernel(*operands, y)
        return jax.freeze(y)

    return call


def _tile(
    order: str, pid: jax.Array, tile_rows: jax.Array, tile_cols: int, group_m: int
) -> tuple[jax.Array, jax.Array]:
    """(tile row, tile column) of a program id: `shared.orders.tile` on int32 values, none negative."""
    if order == "row":
        return lax.div(pid, jnp.int32(tile_cols)), lax.rem(pid, jnp.int32(tile_cols))
    if order == "column":
        return lax.rem(pid, tile_rows), lax.div(pid, tile_rows)
    band = jnp.int32(group_m * tile_cols)
    first_row = lax.div(pid, band) * group_m
    rows = jnp.minimum(group_m, tile_rows - first_row)
    in_band = lax.rem(pid, band)
    return first_row + lax.rem(in_band, rows), lax.div(in_band, rows)


def _operand(shape: tuple[int, int, int], source: jax.Array):
    """Shared memory for stages of a matrix operand (stages, rows, block_k) that TMA fills from source (..., K)."""
    itemsize = source.dtype.itemsize
    width = next(s for s in SWIZZLES if source.shape[-1] * itemsize % s == 0 and shape[-1] * itemsize % s == 0)
    transforms = plgpu.TilingTransform((8, width // itemsize)), plgpu.SwizzleTransform(width)  # type: ignore[abstract]
    return plgpu.SMEM(shape, source.dtype, transforms=transforms)


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


def _gather(array: jax.Array, rows: jax.Array) -> jax.Array:
    """array[rows], zeros where a row does not exist (padding)."""
    return array.at[rows].get(mode="fill", fill_value=0)


def _pad_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """array with zeros appended up to `shape`; the array itself where nothing is missing."""
    if array.shape == shape:
        return array
    return jnp.pad(array, [(0, size - have) for size, have in zip(shape, array.shape, strict=True)])


def _round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


def compile_only(problem: Problem, order: str, config: Config) -> Compiled:
    """The kernel compiled for sm_90a with no device: its PTX, machine code, registers and spills.

    Raises RuntimeError where no C compiler or no CUDA plugin of JAX is installed, or the compiler refuses the kernel.
    """
    from backends import mosaic_compile, xla_compile

    call = functools.partial(moe_gemm, problem=problem, order=order, config=config)
    arguments = xla_compile.argument_types(problem)
    return mosaic_compile.compile_kernel(call, arguments, KERNEL_NAME, shared_bytes(problem, config))
