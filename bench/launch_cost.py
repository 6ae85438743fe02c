"""Where the time of a call goes: kernels, gaps between them, the host. `python -m bench launch`.

A cell is one batch of one layer in one dtype on one backend, at its best known tile. notes/launch-cost.md defines the
columns. Cells are journalled as they come; a run that was cut short goes on behind them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from bench import cells_cli, launch_host, launch_step, results, selection
from bench.cases import _TINY, Case, Row
from bench.launch_host import rounded
from bench.launch_tables import host, kernels, times
from bench.terminal import print_table
from shared.checks import ArgumentError
from shared.models import model

FILE = "launch-cost.jsonl"
DTYPES = ("fp16", "fp8-w8a8")
STEP_ROUNDS = 7
"""Of a step, recorded and timed in turns: each time less the record before it, as clocks drift by more between two
rounds than a layer's overhead is."""
_CASES = (
    ("qwen3-30b-a3b", 8), ("mixtral-8x7b", 8), ("deepseek-v3", 8), ("qwen3-30b-a3b", 1), ("mixtral-8x7b", 1)
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cell:
    case: Case
    dtype: str
    backend: str

    @property
    def id(self) -> str:
        return f"{self.case.name}/{self.dtype}/{self.backend}"


def cells(*, rehearse: bool = False) -> Iterator[Cell]:
    """PyTorch first: what there is after a short run is what the host costs most directly."""
    from backends.registry import BACKENDS

    batches = [Case(_TINY, "gate-up", 4)] if rehearse else [Case(model(m), "gate-up", tokens) for m, tokens in _CASES]
    for framework in (BACKENDS[:1], BACKENDS[1:]):
        for case in batches:
            for dtype in DTYPES:
                for backend in framework:
                    yield Cell(case, dtype, backend)


def run(
    out: Path, device: Any, *, seconds: float, say: Callable[[str], None], keyword: str = "", rehearse: bool = False
) -> bool:
    """Measure the cells that `out` lacks or has of other sources or versions, one JSON line each; whether all are done.

    seconds: start no cell after so many. keyword: -k, of the cells that are wanted.
    """
    from bench import data as bench_data
    from bench.machine import versions

    results.end_at_a_line(out)
    where = {"gpu": device.gpu, "versions": versions(), "sources": results.sources()}
    known = {row["id"] for row in read(out) if all(row.get(key) == value for key, value in where.items())}
    begun = time.monotonic()
    held: tuple[object, Any] | None = None
    for cell in selection.select(cells(rehearse=rehearse), keyword, lambda cell: cell.id):
        if cell.id in known:
            continue
        if time.monotonic() - begun > seconds:
            say(f"{seconds:.0f} s are over; the same command goes on behind {out}")
            return False
        layer = (cell.case.model, cell.dtype)
        if held is None or held[0] != layer:
            held = None
            held = (layer, bench_data.build(cell.case, cell.dtype, "channel", device=device.torch_device))
        data = bench_data.rebatch(held[1], cell.case)
        started = time.monotonic()
        found: dict[str, Any] = {"id": cell.id, "case": cell.case.name, "dtype": cell.dtype, "backend": cell.backend}
        try:
            found |= measure(cell, data, device)
        except Exception as error:
            if device.lost():
                raise
            found |= {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]}
        results.append(out, found | where | {"date": time.strftime("%Y-%m-%d")})
        told = found.get("failed") or ", ".join(f"{name} {value}" for name, value in found["us"].items())
        say(f"{cell.id} ({time.monotonic() - started:.1f} s): {told}")
        _free()
    return True


