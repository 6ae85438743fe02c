"""Where the time of the Triton GEMM kernel above a plain read goes, part by part: `python -m bench tile-reads`.

Each step of tile_read_launch.py reads the same weights and does one thing more than the step before; the last is the
shipped kernel. Beside them is the fastest of a few plain reads (reads.py) of as many bytes. A step whose sums or
products are wrong has no time. Every sample has a flushed L2, and steps and shipped kernel a call's own planning just
before them; all are timed in turns.

`balanced` is a made-up layer with equally many tiles for every SM. mixtral-8x7b with one token has the same K, config
and active experts, and tiles that do not come out even.

One JSON line a cell (case and dtype) is written when it is done; a run that was cut short goes on behind them.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from bench import cells_cli, reads, results, selection
from bench.cases import _TINY, Case, Row
from bench.terminal import print_table
from bench.tile_read_launch import STEPS, Reader
from bench.tile_read_tables import COLUMNS, FILE, PLAIN, SAMPLES, SHIPPED, read, sources, table
from shared.config import Config
from shared.gpus import gpus
from shared.models import Model, model

DTYPES = ("fp16", "fp8-w8a8")
DESIGNS = tuple(d for d in reads.DESIGNS if d.per_program == 4096 or d.programs_per_sm == 2)
"""One of each kind."""
_BALANCED = Model(
    name="balanced", hidden=4096, intermediate=gpus()["h200"].sms * 64, experts=2, top_k=2, tp=1,
    source="made up: 128 channels of each expert an SM",
)  # fmt: skip
_MIXTRAL = model("mixtral-8x7b")
_CASES = (
    (_MIXTRAL, "gate-up", (1, 8)),
    (_BALANCED, "gate-up", (1,)),
    (model("deepseek-v3"), "gate-up", (8,)),
    (model("gpt-oss-120b"), "down", (8,)),
    (model("qwen3-30b-a3b"), "down", (1, 8)),
)


def cells(*, rehearse: bool = False) -> Iterator[Row]:
    """The shipped kernel's row of each case and dtype; those of one layer and dtype come together."""
    for layer, gemm, batches in ((_TINY, "gate-up", (4,)),) if rehearse else _CASES:
        for dtype in DTYPES:
            for tokens in batches:
                yield Row(Case(layer, gemm, tokens), dtype, "column", "torch-triton")


def config_of(row: Row, gpu: str) -> Config:
    """The tuned config; of the made-up layer that of mixtral-8x7b with one token, which it stands beside."""
    import backends

    problem = row.problem
    if row.case.model is _BALANCED:
        problem = Case(_MIXTRAL, "gate-up", 1).problem(row.dtype)
    return backends.config_for(problem, backend="torch-triton", gpu=gpu)


def run(
    out: Path, device: Any, *, seconds: float, say: Callable[[str], None], keyword: str = "", rehearse: bool = False
) -> bool:
    """Measure the cells that `out` lacks or has of other sources or versions; whether all are done.

    seconds: start no cell after so many. keyword: -k, of the cells that are wanted.
    """
    from bench import data as bench_data
    from bench.machine import versions

    results.end_at_a_line(out)
    where = {"gpu": device.gpu, "versions": versions(), "sources": sources()}
    known = {row["id"] for row in read(out) if all(row.get(key) == value for key, value in where.items())}
    chosen = selection.select(cells(rehearse=rehearse), keyword, _id)
    wanted = [row for row in chosen if _id(row) not in known]
    cache = bench_data.BatchCache(lambda *key: bench_data.build_batches(*key, device=device.torch_device), wanted)
    begun = time.monotonic()
    for row in wanted:
        if time.monotonic() - begun > seconds:
            say(f"{seconds:.0f} s are over; the same command goes on behind {out}")
            return False
        started = time.monotonic()
        found = measure(row, cache.get(row.case, row.dtype, "channel"), device)
        results.append(out, found | where | {"date": time.strftime("%Y-%m-%d")})
        told = [f"{name} {found['us'].get(name, 'no time')}" for name in (*found["us"], *found["failed"])]
        say(f"{_id(row)} ({time.monotonic() - started:.1f} s): {', '.join(told)}")
    cache.free()
    return True


def _id(row: Row) -> str:
    return f"{row.case.name}/{row.dtype}"


