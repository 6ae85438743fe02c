"""The MoE GEMM in Triton: one kernel, launched by PyTorch (`torch_triton`) and by JAX (`jax_triton`).

A launch of `moe_gemm_kernel` computes y (T*top_k, N), one output tile of BLOCK_M slots x BLOCK_N channels a program:

    sorted_slot  0  3  9  S  | 1  2  S  S | ...      BLOCK_M rows a tile row; S marks padding
    tile_expert       0      |      2     | ...      all slots of a tile row go to one expert

    Locate tile   program id -> (tile row, tile column), in the order asked for
    Gather rows   the tile row's slots -> their tokens' rows of x, its expert -> that expert's weights
    Stream K      accumulate x[token, k] * w[expert, n, k] in float32, BLOCK_K at a time
    Scale         FP8 scales and the routing weight, in float32
    Store         to the rows of y that the slots name

Two small kernels come first in a call: `plan_kernel` (sort slots by expert, on the device, static shapes) and, where
`Problem.scales_x`, `scale_kernel` (activations to e4m3 or float16, one scale a token).
"""

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def locate_tile(pid, tile_rows, tile_cols, ORDER: tl.constexpr, GROUP_M: tl.constexpr):
    """Program id -> (tile row, tile column); see shared/orders.py, the specification."""
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
    else:
        # The article's mapping, divisors exchanged: here to be shown wrong. tile_rows is its padded grid_m.
        tl.static_assert(ORDER == "published-2024")
        row = pid % tile_cols
        col = pid // tile_rows
    return row, col


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
    y_ptr,  # (T * top_k, N)
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
):
    # Locate tile
    pid = tl.program_id(0)
    tile_cols: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile_rows = tl.load(tile_rows_ptr)
    if ORDER == "published-2024":
        row, col = locate_tile(pid, PUBLISHED_GRID_M, tile_cols, ORDER, GROUP_M)
        if (row >= tile_rows) | (col >= tile_cols):
            return
    else:
        if pid >= tile_rows * tile_cols:
            return
        row, col = locate_tile(pid, tile_rows, tile_cols, ORDER, GROUP_M)

    # Gather rows. Offsets of rows and experts are 64-bit: T * top_k * N and E * N * K pass 2**31.
    slot = tl.load(sorted_slot_ptr + row * BLOCK_M + tl.arange(0, BLOCK_M))
    row_valid = slot < slots
    token = slot // TOP_K
    expert = tl.load(tile_expert_ptr + row)
    n = col * BLOCK_N + tl.arange(0, BLOCK_N)
    n_valid = n < N
    y_rows = y_ptr + slot.to(tl.int64) * N
    if expert < 0:
        y_zero = tl.zeros((BLOCK_M, BLOCK_N), y_ptr.dtype.element_ty)
        tl.store(y_rows[:, None] + n[None, :], y_zero, mask=row_valid[:, None] & n_valid[None, :])
        return
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    # Past the last channel, channel N - 1 is read again instead of masking: its products are never stored, and
    # unmasked loads stay 16 bytes wide.
    n_read = tl.minimum(n, N - 1)
    w_ptrs = w_ptr + expert.to(tl.int64) * w_stride_e + n_read.to(tl.int64)[:, None] * w_stride_n + k[None, :]

    # Stream K
    if SWAP_AB:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    scale_cols: tl.constexpr = (K + 127) // 128
    block_scale_ptrs = w_scale_ptr + (expert.to(tl.int64) * ((N + 127) // 128) + n_read // 128) * scale_cols
    for step in range((K + BLOCK_K - 1) // BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs, mask=row_valid[:, None], other=0.0)
            w = tl.load(w_ptrs)
        else:  # both tails are masked: 0 * NaN is NaN
            k_valid = k < K - step * BLOCK_K
            x = tl.load(x_ptrs, mask=row_valid[:, None] & k_valid[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=k_valid[None, :], other=0.0)
        if SCALES != "none" and not QUANTISED_X:
            w = w.to(tl.float16)  # x is float16 then: the one 16-bit type that hardware widens e4m3 to
        if SCALES == "block":
            # BLOCK_K divides 128, so one step lies in one column of scale blocks. Partial sums are scaled in float32.
            block_scale = tl.load(block_scale_ptrs + step * BLOCK_K // 128)
            if SWAP_AB:
                acc += tl.dot(w, x.T) * block_scale[:, None]
            else:
                acc += tl.dot(x, w.T) * block_scale[None, :]
        else:
            acc = tl.dot(w, x.T, acc) if SWAP_AB else tl.dot(x, w.T, acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K

    # Scale
    if SCALES == "channel":
        w_scale = tl.load(w_scale_ptr + expert.to(tl.int64) * N + n_read)
        acc *= w_scale[:, None] if SWAP_AB else w_scale[None, :]
    if SCALED_X:
        x_scale = tl.load(x_scale_ptr + token, mask=row_valid, other=0.0)
        acc *= x_scale[None, :] if SWAP_AB else x_scale[:, None]
    if ROUTING_WEIGHT:
        routing_weight = tl.load(topk_weight_ptr + slot, mask=row_valid, other=0.0)
        acc *= routing_weight[None, :] if SWAP_AB else routing_weight[:, None]

    # Store
    y = (acc.T if SWAP_AB else acc).to(y_ptr.dtype.element_ty)
    tl.store(y_rows[:, None] + n[None, :], y, mask=row_valid[:, None] & n_valid[None, :])


@triton.jit
def bucket_of(ids, E: tl.constexpr):
    """Expert number -> bucket: -1, and what is no expert's number at all, to bucket E, whose rows of y are zeros."""
    return tl.where((ids < 0) | (ids >= E), E, ids)


@triton.jit(do_not_specialize=["slots"])
def plan_kernel(
    topk_ids_ptr,  # (S,)
    sorted_slot_ptr,  # (max_tile_rows * BLOCK_M,)
    tile_expert_ptr,  # (max_tile_rows,)
    tile_rows_ptr,  # (1,)
    slots,
    E: tl.constexpr,
    MAX_TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BUCKETS: tl.constexpr,  # power of two, at least E + 1
    CHUNK: tl.constexpr,
):
    """Counting sort of slots by bucket; program b writes bucket b's rows. Bucket E takes the -1 slots, and the tail.

    Every program counts all buckets again, from L2, instead of waiting for another launch to have done it. Slots keep
    their order, so the plan is the same in every run.
    """
    bucket = tl.program_id(0)
    buckets = tl.arange(0, BUCKETS)
    chunk = tl.arange(0, CHUNK)

    counts = tl.zeros((BUCKETS,), tl.int32)
    for start in range(0, slots, CHUNK):
        in_range = start + chunk < slots
        ids = tl.load(topk_ids_ptr + start + chunk, mask=in_range, other=-1)
        counts += tl.histogram(bucket_of(ids, E), BUCKETS, mask=in_range)
    rows = (counts + BLOCK_M - 1) // BLOCK_M
    first_row = tl.sum(tl.where(buckets < bucket, rows, 0))
    own_rows = tl.sum(tl.where(buckets == bucket, rows, 0))
    own_count = tl.sum(tl.where(buckets == bucket, counts, 0))

    placed = first_row * BLOCK_M
    for start in range(0, slots, CHUNK):
        in_range = start + chunk < slots
        ids = tl.load(topk_ids_ptr + start + chunk, mask=in_range, other=-1)
        mine = (bucket_of(ids, E) == bucket) & in_range
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(sorted_slot_ptr + placed + rank, start + chunk, mask=mine)
        placed += tl.sum(mine.to(tl.int32))

    end_row = first_row + own_rows
    expert = bucket
    if bucket == E:
        tl.store(tile_rows_ptr, end_row)
        end_row = MAX_TILE_ROWS
        expert = -1
    for start in range(first_row, end_row, CHUNK):
        tl.store(tile_expert_ptr + start + chunk, expert, mask=start + chunk < end_row)
    for start in range(first_row * BLOCK_M + own_count, end_row * BLOCK_M, CHUNK):
        tl.store(sorted_slot_ptr + start + chunk, slots, mask=start + chunk < end_row * BLOCK_M)


@triton.jit
def scale_kernel(
    x_ptr,  # (T, K), rows x_stride apart
    scaled_ptr,  # (T, K), float8_e4m3fn or float16
    scale_ptr,  # (T,)
    x_stride: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """x to e4m3 or float16, one power of two a token: shared/fp8.py's quantise_token or scale_token, bit for bit."""
    TO_FP8: tl.constexpr = scaled_ptr.dtype.element_ty == tl.float8e4nv
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNK)

    largest = tl.zeros((CHUNK,), tl.float32)
    not_finite = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, K, CHUNK):
        x = tl.load(x_ptr + token * x_stride + start + chunk, mask=start + chunk < K, other=0.0).to(tl.float32)
        finite = tl.abs(x) < float("inf")
        largest = tl.maximum(largest, tl.where(finite, tl.abs(x), 0.0))
        not_finite = tl.where(finite, not_finite, 1)
    amax = tl.max(largest, 0)

    # From the bits of amax: for e4m3 the least power of two with amax / scale <= 448 = 1.75 * 2**8, for float16 the one
    # that takes amax to [2**14, 2**15).
    bits = amax.to(tl.int32, bitcast=True)
    if TO_FP8:
        exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    else:
        exponent = (bits >> 23) - 127 - 14
    exponent = tl.where(amax == 0, 0, tl.maximum(exponent, -100))
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)

    for start in range(0, K, CHUNK):
        x = tl.load(x_ptr + token * x_stride + start + chunk, mask=start + chunk < K, other=0.0).to(tl.float32)
        scaled = x * inverse
        if TO_FP8:
            scaled = tl.where(tl.abs(x) < float("inf"), scaled, 0.0)
            scaled = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)
        tl.store(scaled_ptr + token * K + start + chunk, scaled.to(scaled_ptr.dtype.element_ty), mask=start + chunk < K)
    if TO_FP8:  # e4m3 has no infinity: a row that is not finite becomes NaN by its scale
        scale = tl.where(tl.max(not_finite, 0) > 0, float("nan"), scale)
    tl.store(scale_ptr + token, scale)
