"""The verbs that answer why: counters (and, beside it, what they are set against)."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import cells_cli, selection
from bench.predict import predict
from bench.terminal import print_table
from shared.checks import ArgumentError

Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def add_to(app: typer.Typer) -> None:
    for verb in (
        locality,
        counters,
        predict,
        reads,
    ):
        app.command()(verb)


def reads(
    out: Annotated[Path | None, typer.Option(help="JSON lines, a part of a run about the targets; a new file")] = None,
    clock: cells_cli.ClockName = "cupti",
    as_json: Json = False,
) -> None:
    """What a kernel takes that does nothing but read, from 4 MiB to 4 GiB, on this GPU with a cold L2 (seconds)."""
    import torch

    from bench import reads as plain_reads
    from bench import results
    from bench.clock import CLOCKS, ClockError
    from bench.machine import Machine
    from shared.checks import check_name

    try:
        check_name("--clock", clock, CLOCKS)
        if out is not None and out.exists():
            raise ArgumentError(f"--out: got {out}, which exists; allowed: a new file")
        if not torch.cuda.is_available():
            raise ArgumentError("no NVIDIA GPU that PyTorch can use: reads are timed on one")
        device = Machine(clock)
    except (ArgumentError, ClockError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    lines = plain_reads.lines(device, clock)
    if out is not None:
        journal = results.Journal(out)
        for line in lines:
            journal.write(**line)
    found = results.compact(lines)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_table(plain_reads.table(found), "Plain reads from a cold L2")


def locality(
    seconds: cells_cli.Seconds = 540,
    keyword: selection.Keyword = "",
    out: Annotated[Path | None, typer.Option(help="folder to write to; default: this GPU's in bench/results")] = None,
    with_counters: Annotated[bool, typer.Option("--counters/--no-counters", help="read counters too, with ncu")] = True,
    clock: cells_cli.ClockName = "cupti",
    as_json: Json = False,
) -> None:
    """Does tile order matter, and with FP8? Measures what is missing (on a GPU), then prints the verdict."""
    from bench import counters, results, verdict
    from bench import locality as cells
    from bench.clock import ClockError
    from bench.machine import Machine, gpu_key, smi

    say = cells_cli.say
    with cells_cli.refusals():
        cells.selected(keyword)  # for its refusal, before anything is measured
    gpu = smi(("name",)).get("name")
    if gpu is None:
        say("No NVIDIA GPU here: what follows was measured elsewhere. `python -m bench predict` needs none.")
        folders = [out] if out else sorted(path.parent for path in results.RESULTS.glob("*/locality.jsonl"))
    else:
        folder = out or results.RESULTS / gpu_key(gpu)
        folders = [folder]
        try:
            device = Machine(clock)
            done = cells.run(folder / "locality.jsonl", device, seconds=seconds, say=say, keyword=keyword)
            if done and not keyword:
                from bench import steps

                steps.run(folder / "steps.jsonl", device, say=say)
            if done and with_counters and not keyword:
                counters.collect(_model_points(), folder / "counters.jsonl", say=say)
        except (counters.CountersUnavailable, ClockError) as reason:
            say(f"not measured: {reason}")
    found = {folder.name: verdict.load(folder) for folder in folders}
    answers = {name: verdict.answer(measured, counted) for name, (measured, counted, _) in found.items()}
    if as_json:
        typer.echo(json.dumps(answers))
        return
    for name, text in answers.items():
        typer.echo(f"{name}:")
        for line in text.replace("**", "").splitlines():
            typer.echo(textwrap.fill(line, width=100, subsequent_indent="  "))


def counters(
    model: Annotated[str, typer.Option(help="a model of shared/data/models.json")] = "mixtral-8x7b",
    gemm: Annotated[str, typer.Option(help="gate-up or down")] = "gate-up",
    tp: Annotated[int | None, typer.Option(help="tensor-parallel degree; default: as the model is served")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="batch size; may be repeated (default 8)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="may be repeated (default fp16)")] = None,
    order: Annotated[list[str] | None, typer.Option(help="may be repeated (default row and column)")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="may be repeated (default torch-triton)")] = None,
    config: Annotated[str | None, typer.Option(help="JSON of a Config; default: the best known one")] = None,
    routing: Annotated[str, typer.Option(help="uniform, zipf-EXPONENT, one-expert, or a .npy file")] = "uniform",
    seed: Annotated[int, typer.Option(help="of routing and data")] = 0,
    cache: Annotated[str, typer.Option(help="ncu's cache control: all (flush before each replay) or none")] = "all",
    source: Annotated[Path | None, typer.Option("--from", help="read ncu's saved CSV instead of running")] = None,
    model_points: Annotated[
        bool, typer.Option("--model-points", help="the committed points: cache model, article, all backends")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON lines to append to; points it holds are not run again")] = None,
    keep: Annotated[Path | None, typer.Option(help="keep ncu's CSV here")] = None,
    as_json: Json = False,
) -> None:
    """Hardware counters of single launches, beside the bytes that had to be read. Needs ncu."""
    from bench import counters

    def say(line: str) -> None:
        typer.echo(line, err=True)

    try:
        if source is not None:
            try:
                rows: list[dict[str, Any]] = counters.parse(source.read_text(encoding="utf-8"))
            except (ValueError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise ValueError(f"{source}: cannot be read: {reason}") from None
        elif model_points:
            target = out or Path("counters.jsonl")
            counters.collect(_model_points(), target, say=say, keep=keep, cache=cache)
            rows = counters.read(target, cache)
        else:
            points = _points(
                model, gemm, tp, tokens or [8], dtype or ["fp16"], order or ["row", "column"],
                backend or ["torch-triton"], config, routing, seed,
            )  # fmt: skip
            if out is not None:
                counters.collect(points, out, say=say, keep=keep, cache=cache)
                rows = counters.read(out, cache)
            else:
                rows = counters.measure(points, cache=cache, say=say, keep=keep)
    except (counters.CountersUnavailable, ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        print_table(counters.launch_table(rows) if source is not None else counters.table(rows))


def _points(
    model: str, gemm: str, tp: int | None, tokens: list[int], dtypes: list[str], orders: list[str], names: list[str],
    config: str | None, routing: str, seed: int,
) -> list[Any]:  # fmt: skip
    import backends
    from bench.machine import smi
    from bench.points import Point
    from shared.config import Config
    from shared.models import model as find

    points = []
    for dtype in dtypes:
        for batch in tokens:
            problem = find(model).problem(gemm, batch, dtype, tp=tp)
            for backend in names:
                if config is not None:
                    chosen = Config.from_json(config)
                else:
                    chosen = backends.config_for(problem, backend=backend, gpu=smi(("name",)).get("name"))
                refusal = backends.load(backend).unsupported(problem, chosen)
                if refusal is not None:
                    raise ArgumentError(refusal)
                for order in orders:
                    points.append(
                        Point(
                            model=model,
                            gemm=gemm,
                            tp=tp,
                            tokens=batch,
                            dtype=dtype,
                            routing=routing,
                            seed=seed,
                            backend=backend,
                            order=order,
                            config=chosen,
                        )
                    )
    return points


def _model_points() -> list[Any]:
    from bench.cache_points import article_points, groups, other_points

    return [*article_points(), *(point for group in groups() for point in group.points), *other_points()]
