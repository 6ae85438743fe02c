"""`python -m bench fuzz`: options checked, progress and summary printed, result written."""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.checks import ArgumentError, check_name

if TYPE_CHECKING:
    from bench.fuzz.campaign import Options, Result

FOLDER = Path(".benchmarks/fuzz")
INTERRUPTED = 130


def add_to(app: typer.Typer) -> None:
    app.command()(fuzz)


def fuzz(
    examples: Annotated[int, typer.Option(help="examples of each backend")] = 500,
    backend: Annotated[list[str] | None, typer.Option(help="may be repeated; default: all")] = None,
    seed: Annotated[int, typer.Option(help="the same seed draws the same examples")] = 0,
    jobs: Annotated[int | None, typer.Option(help="processes (default 16; interpreters: one a core)")] = None,
    interpret: Annotated[bool, typer.Option("--interpret", help="in the interpreters, on the CPU")] = False,
    draws: Annotated[int | None, typer.Option(help="draws of data for one program (default 16 or 2)")] = None,
    seconds: Annotated[float | None, typer.Option(help="start nothing new after so long")] = None,
    regressions: Annotated[Path | None, typer.Option(help="where failing examples are saved")] = None,
    replay: Annotated[Path | None, typer.Option(help="only run this saved example")] = None,
    out: Annotated[Path | None, typer.Option(help="the result as a JSON file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Random problems, configs and values over the whole spec, against float64; failing ones are shrunk and saved.

    Exit status: 0 all right, 1 something failed, 130 interrupted before anything failed.
    """
    try:
        _check_place(interpret=interpret)
        if replay is not None:
            raise typer.Exit(_replay(replay, interpret=interpret))
        options = _options(examples, backend, seed, jobs, draws, seconds, regressions, interpret=interpret)
    except ArgumentError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(_run(options, out, as_json=as_json))


def _options(
    examples: int,
    backend: list[str] | None,
    seed: int,
    jobs: int | None,
    draws: int | None,
    seconds: float | None,
    regressions: Path | None,
    *,
    interpret: bool,
) -> Options:
    from backends import BACKENDS
    from bench.fuzz import campaign

    for name in backend or ():
        check_name("backend", name, BACKENDS)
    examples = _positive("examples", examples, 1)
    return campaign.Options(
        backends=tuple(dict.fromkeys(backend or BACKENDS)),
        examples=examples,
        seed=_positive("seed", seed, 0),
        jobs=_positive("jobs", jobs, 1) if jobs is not None else (os.cpu_count() or 1) if interpret else 16,
        interpret=interpret,
        draws=min(examples, _positive("draws", draws, 1) if draws is not None else 2 if interpret else 16),
        seconds=seconds,
        regressions=regressions or campaign.REGRESSIONS,
    )


def _run(options: Options, out: Path | None, *, as_json: bool) -> int:
    from bench.fuzz import campaign

    started = f"{datetime.now(UTC):%Y%m%dT%H%M%S}"
    path = out or FOLDER / f"{started}.json"

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    say(
        f"fuzzing {', '.join(options.backends)} with seed {options.seed}: {options.examples} examples each, "
        f"{options.draws} a program, {options.jobs} processes, {'interpreters' if options.interpret else 'compiled'}"
    )
    with campaign.ended_in_order():
        result = campaign.run(options, FOLDER / f"{started}-{os.getpid()}", say)
        campaign.ignore_endings()
        campaign.dump(result, path, date=started, **_facts(interpret=options.interpret))
    say(_summary(result) + f"\n{path}")
    if as_json:
        print(path.read_text(encoding="utf-8"))
    if result.failures:
        return 1
    return INTERRUPTED if result.stopped == "interrupted" else 0


def _replay(path: Path, *, interpret: bool) -> int:
    """Run one saved example in this process: 0 right, 1 wrong; errors come as they are."""
    from bench.fuzz import execute, judge
    from bench.fuzz.example import load

    example = load(path)
    print(example)
    begin = time.monotonic()
    try:
        execute.check(example, interpret=interpret)
    except judge.Wrong as fault:
        print(f"wrong: {fault}")
        return 1
    except execute.Refused as reason:
        print(f"refused: {reason}")
        return 0
    print(f"right ({time.monotonic() - begin:.1f} s)")
    return 0


def _check_place(*, interpret: bool) -> None:
    """ArgumentError without a GPU, unless the interpreters are asked for."""
    if interpret:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return
    import torch

    if not torch.cuda.is_available():
        raise ArgumentError(
            "interpret: got False where PyTorch sees no GPU; allowed: --interpret, or a machine with one"
        )


def _positive(name: str, value: int, least: int) -> int:
    if value < least:
        raise ArgumentError(f"{name}: got {value}; allowed: {least} or more")
    return value


def _summary(result: Result) -> str:
    lines = []
    for name in result.options.backends:
        failed = sum(f.example.program.backend == name for f in result.failures)
        refused = sum(result.refused.get(name, {}).values())
        lines.append(
            f"{name:14} {result.examples[name]:6} examples of {result.programs[name]} programs, {failed} failed"
            + (f"; {refused} programs refused" if refused else "")
        )
    for failure in result.failures:
        if failure.note:
            lines.append(f"{failure.kind}: {failure.path} ({failure.note})")
        else:
            lines.append(f"{failure.kind}: {failure.example}\n    {failure.text.splitlines()[0]}\n    {failure.path}")
    lines.append(f"{result.seconds:.0f} s" + (f", stopped: {result.stopped}" if result.stopped else ""))
    return "\n".join(lines)


def _facts(*, interpret: bool) -> dict[str, Any]:
    from bench import machine, results

    name = None if interpret else machine.smi(("name",)).get("name")
    return {"gpu": name, "versions": machine.versions(), "sources": results.sources()}
