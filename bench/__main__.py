"""python -m bench: doctor, compare, fuzz, order, report, sanitize, tune."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from bench import evidence_cli, results
from bench.fuzz import command as fuzz_command
from bench.sanitize import command as sanitize_command
from shared.checks import ArgumentError

ROOT = Path(__file__).parent.parent
app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Benchmarks of the MoE GEMM backends."
)
evidence_cli.add_to(app)
fuzz_command.add_to(app)
sanitize_command.add_to(app)
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command()
def doctor(as_json: Json = False) -> None:
    """Which backends can run here, and for each that cannot: why, and what to do."""
    from bench import doctor

    found = doctor.examine()
    typer.echo(json.dumps(found, indent=1) if as_json else doctor.text(found))


@app.command()
def order(
    tile_rows: Annotated[int, typer.Option("--tile-rows", help="tile rows of the grid")],
    tile_cols: Annotated[int, typer.Option("--tile-cols", help="tile columns of the grid")],
    name: Annotated[str, typer.Option("--order", help="row, column, grouped, or published-2024")],
    group_m: Annotated[int, typer.Option("--group-m", help="tile rows per band of grouped")] = 8,
    as_json: Json = False,
) -> None:
    """In which order thread blocks walk the tiles of a grid: a picture, or [[row, col], ...]."""
    from bench import walk

    try:
        tiles = walk.walk(name, tile_rows, tile_cols, group_m)
    except ArgumentError as error:
        _fail(str(error))
    typer.echo(json.dumps(tiles) if as_json else walk.picture(tiles, tile_rows, tile_cols))


@app.command()
def compare(
    full: Annotated[bool, typer.Option("--full", help="every model, GEMM, batch, dtype and order (hours)")] = False,
    keyword: Annotated[str, typer.Option("-k", help="pytest's expression over ids: 'mixtral and fp16'")] = "",
    rounds: Annotated[int, typer.Option(help="samples per benchmark")] = 30,
    warm: Annotated[bool, typer.Option("--warm", help="do not flush L2")] = False,
    routing: Annotated[str, typer.Option(help="uniform, zipf-EXPONENT, one-expert, or a .npy file")] = "uniform",
    clock: Annotated[str, typer.Option(help="cupti or jax-cupti")] = "cupti",
    results_path: Annotated[Path | None, typer.Option("--results", help="JSON-lines file to append to")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="only print the table of this file")] = None,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="a tiny case on the CPU; times mean nothing")] = False,
    as_json: Json = False,
) -> None:
    """Run the benchmark suite on this GPU and print its table; without a GPU, the correctness matrix."""
    if source is not None:
        _print_table(source, as_json)
        return
    if not rehearse and not _has_gpu():
        raise typer.Exit(_compare_without_gpu(as_json))
    path = (results_path or results.default_path()).absolute()
    command = [sys.executable, "-m", "pytest", "bench", "-q", "--benchmark-columns=median,iqr,rounds"]
    command += [f"--results={path}", f"--rounds={rounds}", f"--routing={routing}", f"--clock={clock}"]
    command += ["-k", keyword] if keyword else []
    command += [f"--{name}" for name, on in (("full", full), ("warm", warm), ("rehearse", rehearse)) if on]
    code = _run(command, quiet=as_json)
    if not path.exists():
        raise typer.Exit(code or 1)
    _print_table(path, as_json)
    raise typer.Exit(code)


@app.command()
def report(
    check: Annotated[bool, typer.Option("--check", help="change nothing; exit 1 if something differs")] = False,
    add: Annotated[list[Path] | None, typer.Option(help="a run's JSON lines, to be kept in bench/results")] = None,
    into: Annotated[str | None, typer.Option(help="merge what --add names into this kept file of its GPU")] = None,
    as_json: Json = False,
) -> None:
    """Rewrite README's generated blocks and the pictures from the committed result files."""
    from bench import report

    if into is not None and not add:
        _fail("--into: says where --add puts a run; name the run with --add RUN.jsonl")
    try:
        added = [results.add(run, name=run.stem, into=into) for run in add or []]
        changed = report.rewrite(check=check)
    except ValueError as error:
        _fail(str(error))
    if as_json:
        kept = [dataclasses.asdict(one) | {"path": str(one.path)} for one in added]
        typer.echo(json.dumps({"added": kept, "changed": changed}))
    else:
        lines = [str(one) for one in added] + [f"{'differs' if check else 'rewritten'}: {c}" for c in changed]
        typer.echo("\n".join(lines) or "README and pictures agree with the committed results")
    raise typer.Exit(1 if check and changed else 0)


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _run(command: list[str], *, quiet: bool) -> int:
    """Exit status of a child in the project's folder; quiet: its output goes to stderr, as stdout is for JSON.

    Ctrl-C reaches the child as well, which ends its run in order; what it measured is in its results file.
    """
    child = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr if quiet else None)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue


def _compare_without_gpu(as_json: bool) -> int:
    note = (
        "No NVIDIA GPU here: timings need one. Running what is real without it: the correctness matrix of every "
        "backend in its interpreter (small shapes, against the float64 reference)."
    )
    typer.echo(note, err=as_json)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    code = _run([sys.executable, "-m", "pytest", "tests", "-m", "interpret", "-q"], quiet=as_json)
    typer.echo(
        json.dumps({"gpu": None, "correctness_exit_status": code})
        if as_json
        else "No times were taken. On a machine with an NVIDIA GPU the same command measures them."
    )
    return code


def _print_table(path: Path, as_json: bool) -> None:
    found = results.compact(results.read(path)) if path.suffix == ".jsonl" else json.loads(path.read_text())
    if as_json:
        typer.echo(json.dumps(found))
        return
    _show(found)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from bench import tables

    wide = Console(width=None if sys.stdout.isatty() else 200)
    named = (
        ("Kernel time, µs (bold: best)", tables.kernel_times(found)),
        ("Calls, µs", tables.call_times(found)),
        ("The kernel as published in 2024", tables.published(found)),
    )
    for title, (headings, lines) in named:
        if not lines:
            continue
        table = Table(title=title, title_justify="left")
        for heading in headings:
            table.add_column(heading)
        for line in lines:
            table.add_row(*(f"[bold]{cell[2:-2]}[/bold]" if cell.startswith("**") else cell for cell in line))
        wide.print(table)
    for name, reason in found["skipped"].items():
        wide.print(f"not measured: {name}: {reason}", markup=False, highlight=False)
    if found["run"]:
        wide.print(tables.environment(found["run"]), markup=False, highlight=False)


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
