"""The float64 reference, and how far a result may be from it."""

from __future__ import annotations

import numpy as np

from shared.fp8 import expand_block_scale, quantise_token
from shared.problem import SCALE_BLOCK, Problem


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


LEAST_NORMAL_FP16, LEAST_NORMAL_E4M3 = 2.0**-14, 2.0**-6


def error_bound(problem: Problem, rounded_parts: int = 1) -> float:
    """Largest relative error that counts as rounding.

    Twice what rounding y once errs by, or rounding and adding so many parts (`Config.rounded_parts`); accumulating in
    float32 adds less than 1e-6. For fp8-w8a8, one and a half times the matrix instruction's own loss is added, as
    independent errors are.
    """
    return float(np.hypot(2 * rounding_error(problem, rounded_parts), 1.5 * accumulation_error(problem)))


def element_bound(problem: Problem, rounded_parts: int = 1) -> float:
    """Largest error of one element, as a share of the largest magnitude in its row of y.

    Over the whole output one wrong element could hide. Rounding to p bits moves an element by at most 2**-p of itself,
    which is 2.4 times the root mean square; 2.5 is allowed. Of 10**4 elements summed by `accumulate_fp8`, the worst is
    off by 1.9 times `accumulation_error` of the row's largest, and outputs have up to 10**9 elements; 5 is allowed.

    Where P parts are rounded and added, all roundings of one element may be at their largest and of one sign: P parts
    of 1/sqrt(P) of the row's largest, and sums of j = 2 ... P parts of sqrt(j/P).
    """
    roundings = sum((j / rounded_parts) ** 0.5 for j in range(2, rounded_parts + 1)) + rounded_parts**0.5
    return 2.5 * rounding_error(problem) * roundings + 5 * accumulation_error(problem)


def rounding_error(problem: Problem, rounded_parts: int = 1) -> float:
    """Relative error of rounding y once to its dtype: about 2**-(p+1) / sqrt(3) of the norm for a p-bit significand.

    2.1e-4 for float16 (p = 11, with the leading bit), 1.7e-3 for bfloat16 (p = 8).

    P parts that are rounded and then added in that dtype round 2 P - 1 times (the first addition is to zero). The parts
    are independent and of 1/P of y's square each, so together they are rounded as y is once; the sum of j of them has
    j/P of its square, for j = 2 ... P, which adds up to (P + 1)/2 - 1/P.
    """
    once = 2.1e-4 if problem.activation == "float16" else 1.7e-3
    return once * float(np.sqrt(1 + (rounded_parts + 1) / 2 - 1 / rounded_parts))


def accumulation_error(problem: Problem) -> float:
    """Relative error that Hopper's FP8 matrix instruction adds in fp8-w8a8; 0 for the other dtypes.

    It aligns the products of 32 values of K and the running sum to the largest of them and cuts what lies below 13
    bits of it (`accumulate_fp8`; DeepGEMM issue 50 reports the symptom). On random normal data that loses 1.33e-3 at
    K = 4096 and grows as K**0.62. With block scales the instruction sums at most 128 values of K; the rest is float32.
    """
    if not problem.quantises_x:
        return 0.0
    summed = min(problem.k, SCALE_BLOCK) if problem.scale_layout == "block" else problem.k
    return 1.33e-3 * (summed / 4096) ** 0.62


def accumulate_fp8(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x (M, K) @ w (N, K).T as Hopper's FP8 matrix instruction sums it: float64 numbers that are e4m3 values.

    A model, fitted to nothing: 32 products and the running sum, aligned to the largest, cut below 13 bits, added.
    Factors below the least normal number (2**-6) are not normalised first, as in `accumulate_fp16`.
    """
    total = np.zeros((x.shape[0], w.shape[0]))
    sizes = [_aligned_as(v, LEAST_NORMAL_E4M3) for v in (x, w)]
    for start in range(0, x.shape[1], 32):
        k = slice(start, start + 32)
        terms, largest = _terms(x[:, k], w[:, k], sizes[0][:, k], sizes[1][:, k], total)
        total = _cut(terms, largest, 13).sum(axis=2)
        total = _cut(total, np.abs(total), 13)
    return total


def accumulate_fp16(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x (M, K) @ w (N, K).T as Hopper's float16 matrix instruction sums it: float64 numbers that are float16 values.

    A model, as `accumulate_fp8`: 16 products and the running sum, aligned to the largest, cut below 24 bits. Factors
    below the least normal number (2**-14) are not normalised first: a product of theirs is as large to the alignment as
    if they were that number, so sums in which such products are the largest keep up to 10 bits less.
    """
    total = np.zeros((x.shape[0], w.shape[0]))
    sizes = [_aligned_as(v, LEAST_NORMAL_FP16) for v in (x, w)]
    for start in range(0, x.shape[1], 16):
        k = slice(start, start + 16)
        terms, largest = _terms(x[:, k], w[:, k], sizes[0][:, k], sizes[1][:, k], total)
        total = _cut(terms, largest, 24).sum(axis=2).astype(np.float32).astype(np.float64)
    return total


def _aligned_as(values: np.ndarray, least_normal: float) -> np.ndarray:
    """The power of two by which a matrix instruction aligns a factor; 0 for zeros."""
    return np.where(
        values == 0, 0.0, np.maximum(2.0 ** np.floor(np.log2(np.abs(values) + (values == 0))), least_normal)
    )


def _terms(
    x: np.ndarray, w: np.ndarray, x_size: np.ndarray, w_size: np.ndarray, total: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Products of one step and the running sum, (M, N, k + 1), and the largest size among them, (M, N, 1)."""
    terms = np.concatenate([x[:, None] * w[None], total[:, :, None]], axis=2)
    sizes = np.concatenate([x_size[:, None] * w_size[None], np.abs(total)[:, :, None]], axis=2)
    return terms, sizes.max(axis=2, keepdims=True)


def _cut(values: np.ndarray, largest: np.ndarray, bits: int) -> np.ndarray:
    """Values without what lies below 2**-bits of the power of two in `largest`."""
    _, exponent = np.frexp(largest)
    unit = np.ldexp(1.0, exponent - 1 - bits)
    return np.trunc(values / unit) * unit


def _of_expert(w_scale: np.ndarray | None, expert: int) -> np.ndarray | None:
    return None if w_scale is None else w_scale[expert]
