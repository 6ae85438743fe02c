"""Which config is fastest: every candidate of a case checked, then timed in turns, and all times kept.

    python -m bench tune --backend torch-triton --out tune.jsonl            the cases of the targets set
    python -m bench tune --collect tune.jsonl                               the best of them into backends/tuned/

A case's candidates are timed round-robin (A B C A B C ...), each after a cache flush, so that a drift of the clocks
meets all of them. What cannot win is left out before (`bench.prune`), and the slower two thirds after two rounds; both
stay in the file. A run that is cut short keeps its finished cases, and a repeated one goes on behind them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from backends import tuning
from backends.triton_launch import tail_rows
from bench import prune, selection
from bench.candidates import candidates, near
from bench.cases import DEFAULT_DTYPES, TARGET_ORDER, Row, cases, check_shard
from bench.clock import CLOCKS, ClockError
from bench.machine import has_gpu
from bench.prune import Spills
from bench.results import UnusableFile, alone, append, differences, end_at_a_line, json_lines
from bench.turns import Turns, beside_others, place
from shared.checks import ArgumentError, check_name
from shared.config import Config
from shared.models import model
from shared.problem import ScaleLayout

TUNED = Path(__file__).parent.parent / "backends" / "tuned"
PROBE_ROUNDS = 2
"""Samples of every candidate; the fastest third gets ROUNDS."""
ROUNDS = 7
COMPILE_THREADS = 12
_SHAPE = ("dtype", "scale_layout", "experts", "n", "k", "top_k", "tokens")


def tune_case(
    row: Row, device: Any, configs: list[Config], data: Any, spills: Spills | None = None, turns: Turns | None = None
) -> dict[str, Any]:
    """Times in µs of each candidate that runs and is right; what was left out or failed is kept with its reason.

    The config that calls take today is timed first. What does not fit, spills, or has a lower bound above the best time
    so far is not timed. All others are timed PROBE_ROUNDS times, the fastest third ROUNDS times.
    """
    import backends
    from backends import registry
    from bench.contenders import CannotRun, Contender, prepare
    from bench.measure import check, gpu_sample

    module, problem, counts = registry.load(row.contender), data.problem, data.counts.tolist()
    pads = row.contender != "pallas-mosaic"  # which multiplies few more rows than hold slots
    incumbent = backends.config_for(problem, backend=row.contender, gpu=device.gpu)
    configs = list(dict.fromkeys((incumbent, *configs)))
    pruned: dict[str, str] = {}
    failed: dict[str, str] = {}
    errors: dict[Config, float] = {}
    samples: dict[Config, list[float]] = {}
    contenders: dict[Config, Contender] = {}

    def make_ready(wanted: list[Config]) -> None:
        for config in wanted:
            try:
                contenders[config] = prepare(row, data, device, config=config)
            except CannotRun as reason:
                failed[str(config)] = str(reason)
        wanted = [config for config in wanted if config in contenders]
        with beside_others(turns):
            failed.update(_compile({config: contenders[config] for config in wanted}, device))
        for config in wanted:
            if str(config) in failed:
                continue
            try:
                found = check(contenders[config], data, device, contenders[config].eager)
                errors[config] = float(found["error"] or 0)
            except Exception as error:
                failed[str(config)] = f"{type(error).__name__}: {error}"[:300]

    def time_once(config: Config) -> None:
        samples.setdefault(config, []).append(gpu_sample(contenders[config], device) * 1e6)

    def median(config: Config) -> float:
        return statistics.median(samples[config])

    fitting = []
    for config in configs:
        reason = module.unsupported(problem, config)
        if reason is None:
            fitting.append(config)
        else:
            pruned[str(config)] = reason
    if spills is not None:
        spills.ask(row.contender, problem, row.order, [config for config in fitting if config != incumbent])
    make_ready([config for config in fitting if config == incumbent])
    for config in errors:
        for _ in range(PROBE_ROUNDS):
            time_once(config)
    worth = []
    for config in fitting:
        if config == incumbent:
            continue
        best = min((median(known) for known in samples), default=float("inf")) * 1e-6
        why = prune.cannot_win(problem, counts, config, device.ceilings(), best, pads=pads)
        if why is None and spills is not None:
            why = spills.reason(row.contender, problem, row.order, config)
        if why is None:
            worth.append(config)
        else:
            pruned[str(config)] = why
    make_ready(worth)
    others = [config for config in worth if config in errors]
    others.sort(key=lambda config: prune.lower_bound_seconds(problem, counts, config, device.ceilings(), pads=pads))
    for turn in range(PROBE_ROUNDS):
        for config in others:
            if turn == 0:
                best = min((median(known) for known in samples), default=float("inf")) * 1e-6
                why = prune.cannot_win(problem, counts, config, device.ceilings(), best, pads=pads)
                if why is not None:
                    pruned[str(config)] = why
                    continue
            if str(config) not in pruned:
                time_once(config)
    finalists = best_third(samples)
    for _ in range(ROUNDS - PROBE_ROUNDS):
        for config in finalists:
            time_once(config)
    ranked = sorted(samples, key=lambda config: (config not in finalists, median(config)))
    times = [
        {
            "us": round(median(config), 2),
            "error": float(f"{errors[config]:.3g}"),
            "samples": len(samples[config]),
            "config": dataclasses.asdict(config),
        }
        for config in ranked
    ]
    shape = {name: getattr(problem, name) for name in _SHAPE}
    told = {
        "backend": row.contender,
        "case": row.case.name,
        "order": row.order,
        "before": dataclasses.asdict(incumbent),
    }
    return {**told, **shape, "times": times, "pruned": pruned, "failed": failed}


def best_third(samples: dict[Config, list[float]]) -> list[Config]:
    """The configs with the lowest medians: a third of them, and at least three."""
    ranked = sorted(samples, key=lambda config: statistics.median(samples[config]))
    return ranked[: max(3, -(-len(ranked) // 3))]


def _compile(contenders: Mapping[Any, Any], device: Any) -> dict[str, str]:
    """Run each once, side by side, as compiling takes longest; contenders by config; {str(config): what went wrong}."""
    from bench.contenders import wait

    failed = {}
    device.clock.pause()  # CUPTI loses records of kernels that several threads launched at once
    pool = concurrent.futures.ThreadPoolExecutor(COMPILE_THREADS)
    try:
        runs = {
            config: pool.submit(lambda each: wait(each.eager(), each.framework, device), contender)
            for config, contender in contenders.items()
        }
        for config, run in runs.items():
            try:
                run.result()
            except Exception as error:
                failed[str(config)] = f"{type(error).__name__}: {error}"[:300]
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted run does not wait for those that have not begun
    device.clock.reset()
    return failed


def jobs(
    backends: list[str],
    dtypes: list[str],
    only: list[str],
    order: str = TARGET_ORDER,
    models: list[str] | None = None,
    shard: tuple[int, int] = (1, 1),
) -> list[Row]:
    """The rows that are asked for of the targets set's layers, each with all its batches; models None: of every model.

    Those of one layer and dtype together, as they share the weights. shard: as in `bench.cases.cases`.
    Raises ArgumentError where there is none.
    """
    every = cases("targets", shard)
    chosen = [case for case in every if not models or case.model.name in models]
    if not chosen:
        raise selection.nothing("--model", models, [case.name for case in every])
    layers = dict.fromkeys((case.model, case.gemm) for case in chosen)
    rows = [
        Row(case, dtype, order, backend)
        for layer in layers
        for dtype in dtypes
        for case in chosen
        if (case.model, case.gemm) == layer
        for backend in backends
    ]
    found = [row for row in rows if any(part in row.id for part in only)]
    if not found:
        raise selection.nothing("--only", only, [row.id for row in rows])
    return found


def has_entry(row: Row, gpu: str) -> bool:
    """Whether backends/tuned/ has this backend's own entry for the row's layer, dtype and number of tokens."""
    entries = tuning.of_layer(row.problem, row.contender, gpu)
    return any((entry["backend"], entry["tokens"]) == (row.contender, row.case.tokens) for entry in entries)


def configs_for(row: Row, gpu: str, near_only: bool) -> list[Config]:
    """The configs to time: all candidates, or those near known ones, if there are any of other batches of the layer."""
    known = tuning.of_layer(row.problem, row.contender, gpu) if near_only else []
    return near(row.problem, row.contender, known) or candidates(row.problem, row.contender)


def run(arguments: argparse.Namespace) -> None:
    """Time the cases that are asked for and not in the file yet, one line each. Raises ArgumentError."""
    from bench.machine import Machine, gpu_uuid

    # JAX would otherwise take three quarters of the GPU's memory at its first use, and others share the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    rows = jobs(arguments.backend, arguments.dtype, arguments.only, arguments.order, arguments.model, arguments.shard)
    with alone(Path(arguments.out)), place(arguments.take_turns, gpu_uuid) as turns:
        _run(rows, arguments, Machine(arguments.clock, turns), turns)


def _run(rows: list[Row], arguments: argparse.Namespace, device: Any, turns: Turns | None) -> None:
    from bench import data as bench_data
    from bench.machine import versions

    started = time.monotonic()
    out = Path(arguments.out)
    done = finished(out, gpu=device.gpu, versions=versions())
    layout: ScaleLayout = "channel"
    seeds = _best_of(arguments.from_best, arguments.top) if arguments.from_best else {}
    rows = [row for row in rows if (row.contender, row.case.name, row.dtype, row.order) not in done]
    if arguments.missing:
        rows = [row for row in rows if not has_entry(row, device.gpu)]
    if not rows:
        print(f"nothing to time: all cases are in {out}{' or backends/tuned/' if arguments.missing else ''}")
    cache = bench_data.BatchCache(lambda *key: bench_data.build_batches(*key, device=device.torch_device), rows)
    spills = Spills()
    try:
        for number, row in enumerate(rows, 1):
            if time.monotonic() - started > arguments.seconds:
                print(f"out of time with {len(rows) - number + 1} cases left; run again to go on")
                break
            begin = time.monotonic()
            configs = seeds.get((row.case.name, row.dtype)) or configs_for(row, device.gpu, arguments.near)
            others = turns if cache.key_of(row.case, row.dtype, layout) != cache.key else None
            with beside_others(others):
                data = cache.get(row.case, row.dtype, layout)
                device.synchronize()
            entry = tune_case(row, device, configs, data, spills, turns)
            entry |= {"gpu": device.gpu, "versions": versions(), "date": time.strftime("%Y-%m-%d")}
            append(out, entry)
            now = time.monotonic()
            print(progress(row, entry, number, len(rows), now - begin, now - started), flush=True)
    finally:
        spills.close()


def progress(row: Row, entry: dict[str, Any], number: int, total: int, seconds: float, elapsed: float) -> str:
    """A line for a case that is done: its best config, what was left out, and how long the rest may take."""
    best = entry["times"][0] if entry["times"] else None
    told = f"{best['us']:8.1f} us  {Config.from_mapping(best['config'])}" if best else f"none: {entry['failed']}"
    left = elapsed / number * (total - number)
    return (
        f"[{number}/{total}] {row.id:64} {told}  ({len(entry['times'])} timed, {len(entry['pruned'])} left out, "
        f"{len(entry['failed'])} failed, {seconds:.1f} s; about {left / 60:.0f} min left)"
    )


def finished(out: Path, *, gpu: str, versions: dict[str, str | None]) -> set[tuple[str, str, str, str]]:
    """(backend, case, dtype, order) of what a file has; a last line that was cut off is taken away.

    Raises ArgumentError where it is no tuning file, or was made on another GPU or with other versions, whose times are
    not compared: such a file is left as it is.
    """
    if not out.exists():
        return set()
    here = {"gpu": gpu, "versions": versions}
    for entry in _entries(out):
        if differing := differences(entry, here, ("gpu",)):
            raise ArgumentError(f"--out: {out} was made elsewhere: {'; '.join(differing)}; allowed: another file")
    end_at_a_line(out)
    return {(e["backend"], e["case"], e["dtype"], e.get("order", "column")) for e in _entries(out)}


def read(path: Path, needed: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The entries of a tuning file, but for a last line that was cut off; ArgumentError where there are none.

    needed: fields that each has besides its times
    """
    entries = _entries(path, needed)
    if not entries:
        raise ArgumentError(f"{path}: not a tuning file: no entries with times")
    return entries


