"""What features of Hopper that the shipped Triton kernel does not use would change: `python -m bench variants`.

A cell is one case in one dtype. `base` is the shipped kernel with tiles of one block of rows, each variant of
variant_launch.py a kernel with one feature more; all are tried at the tuned config (in one block) and a few beside it.
`two-blocks` is the shipped kernel as tuned, where its tiles have two blocks of rows: a feature that it does use.

All of a cell are compiled side by side, checked, and timed in turns: a drift of the clocks meets all of them. The
fastest two configs of each variant get more turns. One JSON line a variant is written when its cell is done; a run that
was cut short goes on behind them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from backends.triton_launch import tail_rows
from bench import cells_cli, results, selection
from bench.cases import _TINY, DEFAULT_DTYPES, Case, Row
from bench.terminal import print_table
from bench.variant_launch import ORDERS, VARIANTS, Variant, moe_gemm, unsupported
from bench.variant_tables import BASE, FILE, TWO_BLOCKS, read, sources, summary, table
from shared.checks import check_name
from shared.config import MOST_STAGES, Config
from shared.models import model
from shared.problem import Problem

PROBE_ROUNDS = 2
"""Samples of every config; the fastest FINALISTS of each variant get ROUNDS."""
ROUNDS = 9
FINALISTS = 2
_CASES = (
    ("mixtral-8x7b", "gate-up", (1, 8, 64, 512)),
    ("gpt-oss-120b", "down", (8,)),
    ("qwen3-30b-a3b", "down", (8,)),
    ("deepseek-v3", "gate-up", (8,)),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    case: Case
    dtype: str
    order: str

    @property
    def problem(self) -> Problem:
        return self.case.problem(self.dtype)

    def row(self, variant: str) -> Row:
        return Row(self.case, self.dtype, self.order, variant)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A variant, or base, at one config."""

    variant: str
    config: Config

    def __str__(self) -> str:
        return f"{self.variant} {self.config}"


def cells(order: str = "column", *, rehearse: bool = False) -> Iterator[Cell]:
    """Cells of one layer and dtype come together, as they share their weights."""
    for name, gemm, batches in () if rehearse else _CASES:
        for dtype in DEFAULT_DTYPES:
            for tokens in batches:
                yield Cell(Case(model(name), gemm, tokens), dtype, order)
    if rehearse:
        for dtype in DEFAULT_DTYPES:
            yield Cell(Case(_TINY, "gate-up", 4), dtype, order)


def candidates(problem: Problem, name: str, tuned: Config) -> list[Config]:
    """The tuned config and its neighbours: stages, channels, depth and warps of a tile; fp8-w8a16's other operand side.

    What does not fit shared memory gets fewer stages; what the variant cannot do is left out. Warp specialisation wants
    tiles of its own, see variant_kernels.py: the tuned one as near as it goes. As its three warp-groups take all
    registers of an SM, the deepest pipelines that leave room for its epilogue are tried as well.
    """
    variant, tuned = VARIANTS.get(name, Variant()), in_one_block(tuned)
    if variant.warp_specialise:
        tuned = tuned.replace(block_n=64, num_warps=4, swap_ab=True)
    deep = 2 if tuned.block_k * problem.w_itemsize < 256 else 0.5
    found = [tuned, *(tuned.replace(num_stages=_allowed(tuned.num_stages + more)) for more in (-1, 1))]
    found += [tuned.replace(block_n=n) for n in (64, 128)]
    other = tuned.replace(block_k=int(tuned.block_k * deep), num_stages=_allowed(int(tuned.num_stages / deep)))
    found.append(other)
    if tuned.block_m * tuned.block_n >= 64 * 128:  # enough rows for two warp-groups
        found.append(tuned.replace(num_warps=12 - tuned.num_warps if tuned.num_warps in (4, 8) else 4))
    if problem.dtype == "fp8-w8a16":
        found.append(tuned.replace(swap_ab=not tuned.swap_ab))
    if variant.warp_specialise:
        for config in (tuned, other):
            deepest = _fitting(problem, name, config.replace(num_stages=MOST_STAGES))
            found += [deepest.replace(num_stages=max(2, deepest.num_stages - 1))] if deepest else []
    fitting = (_fitting(problem, name, config) for config in found)
    return list(dict.fromkeys(config for config in fitting if config is not None))


def _allowed(num_stages: int) -> int:
    return min(max(2, num_stages), MOST_STAGES)


