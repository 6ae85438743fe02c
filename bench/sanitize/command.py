"""`python -m bench sanitize`: options checked, progress and the matrix printed, the report written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from backends.registry import BACKENDS
from bench import selection
from shared.checks import ArgumentError, check_name


def add_to(app: typer.Typer) -> None:
    app.command()(sanitize)


def sanitize(
    tool: Annotated[
        list[str] | None, typer.Option(help="memcheck, racecheck, initcheck, synccheck; default: all")
    ] = None,
    backend: Annotated[list[str] | None, typer.Option(help="by name; default: all")] = None,
    keyword: selection.Keyword = "",
    full: Annotated[bool, typer.Option("--full", help="every variant under every tool, not memcheck alone")] = False,
    jobs: Annotated[int, typer.Option(help="processes at once")] = max(1, min(8, (os.cpu_count() or 2) // 2)),
    timeout: Annotated[float, typer.Option(help="seconds after which a process is stopped")] = 400,
    out: Annotated[Path | None, typer.Option(help="JSON file, kept up to date while the run goes on")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Run the kernels under NVIDIA's compute-sanitizer; first it has to catch planted faults. Exit 1: not clean."""
    from bench.machine import has_gpu
    from bench.sanitize import matrix, run, sanitizer
    from bench.sanitize import report as reports

    tools = [name for item in tool or matrix.TOOLS for name in item.split(",")]
    backends = [name for item in backend or BACKENDS for name in item.split(",")]
    try:
        for name in tools:
            check_name("--tool", name, matrix.TOOLS)
        for name in backends:
            check_name("--backend", name, BACKENDS)
        matrix.selected(tools, backends, keyword, full=full)  # for its refusal, before anything runs
    except ArgumentError as error:
        fail(str(error))
    path = sanitizer.executable()
    if path is None:
        fail(sanitizer.REMEDY)
    if not has_gpu():
        fail(sanitizer.NO_GPU)
    launch = sanitizer.Sanitizer(path)
    keeper = reports.Keeper(out, reports.started(launch))

    def say(line: str) -> None:
        typer.echo(line, err=as_json)

    code = 130
    try:
        run.run(
            launch, tools=tools, backends=backends, keyword=keyword, full=full, jobs=jobs, seconds=timeout, say=say,
            keep=keeper,
        )  # fmt: skip
        code = 0 if reports.passed(keeper.report) else 1
    except ArgumentError as error:
        fail(str(error))
    except KeyboardInterrupt:
        say("interrupted")
    if keeper.report:
        typer.echo(json.dumps(keeper.report) if as_json else reports.text(keeper.report))
    raise typer.Exit(code)


def fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)
