"""Which configs the tuner times for a case: all that are worth it, or those near what is known of other batches."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from backends import registry
from backends.triton_launch import ACCUMULATORS
from shared.config import MOST_STAGES, REDUCTIONS, Config
from shared.problem import Problem

FEW_TILES = 132
"""Below so many tiles of 64 channels, multiprocessors of an H200 would stand idle: narrower tiles are tried too."""
TRITON_HEIGHTS = (16, 32, 48, 64, 80, 96, 128, 160, 192)
"""Rows of a tile: one or two blocks, each a power of two."""
MOSAIC_HEIGHTS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)


def candidates(problem: Problem, backend: str) -> list[Config]:
    """Configs worth timing: token tiles near an expert's slots, and tiles that fill the pipeline and fit the GPU.

    Where there are few tiles, also several thread blocks a tile (split_k), with each way of adding up what they have;
    in pallas-mosaic's clusters, which pay with many tiles as well, wherever a tile is low enough.
    """
    per_expert = _slots_per_expert(problem)
    rows = [m for m in (16, 32, 64, 128) if (m == 16 or m / 2 < per_expert * 1.3) and m * 2 >= min(per_expert, 128)]
    found: list[Config] = []
    if backend == "pallas-mosaic":
        # A tile multiplies no more rows than it has slots, nearly: taller tiles cost shared memory alone.
        tall = [m for m in MOSAIC_HEIGHTS if m >= min(per_expert, 128)][: 1 if per_expert < 4 else 4]
        found += [config for m in tall for config in _mosaic_tiles(problem, m)]
    else:
        # Two blocks of rows, where an expert's slots are a little more than one has.
        tall = [m for m in (48, 80, 96, 160, 192) if per_expert < m <= 1.6 * per_expert]
        for block_m in (*rows, *tall):
            for swap_ab in (False, True) if _few_tiles(problem) or problem.dtype == "fp8-w8a16" else (True,):
                found += _triton_tiles(problem, block_m, swap_ab)
    if _few_tiles(problem):
        found += _split(problem, backend, rows[0])
    if backend == "pallas-mosaic":
        found += _clusters(problem, next((m for m in (16, 32) if m >= per_expert), 32))
    return list(dict.fromkeys(found))


def _split(problem: Problem, backend: str, block_m: int) -> Iterator[Config]:
    """One or two tiles, each with its K in 2, 4 and 8 parts, two thread blocks a multiprocessor."""
    swap_ab = backend == "pallas-mosaic" or problem.dtype != "fp8-w8a16"
    block_k = 256 if problem.dtype == "fp8-w8a8" else 128
    for block_n in (64,) if backend == "pallas-mosaic" else (64, 128):
        stage = block_k * (block_m * problem.x_itemsize + block_n * problem.w_itemsize)
        num_stages = max(2, min(5, 100_000 // stage))
        tile = Config(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages, swap_ab=swap_ab)
        for split_k, reduction in itertools.product((2, 4, 8), REDUCTIONS):
            config = tile.replace(split_k=split_k, reduction=reduction)
            if config.parts(problem.k) == split_k:
                yield config


def _clusters(problem: Problem, block_m: int) -> Iterator[Config]:
    """Tiles whose parts of K are a thread block cluster's (pallas-mosaic): two parts, and four where tiles are few."""
    from backends import mosaic_config

    splits = (2, 4) if _few_tiles(problem, 2 * FEW_TILES) else (2,)
    depths = (128, 256) if problem.is_fp8 else (64, 128, 256)
    for split_k, block_n, block_k in itertools.product(splits, (64, 128), depths):
        tile = Config(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=2, split_k=split_k)
        if mosaic_config.adds_in_cluster(problem, tile) and mosaic_config.unsupported(problem, tile) is None:
            yield from _deepest(problem, tile, (1, 2))


def _slots_per_expert(problem: Problem) -> float:
    """Mean slots of an active expert, if routing spreads them as far as it can."""
    return problem.slots / max(1, min(problem.experts, problem.slots))


def _few_tiles(problem: Problem, few: int = FEW_TILES) -> bool:
    return problem.tile_cols(64) * min(problem.experts, problem.slots) < few


