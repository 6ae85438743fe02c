"""python -m bench: the verbs and their options."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from bench import evidence_cli, launch_cost, results, selection, tile_reads, tune, variants
from bench.cases import SETS, check_routing, check_shard
from bench.fuzz import command as fuzz_command
from bench.machine import has_gpu, without_gpu_jax_stays_on_the_cpu
from bench.sanitize import command as sanitize_command
from bench.terminal import print_table
from shared.checks import ArgumentError, check_name

ROOT = Path(__file__).parent.parent
app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Benchmarks of the MoE GEMM backends."
)
evidence_cli.add_to(app)
fuzz_command.add_to(app)
sanitize_command.add_to(app)
tune.add_to(app)
launch_cost.add_to(app)
variants.add_to(app)
tile_reads.add_to(app)
_USAGE_ERROR = 4
"""pytest's exit status for wrong options."""
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
    name: Annotated[str, typer.Option("--order", help="row, column, grouped, popular, or published-2024")],
    group_m: Annotated[int, typer.Option("--group-m", help="tile rows per band of grouped")] = 8,
    expert_rows: Annotated[
        str | None, typer.Option("--expert-rows", help="for popular: tile rows of each expert, hottest first, as 3,1,1")
    ] = None,
    as_json: Json = False,
) -> None:
    """In which order thread blocks walk the tiles of a grid: a picture, or [[row, col], ...]."""
    from bench import walk

    try:
        rows = None if expert_rows is None else walk.numbers("expert-rows", expert_rows)
        tiles = walk.walk(name, tile_rows, tile_cols, group_m, rows)
    except ArgumentError as error:
        _fail(str(error))
    typer.echo(json.dumps(tiles) if as_json else walk.picture(tiles, tile_rows, tile_cols))


@app.command()
def compare(
    which: Annotated[str, typer.Option("--set", help="default, full, or targets (what `targets` judges)")] = "default",
    full: Annotated[bool, typer.Option("--full", help="--set full: every model, GEMM, batch, dtype, order")] = False,
    shard: Annotated[str, typer.Option(help="I/N: the I-th of N parts of the set, for N GPUs side by side")] = "1/1",
    take_turns: Annotated[bool, typer.Option("--take-turns", help="other shards run on this GPU, too")] = False,
    keyword: selection.Keyword = "",
    rounds: Annotated[int | None, typer.Option(help="samples per benchmark (default 30; targets: at most 20)")] = None,
    warm: Annotated[bool, typer.Option("--warm", help="do not flush L2")] = False,
    routing: Annotated[str, typer.Option(help="uniform, zipf-EXPONENT, one-expert, or a .npy file")] = "uniform",
    clock: Annotated[str, typer.Option(help="cupti or jax-cupti")] = "cupti",
    results_path: Annotated[Path | None, typer.Option("--results", help="JSON lines; gone on with if there")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="go on with this file of a run cut short")] = None,
    source: Annotated[list[Path] | None, typer.Option("--from", help="only print this file; two: compare them")] = None,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="a tiny case on the CPU; times mean nothing")] = False,
    as_json: Json = False,
) -> None:
    """Run the benchmark suite on this GPU and print its table; without a GPU, the correctness matrix."""
    options = {
        "--set": which != "default",
        "--shard": shard != "1/1",
        "--take-turns": take_turns,
        "-k": keyword,
        "--rounds": rounds is not None,
        "--warm": warm,
        "--routing": routing != "uniform",
    }
    options |= {"--clock": clock != "cupti", "--results": results_path, "--resume": resume}
    if source:
        given = [name for name, on in (options | {"--full": full, "--rehearse": rehearse}).items() if on]
        if given:
            _fail(f"--from: prints whole files; got it beside {', '.join(given)}; allowed: --json alone")
        _print_tables(source, as_json)
        return
    if resume is not None:
        if results_path not in (None, resume):
            _fail(f"--resume: got {resume} beside --results {results_path}; allowed: one of them")
        if not resume.exists():
            _fail(f"--resume: got {resume}, which does not exist; allowed: the file of a run that was cut short")
    try:
        check_routing(routing)
        check_name("--set", which, SETS)
        if full and which == "targets":
            raise ArgumentError("--set: got targets beside --full; allowed: one of them")
        which = "full" if full else which
        check_shard(shard, which)
        selection.matcher(keyword)
        if rounds is not None and rounds < 1:
            raise ArgumentError(f"--rounds: got {rounds}; allowed: 1 or more")
    except ArgumentError as error:
        _fail(str(error))
    if not rehearse and not has_gpu():
        if keyword:  # what would be refused on a GPU is refused here
            _check_selection([f"--set={which}", f"--shard={shard}", f"--routing={routing}", "-k", keyword])
        raise typer.Exit(_compare_without_gpu(as_json, [name for name, given in options.items() if given]))
    path = (resume or results_path or results.default_path()).absolute()
    command = [sys.executable, "-m", "pytest", "bench", "-q", "--tb=short", "--benchmark-columns=median,iqr,rounds"]
    command += [f"--results={path}", f"--routing={routing}", f"--clock={clock}", f"--set={which}", f"--shard={shard}"]
    command += [] if rounds is None else [f"--rounds={rounds}"]
    command += ["-k", keyword] if keyword else []
    command += [f"--{name}" for name, on in (("warm", warm), ("rehearse", rehearse), ("take-turns", take_turns)) if on]
    code = _run(command, quiet=as_json)
    if code == _USAGE_ERROR:
        raise typer.Exit(2)
    if not path.exists():
        raise typer.Exit(code or 1)
    _print_tables([path], as_json)
    raise typer.Exit(code)


