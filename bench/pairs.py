"""Comparison by pairs: A and B in turn within one run, so that clocks and temperature drift under both alike.

Each pair runs both, in random order; its ratio is one sample. The median ratio carries a bootstrap interval, and where
the interval holds 1 the verdict is that no difference was seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

RESAMPLES = 5000
CONFIDENCE = 0.95
NO_DIFFERENCE = "no difference"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Time of B over time of A. ratio: median over pairs; low, high: its 95 % bootstrap interval.

    a, b: median seconds; pairs: how many
    """

    ratio: float
    low: float
    high: float
    a: float
    b: float
    pairs: int

    def verdict(self, a: str, b: str) -> str:
        """Such as "column is 1.34 times as fast as row", or "no difference"."""
        if self.low <= 1 <= self.high:
            return NO_DIFFERENCE
        if self.ratio > 1:
            return f"{a} is {self.ratio:.3f} times as fast as {b}"
        return f"{b} is {1 / self.ratio:.3f} times as fast as {a}"


def compare(a: Callable[[], float], b: Callable[[], float], *, pairs: int = 30, seed: int = 0) -> Comparison:
    """Run a and b, each returning seconds, `pairs` times each, in random order within a pair."""
    rng = np.random.default_rng(seed)
    times = np.empty((pairs, 2))
    for pair in range(pairs):
        for which in rng.permutation(2):
            times[pair, which] = (a, b)[which]()
    return judge(times[:, 0], times[:, 1], seed=seed)


def judge(a: np.ndarray, b: np.ndarray, *, seed: int = 0) -> Comparison:
    """Comparison of paired samples a, b (pairs,), seconds: percentile bootstrap over pairs, seeded."""
    if a.shape != b.shape or a.ndim != 1 or a.size == 0:
        raise ValueError(f"pairs: got shapes {a.shape} and {b.shape}; allowed: two equal, one-dimensional, not empty")
    ratios = b / a
    draws = np.random.default_rng(seed).integers(0, ratios.size, (RESAMPLES, ratios.size))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(ratios[draws], axis=1), [tail, 1 - tail])
    return Comparison(
        ratio=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        a=float(np.median(a)),
        b=float(np.median(b)),
        pairs=int(a.size),
    )
