"""The MoE GEMM in Triton: one kernel, launched by PyTorch (`torch_triton`) and by JAX (`jax_triton`).

A launch of `moe_gemm_kernel` computes y (T*top_k, N), one output tile of BLOCK_M slots x BLOCK_N channels a program:

    sorted_slot  0  3  9  S  | 1  2  S  S | ...      BLOCK_M rows a tile row; S marks padding
    tile_expert       0      |      2     | ...      all slots of a tile row go to one expert

    Locate tile   program id -> (tile row, tile column), in the order asked for
    Gather rows   the tile row's slots -> their tokens' rows of x, its expert -> that expert's weights
    Stream K      accumulate x[token, k] * w[expert, n, k] in float32, BLOCK_K at a time
    Scale         FP8 scales and the routing weight, in float32
    Store         to the rows of y that the slots name

One small kernel comes first in a call, `prepare_kernel` in triton_prepare.py: it sorts slots by expert, on the device
and with static shapes, and where `Problem.scales_x` takes activations to e4m3 or float16, one scale a token.

Split K: PARTS programs share an output tile, each streams its own steps of K.

    REDUCTION       each program           before                   after
    "two-pass"      stores float32 sums                             `moe_gemm_kernel_reduce` adds, scales, rounds to y
    "atomic-fp32"   adds float32 sums      `..._zero` clears them   `moe_gemm_kernel_reduce` scales, rounds to y
    "atomic"        scales, rounds, adds   `..._zero` clears y

Both further kernels carry the GEMM kernel's name in theirs: whoever times kernels by that name counts them in.
"""

import triton
import triton.language as tl

# The lower, or upper, two e4m3 values of a word as two float16.
WIDEN_LOWER = tl.constexpr("{ .reg .b16 half<2>; mov.b32 {half0, half1}, $1; cvt.rn.f16x2.e4m3x2 $0, half0; }")
WIDEN_UPPER = tl.constexpr("{ .reg .b16 half<2>; mov.b32 {half0, half1}, $1; cvt.rn.f16x2.e4m3x2 $0, half1; }")


