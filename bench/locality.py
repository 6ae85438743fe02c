"""The verdict: does the order in which thread blocks walk the tiles make the GEMM faster, and with FP8 weights?

A cell is one batch of one layer in one dtype on one backend. In it every tile shape runs in every order, all of them in
turn and in random order within a round, each launch from a flushed L2 and each result checked. So any two of a cell's
(tile, order) combinations are compared by pairs: the same tile in two orders, or each order at its own best tile. Best
tiles are picked on the even rounds and compared on the odd ones: picking the luckiest must not count as winning.

Cells are journalled as they come; a run that was cut short goes on behind them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench import pairs, results, selection
from bench.cache_points import tile
from bench.cases import Case, Row
from shared.config import REDUCTIONS, Config
from shared.models import model, models
from shared.orders import ORDERS
from shared.problem import Problem

ROUNDS = 12
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)
DTYPES = ("fp16", "fp8-w8a16", "fp8-w8a8")
DOWN = (("mixtral-8x7b", "qwen3-30b-a3b"), (16, 128, 512, 2048))
OTHER_BACKENDS = ("jax-triton", "pallas-triton", "pallas-mosaic")
OTHERS = (("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"), (4, 64, 512))
SKEWED = (("mixtral-8x7b", "qwen3-30b-a3b"), ("zipf-0.8", "zipf-1.2", "zipf-2.0"), (64, 512))
BLOCK_M = (16, 32, 64, 128)
COMPILE_THREADS = 12
EVEN_ORDERS = ("row", "column", "grouped")
"""Orders compared under even routing; `popular` is for skewed routing."""
SPLIT = (("deepseek-v3", "qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x7b"), (1, 2, 4, 8))
SPLIT_PARTS = (2, 4)
FEW_TILES = 2 * 132
"""Splitting K is tried where tiles of 64 channels are fewer than two for each of an H200's multiprocessors."""
Combo = tuple[Config, str]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One batch of one layer in one dtype on one backend.

    question: "order", which compares orders by the time of the GEMM kernel, or "split-k", which compares parts of K and
              their reductions in column order, by the GPU time of all kernels of a call: a sum of partial sums is one
    """

    case: Case
    dtype: str
    backend: str = "torch-triton"
    routing: str = "uniform"
    question: str = "order"

    @property
    def id(self) -> str:
        asked = "" if self.question == "order" else f"/{self.question}"
        return f"{self.case.name}/{self.dtype}/{self.backend}/{self.routing}{asked}"

    @property
    def problem(self) -> Problem:
        return self.case.problem(self.dtype)

    @property
    def layer(self) -> tuple[object, ...]:
        """What shares its weights."""
        return self.case.model, self.case.gemm, self.dtype

    def combos(self, counts: np.ndarray) -> list[Combo]:
        """(tile, order) pairs to time in turn, among those that the backend takes."""
        import backends

        best = backends.config_for(self.problem, backend=self.backend, gpu="NVIDIA H200").replace(split_k=1)
        if self.question == "split-k":
            configs = [best, *_split_tiles(self.dtype, self.backend)]
            orders: tuple[str, ...] = ("column",)
        else:
            configs = [best, *self._tiles(counts)]
            orders = EVEN_ORDERS if self.routing == "uniform" else ORDERS
        refused = backends.load(self.backend).unsupported
        taken = [config for config in dict.fromkeys(configs) if refused(self.problem, config) is None]
        return list(itertools.product(taken, orders))

    def _tiles(self, counts: np.ndarray) -> list[Config]:
        """Token tiles up to twice the largest expert's slots; the other backends show their best tile alone."""
        if self.backend != "torch-triton":
            return []
        largest = int(counts.max(initial=1))
        return [tile(self.dtype, block_m) for block_m in BLOCK_M if block_m == 16 or block_m < 2 * largest]


