"""Which Config a call without one gets: the best measured for the shape and GPU, else a rule of thumb.

Measured configs are data: `tuned/GPU.json`, one entry a backend, dtype, shape and number of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from importlib import resources
from typing import Any

from backends import registry
from shared.config import Config
from shared.problem import Problem


@dataclasses.dataclass(frozen=True)
class Choice:
    """A config, where it comes from, and the tile order that goes with it."""

    config: Config
    source: str
    order: str


def choose(problem: Problem, backend: str, gpu: str | None) -> Choice:
    """The config for `problem` on the GPU of that name (as its driver calls it; None: unknown).

    Measured entries of the same layer (`of_layer`) are taken at the number of tokens that is nearest by ratio, the
    backend's own first where another's is as near, then the one at more tokens, whose tiles hold all that an expert
    has; at most a factor of 2 away: a tile that is best for 4 tokens says nothing of 2048. Without one, the entry of
    the nearest other shape that is near enough (`_nearest`), then the rule of thumb.
    """
    entries = of_layer(problem, backend, gpu) if problem.tokens else []

    def distance(entry: dict[str, Any]) -> tuple[float, bool, int]:
        return _ratio(entry["tokens"], problem.tokens), entry["backend"] != backend, -entry["tokens"]

    nearest = min(entries, key=distance, default=None)
    if nearest is not None and _ratio(nearest["tokens"], problem.tokens) <= 2:
        what = f"{nearest['dtype']} in {nearest['backend']} at {nearest['tokens']} tokens"
        config = Config.from_mapping(nearest["config"])
        if nearest["tokens"] != problem.tokens and not _parts_stay(problem, backend, config):
            config = config.replace(split_k=1)
        return _choice(problem, config, f"measured on {gpu}: {what}")
    slug = slug_of(gpu)
    for kernel in _SAME_TILES.get(backend, (backend,)):
        near = _nearest(problem, backend, kernel, slug)
        if near is not None:
            entry, config = near
            shape = f"N = {entry['n']}, K = {entry['k']}, {entry['experts']} experts, top {entry['top_k']}"
            what = f"{entry['dtype']} in {entry['backend']} at {entry['tokens']} tokens of {shape}"
            return _choice(problem, config, f"nearest: measured on {gpu}: {what}")
    source = "rule of thumb" + (f", no measured entry for {gpu}" if gpu else "")
    return _choice(problem, rule_of_thumb(problem, backend), source)


def _parts_stay(problem: Problem, backend: str, config: Config) -> bool:
    """Whether another batch of a layer has its K split as the measured one has: where a thread block cluster adds up
    the parts, which pays with many tiles, too. Elsewhere it pays where tiles are few, and a batch decides how many."""
    if backend != "pallas-mosaic" or config.split_k == 1:
        return False
    from backends import mosaic_config  # which needs JAX, as the backend does

    return mosaic_config.adds_in_cluster(problem, config)


def _choice(problem: Problem, config: Config, source: str) -> Choice:
    return Choice(config, source, order_for(problem, config))


def order_for(problem: Problem, config: Config) -> str:
    """Row order where a tile holds an active expert's mean number of slots, else column order.

    Measured on an H200: with one tile row an expert, row order saves a program a wait (median 0.99 of column order's
    time, notes/locality.md); with several, it reads an expert's weights again for each.
    """
    return "row" if config.block_m >= _per_expert(problem.slots, problem.experts) else "column"


def of_layer(problem: Problem, backend: str, gpu: str | None) -> list[dict[str, Any]]:
    """Measured entries of this dtype, scale layout, E, N, K and top_k at any number of tokens, on the GPU of that name.

    Those of the backend itself first, then those of the one whose tiles it shares (`_SAME_TILES`).
    """
    kernels = _SAME_TILES.get(backend, (backend,))
    return [entry for kernel in kernels for entry in _entries(slug_of(gpu)) if _same_shape(entry, problem, kernel)]


def _nearest(problem: Problem, backend: str, kernel: str, slug: str) -> tuple[dict[str, Any], Config] | None:
    """The measured entry of `kernel` whose shape is nearest, with its config; None where none is near enough.

    Near enough: slots per active expert within a factor of 2, as they decide block_m, and bytes per expert within a
    factor of 4, as they decide how many tiles there are. Nearest: by the sum of the logarithms of the ratios of slots
    per active expert, N, K and E. K is not split: whether that pays depends on how many tiles there are and how long K
    is, which another shape has otherwise.
    """
    dtype = _MEASURED_AS.get(problem.dtype, problem.dtype)
    found: list[tuple[float, float, int, dict[str, Any]]] = []
    for entry in _entries(slug) if problem.tokens else ():
        if (entry["backend"], entry["dtype"], entry["scale_layout"]) != (kernel, dtype, problem.scale_layout):
            continue
        slots = _per_expert(entry["tokens"] * entry["top_k"], entry["experts"])
        rows = _ratio(slots, _per_expert(problem.slots, problem.experts))
        if rows > 2 or _ratio(entry["n"] * entry["k"], problem.n * problem.k) > 4:
            continue
        others = ((entry["n"], problem.n), (entry["k"], problem.k), (entry["experts"], problem.experts))
        distance = math.log(rows) + sum(math.log(_ratio(a, b)) for a, b in others)
        found.append((distance, _ratio(entry["tokens"], problem.tokens), len(found), entry))
    for _, _, _, entry in sorted(found, key=lambda item: item[:3]):
        config = Config.from_mapping(entry["config"]).replace(split_k=1)
        if registry.load(backend).unsupported(problem, config) is None:
            return entry, config
    return None


def rule_of_thumb(problem: Problem, backend: str) -> Config:
    """A config by slots per active expert, read off what was best on an H200 for the models of the table.

    Token tiles hold one and a half times an expert's mean, so that most experts fit one tile row and read their weights
    once. Weights on the left fill the matrix instruction's 64-row side, except where a small tile widens them first
    (fp8-w8a16 in Triton): widened weights are a slow left operand there. A K step holds 128 to 256 bytes of a weight
    row.
    """
    per_expert = problem.slots / max(1, min(problem.experts, problem.slots))
    if backend == "pallas-mosaic":
        return _rule_for_mosaic(problem, per_expert)
    widens = problem.dtype == "fp8-w8a16"
    block_m = 16
    while block_m < 128 and block_m < per_expert * (1 if widens else 1.5):
        block_m *= 2
    large = block_m >= 64
    block_k = (64 if large else 128) * (2 if problem.is_fp8 else 1)
    block_n = 128 if large or widens else 64
    num_stages = {64: 3, 128: 4, 256: 4}[block_k]
    swap_ab = not widens or block_m == 64
    if problem.scale_layout == "block":  # partial sums of one scale block need registers of their own
        block_k, block_m = min(block_k, 128), min(block_m, 64)
        num_stages = 4
    return Config(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, swap_ab=swap_ab)


def _rule_for_mosaic(problem: Problem, per_expert: float) -> Config:
    """Weights are always on the left, and a tile multiplies hardly more rows than it has slots: tall tiles cost shared
    memory alone, so a tile is to hold all slots of most experts. Two warp-groups share tall tiles, and widening."""
    rows = (16, 32, 64, 96, 128, 160)
    block_m = next((m for m in rows if m >= per_expert * 1.25), rows[-1])
    block_k = (256 if block_m <= 32 else 128) // problem.w_itemsize
    num_warps = 8 if block_m >= 96 or problem.dtype == "fp8-w8a16" else 4
    if problem.scale_layout == "block":
        block_k, block_m, num_warps = min(block_k, 128), min(block_m, 64), 4
    stage = block_k * (block_m * problem.x_itemsize + 128 * problem.w_itemsize)
    num_stages = max(2, min(8, 200_000 // stage))
    return Config(block_m=block_m, block_n=128, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


def slug_of(gpu: str | None) -> str:
    """Name of a GPU's file in tuned/, without its ending. gpu: as its driver calls it; "" for none."""
    return "" if gpu is None else gpu.lower().replace(" ", "-")


@functools.cache
def _entries(slug: str) -> list[dict[str, Any]]:
    path = resources.files("backends").joinpath(f"tuned/{slug}.json")
    return json.loads(path.read_text())["entries"] if slug and path.is_file() else []


_SAME_TILES = {"jax-triton": ("torch-triton",), "pallas-triton": ("pallas-triton", "torch-triton")}
"""jax-triton launches torch-triton's kernel; pallas-triton, its port, takes its tiles where it has no entry as near."""
_MEASURED_AS = {"bf16": "fp16"}
"""bf16 moves fp16's bytes at fp16's rate: one entry serves both."""


def _same_shape(entry: dict[str, Any], problem: Problem, backend: str) -> bool:
    dtype = _MEASURED_AS.get(problem.dtype, problem.dtype)
    shape = (dtype, problem.scale_layout, problem.experts, problem.n, problem.k, problem.top_k)
    measured = tuple(entry[name] for name in ("dtype", "scale_layout", "experts", "n", "k", "top_k"))
    return entry["backend"] == backend and measured == shape


def _per_expert(slots: int, experts: int) -> float:
    """Slots per active expert, if routing spreads them as far as it can."""
    return slots / max(1, min(experts, slots))


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)
