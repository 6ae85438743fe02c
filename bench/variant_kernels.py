"""The GEMM kernel with features of Hopper that the shipped one does not use, each by itself, for their figures.

Evidence, not product: `python -m bench variants` times these beside `moe_gemm_kernel` of backends/triton_kernel.py,
whose names and steps they keep, so that a diff shows what a feature changes. They know orders "row" and "column", no
split K and no block scales. Both carry the GEMM kernel's name in theirs: whoever times kernels looks for it.

    moe_gemm_kernel_tma         weights by the tensor memory accelerator (TMA): one thread asks for a (BLOCK_N, BLOCK_K)
                                box of a descriptor that the host made, where the shipped kernel's threads copy 16 bytes
                                each. x is gathered by pointers as before: its rows are no neighbours
    moe_gemm_kernel_persistent  as many programs as the GPU holds at once, P; each takes every P-th tile of the order's
                                queue. With or without TMA; with FLATTEN loads go on from one tile to the next

Warp specialisation: Triton 3.8 takes `tl.range(..., warp_specialize=True)` for sm_90, but only of loops whose operands
all come by TMA. A pointer load that feeds the product ends the compilation with "unsupported load type for producer
commit" (triton issue 9728), and Hopper's TMA cannot gather rows. So it is measured with GATHERED, where x has been
brought into the plan's order beforehand, as pallas-mosaic has it. What else decides, seen in the compiler's output:
with FLATTEN, with 8 warps, and where the left operand is too small for the warp-group instruction the request is
ignored without a word; where it has more than 64 rows for 4 warps, compilation fails, as the pass splits the tile
between two warp-groups but not its box ("descriptor block and tensor must have the same number of elements").
"""

import triton
import triton.language as tl

from backends.triton_kernel import locate_tile


@triton.jit(do_not_specialize=["slots"])
def moe_gemm_kernel_tma(
    x_ptr,  # (T, K), rows x_stride apart
    w_desc,  # descriptor of (E * N, K), boxes of BLOCK_N x BLOCK_K
    w_scale_ptr,  # (E, N); not read without FP8
    x_scale_ptr,  # (T,); not read unless SCALED_X
    topk_weight_ptr,  # (T * top_k,); not read unless ROUTING_WEIGHT
    sorted_slot_ptr,  # (max_tile_rows * BLOCK_M,)
    tile_expert_ptr,  # (max_tile_rows,)
    tile_rows_ptr,  # (1,)
    tile_span_ptr,  # not read
    y_ptr,  # (S, N)
    slots,  # S = T * top_k
    x_stride: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SCALES: tl.constexpr,  # "none", "channel"
    QUANTISED_X: tl.constexpr,  # x is e4m3
    SCALED_X: tl.constexpr,  # x has a scale a token
    ROUTING_WEIGHT: tl.constexpr,
    ORDER: tl.constexpr,
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
    if pid >= tile_rows * tile_cols:
        return
    row, col = locate_tile(pid, tile_rows, tile_cols, tile_span_ptr, ORDER, GROUP_M)

    # Gather rows. Offsets of rows are 64-bit: T * top_k * N passes 2**31. Boxes are found by row and column.
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
    # Past the last channel, the next expert's are read, and zeros behind the last expert: their products are never
    # stored.
    w_row = expert * N + col * BLOCK_N
    n_read = tl.minimum(n, N - 1)

    # Stream K
    if SWAP_AB:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    for step in range(0, steps):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs, mask=row_valid[:, None], other=0.0)
        else:  # the box's tail is zeros
            k_valid = k < K - step * BLOCK_K
            x = tl.load(x_ptrs, mask=row_valid[:, None] & k_valid[None, :], other=0.0)
        w = w_desc.load([w_row, step * BLOCK_K])
        if SCALES != "none" and not QUANTISED_X:
            w = w.to(tl.float16)  # x is float16 then: the one 16-bit type that hardware widens e4m3 to
        acc = tl.dot(w, x.T, acc) if SWAP_AB else tl.dot(x, w.T, acc)
        x_ptrs += BLOCK_K

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