@app.command()
def targets(
    source: Annotated[list[Path] | None, typer.Option("--from", help="a run's file, or all parts of it")] = None,
    launch: Annotated[Path | None, typer.Option(help="what `launch` measured; default: beside the run's file")] = None,
    as_json: Json = False,
) -> None:
    """Which speed targets the committed results meet: exit status 1 where one is missed or not measured."""
    from bench import target_lines, targets

    try:
        if launch is not None and not launch.exists():
            raise results.UnusableFile(f"--launch: got {launch}, which does not exist; allowed: a file of `launch`")
        paths = source or targets.committed()
        found = targets.load(paths)
        beside = paths[0].parent if paths else targets.FOLDER
        launched = targets.launches(launch or targets.launch_file(beside), found)
        lines = targets.judge(found, launched)
    except results.UnusableFile as error:
        _fail(str(error))
    passed = targets.met(lines)
    if as_json:
        run = found["run"] if found else None
        typer.echo(json.dumps({"met": passed, "run": run, "lines": [dataclasses.asdict(line) for line in lines]}))
    else:
        print_table(target_lines.table(lines), "Speed targets, one GPU, cold L2")
        for note in targets.doubts(found):
            typer.echo(note)
        typer.echo(targets.told(lines))
    raise typer.Exit(0 if passed else 1)


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
    if check and add:
        _fail("--check: changes nothing, and --add keeps a run; allowed: one of them")
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


def _check_selection(options: list[str]) -> None:
    """Exit status 2 with the suite's own words where these options select no benchmark."""
    command = [sys.executable, "-m", "pytest", "bench", "--collect-only", "-q", *options]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if collected.returncode == _USAGE_ERROR:
        _fail(collected.stderr.strip().removeprefix("ERROR: "))


def _compare_without_gpu(as_json: bool, ignored: list[str]) -> int:
    note = (
        "No NVIDIA GPU here: timings need one. Running what is real without it: the correctness matrix of every "
        "backend in its interpreter (small shapes, against the float64 reference)."
    )
    if ignored:
        note += f" It is always the whole matrix; ignored, as they are about benchmarks: {', '.join(ignored)}."
    typer.echo(note, err=as_json)
    code = _run([sys.executable, "-m", "pytest", "tests", "-m", "interpret", "-q"], quiet=as_json)
    typer.echo(
        json.dumps({"gpu": None, "correctness_exit_status": code, "ignored_options": ignored})
        if as_json
        else "No times were taken. On a machine with an NVIDIA GPU the same command measures them."
    )
    return code


def _print_tables(paths: list[Path], as_json: bool) -> None:
    """The tables of one file, or several files' kernel times side by side with what they differ in."""
    from bench import tables

    try:
        found = [results.load(path) for path in paths]
        if as_json:
            typer.echo(json.dumps(found[0] if len(found) == 1 else found))
        elif len(found) == 1:
            _show(found[0])
        else:
            told, table = tables.compared([(path.stem, content) for path, content in zip(paths, found, strict=True)])
            typer.echo(told)
            print_table(table, "Kernel time")
    except (ArgumentError, results.UnusableFile) as error:
        _fail(str(error))


def _show(found: dict[str, Any]) -> None:
    from bench import tables

    named = (
        ("Kernel time, µs (bold: best)", tables.kernel_times(found)),
        ("Calls, µs", tables.call_times(found)),
        ("The kernel as published in 2024", tables.published(found)),
        ("Configs in force", tables.configs(found)),
    )
    for title, table in named:
        if table[1]:
            print_table(table, title)
    for note in tables.notes(found):
        typer.echo(note)
    for line in (*tables.peers_told(found), *tables.skipped(found)):
        typer.echo(line)
    typer.echo(tables.environment(found["run"]))


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    without_gpu_jax_stays_on_the_cpu()
    app()
