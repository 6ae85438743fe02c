"""The shipped Triton GEMM kernel with parts of it left out, to tell what each costs beside a plain read.

With all parts this is `moe_gemm_kernel` for a tile of one block of rows, whole tiles of channels, weights on the left
and column order, without scales. Without the product, weights and x are int32 words of the same bytes, and each program
stores the sum of all that it read: no load can be left out, and a sum tells a byte that was missed.

    "contiguous"        a tile's strip of weights, BLOCK_N x K, is walked from its first byte to its last
    "tiles"             the same strip BLOCK_K deep at a time, as the GEMM walks it; experts are 0, 1, 2, ...
    "behind the plan"   a program reads first which tiles there are, then its expert and its slots
    "with x"            it also reads the slots' rows of x
    "with the product"  it multiplies, and stores y in place of a sum
"""

from __future__ import annotations

import triton
import triton.language as tl

from backends.triton_kernel import gather_rows, load_x, multiply, store, zeros


@triton.jit(do_not_specialize=["rows", "slots"])
def moe_gemm_kernel_tile_read(
    x_ptr,  # (T, K); int32 without PRODUCT
    w_ptr,  # (E, N, K); int32 without PRODUCT
    sorted_slot_ptr,  # (max_tile_rows * BLOCK_M,)
    tile_expert_ptr,  # (max_tile_rows,)
    tile_rows_ptr,  # (1,)
    out_ptr,  # int32 (tile rows * N / BLOCK_N,), a sum a program; with PRODUCT y (S, N)
    rows,  # tile rows in use, for a kernel that does not read the plan
    slots,  # S = T * top_k
    N: tl.constexpr,
    K: tl.constexpr,  # elements of w_ptr, as BLOCK_K
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides N
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,  # of the loop: without a product Triton gives a loop only those that it asks for
    CONTIGUOUS: tl.constexpr,
    PLANNED: tl.constexpr,
    GATHER_X: tl.constexpr,  # needs PLANNED
    PRODUCT: tl.constexpr,  # needs GATHER_X
):
    # Locate tile
    pid = tl.program_id(0)
    tile_cols: tl.constexpr = N // BLOCK_N
    if PLANNED:
        rows = tl.load(tile_rows_ptr)
        if pid >= rows * tile_cols:
            return
    row = pid % rows
    col = pid // rows
    expert = row
    if PLANNED:
        expert = tl.load(tile_expert_ptr + row)
        slot = tl.load(sorted_slot_ptr + row * BLOCK_M + tl.arange(0, BLOCK_M))
        if expert < 0:
            return

    # Pointers
    k = tl.arange(0, BLOCK_K)
    n = col * BLOCK_N + tl.arange(0, BLOCK_N)
    within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_K + k[None, :]  # of a block of the strip, CONTIGUOUS
    if CONTIGUOUS:
        w_ptrs = w_ptr + expert.to(tl.int64) * N * K + col.to(tl.int64) * BLOCK_N * K + within
    else:
        w_ptrs = w_ptr + expert.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
    if GATHER_X:
        row_valid = slot < slots
        x_ptrs = gather_rows(x_ptr, slot, k, K, TOP_K)

    # Stream K
    MASK_K: tl.constexpr = K % BLOCK_K != 0
    if PRODUCT:
        acc = zeros(BLOCK_M, BLOCK_N, True)
    else:
        w_sums = tl.zeros((BLOCK_N, BLOCK_K), tl.int32)
        x_sums = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for step in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        k_valid = k < K - step * BLOCK_K
        if GATHER_X:
            x = load_x(x_ptrs, row_valid, k_valid, MASK_K)
            x_ptrs += BLOCK_K
        if not MASK_K:
            w = tl.load(w_ptrs)
        elif CONTIGUOUS:
            w = tl.load(w_ptrs, mask=within < BLOCK_N * K - step * (BLOCK_N * BLOCK_K), other=0.0)
        else:
            w = tl.load(w_ptrs, mask=k_valid[None, :], other=0.0)
        w_ptrs += BLOCK_N * BLOCK_K if CONTIGUOUS else BLOCK_K
        if PRODUCT:
            acc = multiply(acc, x, w, 1.0, "none", True)
        else:
            w_sums += w
            if GATHER_X:
                x_sums += x

    # Store
    if PRODUCT:
        store(out_ptr, acc.T, slot, slots, n, N, "none")
    else:
        # Modulo 2**32 in the end. Wider here, as Triton's interpreter refuses sums that overflow.
        total = tl.sum(w_sums.to(tl.int64))
        if PLANNED:
            total += tl.sum(tl.where(slot < slots, slot, 0))
        if GATHER_X:
            total += tl.sum(x_sums.to(tl.int64))
        tl.store(out_ptr + pid, total.to(tl.int32))