@triton.jit(do_not_specialize=["slots"])
def moe_gemm_kernel_persistent(
    x,  # (T, K), rows x_stride apart; GATHERED: descriptor of (max_tile_rows * BLOCK_M, K), boxes of BLOCK_M x BLOCK_K
    w,  # (E, N, K), K contiguous; TMA: descriptor of (E * N, K), boxes of BLOCK_N x BLOCK_K
    w_scale_ptr,  # (E, N); not read without FP8
    x_scale_ptr,  # (T,); not read unless SCALED_X
    topk_weight_ptr,  # (T * top_k,); not read unless ROUTING_WEIGHT
    sorted_slot_ptr,  # (max_tile_rows * BLOCK_M,)
    tile_expert_ptr,  # (max_tile_rows,)
    tile_rows_ptr,  # (1,)
    tile_span_ptr,  # not read
    y_ptr,  # (S, N)
    slots,  # S = T * top_k
    x_stride: tl.constexpr,
    w_stride_e: tl.constexpr,
    w_stride_n: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SCALES: tl.constexpr,  # "none", "channel"
    QUANTISED_X: tl.constexpr,  # x is e4m3
    SCALED_X: tl.constexpr,  # x has a scale a token
    ROUTING_WEIGHT: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
    GATHERED: tl.constexpr,  # x: a row a slot of the plan, in its order
    FLATTEN: tl.constexpr,  # one loop over all steps of all tiles
    WARP_SPECIALISE: tl.constexpr,
):
    tile_cols: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile_rows = tl.load(tile_rows_ptr)
    k = tl.arange(0, BLOCK_K)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first, tiles, programs = tl.program_id(0), tile_rows * tile_cols, tl.num_programs(0)
    for pid in tl.range(first, tiles, programs, flatten=FLATTEN, warp_specialize=WARP_SPECIALISE):
        # Locate tile
        row, col = locate_tile(pid, tile_rows, tile_cols, tile_span_ptr, ORDER, GROUP_M)

        # Gather rows. Offsets of rows and experts are 64-bit: T * top_k * N and E * N * K pass 2**31.
        slot = tl.load(sorted_slot_ptr + row * BLOCK_M + tl.arange(0, BLOCK_M))
        row_valid = slot < slots
        token = slot // TOP_K
        # Rows without an expert read the first one's weights and store zeros: a branch around the loop over K would
        # keep the two loops apart.
        has_expert = tl.load(tile_expert_ptr + row) >= 0
        expert = tl.maximum(tl.load(tile_expert_ptr + row), 0)
        n = col * BLOCK_N + tl.arange(0, BLOCK_N)
        n_valid = n < N
        n_read = tl.minimum(n, N - 1)
        y_rows = y_ptr + slot.to(tl.int64) * N
        if not GATHERED:
            x_rows = x + token.to(tl.int64)[:, None] * x_stride
        w_row = expert * N + col * BLOCK_N
        if not TMA:
            w_rows = w + expert.to(tl.int64) * w_stride_e + n_read.to(tl.int64)[:, None] * w_stride_n

        # Stream K
        if SWAP_AB:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, steps):
            k_step = step * BLOCK_K + k
            if GATHERED:
                x_tile = x.load([row * BLOCK_M, step * BLOCK_K])
            elif K % BLOCK_K == 0:
                x_tile = tl.load(x_rows + k_step[None, :], mask=row_valid[:, None], other=0.0)
            else:  # both tails are masked: 0 * NaN is NaN
                x_tile = tl.load(x_rows + k_step[None, :], mask=row_valid[:, None] & (k_step < K)[None, :], other=0.0)
            if TMA:
                w_tile = w.load([w_row, step * BLOCK_K])
            elif K % BLOCK_K == 0:
                w_tile = tl.load(w_rows + k_step[None, :])
            else:
                w_tile = tl.load(w_rows + k_step[None, :], mask=(k_step < K)[None, :], other=0.0)
            if SCALES != "none" and not QUANTISED_X:
                w_tile = w_tile.to(tl.float16)  # x is float16 then: the one 16-bit type that hardware widens e4m3 to
            acc = tl.dot(w_tile, x_tile.T, acc) if SWAP_AB else tl.dot(x_tile, w_tile.T, acc)

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
        y = tl.where(has_expert, acc.T if SWAP_AB else acc, 0.0).to(y_ptr.dtype.element_ty)
        tl.store(y_rows[:, None] + n[None, :], y, mask=row_valid[:, None] & n_valid[None, :])
