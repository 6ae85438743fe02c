"""Fitting and judging the cache model (`shared/cache_model.py`) on counted launches of one GPU.

Only points of groups that say so (`bench/cache_points.py`) are fitted; the errors that count are those of the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
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
    l2_share=0.55,
    l2_sharpness=8.0,
    spread=0.015,
    l2_bytes_per_sm_per_s=70e9,
    dram_share=0.89,
    sm_bytes_per_s=130e9,
    flops_share=1.0,
    tile_start_s=2e-6,
)
"""Where an earlier fit ended, so that one round often is enough."""
GRID: dict[str, tuple[float, ...]] = {
    "l2_share": (0.475, 0.5, 0.525, 0.55, 0.575),
    "l2_sharpness": (4.0, 6.0, 8.0, 12.0, 16.0),
    "spread": (0.0, 0.015, 0.03, 0.045, 0.06, 0.09),
    "l2_bytes_per_sm_per_s": (60e9, 65e9, 70e9, 75e9, 80e9),
    "dram_share": (0.85, 0.87, 0.89, 0.91, 0.93),
    "sm_bytes_per_s": (95e9, 105e9, 115e9, 130e9, 150e9),
    "flops_share": (0.5, 0.7, 0.85, 1.0),
    "tile_start_s": (0.5e-6, 1e-6, 1.5e-6, 2e-6, 2.5e-6, 3e-6),
}
"""Values that are tried."""
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


def predict_all(points: Sequence[Point], parameters: Parameters, pool: ProcessPoolExecutor) -> list[Prediction]:
    return list(pool.map(predict, points, [parameters] * len(points), chunksize=1))


def digest(points: Iterable[Measured]) -> str:
    """Of the measurements that are read: any that changes, changes it."""
    facts = [[one.point.id, one.fits, round(one.dram_bytes), round(one.time_us, 3)] for one in points]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def fit(path: Path = COUNTERS, *, say: Callable[[str], None] = lambda line: None, rounds: int = 3) -> dict[str, Any]:
    """{"values", "fits_about_as_well", "errors", ...}: parameter by parameter over GRID, until a round changes nothing.

    Error: root mean square of log(predicted / measured) of DRAM bytes, plus the same of time.
    """
    points = [one for one in measured(path) if one.fits]
    known: dict[Parameters, tuple[float, float]] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:

        def errors(parameters: Parameters) -> tuple[float, float]:
            if parameters not in known:
                found = predict_all([one.point for one in points], parameters, pool)
                known[parameters] = (
                    _root_mean_square(p.dram_bytes / m.dram_bytes for p, m in zip(found, points, strict=True)),
                    _root_mean_square(p.time_us / m.time_us for p, m in zip(found, points, strict=True)),
                )
            return known[parameters]

        best = START
        intervals: dict[str, list[float]] = {}
        for _ in range(rounds):
            before = best
            for name, values in GRID.items():
                tried = {value: sum(errors(best.replace(**{name: value}))) for value in values}
                value = min(tried, key=tried.__getitem__)
                best = best.replace(**{name: value})
                good = [other for other in values if tried[other] <= ABOUT_AS_GOOD * tried[value]]
                intervals[name] = [min(good), max(good)]
                say(f"{name}: {value:g}, error {tried[value]:.4f}; about as good: {min(good):g} to {max(good):g}")
            if best == before:
                break
        in_bytes, in_time = errors(best)
    return {
        "values": dataclasses.asdict(best),
        "fits_about_as_well": intervals,
        "grid": GRID,
        "errors": {"dram_bytes": round(in_bytes, 4), "time": round(in_time, 4)},
        "gpu": gpu(GPU).name,
        "points": len(points),
        "data": digest(points),
    }


def _root_mean_square(ratios: Iterable[float]) -> float:
    squares = [math.log(ratio) ** 2 for ratio in ratios]
    return math.sqrt(sum(squares) / len(squares))


def write(found: dict[str, Any], path: Path) -> None:
    body = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    path.write_text("{\n" + body + "\n}\n", encoding="utf-8")