def measure(cell: Cell, data: Any, device: Any) -> dict[str, Any]:
    """{"us": {column: µs}, "kernels": {name: µs a call}, "host_us": {part: µs}, facts} of a cell."""
    import backends
    from bench.contenders import CannotRun, capture, prepare, wait
    from bench.measure import check

    order = backends.choose_config(cell.case.problem(cell.dtype), backend=cell.backend).order
    contender = prepare(Row(cell.case, cell.dtype, order, cell.backend), data, device)
    framework, name = contender.framework, contender.kernel_name or ""
    assert contender.config is not None
    check(contender, data, device, contender.eager)
    layers, copies = launch_step.layers(
        contender, data, device, launch_step.layers_of_a_step(cell.case.model, framework)
    )
    kernels, _ = _recorded(contender, device, contender.eager, flush=True)
    us: dict[str, float | None] = {"kernel": _of_name(kernels, name), "gpu_total": _of_name(kernels, "")}
    found = {
        "config": dataclasses.asdict(contender.config),
        "order": order,
        "layers": len(layers),
        "copies": copies,
        "read_bytes": data.problem.read_bytes(data.counts.tolist()),
        "us": us,
        "kernels": kernels,
    }
    device.clock.pause()
    us["latency"] = launch_host.latency(contender, device, contender.eager)
    us["issued"], us["steady"] = launch_host.in_a_row(contender, layers, device)
    found["host_us"] = launch_host.parts(cell.backend, contender, device)
    device.clock.reset()  # recording, as a graph's kernels are seen only if it was instantiated so
    try:
        one = capture(contender, device)
        step = (
            launch_step.in_cuda_graph(contender, layers, device)
            if framework == "torch"
            else launch_step.in_jit(contender, layers)
        )
        wait(step(), framework, device)
    except CannotRun as reason:
        return found | {"not_captured": str(reason)}
    finally:
        contender.captured = None
    _, us["gaps"] = _recorded(contender, device, one, flush=True)
    device.clock.pause()
    us["captured"] = launch_host.latency(contender, device, one)
    of_kernels, of_steps = [], []
    for _ in range(1 if device.interpret else STEP_ROUNDS):
        device.clock.reset()
        of_kernels.append(_of_name(_recorded(contender, device, step, flush=False)[0], name))
        device.clock.pause()
        of_steps.append(launch_host.latency(contender, device, step, flush=False))
    overheads = [step_us - kernels_us for step_us, kernels_us in zip(of_steps, of_kernels, strict=True)]
    kernel, layer, overhead = (statistics.median(of) / len(layers) for of in (of_kernels, of_steps, overheads))
    alone = _of_name(kernels, name)
    if kernel < alone / 2 and not device.interpret:
        raise AssertionError(f"{cell.id}: a step's kernels take {kernel:.1f} us a layer, one alone {alone:.1f}")
    us |= {"layer_kernel": rounded(kernel), "layer": rounded(layer), "layer_overhead": rounded(overhead)}
    device.clock.reset()
    return found


def _of_name(kernels: dict[str, float], name: str) -> float:
    """µs of the kernels whose names contain `name`."""
    return rounded(sum(us for kernel, us in kernels.items() if name in kernel))


def _recorded(
    contender: Any, device: Any, call: Callable[[], Any], *, flush: bool
) -> tuple[dict[str, float], float | None]:
    """({kernel: µs a call}, µs of gaps between a call's kernels): medians over calls; no gaps where no clock tells."""
    from bench.clock import settle
    from bench.contenders import wait

    samples: list[dict[str, float]] = []
    gaps: list[float] = []
    for _ in range(1 if device.interpret else 3):
        if flush:
            device.flush()
        device.synchronize()
        device.clock.reset()
        wait(call(), contender.framework, device)
        records = settle(device.clock)
        if not records:
            continue
        sample: dict[str, float] = {}
        for record in records:
            sample[record.name] = sample.get(record.name, 0.0) + record.duration * 1e6
        samples.append(sample)
        starts = [(record.start, record.duration) for record in records if record.start is not None]
        if len(starts) == len(records):
            span = max(start + duration for start, duration in starts) - starts[0][0]
            gaps.append((span - sum(duration for _, duration in starts)) * 1e6)
    if not samples:
        raise ArgumentError(f"clock: {device.clock.name} recorded no kernel of this call")
    most = max(len(sample) for sample in samples)  # a record is lost now and then
    whole = [sample for sample in samples if len(sample) == most]
    medians = {name: rounded(statistics.median(sample.get(name, 0.0) for sample in whole)) for name in whole[0]}
    return medians, rounded(statistics.median(gaps)) if gaps else None


def _free() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def read(path: Path) -> list[dict[str, Any]]:
    """The cells of a file, those of one case together; of one measured twice the last. None where there is no file."""
    order = {cell.id: i for i, cell in enumerate(sorted(cells(), key=lambda cell: _CASES.index(_batch(cell))))}
    rows = results.by_id(path, "backend") if path.exists() else []
    return sorted(rows, key=lambda row: order.get(row["id"], len(order)))


def _batch(cell: Cell) -> tuple[str, int]:
    return cell.case.model.name, cell.case.tokens


# The command


def add_to(app: typer.Typer) -> None:
    app.command(name="launch")(launch)


def launch(
    seconds: cells_cli.Seconds = 540,
    keyword: selection.Keyword = "",
    out: cells_cli.Out = None,
    clock: cells_cli.ClockName = "cupti",
    source: cells_cli.Source = None,
    rehearse: cells_cli.Rehearse = False,
    as_json: cells_cli.AsJson = False,
) -> None:
    """Where the time of a call goes: kernels, gaps between them, the host; one call, calls in a row, a decode step."""
    import json

    def measure(path: Path, device: Any) -> None:
        run(path, device, seconds=seconds, say=cells_cli.say, keyword=keyword, rehearse=rehearse)

    with cells_cli.refusals():
        rows = cells_cli.rows(
            source, out, file=FILE, keyword=keyword, ids=[cell.id for cell in cells(rehearse=rehearse)],
            clock=clock, rehearse=rehearse, measure=measure, read=read,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows))
        return
    print_table(times(rows), "Calls, µs")
    print_table(host(rows), "On the host, µs")
    print_table(kernels(rows), "On the GPU")
