"""Where the time of a call goes: kernels, gaps between them, the host. `python -m bench launch`.

A cell is one batch of one layer in one dtype on one backend, at its best known tile. notes/launch-cost.md defines the
columns. Cells are journalled as they come; a run that was cut short goes on behind them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer

from bench import cells_cli, results
from bench.cases import _TINY, Case, Row
from bench.terminal import Table, print_table
from shared.checks import ArgumentError
from shared.models import Model, model

FILE = "launch-cost.jsonl"
DTYPES = ("fp16", "fp8-w8a8")
JAX_LAYERS = 8
"""Layers in one jax.jit, of which each costs XLA compile time; a CUDA graph has as many as the model."""
SAMPLES = 15
STEP_ROUNDS = 3
"""Of a step, recorded and timed in turns, as clocks drift by more between two rounds than a layer's overhead is."""
IN_A_ROW = 32
"""Calls in a row before the device is waited for: few enough that their launches fit the driver's queue."""
ROUNDS = 5
L2_MULTIPLE = 4
MOST_BYTES = 24 << 30
"""Weights that one cell holds, copies included."""
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


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a decode step: its inputs are its own, its weights are shared with every `copies`-th layer."""

    arguments: tuple[Any, ...]


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

    seconds: start no cell after so many.
    """
    from bench import data as bench_data
    from bench.machine import versions

    results.end_at_a_line(out)
    where = {"gpu": device.gpu, "versions": versions(), "sources": results.sources()}
    known = {row["id"] for row in read(out) if all(row.get(key) == value for key, value in where.items())}
    begun = time.monotonic()
    held: tuple[object, Any] | None = None
    for cell in cells(rehearse=rehearse):
        if keyword not in cell.id or cell.id in known:
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
    from bench.contenders import CannotRun, capture, prepare, wait
    from bench.measure import check

    contender = prepare(Row(cell.case, cell.dtype, "column", cell.backend), data, device)
    framework, name = contender.framework, contender.kernel_name or ""
    assert contender.config is not None
    check(contender, data, device, contender.eager)
    layers, copies = _layers(contender, data, device, layers_of_a_step(cell.case.model, framework))
    kernels, _ = _recorded(contender, device, contender.eager, flush=True)
    us: dict[str, float | None] = {"kernel": _of_name(kernels, name), "gpu_total": _of_name(kernels, "")}
    found = {
        "config": dataclasses.asdict(contender.config),
        "layers": len(layers),
        "copies": copies,
        "read_bytes": data.problem.read_bytes(data.counts.tolist()),
        "us": us,
        "kernels": kernels,
    }
    device.clock.pause()
    us["latency"] = _latency(contender, device, contender.eager)
    us["issued"], us["steady"] = _in_a_row(contender, layers, device)
    found["host_us"] = _host_parts(cell, contender, device)
    device.clock.reset()  # recording, as a graph's kernels are seen only if it was instantiated so
    try:
        one = capture(contender, device)
        step = _step_torch(contender, layers, device) if framework == "torch" else _step_jax(contender, layers)
        wait(step(), framework, device)
    except CannotRun as reason:
        return found | {"not_captured": str(reason)}
    finally:
        contender.captured = None
    _, us["gaps"] = _recorded(contender, device, one, flush=True)
    device.clock.pause()
    us["captured"] = _latency(contender, device, one)
    of_kernels, of_steps = [], []
    for _ in range(1 if device.interpret else STEP_ROUNDS):
        device.clock.reset()
        of_kernels.append(_of_name(_recorded(contender, device, step, flush=False)[0], name))
        device.clock.pause()
        of_steps.append(_latency(contender, device, step, flush=False))
    kernel, layer = statistics.median(of_kernels) / len(layers), statistics.median(of_steps) / len(layers)
    alone = _of_name(kernels, name)
    if kernel < alone / 2 and not device.interpret:
        raise AssertionError(f"{cell.id}: a step's kernels take {kernel:.1f} us a layer, one alone {alone:.1f}")
    us |= {"layer_kernel": _round(kernel), "layer": _round(layer), "layer_overhead": _round(layer - kernel)}
    device.clock.reset()
    return found


def _of_name(kernels: dict[str, float], name: str) -> float:
    """µs of the kernels whose names contain `name`."""
    return _round(sum(us for kernel, us in kernels.items() if name in kernel))


def layers_of_a_step(of: Model, framework: str) -> int:
    """All MoE layers of the model; inside jax.jit no more than JAX_LAYERS."""
    return min(JAX_LAYERS, of.layers) if framework == "jax" else of.layers


