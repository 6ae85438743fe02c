"""The float64 reference, and how far a result may be from it."""

from __future__ import annotations

import numpy as np

from shared.fp8 import expand_block_scale, quantise_token
from shared.problem import Problem


def moe_gemm_reference(
    x: np.ndarray,
    w: np.ndarray,
    topk_ids: np.ndarray,
    *,
    problem: Problem,
    w_scale: np.ndarray | None = None,
    topk_weight: np.ndarray | None = None,
) -> np.ndarray:
    """y (T, top_k, N) in float64, from the same (already quantised) weights; -1 slots are rows of zeros.

    For fp8-w8a8 the activations are quantised as the spec says (`fp8.quantise_token`), so that the difference to a
    kernel's result is the kernel's rounding, not the quantisation.
    """
    tokens, top_k = topk_ids.shape
    y = np.zeros((tokens, top_k, problem.n))
    if problem.quantises_x:
        q, scale = quantise_token(x)
        activations = q.astype(np.float64) * scale[:, None]
    else:
        activations = x.astype(np.float64)
    for expert in np.unique(topk_ids[topk_ids >= 0]):
        token, slot = np.nonzero(topk_ids == expert)
        y[token, slot] = activations[token] @ dequantise(w[expert], _of_expert(w_scale, expert), problem).T
    if topk_weight is not None:
        y *= np.where(topk_ids >= 0, topk_weight, 0).astype(np.float64)[:, :, None]
    return y


def dequantise(w: np.ndarray, w_scale: np.ndarray | None, problem: Problem) -> np.ndarray:
    """One expert's weights (N, K) in float64, with their scales applied."""
    weights = w.astype(np.float64)
    if w_scale is None:
        return weights
    if problem.scale_layout == "channel":
        return weights * w_scale[:, None]
    return weights * expand_block_scale(w_scale[None], problem.n, problem.k)[0]


def relative_error(y: np.ndarray, reference: np.ndarray) -> float:
    """||y - reference|| / ||reference|| over the whole output. NaN in y gives NaN; 0 only if both are zero."""
    difference = float(np.linalg.norm(y.astype(np.float64) - reference))
    norm = float(np.linalg.norm(reference))
    return difference / norm if norm > 0 else difference


def error_bound(problem: Problem) -> float:
    """Largest relative error that counts as rounding.

    Rounding y once to a p-bit significand errs by about 2**-(p+1) / sqrt(3) of the norm: 2.1e-4 for float16 (p = 11,
    with the leading bit), 1.7e-3 for bfloat16 (p = 8). The bounds are twice that. Accumulating in float32 adds less
    than 1e-6. FP8 matrix instructions of Hopper keep about 14 bits of a partial sum (DeepGEMM issue 50), which was
    measured at 0.9 to 1.4e-3 for K of 2048 to 7168; fp8-w8a8 is allowed 2e-3 for it on top of the output's rounding,
    added as independent errors are.
    """
    rounding = 4.2e-4 if problem.activation == "float16" else 3.4e-3
    accumulation = 2e-3 if problem.quantises_x else 0.0
    return float(np.hypot(rounding, accumulation))


def _of_expert(w_scale: np.ndarray | None, expert: int) -> np.ndarray | None:
    return None if w_scale is None else w_scale[expert]
