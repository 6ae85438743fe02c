"""Small valid arguments of `backends.moe_gemm` as torch tensors, JAX arrays or NumPy arrays, on the CPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from backends import arrays
from shared import fp8

KINDS = ("torch", "jax", "numpy")
T, E, N, K, TOP_K = 3, 4, 64, 32, 2


def numpy_arguments(dtype: str = "fp16", layout: str = "channel") -> dict[str, np.ndarray | None]:
    """x, w, topk_ids, w_scale, topk_weight; dtype "fp16", "bf16" or "fp8"."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((T, K)).astype(np.float16 if dtype == "fp16" else ml_dtypes.bfloat16)
    w = rng.standard_normal((E, N, K)).astype(np.float32)
    w_scale = None
    if dtype == "fp8":
        w, w_scale = (fp8.quantise_channel if layout == "channel" else fp8.quantise_block)(w)
    else:
        w = w.astype(x.dtype)
    ids = np.array([(0, 3), (2, -1), (3, 3)], np.int32)
    return {"x": x, "w": w, "topk_ids": ids, "w_scale": w_scale, "topk_weight": rng.random((T, TOP_K), np.float32)}


def convert(array: Any, kind: str) -> Any:
    """A NumPy array as `kind`; anything else as it is."""
    if not isinstance(array, np.ndarray) or kind == "numpy":
        return array
    return arrays.to_framework(array, kind, on_gpu=False)


def arguments(kind: str, dtype: str = "fp16", layout: str = "channel") -> dict[str, Any]:
    return {name: convert(array, kind) for name, array in numpy_arguments(dtype, layout).items()}