def _split_tiles(dtype: str, backend: str) -> list[Config]:
    """Narrow tiles, whole and with K in parts, by each reduction."""
    block_k = 128 if dtype == "fp16" else 256
    shapes = [(64, True, 4), (32, False, 5), (64, False, 4)]
    if backend == "pallas-mosaic":
        shapes = [(64, True, 4), (128, True, 4)]
    found = []
    for block_n, swap_ab, num_stages in shapes:
        whole = Config(block_m=16, block_n=block_n, block_k=block_k, num_stages=num_stages, swap_ab=swap_ab)
        found.append(whole)
        for split_k, reduction in itertools.product(SPLIT_PARTS, REDUCTIONS):
            found.append(whole.replace(split_k=split_k, reduction=reduction))
    return found


def cells() -> Iterator[Cell]:
    """Every cell, those of one layer together, as they share its weights."""
    seen: set[str] = set()
    for cell in sorted(
        _cells(),
        key=lambda cell: (
            list(models()).index(cell.case.model.name),
            cell.case.gemm != "gate-up",
            DTYPES.index(cell.dtype),
        ),
    ):
        if cell.id not in seen:
            seen.add(cell.id)
            yield cell


def _cells() -> Iterator[Cell]:
    for dtype in DTYPES:
        skewed = SKEWED[0] if dtype != "fp8-w8a16" else ()
        for name in models():
            yield from (Cell(Case(model(name), "gate-up", tokens), dtype) for tokens in TOKENS)
        for name in DOWN[0]:
            yield from (Cell(Case(model(name), "down", tokens), dtype) for tokens in DOWN[1])
        for name in OTHERS[0]:
            for backend in OTHER_BACKENDS:
                yield from (Cell(Case(model(name), "gate-up", tokens), dtype, backend) for tokens in OTHERS[1])
        for name in skewed:
            for routing in SKEWED[1]:
                yield from (Cell(Case(model(name), "gate-up", tokens), dtype, routing=routing) for tokens in SKEWED[2])
        for name in SPLIT[0]:
            for gemm, tokens in itertools.product(("gate-up", "down"), SPLIT[1]):
                cell = Cell(Case(model(name), gemm, tokens), dtype, question="split-k")
                if cell.problem.tile_cols(64) * min(cell.problem.experts, cell.problem.slots) < FEW_TILES:
                    yield cell
        yield Cell(Case(model("deepseek-v3"), "gate-up", 1), dtype, "pallas-mosaic", question="split-k")


def selected(keyword: str) -> list[Cell]:
    """The cells that -k selects. Raises ArgumentError where there is none."""
    return selection.select(cells(), keyword, lambda cell: cell.id)


def run(
    out: Path, device: Any, *, seconds: float, say: Callable[[str], None], keyword: str = "", rounds: int = ROUNDS
) -> bool:
    """Measure the cells that `out` lacks, one JSON line each; False where `seconds` ended before the last of them.

    keyword: -k, of the cells that are wanted.
    """
    from bench import data as bench_data
    from bench.machine import versions

    started = time.monotonic()
    results.end_at_a_line(out)
    had = read(out) if out.exists() else []
    known = {cell["id"] for cell in had}
    if kept := sources_told([cell for cell in had if cell.get("sources") != results.sources()]):
        say(f"{out}: cells by other sources than the present ones, or by unrecorded ones, are kept; {kept}")
    missing = [cell for cell in selected(keyword) if cell.id not in known]
    ceilings = device.ceilings() if missing else {}
    layer: tuple[object, ...] | None = None
    weights: bench_data.Data | None = None
    for number, cell in enumerate(missing):
        if time.monotonic() - started > seconds:
            say(f"{len(missing) - number} cells left after {seconds:.0f} s; the same command goes on")
            return False
        if cell.layer != layer or weights is None:
            weights = None
            _free()
            weights = bench_data.build(cell.case, cell.dtype, "channel", device=device.torch_device)
            layer = cell.layer
        data = bench_data.rebatch(weights, cell.case, route=cell.routing)
        found = measure(cell, data, device, rounds)
        found |= {
            "gpu": device.gpu, "versions": versions(), "date": time.strftime("%Y-%m-%d"), "ceilings": ceilings,
            "state": device.state(), **results.code(),
        }  # fmt: skip
        results.append(out, found)
        left = (time.monotonic() - started) / (number + 1) * (len(missing) - number - 1)
        say(f"[{number + 1}/{len(missing)}, {left:.0f} s left] {cell.id}: {told(found)}")
    return True