_BEGINS = '{"backend": '
"""Every line, one that was cut off too: the backend comes first in what `tune_case` returns."""


def _entries(path: Path, needed: Sequence[str] = ("backend", "case", "dtype")) -> list[dict[str, Any]]:
    """As `read`; [] of a file whose first case was never finished."""
    try:
        entries = json_lines(path, "times")
        text = path.read_text(encoding="utf-8")
    except UnusableFile as error:
        raise ArgumentError(f"not a tuning file: {error}") from error
    if not entries and not _BEGINS.startswith(text[: len(_BEGINS)]):
        raise ArgumentError(f"{path}: not a tuning file: no entries with times")
    for number, entry in enumerate(entries, 1):
        if lacking := [name for name in needed if name not in entry]:
            raise ArgumentError(f"{path}: line {number} has no {', '.join(lacking)}: not a tuning file")
    return entries


def collect(path: Path) -> Path:
    """The best config of each finished case, into backends/tuned/<gpu>.json beside what is there already.

    path: what `tune` wrote, or the cells of `locality`, of which those are taken where splitting K won. Of a case that
    it has twice, as two runs side by side leave it, the faster one counts; not where they are of two orders.
    """
    keys = ("backend", *_SHAPE)
    entries = split_entries(path) if path.stem == "locality" else read(path, (*keys, "gpu", "versions", "date"))
    if not entries:
        raise ArgumentError(f"{path}: holds nothing to collect")
    gpu = entries[0]["gpu"]
    if others := sorted({entry["gpu"] for entry in entries} - {gpu}):
        raise ArgumentError(f"{path}: has times of several GPUs: {gpu}, {', '.join(others)}; allowed: one")
    target = TUNED / f"{tuning.slug_of(gpu)}.json"
    known = json.loads(target.read_text())["entries"] if target.exists() else []
    merged = {tuple(entry[key] for key in keys): entry for entry in known}
    found: dict[tuple[Any, ...], tuple[str, float]] = {}
    for entry in entries:
        # A default gives the same bits in every run: what adds up by atomics is not taken, however fast.
        taken = [t for t in entry["times"] if _config(path, entry, t["config"]).deterministic]
        if taken:
            best, key, order = taken[0], tuple(entry[key] for key in keys), entry.get("order", "column")
            order_before, us_before = found.get(key, (order, float("inf")))
            if order_before != order:
                raise ArgumentError(
                    f"{path}: has {key} in the orders {order_before} and {order}; allowed: a file of one order"
                )
            if best["us"] >= us_before:
                continue
            found[key] = order, best["us"]
            merged[key] = {
                **{key: entry[key] for key in keys},
                "config": best["config"],
                "us": round(best["us"], 2),
                **({"us_of": entry["us_of"]} if "us_of" in entry else {}),
                **_in_one_block(taken),
                "date": entry["date"],
                "versions": {name: entry["versions"][name] for name in ("torch", "triton", "jax")},
            }
    body = ",\n".join(json.dumps(merged[key]) for key in sorted(merged, key=str))
    written = target.with_suffix(".json.new")  # an interrupt does not leave half a file in its place
    written.write_text(f'{{"gpu": {json.dumps(gpu)}, "entries": [\n{body}\n]}}\n')
    written.replace(target)
    return target


