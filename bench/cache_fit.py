"""Fitting and judging the cache model (`shared/cache_model.py`) on counted launches of one GPU.

Only points of groups that say so (`bench/cache_points.py`) are fitted; the errors that count are those of the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench import cache_points, counters, results
from bench.points import Point
from shared import cache_model
from shared.cache_launch import Chip, Launch
from shared.cache_model import Parameters, Prediction
from shared.checks import ArgumentError
from shared.gpus import gpu

GPU = "h200"
"""The GPU whose counters fit the parameters."""
COUNTERS = results.RESULTS / GPU / "counters.jsonl"
PARAMETERS = Path(cache_model.__file__).parent / "data" / "cache_model.json"
START = Parameters(
    l2_share=1.0,
    l2_sharpness=24.0,
    sm_spread=0.01,
    older_first=0.15,
    l2_bytes_per_sm_per_s=70e9,
    dram_share=0.93,
    sm_bytes_per_s=130e9,
    flops_share=1.0,
    widened_per_clock=96.0,
    tile_start_s=2e-6,
)
"""Where an earlier fit ended, so that one round often is enough."""
GRID: dict[str, tuple[float, ...]] = {
    "l2_share": (0.9, 0.95, 1.0, 1.05),
    "l2_sharpness": (12.0, 16.0, 24.0, 32.0),
    "sm_spread": (0.0, 0.005, 0.01, 0.015, 0.02),
    "older_first": (0.0, 0.1, 0.125, 0.15, 0.2),
    "l2_bytes_per_sm_per_s": (65e9, 70e9, 75e9),
    "dram_share": (0.89, 0.91, 0.93, 0.95),
    "sm_bytes_per_s": (115e9, 130e9, 150e9),
    "flops_share": (0.85, 1.0),
    "widened_per_clock": (64.0, 96.0, 128.0),
    "tile_start_s": (1.5e-6, 2e-6, 2.5e-6),
}
"""Values that are tried."""
WORST_COUNTS, TIME_COUNTS = 0.25, 0.3
"""What the worst point, and time, add to the error that is made least."""
NO_BETTER = 1.01
"""A value stays where the best other one's error is less than 1% smaller: draws of halves and speeds do as much."""
ABOUT_AS_GOOD = 1.1
"""A value whose error is at most so many times the best value's fits about as well."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One counted launch."""

    group: str
    fits: bool
    point: Point
    dram_bytes: float
    time_us: float
    needed_bytes: float
    blocks_per_sm: int | None


def measured(path: Path = COUNTERS) -> list[Measured]:
    """The launches of `cache_points.groups()` that the file has counters of. Raises ArgumentError without the file."""
    if not path.exists():
        raise ArgumentError(
            f"counters: got {path}, which is not there; allowed: what `python -m bench counters --model-points` wrote"
        )
    rows = {row["id"]: row for row in counters.read(path) if row.get("launches") and row.get("dram_read_bytes")}
    found = [
        Measured(
            group=group.name,
            fits=group.fits,
            point=point,
            dram_bytes=rows[point.id]["dram_read_bytes"],
            time_us=rows[point.id]["duration_us"],
            needed_bytes=rows[point.id]["needed_bytes"],
            blocks_per_sm=rows[point.id]["blocks_per_sm"],
        )
        for group in cache_points.groups()
        for point in group.points
        if point.id in rows
    ]
    if not found:
        raise ArgumentError(f"counters: got {path} with none of the model's points; allowed: a file that has some")
    return found


def launch(point: Point) -> Launch:
    problem = point.problem
    return Launch(
        n=problem.n,
        k=problem.k,
        experts=problem.experts,
        topk_ids=point.topk_ids(),
        dtype=point.dtype,
        order=point.order,
        config=point.config,
    )


def predict(point: Point, parameters: Parameters | None = None) -> Prediction:
    return cache_model.predict(launch(point), Chip.of(gpu(GPU), point.dtype), parameters)


def processes() -> ProcessPoolExecutor:
    """One a core, not forked from this one: JAX may have threads here, which a fork would lose."""
    return ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("forkserver"))


def predict_all(points: Sequence[Point], parameters: Parameters, pool: ProcessPoolExecutor) -> list[Prediction]:
    return list(pool.map(predict, points, [parameters] * len(points), chunksize=1))


def digest(points: Iterable[Measured]) -> str:
    """Of the measurements that are read: any that changes, changes it."""
    facts = [[one.point.id, one.fits, round(one.dram_bytes), round(one.time_us, 3)] for one in points]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def fit(path: Path = COUNTERS, *, say: Callable[[str], None] = lambda line: None, rounds: int = 3) -> dict[str, Any]:
    """{"values", "fits_about_as_well", "errors", ...}: parameter by parameter over GRID, until a round changes nothing.

    Error: root mean square of log(predicted / measured) of DRAM bytes, plus WORST_COUNTS of the largest of these logs,
    plus TIME_COUNTS of the root mean square of time.
    """
    points = [one for one in measured(path) if one.fits]
    known: dict[Parameters, tuple[float, float, float]] = {}
    with processes() as pool:

        def errors(parameters: Parameters) -> tuple[float, float, float]:
            """Of DRAM bytes: root mean square and largest; root mean square of time."""
            if parameters not in known:
                found = list(zip(predict_all([one.point for one in points], parameters, pool), points, strict=True))
                in_bytes = [math.log(prediction.dram_bytes / one.dram_bytes) for prediction, one in found]
                in_time = [math.log(prediction.time_us / one.time_us) for prediction, one in found]
                known[parameters] = (
                    _root_mean_square(in_bytes), max(map(abs, in_bytes)), _root_mean_square(in_time)
                )  # fmt: skip
            return known[parameters]

        def error(parameters: Parameters) -> float:
            in_bytes, worst, in_time = errors(parameters)
            return in_bytes + WORST_COUNTS * worst + TIME_COUNTS * in_time

        best = START
        intervals: dict[str, list[float]] = {}
        for _ in range(rounds):
            before = best
            for name, values in GRID.items():
                tried = {value: error(best.replace(**{name: value})) for value in values}
                now = getattr(best, name)
                value = min(tried, key=tried.__getitem__)
                if tried.get(now, math.inf) < NO_BETTER * tried[value]:
                    value = now
                best = best.replace(**{name: value})
                good = [other for other in values if tried[other] <= ABOUT_AS_GOOD * tried[value]]
                intervals[name] = [min(good), max(good)]
                say(f"{name}: {value:g}, error {tried[value]:.4f}; about as good: {min(good):g} to {max(good):g}")
            if best == before:
                break
        in_bytes, worst, in_time = errors(best)
    return {
        "values": dataclasses.asdict(best),
        "fits_about_as_well": intervals,
        "grid": GRID,
        "errors": {"dram_bytes": round(in_bytes, 4), "worst": round(worst, 4), "time": round(in_time, 4)},
        "gpu": gpu(GPU).name,
        "points": len(points),
        "data": digest(points),
    }


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def write(found: dict[str, Any], path: Path) -> None:
    body = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    path.write_text("{\n" + body + "\n}\n", encoding="utf-8")