def _triton_tiles(problem: Problem, block_m: int, swap_ab: bool) -> Iterator[Config]:
    if problem.w_itemsize == 2:
        depths: tuple[int, ...] = (64, 128)
    else:
        depths = (64, 128) if problem.dtype == "fp8-w8a16" and block_m > 16 else (128, 256)
    shapes: tuple[tuple[int, int], ...] = ((64, 4), (128, 4), (128, 8), (256, 8))
    if _few_tiles(problem):
        shapes = ((32, 4), (64, 4)) if not swap_ab else ((32, 4), *shapes)
        depths = (*depths, 2 * depths[-1]) if not swap_ab else depths
    for block_k, (block_n, num_warps) in itertools.product(depths, shapes):
        if not _fits_registers(block_m, block_n, num_warps):
            continue
        for num_stages in _stages(problem, block_m, block_n, block_k):
            yield Config(
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                num_warps=num_warps,
                num_stages=num_stages,
                swap_ab=swap_ab,
            )


def _mosaic_tiles(problem: Problem, block_m: int) -> Iterator[Config]:
    """Tiles of one and two warp-groups, each with the deepest pipelines of one to four thread blocks an SM.

    Two share a tile or, where it is tall, take turns. K steps of 128 bytes of a weight row, in tiles of few rows 256 as
    well.
    """
    small = block_m <= 32
    shapes = ((64, 4), (128, 4), (128, 8)) if block_m <= 64 else ((64, 4), (128, 8), (256, 8))
    for step_bytes in (128, 256) if block_m <= 80 else (128,):
        block_k = step_bytes // problem.w_itemsize
        tiles = [
            Config(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps)
            for block_n, num_warps in shapes
        ]
        if block_m > 32 and problem.dtype != "fp8-w8a16":  # one is to widen while the other multiplies, on one tile
            tiles.append(Config(block_m=block_m, block_n=128, block_k=block_k, num_warps=8, ping_pong=True))
        for tile in tiles:
            yield from _deepest(problem, tile, (1,) if tile.num_warps == 8 else (1, 2, 3, 4) if small else (1, 2))