def measure(row: Row, data: Any, device: Any) -> dict[str, Any]:
    """{"us": {step: median}, "samples_us", "failed": {step: why it has no time}, "bytes", "tiles", ...} of a cell."""
    import torch

    from bench.measure import gpu_sample
    from bench.tune import _compile

    config = config_of(row, "NVIDIA H200" if device.interpret else device.gpu)
    reader = Reader(data, config, device.interpret)
    sms = 1 if device.interpret else torch.cuda.get_device_properties(0).multi_processor_count
    tried = contenders(row, reader, device, sms)
    failed = {
        name: text.splitlines()[0] for name, text in _compile({n: c for n, (c, _) in tried.items()}, device).items()
    }
    samples: dict[str, list[float]] = {}

    def attempted(act: Callable[[str], object]) -> None:
        for name in tried:
            if name in failed:
                continue
            try:
                act(name)
            except Exception as error:
                if device.lost():
                    raise
                samples.pop(name, None)
                failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]

    attempted(lambda name: tried[name][1]())
    for _ in range(1 if device.interpret else SAMPLES):
        attempted(lambda name: samples.setdefault(name, []).append(gpu_sample(tried[name][0], device) * 1e6))
    us = {name: statistics.median(values) for name, values in samples.items()}
    designs = [name for name in us if name.startswith(PLAIN)]
    shown = {PLAIN: min(designs, key=us.__getitem__)} if designs else {}
    shown |= {name: name for name in COLUMNS if name in us}
    return {
        "id": _id(row), "case": row.case.name, "dtype": row.dtype, "config": dataclasses.asdict(config),
        "bytes": reader.weight_bytes, "tiles": reader.rows * reader.tile_cols, "sms": sms,
        "read_bytes_per_s": device.ceilings()["read_bytes_per_s"],
        "us": {name: round(us[of], 3) for name, of in shown.items()},
        "samples_us": {name: [round(value, 3) for value in samples[of]] for name, of in shown.items()},
        "plain_design": shown.get(PLAIN), "programs_per_sm": reader.programs_per_sm, "failed": failed,
    }  # fmt: skip


def contenders(row: Row, reader: Reader, device: Any, sms: int) -> dict[str, tuple[Any, Callable[[], object]]]:
    """{name: (what is timed, its check)}: plain reads, the steps, the shipped kernel. A check raises."""
    import torch

    from backends import torch_triton
    from bench.contenders import Contender, prepare, to_torch
    from bench.measure import check

    def contender(call: Callable[..., Any], name: str, records: int) -> Contender:
        return Contender(row, "torch", call, (), to_torch, name, reader.config, reader.rows, records=records)

    found: dict[str, tuple[Any, Callable[[], object]]] = {}
    hopper = not device.interpret and torch.cuda.get_device_capability() >= (9, 0)
    for design in () if device.interpret else DESIGNS:  # plain reads are not interpreted
        if hopper or design.kind != "descriptor":
            call = functools.partial(reader.plain_read, design, sms)
            found[f"{PLAIN}: {design.name}"] = (
                contender(call, reads.KERNEL, 1),
                functools.partial(reader.check_plain, call),
            )
    planned = 1 if device.interpret else 2  # planning is a kernel, too
    for step in STEPS:
        call = functools.partial(reader, step)
        found[step] = contender(call, torch_triton.KERNEL_NAME, planned), functools.partial(reader.check, step)
    shipped = prepare(row, reader.data, device, config=reader.config)
    return found | {SHIPPED: (shipped, lambda: check(shipped, reader.data, device, shipped.eager))}


def add_to(app: typer.Typer) -> None:
    app.command(name="tile-reads")(tile_reads)


def tile_reads(
    seconds: cells_cli.Seconds = 540,
    keyword: selection.Keyword = "",
    out: cells_cli.Out = None,
    clock: cells_cli.ClockName = "cupti",
    source: cells_cli.Source = None,
    rehearse: cells_cli.Rehearse = False,
    as_json: cells_cli.AsJson = False,
) -> None:
    """What the Triton GEMM kernel takes beside a plain read of its bytes, part by part."""
    import json

    def measure(path: Path, device: Any) -> None:
        run(path, device, seconds=seconds, keyword=keyword, say=cells_cli.say, rehearse=rehearse)

    with cells_cli.refusals():
        rows = cells_cli.rows(
            source, out, file=FILE, keyword=keyword, ids=[_id(row) for row in cells(rehearse=rehearse)],
            clock=clock, rehearse=rehearse, measure=measure, read=read,
        )  # fmt: skip
    typer.echo(json.dumps(rows)) if as_json else print_table(
        table(rows), "µs above the bytes' time at the read ceiling"
    )
