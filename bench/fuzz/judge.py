"""Whether a result is right for data of any size: element by element, with no tolerance that is not accounted for.

An element of y is right if it is the output dtype's nearest value to some number within `slack` of the float64
reference. Overflow to infinity and subnormal results need no rules of their own then. `slack` adds up:

- float32 accumulation: each of K products and of a few scalings may round once, relative to the sum of magnitudes
- what Hopper's FP8 unit cuts off (fp8-w8a8, compiled)
- what its float16 and FP8 units lose of subnormal factors, which they align as if they were the least normal number
  (compiled)
- float32 subnormals, which may be flushed to zero on the way
- bfloat16 activations in fp8-w8a16, which lose what lies 2**28 below their row's largest (`fp8.scale_token`)
- reduction "atomic", which rounds each part of K and each addition to y's dtype

Where products of an element's factors pass float32's range on the way, in whatever order they are multiplied, infinity
and NaN are right too. What is not finite in the reference must be so in y, element by element: the same infinity, or
NaN.
Ordinary data is held to `shared.reference`'s bounds as well.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from bench.fuzz.example import Example
from bench.fuzz.values import Arrays
from shared import fp8
from shared.config import Config
from shared.problem import SCALE_BLOCK, Problem, ceil_div
from shared.reference import (
    LEAST_NORMAL_E4M3,
    LEAST_NORMAL_FP16,
    dequantise,
    element_bound,
    error_bound,
    moe_gemm_reference,
    relative_error,
)

UNIT = 2.0**-23
"""Relative error allowed for each step in float32: matrix instructions truncate where others round (2**-24)."""
LEAST_NORMAL = 2.0**-126
FP8_BITS = 13
"""Below the largest of 32 products and the running sum, the FP8 unit keeps so many bits (reference.accumulate_fp8)."""
FP8_STEP = 32
FP8_DEVIATIONS = 3
"""What 32 products lose adds up as independent errors do; so many standard deviations are allowed, of
units that are upper bounds themselves: four times the largest loss of `reference.accumulate_fp8` on such data."""
STATISTICAL = 1024
"""Elements from which on an error over the whole output means something."""


class Wrong(AssertionError):
    """A result that is not right; the message says where and how."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """reference (T, top_k, N) float64; slack: largest error before rounding; wild: where infinity and NaN are right."""

    reference: np.ndarray
    slack: np.ndarray
    wild: np.ndarray


def expected(example: Example, given: Arrays, *, interpret: bool) -> Expected:
    problem = example.program.problem
    with np.errstate(all="ignore"):
        reference = moe_gemm_reference(
            given.x, given.w, given.topk_ids, problem=problem, w_scale=given.w_scale, topk_weight=given.topk_weight
        )
        slack = np.zeros_like(reference)
        wild = np.zeros(reference.shape, bool)
        codes, x_scale = _as_read(given.x, problem)
        for expert in np.unique(given.topk_ids[given.topk_ids >= 0]):
            token, slot = np.nonzero(given.topk_ids == expert)
            w_scale = None if given.w_scale is None else given.w_scale[expert]
            flushed = _infinity_meets_subnormal(given.x[token], given.w[expert])
            weight = np.ones(token.size) if given.topk_weight is None else np.abs(given.topk_weight[token, slot])
            slack[token, slot], wild[token, slot] = _slack(
                codes[token], x_scale[token], _finite(given.w[expert]), w_scale, weight.astype(np.float64), problem,
                example.program.config, interpret=interpret,
            )  # fmt: skip
            wild[token, slot] |= flushed
    return Expected(reference, slack, wild)


def _slack(
    codes: np.ndarray,
    x_scale: np.ndarray,
    w: np.ndarray,
    w_scale: np.ndarray | None,
    weight: np.ndarray,
    problem: Problem,
    config: Config,
    *,
    interpret: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, N) slack and wild of one expert. codes (rows, K) and w (N, K) as the kernel reads them, float64."""
    scaled = w if w_scale is None else dequantise(w, w_scale, problem)
    factor = x_scale * weight
    magnitude = np.abs(codes) @ np.abs(scaled).T
    if problem.kernel_x_dtype == "float16" and not interpret:
        nominal = _nominal(w, LEAST_NORMAL_FP16)
        nominal = nominal if w_scale is None else dequantise(nominal, w_scale, problem)
        magnitude = _nominal(codes, LEAST_NORMAL_FP16) @ nominal.T
    parts = config.parts(problem.k)
    steps = problem.k + parts + 16
    slack = magnitude * (steps * UNIT)
    if problem.scales_x and not problem.quantises_x:
        amax = np.maximum(np.abs(codes).max(axis=1, initial=0.0), 2.0**-86 / x_scale)
        slack += 2.0**-38 * amax[:, None] * np.abs(scaled).sum(axis=1)
    if problem.quantises_x and not interpret:
        slack += _cut_off(codes, scaled, w, w_scale, problem)
    slack *= factor[:, None]

    # Factors in float32's order are unknown: the largest intermediate is the product of all that are above 1.
    channel = np.ones(problem.n) if w_scale is None else w_scale.reshape(w_scale.shape[0], -1).max(axis=1)
    if problem.scale_layout == "block":
        channel = channel.repeat(SCALE_BLOCK)[: problem.n]
    sums = np.abs(codes) @ np.abs(w).T
    largest = np.log2(np.maximum(sums, 1)) + np.log2(np.maximum(channel, 1))
    largest += (np.log2(np.maximum(x_scale, 1)) + np.log2(np.maximum(weight, 1)))[:, None]
    slack += steps * np.exp2(np.minimum(largest, 200) - 126)
    inputs = np.abs(codes).sum(axis=1)[:, None] + np.abs(scaled).sum(axis=1)[None, :]  # bfloat16 has such inputs
    slack += LEAST_NORMAL * inputs * factor[:, None]
    wild = largest >= 127

    if config.rounded_parts(problem.k) > 1:
        dtype = ml_dtypes.finfo(problem.activation)
        sizes = _sizes_of_parts(codes, scaled, config) * factor[:, None]
        # Parts that cancel exactly are what rounding leaves, which may be too large for y's dtype: both infinities.
        wild |= sizes + slack > float(dtype.max) / 2
        slack += (parts + 1) * (sizes * float(dtype.eps) / 2 + float(dtype.smallest_subnormal))
    return slack, wild


