"""A Triton kernel that marks the left operand of its products to be evicted first from L2, as weights would be."""

import triton
import triton.language as tl


@triton.jit
def product_kernel(w_ptr, x_ptr, y_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """y (64, 16) = w (64, K) @ x (16, K).T"""
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + tl.arange(0, 64)[:, None] * K + k[None, :]
    x_ptrs = x_ptr + tl.arange(0, 16)[:, None] * K + k[None, :]
    acc = tl.zeros((64, 16), tl.float32)
    for _ in range(K // BLOCK_K):
        w = tl.load(w_ptrs, eviction_policy="evict_first")
        acc = tl.dot(w, tl.load(x_ptrs).T, acc)
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    tl.store(y_ptr + tl.arange(0, 64)[:, None] * 16 + tl.arange(0, 16)[None, :], acc)
