"""The problem, exactly: shapes, dtypes, and the bytes and operations that no implementation can avoid.

    y[t, j, n] = topk_weight[t, j] * sum_k x[t, k] * w[topk_ids[t, j], n, k] * w_scale[...]

| name          | shape                                    | dtype                              |
| x             | (T, K)                                   | float16, bfloat16                  |
| w             | (E, N, K), K contiguous                  | float16, bfloat16, float8_e4m3fn   |
| w_scale       | (E, N), or (E, ceil(N/128), ceil(K/128)) | float32; FP8 only                  |
| topk_ids      | (T, top_k)                               | int32; -1 gives a row of zeros     |
| topk_weight   | (T, top_k), optional                     | float32                            |
| y             | (T, top_k, N)                            | dtype of x; float32 accumulation   |

A *slot* is one (token, j) pair; slot number = token * top_k + j.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from shared.checks import ArgumentError, check_name
from shared.keys import Key

DTYPES = ("fp16", "bf16", "fp8-w8a16", "fp8-w8a8")
SCALE_BLOCK = 128
"""Rows and columns of one weight-scale block, as DeepSeek-V3's checkpoint stores them."""

ScaleLayout = Literal["channel", "block"]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem(Key):
    """One MoE GEMM without its data.

    tokens T, experts E, n N, k K, top_k: as in the module's table
    dtype:          fp16, bf16, fp8-w8a16 (weights widened in the kernel) or fp8-w8a8 (activations quantised per token)
    activation:     dtype of x and y, "float16" or "bfloat16"; follows from dtype except for FP8
    scale_layout:   None, or for FP8 "channel" (E, N) or "block" (E, ceil(N/128), ceil(K/128))
    routing_weight: whether topk_weight multiplies the rows
    """

    tokens: int
    experts: int
    n: int
    k: int
    top_k: int
    dtype: str = "fp16"
    activation: str = "float16"
    scale_layout: ScaleLayout | None = None
    routing_weight: bool = False

    def __post_init__(self) -> None:
        check_name("dtype", self.dtype, DTYPES)
        for name, least in (("tokens", 0), ("experts", 1), ("n", 1), ("k", 1), ("top_k", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(f"{name}: got {getattr(self, name)}; allowed: {least} or more")
        check_name("activation", self.activation, ("float16", "bfloat16"))
        expected = {"fp16": "float16", "bf16": "bfloat16"}.get(self.dtype, self.activation)
        if self.activation != expected:
            raise ArgumentError(f"activation: got {self.activation} with dtype {self.dtype}; allowed: {expected}")
        if self.is_fp8 and self.scale_layout not in ("channel", "block"):
            raise ArgumentError(f"scale_layout: got {self.scale_layout} with {self.dtype}; allowed: channel, block")
        if not self.is_fp8 and self.scale_layout is not None:
            raise ArgumentError(f"scale_layout: got {self.scale_layout} with {self.dtype}; allowed: None")

    @classmethod
    def of(cls, dtype: str, *, scale_layout: ScaleLayout = "channel", **shape: Any) -> Problem:
        """Problem with the activation and scale layout that `dtype` implies (FP8: bfloat16 activations)."""
        check_name("dtype", dtype, DTYPES)
        fp8 = dtype.startswith("fp8")
        shape.setdefault("activation", "float16" if dtype == "fp16" else "bfloat16")
        return cls(dtype=dtype, scale_layout=scale_layout if fp8 else None, **shape)

    @property
    def is_fp8(self) -> bool:
        return self.dtype.startswith("fp8")

    @property
    def quantises_x(self) -> bool:
        return self.dtype == "fp8-w8a8"

    @property
    def scales_x(self) -> bool:
        """Whether the kernel reads x with one scale a token: quantised to e4m3 (fp8-w8a8), or as float16.

        Hardware widens e4m3 weights to float16 but not to bfloat16. With bfloat16 activations, fp8-w8a16 multiplies in
        float16: each row of x is scaled into float16's range by a power of two (`fp8.scale_token`).
        """
        return self.quantises_x or (self.dtype == "fp8-w8a16" and self.activation == "bfloat16")

    @property
    def kernel_x_dtype(self) -> str:
        """dtype of x as the GEMM kernel reads it."""
        return "float8_e4m3fn" if self.quantises_x else "float16" if self.scales_x else self.activation

    @property
    def slots(self) -> int:
        """S = T * top_k, the rows of y."""
        return self.tokens * self.top_k

    @property
    def w_itemsize(self) -> int:
        return 1 if self.is_fp8 else 2

    @property
    def x_itemsize(self) -> int:
        """Bytes of one activation as the GEMM kernel reads it."""
        return 1 if self.quantises_x else 2

    @property
    def w_scale_shape(self) -> tuple[int, ...] | None:
        if self.scale_layout == "channel":
            return (self.experts, self.n)
        if self.scale_layout == "block":
            return (self.experts, ceil_div(self.n, SCALE_BLOCK), ceil_div(self.k, SCALE_BLOCK))
        return None

    def max_tile_rows(self, block_m: int) -> int:
        """Most tile rows that any routing can need: the static bound that grids and plan arrays are sized by.

        A bucket (an expert, or the -1 slots) with c > 0 slots fills ceil(c / block_m) <= (c - 1) // block_m + 1 tile
        rows; over b = min(E + 1, S) non-empty buckets that sums to at most (S - b) // block_m + b.
        """
        buckets = min(self.experts + 1, self.slots)
        return (self.slots - buckets) // block_m + buckets

    def tile_cols(self, block_n: int) -> int:
        return ceil_div(self.n, block_n)

    # What has to be moved and computed. Expert counts: slots per expert, (E,), -1 slots left out.

    def weight_bytes(self, expert_counts: Sequence[int]) -> int:
        """Bytes of the active experts' weights and scales, each read once."""
        active = sum(1 for count in expert_counts if count > 0)
        scale = 0
        if self.w_scale_shape is not None:
            scale = 4
            for size in self.w_scale_shape[1:]:
                scale *= size
        return active * (self.n * self.k * self.w_itemsize + scale)

    def read_bytes(self, expert_counts: Sequence[int]) -> int:
        """Bytes that the GEMM must read: active weights and scales, x once, routing arrays once."""
        read = self.weight_bytes(expert_counts) + self.tokens * self.k * self.x_itemsize + self.slots * 4
        if self.scales_x:
            read += self.tokens * 4
        if self.routing_weight:
            read += self.slots * 4
        return read

    def write_bytes(self) -> int:
        return self.slots * self.n * 2

    def operations(self, expert_counts: Sequence[int]) -> int:
        """Multiplications plus additions over the slots that have an expert; padding is not counted."""
        return 2 * sum(expert_counts) * self.n * self.k

    def floor_seconds(self, expert_counts: Sequence[int], *, bytes_per_second: float, flops_per_second: float) -> float:
        """Least time on a GPU with these rates: the larger of reading what must be read and computing it.

        `read_bytes` only, as the write of y overlaps with reading and its share is what `write_bytes` tells.
        """
        return max(self.read_bytes(expert_counts) / bytes_per_second, self.operations(expert_counts) / flops_per_second)
