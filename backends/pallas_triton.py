"""The MoE GEMM in Pallas, lowered through Triton (JAX's `jax.experimental.pallas.triton`).

One program computes one output tile of block_m slots x block_n channels of y (T*top_k, N):

    sorted_slot  0  3  9  S  | 1  2  S  S | ...      block_m rows a tile row; S marks padding
    tile_expert       0      |      2     | ...      all slots of a tile row go to one expert

    Locate tile   program id -> (tile row, tile column), in the order asked for
    Gather rows   the tile row's slots -> their tokens' rows of x, its expert -> that expert's weights
    Stream K      accumulate x[token, k] * w[expert, n, k] in float32, block_k at a time
    Scale         FP8 scales and the routing weight, in float32
    Store         to the rows of y that the slots name

Where K is split, several programs share an output tile and add up float32 sums or parts of y: `pallas_triton_rows` has
the kernels before and after, and backends/triton_kernel.py the table of who does what.

Every ref is a whole array and every index an integer array: rows are gathered, which block specs cannot say.
JAX 0.11 deprecates this lowering for Mosaic GPU (`pallas_mosaic`); it is the nearest port of a Triton kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from backends.compiled import Compiled
from backends.pallas_prepare import lowering_through_triton, signature_of
from backends.pallas_triton_ops import atomic_add, dot_fp8, load, load_pairs, widen_pairs
from backends.pallas_triton_prepare import prepare
from backends.pallas_triton_rows import reduce_parts, zeros
from backends.triton_launch import half_tail, not_in_triton, reads_words, tail_rows, warp_group
from shared.config import Config
from shared.problem import SCALE_BLOCK, Problem, ceil_div

NAME = "pallas-triton"
FRAMEWORK = "jax"
KERNEL_NAME = "moe_gemm_pallas_triton"

SHARED_BYTES = 232448
"""Shared memory that one thread block may use on Hopper."""


def locate_tile(
    pid: jax.Array, tile_rows: jax.Array, tile_cols: int, order: str, group_m: int, tile_span: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Program id -> (tile row, tile column); see shared/orders.py, the specification. int32 scalars.

    tile_span: (max_tile_rows, 2), see shared/planning.py; read by order "popular" alone.
    """
    if order == "row":
        return lax.div(pid, tile_cols), lax.rem(pid, tile_cols)
    if order == "column":
        return lax.rem(pid, tile_rows), lax.div(pid, tile_rows)
    if order == "popular":
        # An expert's tiles are neighbours in pid, so this row of the walk along rows is one of its expert's, too.
        by_rows = lax.div(pid, tile_cols)
        first_row, rows = tile_span[by_rows, 0], tile_span[by_rows, 1]
        within = pid - first_row * tile_cols
        return first_row + lax.rem(within, rows), lax.div(within, rows)
    band = group_m * tile_cols
    first_row = lax.div(pid, band) * group_m
    rows = jnp.minimum(group_m, tile_rows - first_row)
    in_band = lax.rem(pid, band)
    return first_row + lax.rem(in_band, rows), lax.div(in_band, rows)