def _layers(contender: Any, data: Any, device: Any, count: int) -> tuple[list[Layer], int]:
    """So many layers, of which none finds its weights in L2, as those before it read others; and copies of the weights.

    A copy comes again after L2_MULTIPLE times L2, or as far as MOST_BYTES lets it. Inputs are each layer's own: XLA
    would plan equal ones once.
    """
    from bench.data import to_jax

    l2 = 0 if device.interpret else _l2_bytes()
    read = max(1, data.problem.weight_bytes(data.counts.tolist()))
    weights = data.w.numel() * data.w.element_size()
    copies = max(2, min(count, -(-L2_MULTIPLE * l2 // read), MOST_BYTES // weights))
    own: list[Any] = [data.w, *(data.w.clone() for _ in range(copies - 1))]
    inputs = [
        {name: array if array is None or name == "w" else array.clone() for name, array in data.arrays("torch").items()}
        for _ in range(count)
    ]
    device.synchronize()  # before another framework's stream reads them
    convert: Callable[[Any], Any] = to_jax if contender.framework == "jax" else lambda array: array
    own = [convert(w) for w in own]
    found = []
    for i, arrays in enumerate(inputs):
        native = {name: own[i % copies] if name == "w" else convert(a) for name, a in arrays.items() if a is not None}
        found.append(Layer(tuple(native.values())))
    return found, copies


def _l2_bytes() -> int:
    import torch

    return torch.cuda.get_device_properties(0).L2_cache_size


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
    medians = {name: _round(statistics.median(sample.get(name, 0.0) for sample in whole)) for name in whole[0]}
    return medians, _round(statistics.median(gaps)) if gaps else None


def _latency(contender: Any, device: Any, call: Callable[[], Any], *, flush: bool = True) -> float:
    """µs from a call to its result, the device waited for: median."""
    from bench.contenders import wait

    samples = []
    for _ in range(1 if device.interpret else SAMPLES):
        if flush:
            device.flush()
        begun = time.perf_counter()
        wait(call(), contender.framework, device)
        samples.append((time.perf_counter() - begun) * 1e6)
    return _round(statistics.median(samples))


def _in_a_row(contender: Any, layers: Sequence[Layer], device: Any) -> tuple[float, float]:
    """(µs a call until the host is free, µs a call until the last result is there) of IN_A_ROW calls: medians."""
    from bench.contenders import wait

    calls = 1 if device.interpret else IN_A_ROW
    issued, done = [], []
    for _ in range(1 if device.interpret else ROUNDS):
        wait(None, contender.framework, device)
        begun = time.perf_counter()
        for i in range(calls):
            y = contender.call(*layers[i % len(layers)].arguments)
        issued.append((time.perf_counter() - begun) / calls * 1e6)
        wait(y, contender.framework, device)
        done.append((time.perf_counter() - begun) / calls * 1e6)
    return _round(statistics.median(issued)), _round(statistics.median(done))


def _step_torch(contender: Any, layers: Sequence[Layer], device: Any) -> Callable[[], Any]:
    """All layers in one CUDA graph."""
    import torch

    from bench.contenders import CannotRun

    def step() -> list[Any]:
        return [contender.call(*layer.arguments) for layer in layers]

    if device.interpret:
        return step
    step()
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results_of = step()
    except RuntimeError as error:
        raise CannotRun(f"cannot be captured in a CUDA graph: {error}") from error

    def replay() -> Any:
        graph.replay()
        return results_of[-1]

    return replay


def _step_jax(contender: Any, layers: Sequence[Layer]) -> Callable[[], Any]:
    """All layers inside one jax.jit, each after the one before it, as a model's are.

    All results are returned: XLA leaves out a layer whose result no one reads.
    """
    import jax

    @jax.jit
    def step(every: tuple[tuple[Any, ...], ...]) -> Any:
        results_of: list[Any] = []
        for arguments in every:
            if results_of:
                *arguments, results_of[-1] = jax.lax.optimization_barrier((*arguments, results_of[-1]))  # type: ignore[assignment]
            results_of.append(contender.call(*arguments))
        return results_of

    every = tuple(layer.arguments for layer in layers)
    return lambda: step(every)


def _host_parts(cell: Cell, contender: Any, device: Any) -> dict[str, float]:
    """µs of the parts of an eager call that run on the host, each timed alone in a loop.

    door:     `moe_gemm` with a backend that does nothing: checks, look-ups, kind of the arrays
    choice:   the search for the best known config, which a signature's first call makes
    backend:  the backend's own part: allocation and launches (JAX: its jitted function)
    allocate, launch: of torch-triton's part, the two allocations, and all launches of a call by kept kernels
    """
    import backends
    from bench.contenders import wait

    module = backends.load(cell.backend)
    with _backend_that_does_nothing(module) as seen:
        contender.eager()
        (arrays, options) = seen[0]
        parts = {"door": _loop(contender.eager, device)}
    problem = options["problem"]
    parts["choice"] = _loop(lambda: backends.choose_config(problem, backend=cell.backend), device)
    repeat: Any = None
    if module.FRAMEWORK == "torch":
        contender.eager()
        chosen = {name: options[name] for name in ("problem", "order", "config")}
        repeat = module.again(*(*arrays, options["popularity"]), **chosen)
    if repeat is None:
        parts["backend"] = _loop(lambda: module.moe_gemm(*arrays, **options), device)
    else:
        parts["backend"] = _loop(lambda: repeat(*arrays, options["popularity"]), device)
        parts |= _torch_triton_parts(repeat.args[0], arrays, device)
    wait(None, contender.framework, device)
    return {name: _round(value) for name, value in parts.items()}


@contextlib.contextmanager
def _backend_that_does_nothing(module: Any) -> Iterator[list[tuple[Any, Any]]]:
    """In place of a backend. Gives the list of the (arrays, options) that its `moe_gemm` is called with.

    The door knows no call from before, and none of these afterwards.
    """
    import backends

    seen: list[tuple[Any, Any]] = []

    def nothing(*arrays: Any, **options: Any) -> Any:
        seen.append((arrays, options))
        return arrays[0]

    instead: dict[str, Any] = {"moe_gemm": nothing}
    if module.FRAMEWORK == "torch":
        instead["again"] = lambda *_, **__: lambda *arrays: arrays[0]
    with mock.patch.multiple(module, **instead), mock.patch.object(backends, "_repeats", {}):
        yield seen


def _torch_triton_parts(work: Any, arrays: tuple[Any, ...], device: Any) -> dict[str, float]:
    """work: what the calls of these arrays share (backends/torch_triton.py)."""
    kept = work.kept

    def allocate() -> tuple[Any, Any]:
        return kept.empty(*work.together), kept.empty(*work.y)

    together, y = allocate()
    given = [0 if array is None else array.data_ptr() for array in (*arrays, None)]
    addresses = (*given, *(together.data_ptr() + offset for offset in work.offsets), y.data_ptr())
    launch = _loop(lambda: kept.launch(addresses, arrays[0].device.index), device)
    return {"allocate": _loop(allocate, device), "launch": launch}


def _loop(part: Callable[[], Any], device: Any) -> float:
    """µs of one of IN_A_ROW runs of `part` with an idle device before them: median."""
    samples = []
    for _ in range(1 if device.interpret else ROUNDS):
        device.synchronize()
        begun = time.perf_counter()
        for _ in range(1 if device.interpret else IN_A_ROW):
            part()
        samples.append((time.perf_counter() - begun) * 1e6 / (1 if device.interpret else IN_A_ROW))
    device.synchronize()
    return statistics.median(samples)


def _round(value: float) -> float:
    return round(value, 2)


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


# Tables

COLUMNS = {
    "kernel": "kernel", "gpu_total": "GPU total", "latency": "eager, one call", "issued": "eager, host",
    "steady": "eager, in a row", "captured": "captured, one call", "gaps": "gaps in it",
    "layer_kernel": "kernel in a step", "layer": "layer of a step", "layer_overhead": "layer − kernel",
}  # fmt: skip
PARTS = ("door", "choice", "backend", "allocate", "launch")


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def times(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a cell: COLUMNS in µs."""
    headings = ["case", "dtype", "backend", *COLUMNS.values()]
    lines = []
    for row in rows:
        us = row.get("us", {})
        cells_ = (
            [row["failed"], *[""] * (len(COLUMNS) - 1)] if "failed" in row else [_shown(us.get(c)) for c in COLUMNS]
        )
        lines.append([row["case"], row["dtype"], row["backend"], *cells_])
    return headings, lines


def kernels(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a cell: what the GPU runs in one eager call, longest first."""
    lines = []
    for row in rows:
        ran = sorted(row.get("kernels", {}).items(), key=lambda item: -item[1])
        told = ", ".join(f"{name[:60]} {value:.1f}" for name, value in ran)
        lines.append([row["case"], row["dtype"], row["backend"], told])
    return ["case", "dtype", "backend", "kernels of one call, µs"], lines


def host(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a cell: PARTS in µs."""
    lines = [
        [row["case"], row["dtype"], row["backend"], *(_shown(row["host_us"].get(part)) for part in PARTS)]
        for row in rows
        if "host_us" in row
    ]
    return ["case", "dtype", "backend", *PARTS], lines


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of all three; kernels by name for one case alone, as they differ by backend and dtype."""
    from bench.tables import markdown

    if not rows:
        return "Not measured yet."
    last = rows[-1]
    versions = ", ".join(f"{name} {last['versions'][name]}" for name in ("torch", "triton", "jax", "jax-triton"))
    first = [row for row in rows if row["case"] == rows[0]["case"]]
    dates = " and ".join(sorted({row["date"] for row in rows}))
    intro = f"{last['gpu']}, {dates}; {versions}. µs."
    parts = [
        intro, markdown(times(rows)), "On the host, µs:", markdown(host(rows)),
        "On the GPU, kernels by name:", markdown(kernels(first)),
    ]  # fmt: skip
    return "\n\n".join(parts)


# The command


def add_to(app: typer.Typer) -> None:
    app.command(name="launch")(launch)


def launch(
    seconds: cells_cli.Seconds = 540,
    keyword: Annotated[str, typer.Option("-k", help="only cells whose id contains this")] = "",
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
        rows = cells_cli.rows(source, out, file=FILE, clock=clock, rehearse=rehearse, measure=measure, read=read)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    print_table(times(rows), "Calls, µs")
    print_table(host(rows), "On the host, µs")
    print_table(kernels(rows), "On the GPU")
