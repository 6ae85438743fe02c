"""How far the cache model is from counted launches, point by point: bench/results/h200/cache-model.json."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import cache_fit, results
from shared import cache_model
from shared.cache_model import Parameters
from shared.gpus import gpu

JUDGED = cache_fit.COUNTERS.parent / "cache-model.json"
MEDIAN_TARGET, WORST_TARGET = 0.10, 0.25
"""Of the relative error of DRAM bytes, over the judged points."""
READ_AGAIN = 1.1
"""From here on, DRAM bytes over needed bytes, a point says more than that everything is read once."""
ORDERS_DIFFER = 1.05
"""Orders whose measured bytes differ by less are not asked which is better."""


def judge(path: Path, parameters: Parameters | None = None) -> dict[str, Any]:
    """{"gpu", "parameters", "data", "points", "errors", "orders", "targets"} over all counted launches."""
    parameters = parameters or cache_model.fitted()
    found = cache_fit.measured(path)
    with cache_fit.processes() as pool:
        predictions = cache_fit.predict_all([one.point for one in found], parameters, pool)
    points = [
        {
            "id": one.point.id,
            "group": one.group,
            "fits": one.fits,
            "measured_bytes": one.dram_bytes,
            "predicted_bytes": round(prediction.dram_bytes),
            "needed_bytes": one.needed_bytes,
            "measured_us": round(one.time_us, 3),
            "predicted_us": round(prediction.time_us, 3),
            "measured_blocks_per_sm": one.blocks_per_sm,
            "predicted_blocks_per_sm": prediction.blocks_per_sm,
        }
        for one, prediction in zip(found, predictions, strict=True)
    ]
    return {
        "gpu": gpu(cache_fit.GPU).name,
        "parameters": dataclasses.asdict(parameters),
        "data": cache_fit.digest(found),
        "errors": errors(points),
        "orders": orders(points),
        "points": points,
    }


def errors(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for the judged points, for the fitted ones, for judged ones that read again, and for each group.

    `read_once` is what a model would err that says that everything is read once.
    """
    judged = [point for point in points if not point["fits"]]
    named = [
        ("judged", judged),
        (f"judged, {READ_AGAIN} x needed and more", [p for p in judged if times_needed(p) >= READ_AGAIN]),
        ("fitted", [point for point in points if point["fits"]]),
    ]
    for group in dict.fromkeys(point["group"] for point in points):
        mine = [point for point in points if point["group"] == group]
        named.append((f"{group} ({'fitted' if mine[0]['fits'] else 'judged'})", mine))
    return [_errors_of(name, mine) for name, mine in named if mine]


def _errors_of(name: str, points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    in_bytes = [abs(point["predicted_bytes"] / point["measured_bytes"] - 1) for point in points]
    in_time = [abs(point["predicted_us"] / point["measured_us"] - 1) for point in points]
    once = [abs(point["needed_bytes"] / point["measured_bytes"] - 1) for point in points]
    return {
        "points": len(points),
        "name": name,
        "median": round(statistics.median(in_bytes), 4),
        "worst": round(max(in_bytes), 4),
        "worst_point": max(zip(in_bytes, (point["id"] for point in points), strict=True))[1],
        "read_once_median": round(statistics.median(once), 4),
        "read_once_worst": round(max(once), 4),
        "time_median": round(statistics.median(in_time), 4),
        "time_worst": round(max(in_time), 4),
    }


def orders(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of launches that differ in nothing but order: whether the predicted best order is the measured best, by bytes.

    "ratio": the most over the least bytes of the orders, measured and at the same two orders predicted. Judged points
    alone; launches whose orders differ by less than ORDERS_DIFFER are only counted.
    """
    alike: dict[str, dict[str, dict[str, Any]]] = {}
    for point in points:
        if not point["fits"]:
            parts = point["id"].split("/")
            order = parts.pop(5)
            alike.setdefault("/".join(parts), {})[order] = point
    compared = []
    same = 0
    for name, by_order in alike.items():
        if len(by_order) < 2:
            continue
        best, most = (pick(by_order, key=lambda order: by_order[order]["measured_bytes"]) for pick in (min, max))
        ratio = by_order[most]["measured_bytes"] / by_order[best]["measured_bytes"]
        if ratio < ORDERS_DIFFER:
            same += 1
            continue
        predicted = {order: point["predicted_bytes"] for order, point in by_order.items()}
        compared.append(
            {
                "launch": name,
                "best": best,
                "most": most,
                # An order that is measured to read as little as the best is as right.
                "predicted_best_reads": round(
                    by_order[min(predicted, key=predicted.__getitem__)]["measured_bytes"]
                    / by_order[best]["measured_bytes"],
                    4,
                ),
                "ratio": round(ratio, 4),
                "predicted_ratio": round(predicted[most] / predicted[best], 4),
            }
        )
    return {"alike": same, "compared": compared}


def missed(found: dict[str, Any]) -> list[str]:
    """Targets that the judged points miss, as sentences; none: all are met."""
    judged = found["errors"][0]
    lines = []
    if judged["median"] > MEDIAN_TARGET:
        lines.append(f"median error {judged['median']:.1%}, target {MEDIAN_TARGET:.0%}")
    for point in found["points"]:
        error = point["predicted_bytes"] / point["measured_bytes"] - 1
        if not point["fits"] and abs(error) > WORST_TARGET:
            lines.append(f"{point['id']}: error {error:+.1%}, target {WORST_TARGET:.0%}")
    return lines


def times_needed(point: dict[str, Any]) -> float:
    return point["measured_bytes"] / point["needed_bytes"]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(results.dump(found), encoding="utf-8")