def _deepest(problem: Problem, tile: Config, thread_blocks: Sequence[int]) -> Iterator[Config]:
    """`tile` with as many stages as leave room for each of these numbers of thread blocks on an SM (pallas-mosaic)."""
    from backends import mosaic_config

    depths = set()
    for blocks in thread_blocks:
        room = min(mosaic_config.SHARED_MEMORY, mosaic_config.SHARED_MEMORY_PER_SM // blocks - 1024)
        fits = (
            d
            for d in range(2, MOST_STAGES + 1)
            if mosaic_config.shared_bytes(problem, tile.replace(num_stages=d)) <= room
        )
        depths |= {max(fits, default=2)}
    for num_stages in sorted(depths):
        yield tile.replace(num_stages=num_stages)


def _stages(problem: Problem, block_m: int, block_n: int, block_k: int) -> list[int]:
    """One thread block a multiprocessor with the deepest pipeline, two with half of it each, and three stages.

    Three are the least that keep a load in flight while a warp-group instruction reads a stage: large tiles, which the
    arithmetic bounds, gain nothing by more.
    """
    stage = block_k * (block_m * problem.x_itemsize + block_n * problem.w_itemsize)
    output = block_m * block_n * 2
    deepest = min(8, (220_000 - output) // stage)
    depths = {deepest, min(5, (110_000 - output) // stage), min(3, deepest)}
    return sorted(depth for depth in depths if depth >= 2)


def near(problem: Problem, backend: str, known: Sequence[dict[str, Any]]) -> list[Config]:
    """Candidates beside what was best at other batches of the layer; [] where nothing is known of them.

    known: entries of backends/tuned/ for this layer and dtype, those of `backend` and of backends whose tiles it shares
    (`backends.tuning.of_layer`). Of each backend three are looked at: the entry at this number of tokens, the next at
    fewer and the next at more. Their configs are candidates, and so are the steps from those of `backend`; from those
    of the other where it has none itself.
    """
    kernels = list(dict.fromkeys(entry["backend"] for entry in known))
    stepped = backend if backend in kernels else next(iter(kernels), backend)
    found: list[Config] = []
    for kernel in kernels:
        of_kernel = [entry for entry in known if entry["backend"] == kernel]
        for entry in _around(of_kernel, problem.tokens):
            config = Config.from_mapping(entry["config"])
            found.append(config)
            if kernel == stepped:
                found += _steps(problem, backend, config, entry["tokens"])
    fitting = (_fewer_stages(problem, backend, config) for config in found)
    return list(dict.fromkeys(config for config in fitting if config is not None))


def _around(entries: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """The entry at `tokens`, the one at the most tokens below and the one at the fewest above; those there are."""
    exact = [entry for entry in entries if entry["tokens"] == tokens]
    below = [entry for entry in entries if entry["tokens"] < tokens]
    above = [entry for entry in entries if entry["tokens"] > tokens]
    tokens_of = operator.itemgetter("tokens")
    return exact + sorted(below, key=tokens_of)[-1:] + sorted(above, key=tokens_of)[:1]


def _steps(problem: Problem, backend: str, config: Config, tokens: int) -> Iterator[Config]:
    """Configs one step of one parameter away from `config`, which was best at `tokens`.

    More tokens than there want no shorter tiles and no more parts of K, fewer no taller ones and no fewer parts: those
    two are stepped in that direction alone; and taller than twice an expert's mean is mostly padding.
    """
    mosaic = backend == "pallas-mosaic"
    up, down = problem.tokens >= tokens, problem.tokens <= tokens
    heights = MOSAIC_HEIGHTS if mosaic else TRITON_HEIGHTS
    if up and config.block_m < 2 * _slots_per_expert(problem):
        yield from (config.replace(block_m=m) for m in [m for m in heights if m > config.block_m][:1])
    if down:
        yield from (config.replace(block_m=m) for m in [m for m in heights if m < config.block_m][-1:])
    if mosaic:
        yield from _deepest(problem, config, (1, 2, 3, 4) if config.block_m <= 32 else (1, 2))
    else:
        depths = (config.num_stages - 1, config.num_stages + 1)
        yield from (config.replace(num_stages=depth) for depth in depths if 2 <= depth <= MOST_STAGES)
    for block_n in (config.block_n // 2, config.block_n * 2):
        if (64 if mosaic else 32) <= block_n <= 256:
            yield config.replace(block_n=block_n)
    for num_stages in sorted({config.num_stages, min(config.num_stages + 1, MOST_STAGES)}):
        yield config.replace(num_warps=4 if config.num_warps == 8 else 8, num_stages=num_stages)
    if problem.dtype == "fp8-w8a16" and not mosaic:  # widened weights as the left operand, or as the right one
        other = config.replace(swap_ab=not config.swap_ab, num_warps=4, block_n=max(64, config.block_n))
        yield from (
            other,
            other.replace(block_k=128, num_stages=4),
            other.replace(block_n=64, block_k=128, num_stages=4),
        )
    fewer_parts = (config.split_k // 2, 1) if up and config.split_k > 1 else ()
    more_parts = (config.split_k * 2,) if (down and _few_tiles(problem)) or (mosaic and config.split_k == 1) else ()
    yield from (config.replace(split_k=split_k) for split_k in (*fewer_parts, *more_parts) if split_k <= 8)


def _fewer_stages(problem: Problem, backend: str, config: Config) -> Config | None:
    """`config` with as many of its stages as fit the GPU; None where it is none for this problem and backend."""
    if config.parts(problem.k) != config.split_k:
        return None
    if backend != "pallas-mosaic" and not _fits_registers(config.block_m, config.block_n, config.num_warps):
        return None
    unsupported = registry.load(backend).unsupported
    depths = (config.replace(num_stages=depth) for depth in range(config.num_stages, 1, -1))
    return next((config for config in depths if unsupported(problem, config) is None), None)


def _fits_registers(block_m: int, block_n: int, num_warps: int) -> bool:
    """Whether a Triton tile is worth trying: its accumulator in registers, and work for all its warps."""
    if num_warps == 8 and block_m < 32 and block_n < 256:
        return False
    return block_m * block_n <= ACCUMULATORS * 32 * num_warps
