"""Which Config a call without one gets: the best measured for the shape and GPU, else a rule of thumb.

Measured configs are data: `tuned/GPU.json`, one entry a backend, dtype, shape and number of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

from shared.config import Config
from shared.problem import Problem


@dataclasses.dataclass(frozen=True)
class Choice:
    """A config and where it comes from."""

    config: Config
    source: str


def choose(problem: Problem, backend: str, gpu: str | None) -> Choice:
    """The config for `problem` on the GPU of that name (as its driver calls it; None: unknown).

    Measured entries of the same backend, dtype, scale layout, E, N, K and top_k are taken at the number of tokens that
    is nearest by ratio, at most a factor of 2 away: a tile that is best for 4 tokens says nothing of 2048.
    """
    slug = "" if gpu is None else gpu.lower().replace(" ", "-")
    entries = [entry for entry in _entries(slug) if _same_shape(entry, problem, backend)]
    if entries and problem.tokens:
        nearest = min(entries, key=lambda entry: _ratio(entry["tokens"], problem.tokens))
        if _ratio(nearest["tokens"], problem.tokens) <= 2:
            return Choice(
                Config.from_mapping(nearest["config"]), f"measured on {gpu} at {nearest['tokens']} tokens for {backend}"
            )
    return Choice(rule_of_thumb(problem, backend), "rule of thumb" + (f", no measured entry for {gpu}" if gpu else ""))


def rule_of_thumb(problem: Problem, backend: str) -> Config:
    """A config by slots per active expert.

    Token tiles just cover an expert's slots. Weights on the left fill the matrix instruction's 64-row side, except
    where they have to be widened first: widened weights would have to go back to shared memory to be a left operand,
    so fp8-w8a16 in Triton keeps them on the right. pallas-mosaic always has weights on the left. A K step holds 256
    bytes of weights a row where the scale layout allows it, so that a thread block keeps enough loads in flight.
    """
    per_expert = problem.slots / max(1, min(problem.experts, problem.slots))
    block_m = 16
    while block_m < per_expert and block_m < 128:
        block_m *= 2
    large = block_m >= 64
    swap_ab = backend == "pallas-mosaic" or problem.dtype != "fp8-w8a16"
    block_k = 64 if large and not problem.is_fp8 else 128
    if problem.dtype == "fp8-w8a8" and problem.scale_layout == "channel" and not large:
        block_k = 256
    warps = 8 if block_m == 128 and backend != "pallas-mosaic" else 4
    return Config(block_m=block_m, block_k=block_k, num_warps=warps, num_stages=4, swap_ab=swap_ab)


@functools.cache
def _entries(slug: str) -> list[dict[str, Any]]:
    path = resources.files("backends").joinpath(f"tuned/{slug}.json")
    return json.loads(path.read_text())["entries"] if slug and path.is_file() else []


def _same_shape(entry: dict[str, Any], problem: Problem, backend: str) -> bool:
    shape = (problem.dtype, problem.scale_layout, problem.experts, problem.n, problem.k, problem.top_k)
    measured = tuple(entry[name] for name in ("dtype", "scale_layout", "experts", "n", "k", "top_k"))
    return entry["backend"] == backend and measured == shape


def _ratio(a: int, b: int) -> float:
    return max(a / b, b / a)