@triton.jit
def locate_tile(pid, tile_rows, tile_cols, tile_span_ptr, ORDER: tl.constexpr, GROUP_M: tl.constexpr):
    """Program id -> (tile row, tile column); see shared/orders.py, the specification.

    tile_span_ptr: (max_tile_rows, 2), see shared/planning.py; read by ORDER "popular" alone.
    """
    if ORDER == "row":
        row = pid // tile_cols
        col = pid % tile_cols
    elif ORDER == "column":
        row = pid % tile_rows
        col = pid // tile_rows
    elif ORDER == "grouped":
        band = GROUP_M * tile_cols
        first_row = pid // band * GROUP_M
        rows = min(GROUP_M, tile_rows - first_row)
        row = first_row + pid % band % rows
        col = pid % band // rows
    elif ORDER == "popular":
        # An expert's tiles are neighbours in pid, so this row of the walk along rows is one of its expert's, too.
        span_ptr = tile_span_ptr + 2 * (pid // tile_cols)
        first_row = tl.load(span_ptr)
        rows = tl.load(span_ptr + 1)
        within = pid - first_row * tile_cols
        row = first_row + within % rows
        col = within // rows
    else:
        # The article's mapping, divisors exchanged: here to be shown wrong. tile_rows is its padded grid_m.
        tl.static_assert(ORDER == "published-2024")
        row = pid % tile_cols
        col = pid // tile_rows
    return row, col


@triton.jit
def zeros(ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SWAP_AB: tl.constexpr):
    """An accumulator: (ROWS, BLOCK_N), with SWAP_AB (BLOCK_N, ROWS)."""
    if SWAP_AB:
        acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    return acc


@triton.jit
def gather_rows(x_ptr, slot, k, x_stride: tl.constexpr, TOP_K: tl.constexpr):
    """Pointers to the values k (BLOCK_K,) of the tokens of slot (rows,): (rows, BLOCK_K)."""
    token = slot // TOP_K
    return x_ptr + token.to(tl.int64)[:, None] * x_stride + k[None, :]


@triton.jit
def load_row_scale(
    slot, row_valid, x_scale_ptr, topk_weight_ptr,
    TOP_K: tl.constexpr, SCALED_X: tl.constexpr, ROUTING_WEIGHT: tl.constexpr,
):  # fmt: skip
    """What multiplies the rows of slot (rows,) of y: activation scale times routing weight."""
    scale = tl.full(slot.shape, 1.0, tl.float32)
    if SCALED_X:
        token = slot // TOP_K
        scale = tl.load(x_scale_ptr + token, mask=row_valid, other=0.0)
    if ROUTING_WEIGHT:
        scale *= tl.load(topk_weight_ptr + slot, mask=row_valid, other=0.0)
    return scale


@triton.jit
def load_x(x_ptrs, row_valid, k_valid, MASK_K: tl.constexpr):
    """Rows of x, one step of K: zeros where a row is padding and, with MASK_K, past K."""
    if MASK_K:
        x = tl.load(x_ptrs, mask=row_valid[:, None] & k_valid[None, :], other=0.0)
    else:
        x = tl.load(x_ptrs, mask=row_valid[:, None], other=0.0)
    return x


@triton.jit
def widen_half(words, HALF: tl.constexpr):
    """Bytes 2 * HALF and 2 * HALF + 1 of each word (BLOCK_N, BLOCK_K / 4) of e4m3 weights, as float16: (BLOCK_N,
    BLOCK_K / 2), in the order that `prepare_kernel` brings x to."""
    # One instruction. Of bytes that Triton's own operations take apart, LLVM brings each two together again first.
    if HALF == 0:
        both = tl.inline_asm_elementwise(WIDEN_LOWER, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    else:
        both = tl.inline_asm_elementwise(WIDEN_UPPER, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    first = both.to(tl.int16).to(tl.float16, bitcast=True)
    second = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(first, second), (words.shape[0], 2 * words.shape[1]))


@triton.jit
def multiply(acc, x, w, block_scale, SCALES: tl.constexpr, SWAP_AB: tl.constexpr):
    """acc + x @ w.T in float32; acc (rows, BLOCK_N), with SWAP_AB (BLOCK_N, rows)."""
    if SCALES == "block":  # partial sums are scaled in float32
        if SWAP_AB:
            acc += tl.dot(w, x.T) * block_scale[:, None]
        else:
            acc += tl.dot(x, w.T) * block_scale[None, :]
    else:
        acc = tl.dot(w, x.T, acc) if SWAP_AB else tl.dot(x, w.T, acc)
    return acc


@triton.jit
def scale(acc, w_scale, row_scale, CHANNEL_SCALES: tl.constexpr, ROW_SCALES: tl.constexpr, SWAP_AB: tl.constexpr):
    """acc times the scales of its channels, w_scale (BLOCK_N,), and of its rows, row_scale (rows,)."""
    if CHANNEL_SCALES:
        acc *= w_scale[:, None] if SWAP_AB else w_scale[None, :]
    if ROW_SCALES:
        acc *= row_scale[None, :] if SWAP_AB else row_scale[:, None]
    return acc


@triton.jit
def store(y_ptr, y, slot, slots, n, N: tl.constexpr, REDUCTION: tl.constexpr):
    """y (rows, BLOCK_N) to the rows of y_ptr that slot names, channels n; padding, and channels past N, to nowhere."""
    y_ptrs = y_ptr + slot.to(tl.int64)[:, None] * N + n[None, :]
    valid = (slot < slots)[:, None] & (n < N)[None, :]
    if REDUCTION == "atomic" or REDUCTION == "atomic-fp32":
        tl.atomic_add(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=valid, sem="relaxed")
    else:
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=valid)


@triton.jit
def gemm_tile(
    slot, tail_slot, expert, n, first_step, end_step,
    x_ptr, w_ptr, w_scale_ptr, x_scale_ptr, topk_weight_ptr, y_ptr, slots,
    x_stride: tl.constexpr, w_stride_e: tl.constexpr, w_stride_n: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TOP_K: tl.constexpr, SCALES: tl.constexpr, QUANTISED_X: tl.constexpr, SCALED_X: tl.constexpr,
    ROUTING_WEIGHT: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP_AB: tl.constexpr, REDUCTION: tl.constexpr,
    W_WORDS: tl.constexpr,
):  # fmt: skip
    """The tile of the rows slot (ROWS,), and with TAIL also tail_slot (TAIL,), and the channels n (BLOCK_N,): its K
    steps from first_step to end_step. Each is one product or, with W_WORDS, two of half the depth."""
    PRODUCTS: tl.constexpr = 2 if W_WORDS else 1
    DEPTH: tl.constexpr = BLOCK_K // PRODUCTS
    # Gather rows. Offsets of rows and experts are 64-bit: T * top_k * N and E * N * K pass 2**31.
    k = first_step * BLOCK_K + tl.arange(0, DEPTH)
    row_valid = slot < slots
    x_ptrs = gather_rows(x_ptr, slot, k, x_stride, TOP_K)
    if TAIL > 0:
        tail_valid = tail_slot < slots
        tail_ptrs = gather_rows(x_ptr, tail_slot, k, x_stride, TOP_K)
    # Past the last channel, channel N - 1 is read again instead of masking: its products are never stored, and
    # unmasked loads stay 16 bytes wide.
    n_read = tl.minimum(n, N - 1)
    w_rows = expert.to(tl.int64) * w_stride_e + n_read.to(tl.int64) * w_stride_n
    # Weights that are widened go through registers. As values, a thread gets two at a time from shared memory, all that
    # lie side by side of what it multiplies; as words, all that it needs by ldmatrix, and 16 bytes a copy before that.
    W_VALUES: tl.constexpr = 4 if W_WORDS else 1  # of what one element of w_ptrs points to
    if W_WORDS:
        w_ptr = w_ptr.to(tl.pointer_type(tl.int32))
        w_rows = w_rows // W_VALUES
    w_k = first_step * (BLOCK_K // W_VALUES) + tl.arange(0, BLOCK_K // W_VALUES)
    w_ptrs = w_ptr + w_rows[:, None] + w_k[None, :]
    # Scales are read before the stream, which hides the wait for them.
    SUMS_ONLY: tl.constexpr = REDUCTION == "two-pass" or REDUCTION == "atomic-fp32"  # scaled once they are added
    CHANNEL_SCALES: tl.constexpr = SCALES == "channel" and not SUMS_ONLY
    ROW_SCALES: tl.constexpr = (SCALED_X or ROUTING_WEIGHT) and not SUMS_ONLY
    w_scale, row_scale, tail_scale = 1.0, 1.0, 1.0
    if CHANNEL_SCALES:
        w_scale = tl.load(w_scale_ptr + expert.to(tl.int64) * N + n_read)
    if ROW_SCALES:
        row_scale = load_row_scale(slot, row_valid, x_scale_ptr, topk_weight_ptr, TOP_K, SCALED_X, ROUTING_WEIGHT)
        if TAIL > 0:
            tail_scale = load_row_scale(
                tail_slot, tail_valid, x_scale_ptr, topk_weight_ptr, TOP_K, SCALED_X, ROUTING_WEIGHT
            )

    # Stream K
    acc = zeros(ROWS, BLOCK_N, SWAP_AB)
    if TAIL > 0:
        tail_acc = zeros(TAIL, BLOCK_N, SWAP_AB)
    MASK_K: tl.constexpr = K % BLOCK_K != 0
    scale_cols: tl.constexpr = (K + 127) // 128
    block_scale_ptrs = w_scale_ptr + (expert.to(tl.int64) * ((N + 127) // 128) + n_read // 128) * scale_cols
    for step in range(first_step, end_step):
        k_valid = k < K
        if MASK_K:  # of w, too: 0 * NaN is NaN
            w_read = tl.load(w_ptrs, mask=k_valid[None, :], other=0.0)
        else:
            w_read = tl.load(w_ptrs)
        block_scale = 1.0
        if SCALES == "block":  # BLOCK_K divides 128, so one step lies in one column of scale blocks
            block_scale = tl.load(block_scale_ptrs + step * BLOCK_K // 128)
        for product in tl.static_range(PRODUCTS):
            x = load_x(x_ptrs + product * DEPTH, row_valid, k_valid, MASK_K)
            if W_WORDS:
                w = widen_half(w_read, product)
            elif SCALES != "none" and not QUANTISED_X:
                w = w_read.to(tl.float16)  # x is float16 then: the one 16-bit type that hardware widens e4m3 to
            else:
                w = w_read
            acc = multiply(acc, x, w, block_scale, SCALES, SWAP_AB)
            if TAIL > 0:
                x_tail = load_x(tail_ptrs + product * DEPTH, tail_valid, k_valid, MASK_K)
                tail_acc = multiply(tail_acc, x_tail, w, block_scale, SCALES, SWAP_AB)
        x_ptrs += BLOCK_K
        if TAIL > 0:
            tail_ptrs += BLOCK_K
        w_ptrs += BLOCK_K // W_VALUES
        k += BLOCK_K

    # Scale
    acc = scale(acc, w_scale, row_scale, CHANNEL_SCALES, ROW_SCALES, SWAP_AB)
    if TAIL > 0:
        tail_acc = scale(tail_acc, w_scale, tail_scale, CHANNEL_SCALES, ROW_SCALES, SWAP_AB)

    # Store
    store(y_ptr, acc.T if SWAP_AB else acc, slot, slots, n, N, REDUCTION)
    if TAIL > 0:
        store(y_ptr, tail_acc.T if SWAP_AB else tail_acc, tail_slot, slots, n, N, REDUCTION)


@triton.jit(do_not_specialize=["slots"])
def moe_gemm_kernel(
    x_ptr,  # (T, K), rows x_stride apart
    w_ptr,  # (E, N, K), K contiguous
    w_scale_ptr,  # (E, N) or (E, ceil(N/128), ceil(K/128)); not read without FP8
    x_scale_ptr,  # (T,); not read unless SCALED_X
    topk_weight_ptr,  # (T * top_k,); not read unless ROUTING_WEIGHT
    sorted_slot_ptr,  # (max_tile_rows * BLOCK_M,)
    tile_expert_ptr,  # (max_tile_rows,)
    tile_rows_ptr,  # (1,)
    tile_span_ptr,  # (max_tile_rows, 2); not read unless ORDER is "popular"
    y_ptr,  # (S, N); with REDUCTION "two-pass" float32 (PARTS, S, N), with "atomic-fp32" float32 (S, N)
    slots,  # S = T * top_k
    x_stride: tl.constexpr,
    w_stride_e: tl.constexpr,
    w_stride_n: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SCALES: tl.constexpr,  # "none", "channel", "block"
    QUANTISED_X: tl.constexpr,  # x is e4m3
    SCALED_X: tl.constexpr,  # x has a scale a token
    ROUTING_WEIGHT: tl.constexpr,
    ORDER: tl.constexpr,
    PUBLISHED_GRID_M: tl.constexpr,  # only for ORDER "published-2024"
    BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr,  # rows of a tile past its largest power of two, a power of two themselves, or 0
    HALF: tl.constexpr,  # rows of the tail that are multiplied alone where no others of it hold slots, or 0
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
    PARTS: tl.constexpr,  # of K
    REDUCTION: tl.constexpr,  # "none" with one part
    W_WORDS: tl.constexpr,  # e4m3 weights are read as 32-bit words; x's values come in the order of their halves
):
    # Locate tile
    pid = tl.program_id(0)
    tile_cols: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile_rows = tl.load(tile_rows_ptr)
    part = 0
    if ORDER == "published-2024":
        tl.static_assert(PARTS == 1)
        row, col = locate_tile(pid, PUBLISHED_GRID_M, tile_cols, tile_span_ptr, ORDER, GROUP_M)
        if (row >= tile_rows) | (col >= tile_cols):
            return
    else:
        if ORDER == "row":
            # Where a tile is does not depend on tile_rows here, so nothing waits for that: there are programs for the
            # most tile rows, and those past the ones in use have no expert and no slots.
            tiles = tl.num_programs(0) // PARTS
        else:
            tiles = tile_rows * tile_cols
            if pid >= tiles * PARTS:
                return
        # All tiles' first parts, then all second parts, ...: neighbours in the order share what they would share
        # without parts, programs that add to the same elements are far apart, and the last part, which may have fewer
        # steps, comes when the GPU runs empty.
        if PARTS > 1:
            part = pid // tiles
            pid = pid % tiles
        row, col = locate_tile(pid, tile_rows, tile_cols, tile_span_ptr, ORDER, GROUP_M)

    # Whose rows these are: loads that wait for nothing more come together. One branch on all that they tell, as a load
    # that only what is behind a branch reads is moved behind it, and would be waited for once more.
    ROWS: tl.constexpr = BLOCK_M - TAIL
    expert = tl.load(tile_expert_ptr + row)
    slot = tl.load(sorted_slot_ptr + row * BLOCK_M + tl.arange(0, ROWS))
    tail_slot, half_slot = slot, slot
    tall, half_tall = False, False
    if TAIL > 0:
        tail_slot = tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS + tl.arange(0, TAIL))
        tall = (expert >= 0) & (tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS + HALF) < slots)
    if HALF > 0:
        half_slot = tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS + tl.arange(0, HALF))
        half_tall = (expert >= 0) & (tl.load(sorted_slot_ptr + row * BLOCK_M + ROWS) < slots)
    n = col * BLOCK_N + tl.arange(0, BLOCK_N)
    if REDUCTION == "two-pass":
        y_ptr += tl.cast(part, tl.int64) * slots * N
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    if PARTS == 1:
        first_step, end_step = 0, steps
    else:
        part_steps: tl.constexpr = (steps + PARTS - 1) // PARTS
        first_step = part * part_steps
        end_step = min(first_step + part_steps, steps)
    # As much of the tail is multiplied as holds slots: all of it, half of it, nothing.
    if tall:
        gemm_tile(
            slot, tail_slot, expert, n, first_step, end_step,
            x_ptr, w_ptr, w_scale_ptr, x_scale_ptr, topk_weight_ptr, y_ptr, slots,
            x_stride, w_stride_e, w_stride_n, N, K, TOP_K, SCALES, QUANTISED_X, SCALED_X, ROUTING_WEIGHT,
            ROWS, TAIL, BLOCK_N, BLOCK_K, SWAP_AB, REDUCTION, W_WORDS,
        )  # fmt: skip
    elif half_tall:
        gemm_tile(
            slot, half_slot, expert, n, first_step, end_step,
            x_ptr, w_ptr, w_scale_ptr, x_scale_ptr, topk_weight_ptr, y_ptr, slots,
            x_stride, w_stride_e, w_stride_n, N, K, TOP_K, SCALES, QUANTISED_X, SCALED_X, ROUTING_WEIGHT,
            ROWS, HALF, BLOCK_N, BLOCK_K, SWAP_AB, REDUCTION, W_WORDS,
        )  # fmt: skip
    elif expert >= 0:
        gemm_tile(
            slot, tail_slot, expert, n, first_step, end_step,
            x_ptr, w_ptr, w_scale_ptr, x_scale_ptr, topk_weight_ptr, y_ptr, slots,
            x_stride, w_stride_e, w_stride_n, N, K, TOP_K, SCALES, QUANTISED_X, SCALED_X, ROUTING_WEIGHT,
            ROWS, 0, BLOCK_N, BLOCK_K, SWAP_AB, REDUCTION, W_WORDS,
        )  # fmt: skip
    elif REDUCTION == "none":  # else these rows are zeros already, or written by `moe_gemm_kernel_reduce`
        store(y_ptr, tl.zeros((ROWS, BLOCK_N), tl.float32), slot, slots, n, N, REDUCTION)
        if TAIL > 0:
            store(y_ptr, tl.zeros((TAIL, BLOCK_N), tl.float32), tail_slot, slots, n, N, REDUCTION)


@triton.jit(do_not_specialize=["slots"])
def moe_gemm_kernel_zero(
    sums_ptr,  # (S, N): y, or float32 sums
    slots,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Zeros for parts of K to be added to; one program a slot and CHUNK channels."""
    chunks: tl.constexpr = (N + CHUNK - 1) // CHUNK
    slot = tl.program_id(0) // chunks
    n = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    zeros = tl.zeros((CHUNK,), sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + slot.to(tl.int64) * N + n, zeros, mask=n < N)


@triton.jit(do_not_specialize=["slots"])
def moe_gemm_kernel_reduce(
    sums_ptr,  # (PARTS, S, N), float32
    topk_ids_ptr,  # (S,)
    w_scale_ptr,  # (E, N); not read unless CHANNEL_SCALES
    x_scale_ptr,  # (T,); not read unless SCALED_X
    topk_weight_ptr,  # (S,); not read unless ROUTING_WEIGHT
    y_ptr,  # (S, N)
    slots,
    E: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    CHANNEL_SCALES: tl.constexpr,
    SCALED_X: tl.constexpr,
    ROUTING_WEIGHT: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """y from float32 sums over parts of K: added from the first part to the last, scaled as `moe_gemm_kernel` does it.

    One program a slot and CHUNK channels. Slots without an expert get zeros; nobody has written their sums.
    """
    chunks: tl.constexpr = (N + CHUNK - 1) // CHUNK
    slot = tl.program_id(0) // chunks
    n = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    n_valid = n < N
    expert = tl.load(topk_ids_ptr + slot)
    has_expert = (expert >= 0) & (expert < E)
    acc = tl.zeros((CHUNK,), tl.float32)
    if has_expert:
        sums_ptrs = sums_ptr + slot.to(tl.int64) * N + n
        for _ in tl.static_range(PARTS):
            acc += tl.load(sums_ptrs, mask=n_valid, other=0.0)
            sums_ptrs += tl.cast(slots, tl.int64) * N  # jax-triton makes a constant of 1, which has no method
        if CHANNEL_SCALES:
            acc *= tl.load(w_scale_ptr + expert.to(tl.int64) * N + n, mask=n_valid, other=0.0)
        if SCALED_X:
            acc *= tl.load(x_scale_ptr + slot // TOP_K)
        if ROUTING_WEIGHT:
            acc *= tl.load(topk_weight_ptr + slot)
    tl.store(y_ptr + slot.to(tl.int64) * N + n, acc.to(y_ptr.dtype.element_ty), mask=n_valid)
