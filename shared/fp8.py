"""FP8 e4m3 quantisation: weights per output channel or per 128x128 block, activations per token.

Activations that stay 16 bits wide (fp8-w8a16) are scaled per token into float16 instead, see `scale_token`.

All saturate: a value is clamped to +-448 before the cast, as ml_dtypes turns 465 and more into NaN where hardware
conversions saturate. All-zero channels, blocks and tokens get scale 1.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from shared.problem import SCALE_BLOCK, ceil_div

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = 448.0


def to_fp8(values: np.ndarray) -> np.ndarray:
    """e4m3fn of `values`, saturating at +-448; NaN stays NaN."""
    return np.clip(values, -FP8_MAX, FP8_MAX).astype(FP8)


def quantise_channel(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w (E, N, K), floating -> e4m3 weights (E, N, K) and float32 scales (E, N), w = q * scale."""
    w = w.astype(np.float32)
    scale = _scale_of(np.abs(w).max(axis=2))
    return to_fp8(w / scale[:, :, None]), scale


def quantise_block(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w (E, N, K), floating -> e4m3 weights, float32 scales (E, ceil(N/128), ceil(K/128)); edge blocks are smaller."""
    w = w.astype(np.float32)
    experts, n, k = w.shape
    rows, cols = ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK)
    padded = np.zeros((experts, rows * SCALE_BLOCK, cols * SCALE_BLOCK), np.float32)
    padded[:, :n, :k] = np.abs(w)
    scale = _scale_of(padded.reshape(experts, rows, SCALE_BLOCK, cols, SCALE_BLOCK).max(axis=(2, 4)))
    return to_fp8(w / expand_block_scale(scale, n, k)), scale


def expand_block_scale(scale: np.ndarray, n: int, k: int) -> np.ndarray:
    """(E, ceil(N/128), ceil(K/128)) -> one scale per weight, (E, N, K)."""
    return scale.repeat(SCALE_BLOCK, axis=1)[:, :n].repeat(SCALE_BLOCK, axis=2)[:, :, :k]


def quantise_token(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x (T, K), float16 or bfloat16 -> e4m3 (T, K) and float32 scales (T,), x = q * scale: fp8-w8a8's activations.

    A scale is the least power of two with |x| / scale <= 448. Dividing by it is exact on every processor, so all
    backends produce identical bytes; e4m3 is a floating format, so a scale that is not tight costs no precision above
    its subnormals. A row with a value that is not finite gets scale NaN, so that its row of y is NaN and no other.
    """
    x = x.astype(np.float32)
    finite = np.isfinite(x)
    amax = np.where(finite, np.abs(x), 0).max(axis=1, initial=0.0).astype(np.float32)
    exponent = token_scale_exponent(amax, "float8_e4m3fn")
    q = to_fp8(np.where(finite, np.ldexp(x, -exponent[:, None]), 0).astype(np.float32))
    scale = np.ldexp(np.float32(1), exponent).astype(np.float32)
    return q, np.where(finite.all(axis=1), scale, np.float32(np.nan))


def scale_token(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x (T, K), bfloat16 -> float16 (T, K) and float32 scales (T,), x = scaled * scale: fp8-w8a16's activations.

    A scale is the power of two that takes the row's largest finite magnitude to [2**14, 2**15). bfloat16's significands
    fit float16's, so a value changes only where it is more than 2**28 times smaller than its row's largest, and then by
    at most 2**-39 of that largest: less than float32 accumulation loses. Infinities and NaN stay what they are.
    """
    x = x.astype(np.float32)
    amax = np.where(np.isfinite(x), np.abs(x), 0).max(axis=1, initial=0.0).astype(np.float32)
    exponent = token_scale_exponent(amax, "float16")
    return np.ldexp(x, -exponent[:, None]).astype(np.float16), np.ldexp(np.float32(1), exponent).astype(np.float32)


def token_scale_exponent(amax: np.ndarray, target: str) -> np.ndarray:
    """Exponent s >= -100 of a token's scale 2**s, from the bits of float32 amax; 0 for amax 0.

    target "float8_e4m3fn": the least with amax / 2**s <= 448 = 1.75 * 2**8; "float16": amax / 2**s in [2**14, 2**15).
    """
    bits = amax.view(np.int32)
    exponent = (bits >> 23) - 127
    mantissa = bits & 0x7FFFFF
    exponent = exponent - 14 if target == "float16" else exponent - 8 + (mantissa > 0x600000)
    return np.where(amax == 0, 0, np.maximum(exponent, -100)).astype(np.int32)


def _scale_of(amax: np.ndarray) -> np.ndarray:
    """float32 scale that maps amax to 448; 1 where amax is 0. Kept normal, so that dividing by it stays finite."""
    tiny = np.finfo(np.float32).tiny
    return np.where(amax > 0, np.maximum(amax / np.float32(FP8_MAX), tiny), 1).astype(np.float32)


def place_of(k: np.ndarray, halves_of: int, together: int) -> np.ndarray:
    """Where value k of a row of activations stands for a kernel that reads `together` e4m3 weights as one element: 4 as
    a 32-bit word, 2 as a pair.

    Such a kernel multiplies halves_of values of K (a multiple of `together`) in two products, the first with the lower
    half of each element's bytes, the second with the upper. Of every halves_of values, for words 0 1 4 5 8 9 ... come
    first, then 2 3 6 7 ...; for pairs 0 2 4 6 ..., then 1 3 5 7 ...
    """
    own = together // 2
    half = k % together // own
    within = k % halves_of // together * own + k % own
    return k // halves_of * halves_of + half * (halves_of // 2) + within
