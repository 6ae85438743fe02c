"""The arrays of an example, from its seed: ordinary and edge values, odd routings, numbers that are not finite."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from bench.fuzz.example import Draw, Example
from shared import fp8, routing
from shared.problem import SCALE_BLOCK, Problem

ROUTINGS = (
    "uniform",  # any expert for any slot, so an expert may come twice in a token
    "distinct",  # different experts within a token
    "some-minus-one",
    "all-minus-one",
    "one-expert",
    "overfull",  # one expert has nearly all slots, the others a few or none
    "single",  # one expert has one slot, another the rest
    "repeated",  # a token's slots all name the same expert
)
VALUES = (
    "normal",
    "integers",  # -2 to 2: results are exact
    "saturated",  # the largest magnitude: 448 in FP8 and where x is quantised, else what y can just hold
    "subnormal",  # multiples of the least subnormal
    "heavy",  # normal, each element times 2**-8 to 2**8
)
SPREADS = (0, 4, 12, 40)
ZEROS = ("none", "token", "channel", "block", "expert")
SPECIALS = ("none", "nan", "inf", "-inf", "both-inf")
WEIGHTS = ("plain", "zero", "negative", "spread")


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Arguments of moe_gemm as NumPy arrays; shapes as in shared/problem.py."""

    x: np.ndarray
    w: np.ndarray
    topk_ids: np.ndarray
    w_scale: np.ndarray | None
    topk_weight: np.ndarray | None
    popularity: np.ndarray | None


def arrays(example: Example) -> Arrays:
    problem, draw = example.program.problem, example.draw
    rng = np.random.default_rng(draw.seed)
    ids = _ids(problem, draw.routing, rng)
    with np.errstate(over="ignore", invalid="ignore"):
        x = _x(problem, draw, rng)
        w, w_scale = _w(problem, draw, rng)
    weight = _weights(problem, draw.weight, rng)
    popularity = None
    if example.program.popular:  # few different numbers, as equal ones are a case of their own, and the extremes
        choices = np.array([-(2**31), -1, 0, 1, 2, 2**31 - 1], np.int32)
        popularity = rng.choice(choices, problem.experts)
    return Arrays(x, w, ids, w_scale, weight, popularity)


def _ids(problem: Problem, name: str, rng: np.random.Generator) -> np.ndarray:
    shape, experts = (problem.tokens, problem.top_k), problem.experts
    favourite, other = (int(e) for e in rng.integers(0, experts, 2))
    if name == "distinct" and problem.top_k <= experts:
        return routing.uniform(problem.tokens, experts, problem.top_k, seed=int(rng.integers(2**31)))
    if name == "some-minus-one":
        ids = np.where(rng.random(shape) < 0.4, -1, rng.integers(0, experts, shape))
    elif name == "all-minus-one":
        ids = np.full(shape, -1)
    elif name == "one-expert":
        ids = np.full(shape, favourite)
    elif name == "overfull":
        ids = np.where(rng.random(shape) < 0.85, favourite, rng.integers(-1, experts, shape))
    elif name == "single":
        ids = np.full(shape, favourite)
        if ids.size:
            ids.reshape(-1)[rng.integers(ids.size)] = other
    elif name == "repeated":
        ids = np.repeat(rng.integers(-1, experts, (problem.tokens, 1)), problem.top_k, axis=1)
    else:
        ids = rng.integers(0, experts, shape)
    return ids.astype(np.int32)


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator, *, largest: float, least: float) -> np.ndarray:
    """float32. largest: magnitude of saturated values; least: the least subnormal of the dtype."""
    if name == "integers":
        return rng.integers(-2, 3, shape).astype(np.float32)
    if name == "saturated":
        return rng.choice(np.array([-largest, largest], np.float32), shape)
    if name == "subnormal":
        return (rng.integers(-3, 4, shape) * least).astype(np.float32)
    normal = rng.standard_normal(shape, np.float32)
    return normal * np.exp2(rng.integers(-8, 9, shape)).astype(np.float32) if name == "heavy" else normal