def _free() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _adds_in_cluster(contender: Any) -> bool:
    if contender.row.contender != "pallas-mosaic":
        return False
    from backends import mosaic_config

    return mosaic_config.adds_in_cluster(contender.row.problem, contender.config)


def measure(cell: Cell, data: Any, device: Any, rounds: int) -> dict[str, Any]:
    """The cell's facts and, for each (tile, order): its samples in µs by round, in rounds that all of them share."""
    from bench.contenders import CannotRun, Contender, prepare, wait
    from bench.measure import check, floor_us, gpu_sample

    ready: list[Contender] = []
    failed: dict[str, str] = {}
    for config, order in cell.combos(data.counts):
        try:
            ready.append(prepare(Row(cell.case, cell.dtype, order, cell.backend), data, device, config=config))
        except CannotRun as refusal:
            failed[f"{config} {order}"] = str(refusal)

    def compiled(contender: Contender) -> str | None:
        try:
            wait(contender.eager(), contender.framework, device)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]
        return None

    device.clock.pause()  # CUPTI loses records of kernels that several threads launched at once
    with concurrent.futures.ThreadPoolExecutor(1 if device.interpret else COMPILE_THREADS) as pool:
        reasons = list(pool.map(compiled, ready))
    device.clock.reset()
    combos: list[tuple[Contender, dict[str, Any]]] = []
    records: dict[tuple[bool, str, bool], int] = {}
    whole = cell.question == "split-k"
    for contender, reason in zip(ready, reasons, strict=True):
        name = f"{contender.config} {contender.row.order}"
        if reason is not None:
            failed[name] = reason
            continue
        try:
            error = check(contender, data, device, contender.eager)["error"]
        except AssertionError as wrong:
            failed[name] = str(wrong)
            continue
        assert contender.config is not None
        # As many in every tile and order, but in pallas-mosaic, whose clusters need no second one.
        kernels = (contender.config.split_k > 1, contender.config.reduction, _adds_in_cluster(contender))
        contender.records = records.get(kernels)
        combo = {
            "config": dataclasses.asdict(contender.config), "order": contender.row.order,
            "tile_rows": contender.tile_rows, "error": float(f"{error:.3g}"),
        }  # fmt: skip
        combos.append((contender, combo | {"samples_us": []}))
        if contender.records is None:
            gpu_sample(contender, device, whole=whole)
            assert contender.records is not None
            records[kernels] = contender.records

    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for which in rng.permutation(len(combos)):
            contender, combo = combos[which]
            combo["samples_us"].append(round(gpu_sample(contender, device, whole=whole) * 1e6, 3))

    counts = data.counts
    active = int((counts > 0).sum())
    return {
        "id": cell.id,
        "model": cell.case.model.name,
        "gemm": cell.case.gemm,
        "tp": cell.case.model.tp,
        "tokens": cell.case.tokens,
        "dtype": cell.dtype,
        "backend": cell.backend,
        "routing": cell.routing,
        "question": cell.question,
        "active_experts": active,
        "largest_expert": int(counts.max(initial=0)),
        "slots_per_active_expert": round(data.problem.slots / max(1, active), 3),
        "needed_bytes": data.problem.read_bytes(counts.tolist()),
        "floor_us": floor_us(data, device),
        "combos": [combo for _, combo in combos],
        "failed": failed,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The cells of a journal; a later one of the same id counts. Those of older files have no "sources"."""
    return results.by_id(path)


def sources_told(cells: list[dict[str, Any]]) -> str:
    """By which sources of the kernels cells were measured, "" of no cells.

    Such as "kernel sources: 582dddb27f53 (3 cells), not recorded (171 cells)".
    """
    counts = Counter(cell.get("sources", "not recorded") for cell in cells)
    each = ", ".join(f"{sources} ({n} cell{'s' if n > 1 else ''})" for sources, n in sorted(counts.items()))
    return f"kernel sources: {each}" if counts else ""


# What the samples say


@dataclasses.dataclass(frozen=True)
class Win:
    """How many times as fast `better` is as `worse`: ratio of medians of pairs, with its 95 % interval.

    config_worse, config_better: their tiles (the same one, or each order's best).
    """

    better: str
    worse: str
    ratio: float
    low: float
    high: float
    config_better: Config
    config_worse: Config
    tile_rows: int

    @property
    def seen(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1 <= self.high


def same_tile(cell: dict[str, Any], better: str, worse: str) -> list[Win]:
    """`better` against `worse` at each tile."""
    by_order = {order: _by_config(cell, order) for order in (better, worse)}
    return [
        _win(better, worse, by_order[better][config], by_order[worse][config])
        for config in by_order[better]
        if config in by_order[worse]
    ]


def best_tiles(cell: dict[str, Any], better: str, worse: str) -> Win | None:
    """Each order at its own best tile: picked on even rounds, compared on odd ones."""
    best = []
    for order in (better, worse):
        combos = list(_by_config(cell, order).values())
        if not combos:
            return None
        best.append(min(combos, key=lambda combo: statistics.median(combo["samples_us"][::2])))
    return _win(better, worse, best[0], best[1], slice(1, None, 2))


def best_split(cell: dict[str, Any], reduction: str | None = None) -> Win | None:
    """The best tile with K in parts, by `reduction` or any, against the best whole one, picked as in `best_tiles`."""
    whole, parts = [], []
    for combo in cell["combos"]:
        config = Config.from_mapping(combo["config"])
        if config.split_k == 1:
            whole.append(combo)
        elif reduction in (None, config.reduction):
            parts.append(combo)
    if not whole or not parts:
        return None
    a, b = (min(combos, key=lambda combo: statistics.median(combo["samples_us"][::2])) for combos in (parts, whole))
    return _win("split", "whole", a, b, slice(1, None, 2))


def _by_config(cell: dict[str, Any], order: str) -> dict[Config, dict[str, Any]]:
    return {Config.from_mapping(combo["config"]): combo for combo in cell["combos"] if combo["order"] == order}


def _win(better: str, worse: str, a: dict[str, Any], b: dict[str, Any], rounds: slice = slice(None)) -> Win:
    found = _judged(tuple(a["samples_us"][rounds]), tuple(b["samples_us"][rounds]))
    configs = (Config.from_mapping(a["config"]), Config.from_mapping(b["config"]))
    return Win(better, worse, found.ratio, found.low, found.high, *configs, tile_rows=a["tile_rows"])


@functools.cache
def _judged(a: tuple[float, ...], b: tuple[float, ...]) -> pairs.Comparison:
    """Several sentences and tables ask for the same comparison, and its bootstrap takes milliseconds."""
    return pairs.judge(np.array(a), np.array(b))


def told(cell: dict[str, Any]) -> str:
    """One line for the progress of a run."""
    if cell["question"] == "split-k":
        split = best_split(cell)
        return "nothing ran" if split is None else f"whole/split {split.ratio:.3f} [{split.low:.3f}, {split.high:.3f}]"
    best = best_tiles(cell, "column", "row")
    if best is None:
        return f"nothing ran: {cell['failed']}"
    same = max(same_tile(cell, "column", "row"), key=lambda win: abs(np.log(win.ratio)))
    failed = f"; {len(cell['failed'])} failed" if cell["failed"] else ""
    return (
        f"row/column best tiles {best.ratio:.3f} [{best.low:.3f}, {best.high:.3f}], "
        f"at {same.config_better} {same.ratio:.3f}{failed}"
    )