def _config(path: Path, entry: dict[str, Any], config: dict[str, Any]) -> Config:
    """The config of a time; ArgumentError, which names the entry, where a call could not be given it any more."""
    try:
        return Config.from_mapping(config)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {entry['backend']} at {entry['tokens']} tokens: {error}") from error


def _in_one_block(times: list[dict[str, Any]]) -> dict[str, Any]:
    """{"one_block": config}, the best whose rows are one power of two, where the best of all has two blocks of rows.

    Other kernels have one block alone: what is exported to them.
    """
    if not tail_rows(times[0]["config"]["block_m"]):
        return {}
    return next(({"one_block": t["config"]} for t in times if not tail_rows(t["config"]["block_m"])), {})


def split_entries(path: Path) -> list[dict[str, Any]]:
    """Locality's cells where the deterministic reduction of split K is worth more than 2 %, as entries of `tune`.

    Their times are of all kernels of a call. A default must give the same bits in every run, so atomic reductions are
    not taken, however fast.
    """
    from bench import locality, verdict

    found = []
    for cell in locality.read(path):
        win = locality.best_split(cell, "two-pass") if cell["question"] == "split-k" else None
        if win is None or verdict.matters(win) != 1:
            continue
        layer = dataclasses.replace(model(cell["model"]), tp=cell["tp"])
        problem = layer.problem(cell["gemm"], cell["tokens"], cell["dtype"])
        config = dataclasses.asdict(win.config_better)
        matching = (c for c in cell["combos"] if Config.from_mapping(c["config"]) == win.config_better)
        us = statistics.median(next(matching)["samples_us"])
        facts = {name: cell[name] for name in ("backend", "gpu", "versions", "date")} | {"us_of": "all kernels"}
        found.append(
            {name: getattr(problem, name) for name in _SHAPE} | facts | {"times": [{"us": us, "config": config}]}
        )
    return found