def _powers(spread: int, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return np.exp2(rng.integers(-spread, spread + 1, shape)).astype(np.float32)


def _x(problem: Problem, draw: Draw, rng: np.random.Generator) -> np.ndarray:
    half = problem.activation == "float16"
    dtype = np.dtype(np.float16 if half else ml_dtypes.bfloat16)
    least = float(np.finfo(np.float16).smallest_subnormal if half else ml_dtypes.finfo(dtype).smallest_subnormal)
    largest = 448.0 if problem.is_fp8 else 200.0
    x = _values(draw.x, (problem.tokens, problem.k), rng, largest=largest, least=least)
    x *= _powers(min(draw.x_spread, 12) if half else draw.x_spread, (problem.tokens, 1), rng)
    if draw.zeros == "token" and x.size:
        x[rng.random(problem.tokens) < 0.5] = 0
    if half:  # what passes float16's range counts as x_special
        x = np.clip(x, -65504, 65504)
    x = x.astype(dtype)
    if draw.x_special != "none" and x.size:
        rows = np.flatnonzero(rng.random(problem.tokens) < 0.3)
        for token in rows if rows.size else [int(rng.integers(problem.tokens))]:
            # the last column is where a K tail's mask is wrong first
            at = [problem.k - 1 if rng.random() < 0.3 else int(rng.integers(problem.k)) for _ in range(2)]
            x[token, at[0]] = {"nan": np.nan, "-inf": -np.inf}.get(draw.x_special, np.inf)
            if draw.x_special == "both-inf":
                x[token, at[1]] = -np.inf
    return x


def _w(problem: Problem, draw: Draw, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
    experts, n, k = shape = problem.experts, problem.n, problem.k
    half = problem.activation == "float16"
    dtype = fp8.FP8 if problem.is_fp8 else np.dtype(np.float16 if half else ml_dtypes.bfloat16)
    least = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    w = _values(draw.w, shape, rng, largest=448.0 if problem.is_fp8 else 200.0, least=least)
    if draw.zeros == "channel":
        w[rng.random((experts, n)) < 0.3] = 0
    elif draw.zeros == "block":
        row, column = (int(rng.integers(-(-size // SCALE_BLOCK))) * SCALE_BLOCK for size in (n, k))
        w[:, row : row + SCALE_BLOCK, column : column + SCALE_BLOCK] = 0
    elif draw.zeros == "expert":
        w[rng.integers(experts)] = 0

    if not problem.is_fp8:
        w *= _powers(min(draw.w_spread, 8) if half else draw.w_spread, (experts, n, 1), rng)
        w = (np.clip(w, -65504, 65504) if half else w).astype(dtype)
        w_scale = None
    elif draw.w in ("normal", "heavy"):  # quantised as a user would
        w *= _powers(draw.w_spread, (experts, n, 1), rng)
        w, w_scale = (fp8.quantise_channel if problem.scale_layout == "channel" else fp8.quantise_block)(w)
    else:  # these very codes, and scales that have nothing to do with them
        assert problem.w_scale_shape is not None
        w, w_scale = fp8.to_fp8(w), _powers(draw.w_spread, problem.w_scale_shape, rng)
    if draw.w_special == "nan":
        w[rng.integers(experts), rng.integers(n), rng.integers(k)] = np.nan
    return w, w_scale


def _weights(problem: Problem, name: str, rng: np.random.Generator) -> np.ndarray | None:
    if not problem.routing_weight:
        return None
    shape = (problem.tokens, problem.top_k)
    weight = rng.uniform(0.1, 2, shape)
    if name == "zero":
        weight *= rng.random(shape) < 0.6
    elif name == "negative":
        weight *= rng.choice([-1.0, 1.0], shape)
    elif name == "spread":
        weight *= np.exp2(rng.integers(-20, 21, shape))
    return weight.astype(np.float32)