def in_one_block(config: Config) -> Config:
    """The config with as many rows a tile as its larger block has, and K in one part."""
    return config.replace(block_m=config.block_m - tail_rows(config.block_m), split_k=1)


def _fitting(problem: Problem, name: str, config: Config) -> Config | None:
    while unsupported(problem, VARIANTS.get(name, Variant()), config) is not None:
        if config.num_stages == 2:
            return None
        config = config.replace(num_stages=config.num_stages - 1)
    return config


def _each(order: str, names: Sequence[str], *, rehearse: bool) -> list[tuple[Cell, str]]:
    return [(cell, name) for cell in cells(order, rehearse=rehearse) for name in names]


def _id(of: tuple[Cell, str]) -> str:
    cell, name = of
    return cell.row(name).id


def run(
    out: Path, device: Any, *, seconds: float, say: Callable[[str], None], keyword: str = "", order: str = "column",
    names: Sequence[str] = tuple(VARIANTS), rehearse: bool = False,
) -> bool:  # fmt: skip
    """Measure what `out` lacks or has of other sources or versions; whether all is done.

    seconds: start no cell after so many. names: variants that are wanted, keyword: -k, which of those; base is
    measured with each cell.
    """
    from bench import data as bench_data
    from bench.machine import versions

    results.end_at_a_line(out)
    where = {"gpu": device.gpu, "versions": versions(), "sources": sources()}
    known = {row["id"] for row in read(out) if all(row.get(key) == value for key, value in where.items())}
    wanted: dict[Cell, list[str]] = {}
    for cell, name in selection.select(_each(order, names, rehearse=rehearse), keyword, _id):
        if _id((cell, name)) not in known:
            wanted.setdefault(cell, []).append(name)
    cache = bench_data.BatchCache(
        lambda *key: bench_data.build_batches(*key, device=device.torch_device), [cell.row(BASE) for cell in wanted]
    )
    begun = time.monotonic()
    for cell, left in wanted.items():
        if time.monotonic() - begun > seconds:
            say(f"{seconds:.0f} s are over; the same command goes on behind {out}")
            return False
        started = time.monotonic()
        for row in measure(cell, left, cache.get(cell.case, cell.dtype, "channel"), device):
            results.append(out, row | where | {"date": time.strftime("%Y-%m-%d")})
            told = row["error"] if "error" in row else f"{row['us']:.1f} us  {Config.from_mapping(row['config'])}"
            say(f"{row['id']}: {told}")
        say(f"  {time.monotonic() - started:.1f} s")
    cache.free()
    return True


def measure(cell: Cell, names: Sequence[str], data: Any, device: Any) -> list[dict[str, Any]]:
    """A row for base and for each variant: {"us", "config", "times", "failed", ...}; "error" in place of "us" and
    "config" where no config ran and was right."""
    import backends
    from bench.measure import check, gpu_sample
    from bench.tune import _compile

    gpu = "NVIDIA H200" if device.interpret else device.gpu
    tuned = backends.config_for(cell.problem, backend="torch-triton", gpu=gpu)
    most = 1 if device.interpret else None
    wanted = (BASE, *names)
    attempts = [Attempt(name, config) for name in wanted for config in candidates(cell.problem, name, tuned)[:most]]
    if tail_rows(tuned.block_m):
        wanted = (BASE, TWO_BLOCKS, *names)
        attempts.append(Attempt(TWO_BLOCKS, tuned.replace(split_k=1)))
    contenders = {attempt: contender(cell, attempt, data, device) for attempt in attempts}
    failed = {name: _first_line(text) for name, text in _compile(contenders, device).items()}
    errors: dict[Attempt, float] = {}
    samples: dict[Attempt, list[float]] = {}

    def attempted(attempt: Attempt, act: Callable[[], None]) -> None:
        if str(attempt) in failed:
            return
        try:
            act()
        except Exception as error:
            if device.lost():
                raise
            samples.pop(attempt, None)
            failed[str(attempt)] = _first_line(f"{type(error).__name__}: {error}")

    def checked(attempt: Attempt) -> None:
        found = check(contenders[attempt], data, device, contenders[attempt].eager)
        errors[attempt] = float(found["error"] or 0)

    def timed(attempt: Attempt) -> None:
        samples.setdefault(attempt, []).append(gpu_sample(contenders[attempt], device) * 1e6)

    def in_turn(those: Sequence[Attempt], act: Callable[[Attempt], None]) -> None:
        for attempt in those:
            attempted(attempt, lambda attempt=attempt: act(attempt))  # type: ignore[misc]

    in_turn(attempts, checked)
    for _ in range(1 if device.interpret else PROBE_ROUNDS):
        in_turn(attempts, timed)
    finalists = [attempt for name in wanted for attempt in _fastest(samples, name)[:FINALISTS]]
    for _ in range(0 if device.interpret else ROUNDS - PROBE_ROUNDS):
        in_turn(finalists, timed)

    rows: list[dict[str, Any]] = []
    for name in wanted:
        ranked = sorted(_fastest(samples, name), key=lambda attempt: attempt not in finalists)
        times = [
            {
                "us": round(statistics.median(samples[attempt]), 2),
                "samples": len(samples[attempt]),
                "error": float(f"{errors[attempt]:.3g}"),
                "config": dataclasses.asdict(attempt.config),
            }
            for attempt in ranked
        ]
        why = {str(a.config): failed[str(a)] for a in attempts if a.variant == name and str(a) in failed}
        reason = next(iter(why.values()), "no config near the tuned one that this variant can do")
        row: dict[str, Any] = {
            "id": cell.row(name).id, "case": cell.case.name, "dtype": cell.dtype, "order": cell.order, "variant": name,
        }  # fmt: skip
        row |= {"us": times[0]["us"], "config": times[0]["config"]} if times else {"error": reason}
        base = rows[0].get("us") if rows else row.get("us")
        rows.append(row | {"base_us": base, "times": times, "failed": why})
    return rows


