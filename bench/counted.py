"""The child of `bench.counters`: python -m bench.counted POINTS.json TOLD.jsonl, run under ncu.

Runs each point's kernel once, into memory that held NaN, and checks the result. After each it tells, as one JSON line,
how many launches of the GEMM kernel it made, whether the result was right, and why not.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from backends import torch_triton, triton_launch
from bench import contenders, measure
from bench.data import Data, build
from bench.points import Point
from shared import planning


class Counted:
    """What `prepare` and `check` need of a device; no GPU clock, as CUPTI serves one client at a time: ncu."""

    interpret = False
    torch_device = "cuda"

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()


def main(asked: Path, told: Path) -> None:
    import torch

    points = [Point.from_mapping(values) for values in json.loads(asked.read_text())]
    device: Any = Counted()
    made: tuple[object, Data] | None = None
    with told.open("a") as file:
        for number, point in enumerate(points):
            key = (point.case, point.dtype, point.scale_layout, point.routing, point.seed)
            if made is None or made[0] != key:
                made = None
                torch.cuda.empty_cache()
                data = build(
                    point.case, point.dtype, point.scale_layout, device="cuda", seed=point.seed, route=point.routing
                )
                made = (key, data)
            fact = _run(point, made[1], device)
            file.write(json.dumps(fact) + "\n")
            file.flush()
            print(f"point {number + 1}/{len(points)} {point.id}: {fact.get('failed', 'right')}", flush=True)


def _run(point: Point, data: Data, device: Any) -> dict[str, Any]:
    if point.order == triton_launch.PUBLISHED:
        return _run_published(point, data)
    try:
        contender = contenders.prepare(point.row, data, device, config=point.config)
    except contenders.CannotRun as reason:
        return {"launches": 0, "failed": str(reason)}
    try:
        found = measure.check(contender, data, device, contender.eager)
    except measure.WrongResult as wrong:
        return {"launches": 1, "failed": str(wrong), "tile_rows": contender.tile_rows}
    return {"launches": 1, "tile_rows": contender.tile_rows, "error": found["error"]}


def _run_published(point: Point, data: Data) -> dict[str, Any]:
    """The article's mapping, which writes part of y only: `written` is its share, by what is no longer NaN."""
    y = torch_triton.moe_gemm(
        data.x, data.w, data.topk_ids, data.w_scale, None,
        problem=data.problem, order=point.order, config=point.config, fill=math.nan,
    )  # fmt: skip
    tile_rows = planning.tile_rows_in_use(data.counts, point.config.block_m)
    return {"launches": 1, "tile_rows": tile_rows, "written": 1 - float(y.isnan().float().mean())}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