def _kernel(ref: dict[str, Any], problem: Problem, order: str, config: Config) -> None:
    """One output tile, or one part of K of it. `ref` holds the refs of `_operands` by name, and "y" (`_output`)."""
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    n_size, k_size, slots = problem.n, problem.k, problem.slots
    parts, how = config.parts(k_size), config.reduction_of(problem.k)
    sums_only = how in ("two-pass", "atomic-fp32")  # scaled once they are added

    # Locate tile
    pid = pl.program_id(0)
    tile_cols = problem.tile_cols(block_n)
    # Where a tile is does not depend on tile_rows in row order, so nothing waits for that: there are programs for the
    # most tile rows, and those past the ones in use have no expert and no slots.
    tile_rows: Any = problem.max_tile_rows(block_m) if order == "row" else ref["tile_rows"][0]
    tiles = tile_rows * tile_cols

    def one_tile() -> None:
        # All tiles' first parts, then all second parts, ...: triton_kernel.py says why.
        part, tile = (0, pid) if parts == 1 else (lax.div(pid, tiles), lax.rem(pid, tiles))
        row, col = locate_tile(tile, tile_rows, tile_cols, order, config.group_m, ref.get("tile_span"))

        # Whose rows these are: those of a power of two and, of a tall tile, its tail
        tail, half = tail_rows(block_m), half_tail(block_m)
        head = block_m - tail
        expert = ref["tile_expert"][row]
        first = ref["sorted_slot"][pl.ds(row * block_m, head)]
        slots_of = [first]
        has_expert = short = expert >= 0
        if tail:
            slots_of.append(ref["sorted_slot"][pl.ds(row * block_m + head, tail)])
            tall = has_expert & (ref["sorted_slot"][row * block_m + head + half] < slots)
            short = has_expert & jnp.logical_not(tall)
        if half:
            half_slot = ref["sorted_slot"][pl.ds(row * block_m + head, half)]
            half_tall = short & (ref["sorted_slot"][row * block_m + head] < slots)
            short = short & jnp.logical_not(half_tall)
        n = col * block_n + lax.iota(jnp.int32, block_n)

        def store(slot: jax.Array, y: jax.Array) -> None:
            valid = (slot < slots)[:, None] & (n < n_size)[None, :]
            elements = (slot[:, None], n[None, :])
            target = ref["y"].at[part if how == "two-pass" else 0, *elements] if sums_only else ref["y"].at[elements]
            if how in ("atomic", "atomic-fp32"):
                atomic_add(target, y.astype(ref["y"].dtype), valid)
            else:
                plt.store(target, y.astype(ref["y"].dtype), mask=valid)

        def gemm_tile(slots_of: list[jax.Array]) -> None:
            """The rows of all these slots, which share each step's weights."""
            # Gather rows
            row_valid = [slot < slots for slot in slots_of]
            token = [lax.div(slot, problem.top_k) for slot in slots_of]
            # Past the last channel, channel N - 1 is read again instead of masking: its products are never stored, and
            # unmasked loads stay 16 bytes wide.
            n_read = n if n_size % block_n == 0 else jnp.minimum(n, n_size - 1)
            # Scales are read before the stream, which hides the wait for them.
            w_scale = row_scale = None
            if problem.scale_layout == "channel" and not sums_only:
                w_scale = ref["w_scale"][expert, n_read]
            if (problem.scales_x or problem.routing_weight) and not sums_only:
                row_scale = [_row_scale(ref, *of, problem) for of in zip(slots_of, token, row_valid, strict=True)]

            # Stream K
            pairs = _reads_pairs(problem, config)
            halves = 2 if pairs or _in_halves(problem, config) else 1
            depth = block_k // halves

            def step(index: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                weights = []
                if pairs:
                    pair = index * depth + lax.iota(jnp.int32, depth)
                    w_read = load_pairs(ref["w"].at[expert, n_read[:, None], pair[None, :]])
                for half in range(halves):
                    k = index * block_k + half * depth + lax.iota(jnp.int32, depth)
                    k_valid = None
                    if k_size % block_k:  # both tails are masked: 0 * NaN is NaN
                        k_valid = (k < k_size)[None, :]
                    if pairs:
                        w = widen_pairs(w_read, half)
                    else:
                        w = _load(ref["w"], (expert, n_read[:, None], k[None, :]), (block_n, depth), k_valid)
                        if problem.is_fp8 and not problem.quantises_x:
                            w = w.astype(jnp.float16)  # as x is then: the one 16-bit type that hardware widens e4m3 to
                    weights.append((w, k, k_valid))
                block_scale = None
                if problem.scale_layout == "block":
                    block_scale = _block_scale(ref["w_scale"], expert, col * block_n, index * block_k, config)
                sums = list(accs)
                for w, k, k_valid in weights:
                    for i, (of, valid) in enumerate(zip(token, row_valid, strict=True)):
                        x_valid = valid[:, None] if k_valid is None else valid[:, None] & k_valid
                        x = _load(ref["x"], (of[:, None], k[None, :]), (of.size, depth), x_valid)
                        left, right = (w, x) if config.swap_ab else (x, w)
                        if block_scale is None:
                            sums[i] = _dot(left, right, sums[i])
                        else:
                            sums[i] += _dot(left, right, jnp.zeros_like(sums[i])) * block_scale
                return tuple(sums)

            steps = ceil_div(k_size, block_k)
            first_step: Any = 0
            end_step: Any = steps
            if parts > 1:
                first_step = part * config.k_steps_per_split(k_size)
                end_step = jnp.minimum(first_step + config.k_steps_per_split(k_size), steps)
            shapes = [(block_n, slot.size) if config.swap_ab else (slot.size, block_n) for slot in slots_of]
            zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
            accs = lax.fori_loop(first_step, end_step, step, zeros)

            for i, (slot, acc) in enumerate(zip(slots_of, accs, strict=True)):
                # Scale
                if w_scale is not None:
                    acc = acc * _of_channels(w_scale, config)
                if row_scale is not None:
                    acc = acc * _of_rows(row_scale[i], config)

                # Store
                store(slot, acc.T if config.swap_ab else acc)

        # As much of the tail is multiplied as holds slots: all of it, half of it, nothing.
        if tail:
            pl.when(tall)(lambda: gemm_tile(slots_of))
        if half:
            pl.when(half_tall)(lambda: gemm_tile([first, half_slot]))
        pl.when(short)(lambda: gemm_tile([first]))
        if how == "none":  # else these rows are zeros already, or written by the kernel that adds parts up

            @pl.when(jnp.logical_not(has_expert))
            def _zero() -> None:
                for slot in slots_of:
                    store(slot, jnp.zeros((slot.size, block_n), jnp.float32))

    if order == "row":
        one_tile()
    else:
        pl.when(pid < tiles * parts)(one_tile)


def _reads_pairs(problem: Problem, config: Config) -> bool:
    """Whether e4m3 weights are read two at a time, as int16, and a step of K is two products: the first of the even
    values of K, the second of the odd ones, where `prepare` has put them in x. Conditions as `reads_words` has them,
    and channel scales: block scales multiply the sum of each product, and would twice as often.

    An operand that is widened element by element keeps, down to the copy to shared memory, the layout of a 16-bit
    operand: Triton swizzles it, copies 16 bytes at a time and reads it by ldmatrix, where of single values a thread
    gets two at a time. The 32-bit words of triton_kernel.py's `widen_half` have to be taken apart by a reshape instead,
    and XLA's Triton does not swizzle what is read in the layout that comes of it: ldmatrix then meets the same banks
    eight times.
    """
    whole_rows = reads_words(problem, config, w_stride_e=problem.n * problem.k, w_stride_n=problem.k)
    return whole_rows and problem.scale_layout == "channel"


def _in_halves(problem: Problem, config: Config) -> bool:
    """Whether a step of K is taken as two products, one after the other into the same sums, of weights read one by one.

    Weights that are widened go to the warp-group instruction from registers, as its left operand. XLA's Triton ends
    such a step with a wait for all its products, and in tall tiles ptxas then runs the instructions one by one
    (C7514). Of two products it waits for the first alone: the second runs while the next step's weights are widened,
    as Triton's own compiler has it. In tiles of one block of rows halves are mostly slower (1.0 to 1.4 times), and not
    taken.
    """
    widened_left = problem.dtype == "fp8-w8a16" and config.swap_ab and problem.scale_layout == "channel"
    return widened_left and warp_group(config) and config.block_k >= 64 and tail_rows(config.block_m) > 0


def _row_scale(ref: dict[str, Any], slot: jax.Array, token: jax.Array, valid: jax.Array, problem: Problem) -> jax.Array:
    """What multiplies the rows of y of these slots: activation scale times routing weight."""
    scale = jnp.ones(slot.shape, jnp.float32)
    if problem.scales_x:
        scale = plt.load(ref["x_scale"].at[token], mask=valid, other=0.0)
    if problem.routing_weight:
        scale = scale * plt.load(ref["topk_weight"].at[slot], mask=valid, other=0.0)
    return scale


def _dot(left: jax.Array, right: jax.Array, acc: jax.Array) -> jax.Array:
    """acc + left @ right.T in float32: left (M, K), right (N, K), acc (M, N)."""
    if left.dtype == jnp.float8_e4m3fn:
        return dot_fp8(left, right, acc)
    return acc + lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _block_scale(w_scale: Any, expert: jax.Array, n: jax.Array, k: jax.Array, config: Config) -> jax.Array:
    """Scale of the partial sums of a step that begins at channel n and at k: a scalar, or one value a channel.

    block_k divides 128 and block_n divides 128 or is a multiple, so a step lies in one column of scale blocks and in
    block_n / 128 rows. Scalars need no exchange between threads; a vector of channels would, through shared memory
    and two barriers a step.
    """
    _, rows, _ = w_scale.shape
    first, column = lax.div(n, SCALE_BLOCK), lax.div(k, SCALE_BLOCK)
    scale = w_scale[expert, first, column]
    channel = lax.iota(jnp.int32, config.block_n)
    for i in range(1, config.block_n // SCALE_BLOCK):
        next_scale = w_scale[expert, jnp.minimum(first + i, rows - 1), column]
        scale = jnp.where(channel < i * SCALE_BLOCK, scale, next_scale)
    return scale if scale.ndim == 0 else _of_channels(scale, config)


def _of_channels(scale: jax.Array, config: Config) -> jax.Array:
    """scale (block_n,), shaped to multiply the accumulator."""
    return scale[:, None] if config.swap_ab else scale[None, :]


def _of_rows(scale: jax.Array, config: Config) -> jax.Array:
    """scale (block_m,), shaped to multiply the accumulator."""
    return scale[None, :] if config.swap_ab else scale[:, None]


def _load(ref: Any, index: tuple[jax.Array, ...], shape: tuple[int, ...], mask: jax.Array | None) -> jax.Array:
    """ref[index], of `shape`; zero where the mask is false."""
    return load(ref, index, None if mask is None else jnp.broadcast_to(mask, shape))


def _output(problem: Problem, config: Config) -> jax.ShapeDtypeStruct:
    """What the GEMM kernel writes: y (S, N), or float32 sums (parts, S, N) or (1, S, N)."""
    how = config.reduction_of(problem.k)
    if how in ("none", "atomic"):
        return jax.ShapeDtypeStruct((problem.slots, problem.n), jnp.dtype(problem.activation))
    parts = config.parts(problem.k) if how == "two-pass" else 1
    return jax.ShapeDtypeStruct((parts, problem.slots, problem.n), jnp.float32)


def _operands(problem: Problem, order: str, config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Name, shape and dtype of what the GEMM kernel reads, in order."""
    activation = jnp.dtype(problem.activation)
    fp8 = jnp.dtype(jnp.float8_e4m3fn)
    tile_rows = problem.max_tile_rows(config.block_m)
    operands = {
        "sorted_slot": jax.ShapeDtypeStruct((tile_rows * config.block_m,), jnp.int32),
        "tile_expert": jax.ShapeDtypeStruct((tile_rows,), jnp.int32),
        "tile_rows": jax.ShapeDtypeStruct((1,), jnp.int32),
        "x": jax.ShapeDtypeStruct((problem.tokens, problem.k), problem.kernel_x_dtype),
        "w": jax.ShapeDtypeStruct((problem.experts, problem.n, problem.k), fp8 if problem.is_fp8 else activation),
    }
    if order == "popular":
        operands["tile_span"] = jax.ShapeDtypeStruct((tile_rows, 2), jnp.int32)
    if problem.w_scale_shape is not None:
        operands["w_scale"] = jax.ShapeDtypeStruct(problem.w_scale_shape, jnp.float32)
    if problem.scales_x:
        operands["x_scale"] = jax.ShapeDtypeStruct((problem.tokens,), jnp.float32)
    if problem.routing_weight:
        operands["topk_weight"] = jax.ShapeDtypeStruct((problem.slots,), jnp.float32)
    return operands


def _launch(
    arrays: dict[str, Any], problem: Problem, order: str, config: Config, interpret: bool, y_before: Any | None = None
) -> jax.Array:
    """The GEMM kernel alone: `_output`. y_before: what that buffer holds before it runs."""
    names = list(arrays)
    operands = [arrays[name] for name in names]
    aliases = {}
    if y_before is not None:
        aliases[len(operands)] = 0
        operands.append(y_before)
        names.append("y_before")  # the same buffer as y; the kernel does not read it

    def moe_gemm_pallas_triton(*refs: Any) -> None:
        _kernel(dict(zip([*names, "y"], refs, strict=True)), problem, order, config)

    return pl.pallas_call(
        moe_gemm_pallas_triton,
        out_shape=_output(problem, config),
        grid=(_programs(problem, config),),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
    )(*operands)


def _programs(problem: Problem, config: Config) -> int:
    """The most tiles that any routing can need, times the parts of K."""
    return problem.max_tile_rows(config.block_m) * problem.tile_cols(config.block_n) * config.parts(problem.k)


@functools.partial(jax.jit, static_argnames=("problem", "order", "config", "interpret"))
def _moe_gemm(
    x: jax.Array,
    w: jax.Array,
    topk_ids: jax.Array,
    w_scale: jax.Array | None,
    topk_weight: jax.Array | None,
    popularity: jax.Array | None,
    fill: jax.Array | None,
    *,
    problem: Problem,
    order: str,
    config: Config,
    interpret: bool,
) -> jax.Array:
    popular = order == "popular"
    halves_of = config.block_k if _reads_pairs(problem, config) else 0
    prepared = prepare(
        x, topk_ids, popularity, problem, config.block_m, popular=popular, halves_of=halves_of, interpret=interpret
    )
    scales = {
        "w_scale": w_scale,
        "x_scale": prepared.pop("x_scale", None),
        "topk_weight": None if topk_weight is None else topk_weight.reshape(-1),
    }
    values: dict[str, Any] = {**prepared, **scales, "w": w}
    arrays = {name: values[name] for name in _operands(problem, order, config)}
    how, output = config.reduction_of(problem.k), _output(problem, config)
    before = None if fill is None else jnp.full(output.shape, fill, output.dtype)
    if how in ("atomic", "atomic-fp32"):
        before = zeros(output, before, interpret, name=f"{KERNEL_NAME}_zero")
    y = _launch(arrays, problem, order, config, interpret, before)
    if how in ("two-pass", "atomic-fp32"):
        y_before = None if fill is None else jnp.full((problem.slots, problem.n), fill, problem.activation)
        arrays = {"sums": y, "topk_ids": topk_ids.reshape(-1)}
        if problem.scale_layout == "channel":  # block scales have been applied
            arrays["w_scale"] = scales["w_scale"]
        if problem.scales_x:
            arrays["x_scale"] = scales["x_scale"]
        if problem.routing_weight:
            arrays["topk_weight"] = scales["topk_weight"]
        y = reduce_parts(arrays, problem, y_before, interpret, name=f"{KERNEL_NAME}_reduce")
    return y.reshape(problem.tokens, problem.top_k, problem.n)


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
    """y (T, top_k, N) in the dtype of x; shapes and dtypes as in shared/problem.py. Traceable by jax.jit.

    order: one of shared.orders.ORDERS. fill: value that buffers of y and of sums over parts of K are filled with before
    a kernel writes them. interpret: run in Pallas's interpreter on the CPU. popularity: (E,) int32, read by order
    "popular" alone; None: the slot counts of this call.
    """
    filled, given = fill is not None, popularity is not None
    with lowering_through_triton(signature_of(x, NAME, problem, order, config, interpret, filled, given)):
        return _moe_gemm(
            x, w, topk_ids, w_scale, topk_weight, popularity, fill,
            problem=problem, order=order, config=config, interpret=interpret,
        )  # fmt: skip


def compile_only(problem: Problem, order: str, config: Config) -> Compiled:
    """The GEMM kernel compiled by XLA for sm_90a, with no GPU in the machine."""
    from backends.xla_compile import compile_kernel

    operands = _operands(problem, order, config)
    if config.reduction_of(problem.k) in ("atomic", "atomic-fp32"):
        operands["y_before"] = _output(problem, config)

    def launch(*arrays: jax.Array) -> jax.Array:
        by_name = dict(zip(operands, arrays, strict=True))
        before = by_name.pop("y_before", None)
        return _launch(by_name, problem, order, config, interpret=False, y_before=before)

    with lowering_through_triton():
        return compile_kernel(launch, list(operands.values()))


def unavailable(*, interpret: bool) -> str | None:
    """Why this backend cannot run here and what to do about it; None if it can."""
    if not interpret and jax.default_backend() != "gpu":
        return (
            "JAX sees no GPU; install jax[cuda13] on a machine with an NVIDIA GPU, or pass interpret=True for the CPU"
        )
    return None


def unsupported(problem: Problem, config: Config) -> str | None:
    """Why the kernel cannot honour this combination; None if it can."""
    if (reason := not_in_triton(config)) is not None:
        return reason
    if problem.scale_layout == "block" and SCALE_BLOCK % config.block_k:
        return (
            f"config.block_k: got {config.block_k} with one weight scale per {SCALE_BLOCK}x{SCALE_BLOCK} block; "
            f"allowed: a divisor of {SCALE_BLOCK}"
        )
    if problem.quantises_x and config.block_k < 32:  # e4m3 instructions take 32 values of K at a time
        return f"config.block_k: got {config.block_k} in mode fp8-w8a8; allowed: 32 or more"
    needed = _shared_bytes(problem, config)
    if needed > SHARED_BYTES:
        return (
            f"config: got {config}, which needs {needed} bytes of shared memory ({config.num_stages} stages); "
            f"allowed: {SHARED_BYTES}"
        )
    programs = _programs(problem, config)
    if programs >= 2**31:
        return f"config: got {config}, which needs {programs} programs; allowed: 2147483647"
    return None


def _shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that Triton's pipeline takes: what the compiler reported for every kind of config.

    A warp-group instruction (four warps, 64 rows of its left operand) reads its operands from shared memory while the
    next step is loaded, so it holds num_stages buffers. Older instructions copy them to registers first and hold one
    buffer less; so do weights that are widened, and as right operand they go back to shared memory, 16 bits wide. Two
    products a step exchange something there where warps outnumber the 16-channel rows of the tile.
    """
    x_bytes = config.block_m * config.block_k * problem.x_itemsize
    w_bytes = config.block_n * config.block_k * problem.w_itemsize
    if not warp_group(config):
        return max(1, config.num_stages - 1) * (x_bytes + w_bytes)
    if problem.dtype != "fp8-w8a16":
        return config.num_stages * (x_bytes + w_bytes)
    widened = 0 if config.swap_ab else 2 * w_bytes
    two_products = _reads_pairs(problem, config) or _in_halves(problem, config)
    exchanged = 512 * config.num_warps if two_products and 16 * config.num_warps > config.block_n else 0
    return config.num_stages * x_bytes + (config.num_stages - 1) * w_bytes + widened + exchanged