def _best_of(path: str, top: int) -> dict[tuple[str, str], list[Config]]:
    """The fastest `top` configs per (case, dtype) of an earlier run."""
    return {
        (entry["case"], entry["dtype"]): [Config.from_mapping(t["config"]) for t in entry["times"][:top]]
        for entry in read(Path(path), ("case", "dtype"))
    }


def add_to(app: typer.Typer) -> None:
    app.command()(tune)


def tune(
    backend: Annotated[list[str] | None, typer.Option(help="may be repeated (default torch-triton)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="may be repeated (default fp16, fp8-w8a16, fp8-w8a8)")] = None,
    model_name: Annotated[
        list[str] | None, typer.Option("--model", help="may be repeated (default: every model of the comparison)")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="only rows whose id contains this text; may be repeated")
    ] = None,
    order: Annotated[str, typer.Option(help="tile order that the candidates are timed in")] = TARGET_ORDER,
    out: Annotated[Path, typer.Option(help="JSON lines; one that exists is gone on with")] = Path("tune.jsonl"),
    seconds: Annotated[float, typer.Option(help="start no case after this many seconds")] = 540,
    clock: Annotated[str, typer.Option(help="cupti or jax-cupti")] = "cupti",
    from_best: Annotated[Path | None, typer.Option(help="time only the fastest configs of this earlier run")] = None,
    top: Annotated[int, typer.Option(help="how many of them")] = 4,
    near_known: Annotated[
        bool,
        typer.Option("--near", help="time only configs near those in backends/tuned/ for the layer, if there are any"),
    ] = False,
    missing: Annotated[
        bool, typer.Option("--missing", help="only cases that backends/tuned/ has no entry for")
    ] = False,
    shard: Annotated[str, typer.Option(help="I/N: the I-th of N parts of the layers, for N GPUs side by side")] = "1/1",
    take_turns: Annotated[bool, typer.Option("--take-turns", help="other shards run on this GPU, too")] = False,
    collect_from: Annotated[
        Path | None, typer.Option("--collect", help="write the best configs of this run to backends/tuned/")
    ] = None,
    export_to: Annotated[
        Path | None, typer.Option("--export-vllm", help="write tuned tiles into this folder as vLLM's config files")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="of --export-vllm, as its driver names it (default: this one)")
    ] = None,
) -> None:
    """Time candidate tiles of each case in turns; each must be right first. Goes on where an earlier run ended."""
    from backends.registry import BACKENDS
    from shared.orders import ORDERS
    from shared.problem import DTYPES

    chosen = argparse.Namespace(
        backend=backend or ["torch-triton"], dtype=dtype or list(DEFAULT_DTYPES), only=only or [""], order=order,
        out=out, seconds=seconds, clock=clock, from_best=from_best, top=top, model=model_name, near=near_known,
        missing=missing, take_turns=take_turns,
    )  # fmt: skip
    try:
        for name in chosen.backend:
            check_name("--backend", name, BACKENDS)
        for name in chosen.dtype:
            check_name("--dtype", name, DTYPES)
        for name in chosen.model or ():
            check_name("--model", name, sorted({case.model.name for case in cases("targets")}))
        check_name("--order", order, ORDERS)
        check_name("--clock", clock, CLOCKS)
        chosen.shard = check_shard(shard, "targets")
        if near_known and from_best is not None:
            raise ArgumentError(f"--near: given with --from-best {from_best}; allowed: one of the two")
        if collect_from is not None:
            typer.echo(collect(collect_from))
            return
        if gpu is not None and export_to is None:
            raise ArgumentError(f"--gpu: got {gpu!r} without --export-vllm; allowed: with it (tuning is of this GPU)")
        if export_to is not None:
            _export(export_to, gpu)
            return
        jobs(chosen.backend, chosen.dtype, chosen.only, order, model_name, chosen.shard)  # refuses what selects none
        if not has_gpu():
            raise ArgumentError("no NVIDIA GPU that PyTorch can use: `python -m bench doctor` says what is missing")
        run(chosen)
    except (ArgumentError, ClockError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo(f"interrupted; finished cases are in {out}, and the same command goes on behind them", err=True)
        raise typer.Exit(130) from None


def _export(folder: Path, gpu: str | None) -> None:
    """gpu None: the GPU here, or the only one that there are tuned tiles for."""
    from bench import export_vllm

    known = sorted(path.stem for path in TUNED.glob("*.json"))
    if gpu is None and has_gpu():
        import torch

        gpu = torch.cuda.get_device_name()
    wanted = known[0] if gpu is None and len(known) == 1 else None if gpu is None else tuning.slug_of(gpu)
    if wanted not in known:
        raise ArgumentError(f"--gpu: got {gpu}; there are tuned tiles for: {', '.join(known) or 'none'}")
    found = export_vllm.export(TUNED / f"{wanted}.json", folder)
    for line in (*map(str, found.paths), *found.notes):
        typer.echo(line)
