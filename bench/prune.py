"""Which candidates of the tuner need no timing: those that do not fit, that spill registers, or cannot win.

Each reason is kept in the tuning file beside the config that it left out.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence

import numpy as np

from backends.triton_launch import half_tail, tail_rows
from shared import planning
from shared.config import Config
from shared.problem import Problem, ceil_div

L2_OVER_DRAM = 2.0
"""L2 is taken to feed tiles at most so many times as fast as the read ceiling: an assumption on the generous side, as a
bound that is too high would leave out a winner."""
ARITHMETIC_HEADROOM = 1.25
"""Small products are taken to run at most so many times the measured rate, which is that of a large product under the
power limit."""
SPILLED = 64
"""Bytes that may be spilled: so few are spilled before and after the loop over K."""
_OF_ONE_KERNEL = ("torch-triton", "jax-triton")
"""Backends whose kernel does not depend on the number of tokens: compiled once for all batches."""


def lower_bound_seconds(
    problem: Problem, counts: Sequence[int], config: Config, ceilings: Mapping[str, float], *, pads: bool = True
) -> float:
    """Least time of a launch with these tiles, from what they read and multiply.

    pads: whether padding is multiplied, too, up to the tile's end (in Triton, to that of the block that holds a slot).

    Every tile row reads its expert's weights, every tile column the rows of x: at the read ceiling what has to come
    from DRAM once, at `L2_OVER_DRAM` times that what tiles read in all. counts: slots per expert; ceilings: as
    `bench.cold.measure_ceilings` gives them.
    """
    rows = planning.tile_rows_in_use(np.asarray(counts), config.block_m)
    cols = problem.tile_cols(config.block_n)
    weights = rows * problem.n * problem.k * problem.w_itemsize
    activations = cols * sum(counts) * problem.k * problem.x_itemsize
    read = ceilings["read_bytes_per_s"]
    rate = ceilings.get("fp8_flops" if problem.quantises_x else "bf16_flops", ceilings["bf16_flops"])
    depth = ceil_div(problem.k, config.block_k) * config.block_k
    multiplied = sum(_rows_of_tiles(count, config.block_m) for count in counts) if pads else sum(counts)
    operations = 2 * multiplied * cols * config.block_n * depth
    return max(
        problem.read_bytes(counts) / read,
        (weights + activations) / (L2_OVER_DRAM * read),
        operations / (ARITHMETIC_HEADROOM * rate),
    )


def _rows_of_tiles(count: int, block_m: int) -> int:
    """Rows that an expert's tiles multiply: of the last tile's tail as much as holds slots (`triton_launch`)."""
    full, rest = divmod(count, block_m)
    head = block_m - tail_rows(block_m)
    least = next(rows for rows in (0, head, head + half_tail(block_m), block_m) if rest <= rows)
    return full * block_m + least


def cannot_win(
    problem: Problem,
    counts: Sequence[int],
    config: Config,
    ceilings: Mapping[str, float],
    best: float,
    *,
    pads: bool = True,
) -> str | None:
    """Why these tiles are slower than `best` (seconds) whatever the kernel does; None if they need not be."""
    bound = lower_bound_seconds(problem, counts, config, ceilings, pads=pads)
    if bound <= best:
        return None
    return f"cannot win: its tiles need {bound * 1e6:.1f} us or more, another config took {best * 1e6:.1f} us"


class Spills:
    """Bytes that compiled kernels spill, found by compiling without a device in processes of their own."""

    def __init__(self, processes: int | None = None) -> None:
        self._known: dict[tuple[str, Problem, str, Config], concurrent.futures.Future[int | None]] = {}
        self._pool = concurrent.futures.ProcessPoolExecutor(
            processes or max(1, (os.cpu_count() or 2) - 2),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_without_gpu,
        )

    def ask(self, backend: str, problem: Problem, order: str, configs: Sequence[Config]) -> None:
        """Start compiling these, if that has not been done: the answers are there sooner."""
        for config in configs:
            self._future(backend, problem, order, config)

    def reason(self, backend: str, problem: Problem, order: str, config: Config) -> str | None:
        """Why the config is left out; None where next to nothing is spilled, or where it cannot be told."""
        try:
            spilled = self._future(backend, problem, order, config).result()
        except concurrent.futures.BrokenExecutor:
            return None
        return f"spills {spilled} bytes of registers" if spilled is not None and spilled > SPILLED else None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _future(
        self, backend: str, problem: Problem, order: str, config: Config
    ) -> concurrent.futures.Future[int | None]:
        if backend in _OF_ONE_KERNEL:
            problem = dataclasses.replace(problem, tokens=1)
        kernel = "torch-triton" if backend in _OF_ONE_KERNEL else backend
        key = (kernel, problem, order, config)
        if key not in self._known:
            self._known[key] = self._pool.submit(spilled_bytes, *key)
        return self._known[key]


def _without_gpu() -> None:
    # Ctrl-C reaches the whole process group; the parent ends these processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}


@functools.cache
def spilled_bytes(backend: str, problem: Problem, order: str, config: Config) -> int | None:
    """Bytes that the compiled GEMM kernel stores to and loads from local memory; None where compiling fails."""
    from backends import registry

    try:
        return registry.load(backend).compile_only(problem, order, config).spills
    except Exception:  # it is compiled again where it is run, and what the compiler says is kept there
        return None