def _first_line(text: str) -> str:
    return text.splitlines()[0][:300]


def _fastest(samples: dict[Attempt, list[float]], name: str) -> list[Attempt]:
    """This variant's timed configs, by their medians."""
    return sorted((a for a in samples if a.variant == name), key=lambda a: statistics.median(samples[a]))


def contender(cell: Cell, attempt: Attempt, data: Any, device: Any) -> Any:
    """What `bench.measure` checks and times: the shipped kernel's call, or a variant's."""
    from bench.contenders import Contender, prepare, to_torch
    from shared import planning

    if attempt.variant in (BASE, TWO_BLOCKS):
        return prepare(Row(cell.case, cell.dtype, cell.order, "torch-triton"), data, device, config=attempt.config)
    arguments = (data.x, data.w, data.topk_ids, *(() if data.w_scale is None else (data.w_scale,)))

    def call(*given: Any) -> Any:
        return moe_gemm(
            *given, problem=data.problem, order=cell.order, config=attempt.config, variant=VARIANTS[attempt.variant],
            interpret=device.interpret,
        )  # fmt: skip

    return Contender(
        cell.row(attempt.variant), "torch", call, arguments, to_torch, kernel_name="moe_gemm_kernel",
        config=attempt.config, tile_rows=planning.tile_rows_in_use(data.counts, attempt.config.block_m),
    )  # fmt: skip


def add_to(app: typer.Typer) -> None:
    app.command(name="variants")(variants)


def variants(
    seconds: cells_cli.Seconds = 540,
    keyword: selection.Keyword = "",
    name: Annotated[list[str] | None, typer.Option("--variant", help="may be repeated (default: all)")] = None,
    order: Annotated[str, typer.Option(help="row or column")] = "column",
    out: cells_cli.Out = None,
    clock: cells_cli.ClockName = "cupti",
    source: cells_cli.Source = None,
    rehearse: cells_cli.Rehearse = False,
    as_json: cells_cli.AsJson = False,
) -> None:
    """The Triton kernel with TMA, as a persistent kernel, and with warp specialisation, beside the shipped one."""
    import json

    names = name or tuple(VARIANTS)

    def measure(path: Path, device: Any) -> None:
        run(path, device, seconds=seconds, say=cells_cli.say, keyword=keyword, order=order,
            names=names, rehearse=rehearse)  # fmt: skip

    with cells_cli.refusals():
        check_name("--order", order, ORDERS)
        for one in name or ():
            check_name("--variant", one, tuple(VARIANTS))
        rows = cells_cli.rows(
            source, out, file=FILE, keyword=keyword, ids=map(_id, _each(order, names, rehearse=rehearse)),
            clock=clock, rehearse=rehearse, measure=measure, read=read,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows))
        return
    print_table(table(rows), "Kernel time of variants")
    for line in summary(rows):
        typer.echo(line)
