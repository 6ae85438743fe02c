"""What verbs share that measure cells into a file of JSON lines, or print such a file: launch, variants, tile-reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import results, selection
from shared.checks import ArgumentError

Seconds = Annotated[float, typer.Option(help="start no further cell after so many seconds; run again to go on")]
Out = Annotated[Path | None, typer.Option(help="JSON lines; default: this GPU's in bench/results")]
ClockName = Annotated[str, typer.Option(help="cupti or jax-cupti")]
Source = Annotated[Path | None, typer.Option("--from", help="only print this file")]
Rehearse = Annotated[bool, typer.Option("--rehearse", help="a tiny case on the CPU; times mean nothing")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def say(line: str) -> None:
    """Progress: to stderr, as stdout is for the result."""
    typer.echo(line, err=True)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What cannot be done is said in a line, and the process ends with status 2."""
    from bench.clock import ClockError

    try:
        yield
    except (ArgumentError, ClockError, results.UnusableFile) as error:
        say(str(error))
        raise typer.Exit(2) from None


def rows(
    source: Path | None,
    out: Path | None,
    *,
    file: str,
    keyword: str,
    ids: Iterable[str],
    clock: str,
    rehearse: bool,
    measure: Callable[[Path, Any], object],
    read: Callable[[Path], list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """`read` of the file `source`; without one, of `out` or this GPU's `file`, once `measure(path, device)` is done.

    keyword: -k, of the rows to print from `source`, or of `ids`, those that there are to measure.
    Raises ArgumentError where -k selects nothing, before anything is measured; where there is no such file, or no GPU
    and no rehearsal, or a rehearsal without a file.
    """
    from bench.machine import Machine, Rehearsal, gpu_key, smi

    if source is not None:
        if not source.exists():
            raise ArgumentError(f"--from: got {source}, which does not exist; allowed: a file of this command")
        if given := [name for name, on in (("--out", out), ("--rehearse", rehearse)) if on]:
            raise ArgumentError(f"--from: only prints; got it beside {' and '.join(given)}; allowed: -k and --json")
        return selection.select(read(source), keyword, lambda row: row["id"]) if keyword else read(source)
    selection.select(ids, keyword, str)
    gpu = smi(("name",)).get("name")
    if rehearse and out is None:
        raise ArgumentError("--out: got none with --rehearse; allowed: a file, as these times mean nothing")
    if gpu is None and not rehearse:
        raise ArgumentError(
            "no NVIDIA GPU here: times need one; --rehearse walks through on the CPU, --from prints a file"
        )
    path = out or results.RESULTS / gpu_key(str(gpu)) / file
    measure(path, Rehearsal() if rehearse else Machine(clock))
    return read(path)