def _sizes_of_parts(codes: np.ndarray, w: np.ndarray, config: Config) -> np.ndarray:
    """Magnitudes of the sums over each part of K, added: (rows, N). No sum of some parts is larger."""
    depth = config.k_steps_per_split(w.shape[1]) * config.block_k
    parts = [np.abs(codes[:, k : k + depth] @ w[:, k : k + depth].T) for k in range(0, w.shape[1], depth)]
    return np.sum(parts, axis=0)


def _infinity_meets_subnormal(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """(rows, N): whether an infinity of x meets a weight that may be flushed to zero, as their product is NaN then."""
    w = w.astype(np.float64)
    subnormal = (w != 0) & (np.abs(w) < LEAST_NORMAL)
    return np.isinf(x.astype(np.float64)).astype(np.float64) @ subnormal.T > 0


def _nominal(values: np.ndarray, least_normal: float) -> np.ndarray:
    """Magnitudes as matrix units align products by: those below the least normal number count as that number.

    Seen on an H200: float16 sums of subnormal factors are off by up to 2**-16 of their magnitudes, where normal ones
    keep 2**-24; `reference.accumulate_fp16` and `accumulate_fp8` give such results bit for bit.
    """
    return np.where(values == 0, 0.0, np.maximum(np.abs(values), least_normal))


def _cut_off(
    codes: np.ndarray, scaled: np.ndarray, w: np.ndarray, w_scale: np.ndarray | None, problem: Problem
) -> np.ndarray:
    """What the FP8 unit may lose, (rows, N): for each 32 of K a unit, 2**-13 of the largest product or running sum.

    The running sum is cut in one direction, so its losses add; those of the products are independent.
    """
    steps = ceil_div(problem.k, FP8_STEP)
    padding = ((0, 0), (0, steps * FP8_STEP - problem.k))
    nominal = _nominal(w, LEAST_NORMAL_E4M3)
    nominal = nominal if w_scale is None else dequantise(nominal, w_scale, problem)
    a, b, a_size, b_size = (
        np.pad(m, padding).reshape(len(m), steps, FP8_STEP).swapaxes(0, 1)
        for m in (codes, scaled, _nominal(codes, LEAST_NORMAL_E4M3), nominal)
    )
    sums = np.abs(np.cumsum(a @ b.swapaxes(1, 2), axis=0))  # (steps, rows, N)
    running = np.maximum.accumulate(sums, axis=0)
    if problem.scale_layout == "block":  # sums start anew at each block: the difference of two of these
        running *= 2
    products = a_size.max(axis=2)[:, :, None] * b_size.max(axis=2)[:, None, :]
    unit = np.maximum(products, running) * 2.0**-FP8_BITS
    return unit.sum(axis=0) + FP8_DEVIATIONS * np.sqrt((unit**2).sum(axis=0) * (FP8_STEP / 3))


def check(y: np.ndarray, example: Example, given: Arrays, *, interpret: bool) -> None:
    """Wrong, with where and how, unless y is right."""
    problem = example.program.problem
    shape = (problem.tokens, problem.top_k, problem.n)
    if y.shape != shape or y.dtype.name != problem.activation:
        raise Wrong(f"y has shape {y.shape} and dtype {y.dtype}; expected {shape}, {problem.activation}")
    if not y.size:
        return
    hoped = expected(example, given, interpret=interpret)
    with np.errstate(all="ignore"):
        low = (hoped.reference - hoped.slack).astype(y.dtype).astype(np.float64)
        high = (hoped.reference + hoped.slack).astype(y.dtype).astype(np.float64)
        got = y.astype(np.float64)
        finite = np.isfinite(hoped.reference)
        right = np.where(finite, (got >= low) & (got <= high), got == hoped.reference)
        right |= np.isnan(hoped.reference) & np.isnan(got)
        right |= hoped.wild & ~np.isfinite(got)
    nowhere = (given.topk_ids < 0)[:, :, None] & (got != 0)
    if nowhere.any():
        raise Wrong(_say("rows of -1 slots must be zeros", nowhere, got, hoped))
    if not right.all():
        wrong = ~right
        what = "unwritten, or NaN out of nothing" if np.isnan(got[wrong & finite]).any() else "wrong"
        raise Wrong(_say(what, wrong, got, hoped))
    if _ordinary(example) and y.size >= STATISTICAL and (given.topk_ids >= 0).any():
        _check_statistics(got, hoped, problem, example.program.config, interpret=interpret)


def _ordinary(example: Example) -> bool:
    """Normal values of one size, all finite: what the bounds of shared.reference are made for."""
    d = example.draw
    told = (d.x, d.w, d.x_spread, d.w_spread, d.x_special, d.w_special, d.zeros)
    return told == ("normal", "normal", 0, 0, "none", "none", "none") and d.weight != "spread"


def _check_statistics(got: np.ndarray, hoped: Expected, problem: Problem, config: Config, *, interpret: bool) -> None:
    parts = config.rounded_parts(problem.k)
    if interpret and problem.quantises_x:  # interpreters sum in float32 and may not lose what the FP8 unit does
        problem = dataclasses.replace(problem, dtype="fp8-w8a16")
    error, limit = relative_error(got, hoped.reference), error_bound(problem, parts)
    if not error <= limit:
        raise Wrong(f"relative error {error:.2e} above {limit:.1e}")
    if problem.n >= 64:
        rows = np.abs(hoped.reference).max(axis=2, keepdims=True)
        wrong = np.abs(got - hoped.reference) > element_bound(problem, parts) * rows
        if wrong.any():
            raise Wrong(_say("beyond the element bound", wrong, got, hoped))


def _say(what: str, wrong: np.ndarray, got: np.ndarray, hoped: Expected) -> str:
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{what}: {int(wrong.sum())} of {wrong.size} elements, first {list(first)}: {got[first]:.6g}, "
        f"expected {hoped.reference[first]:.6g} within {hoped.slack[first]:.2g}"
    )


def _as_read(x: np.ndarray, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """x (T, K) as the kernel reads it and its scales (T,), float64; what is not finite is 0 and 1 here."""
    scale: np.ndarray
    if problem.quantises_x:
        codes, scale = fp8.quantise_token(x)
    elif problem.scales_x:
        codes, scale = fp8.scale_token(x)
    else:
        codes, scale = x, np.ones(x.shape[0])
    return _finite(codes), np.where(np.isfinite(scale), scale, 1).astype(np.float64)


def _finite(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float64)
    return np.where(np.isfinite(values), values, 0)
