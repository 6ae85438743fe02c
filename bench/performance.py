"""Generated blocks and the picture of notes/performance.md: the targets, each case, the peers, the steps taken."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.registry import BACKENDS
from bench import disassembly, floor_picture, reads, results, tables, target_lines, targets
from bench.tables import NOT_MEASURED
from bench.terminal import Table

PICTURE = "floor-over-time.svg"
STEPS = "steps-taken.json"
STEP_FIELDS = ("step", "predicted", "measured", "source file", "verdict")


def load(folder: Path) -> dict[str, Any] | None:
    """The results about the targets that a GPU's folder holds; None where it holds none."""
    paths = targets.committed(folder)
    return _load(tuple((path, path.stat().st_mtime_ns) for path in paths)) if paths else None


@functools.lru_cache(maxsize=4)
def _load(files: tuple[tuple[Path, int], ...]) -> dict[str, Any] | None:
    return targets.load([path for path, _ in files])


def _launched(folder: Path, found: dict[str, Any] | None) -> list[dict[str, Any]]:
    return targets.launches(targets.launch_file(folder), found)


def targets_table(lines: list[targets.Line]) -> Table:
    """A row per target and dtype, a column per backend: worst case, and how many of the cases meet the target.

    Then what a plain read reaches, and in how many cases it does not reach what is needed.
    """
    headings = ["target", "dtype", "needed", *BACKENDS, "at most (a plain read)", "worst case"]
    found = []
    for (target, dtype, needed), (by_backend, bounds) in _grouped(lines).items():
        one = next(iter(by_backend.values()))
        if not set(by_backend) & set(BACKENDS):  # about all backends, or about peers
            cells = [_cell(one), *("" for _ in BACKENDS[1:])]
        else:
            cells = [_cell(by_backend[name]) if name in by_backend else "" for name in BACKENDS]
        worst = [line for line in by_backend.values() if line.worst is not None]
        pick = min if one.sign == ">=" else max
        case = pick(worst, key=lambda line: line.worst or 0.0).worst_case if worst else one.reason
        found.append([target, dtype, needed, *cells, _bound(bounds), case or "–"])
    return headings, found


def plain_read_table(lines: list[targets.Line]) -> Table:
    """Of each floor: what a plain read of the same bytes reaches, and its time over each backend's, worst and mean."""
    headings = ["target", "dtype", "needed", "floor ÷ plain read: worst", "mean", "cases in which that is too little"]
    headings += [f"plain read ÷ {name}" for name in BACKENDS]
    found = []
    for (target, dtype, needed), (by_backend, bounds) in _grouped(lines).items():
        if target_lines.PLAIN not in bounds or not target.startswith(target_lines.FLOOR_OVER_TIME):
            continue
        bound = bounds[target_lines.PLAIN]
        known = "–" if needed == "–" else f"{bound.of - bound.met} of {bound.of}"
        cells = [target_lines.number(bound.worst), target_lines.number(bound.mean), known]
        if bound.worst is None:
            cells = ["not measured", "–", "–"]
        found.append([target, dtype, needed, *cells])
        found[-1] += [target_lines.read_over_time(by_backend[name]) for name in BACKENDS]
    return headings, found


Grouped = dict[str, targets.Line]


def _grouped(lines: list[targets.Line]) -> dict[tuple[str, str, str], tuple[Grouped, Grouped]]:
    """{(target, dtype, needed): (lines by backend, bounds by kind)}"""
    groups: dict[tuple[str, str, str], tuple[Grouped, Grouped]] = {}
    for line in lines:
        by_backend, bounds = groups.setdefault((line.target, line.dtype, line.needed), ({}, {}))
        (bounds if line.is_bound else by_backend)[line.backend] = line
    return groups


def _bound(bounds: Grouped) -> str:
    """Such as "0.812 (28 of 40)"; of peers, "1.049; at the floor 1.093"."""
    cells = []
    for kind, line in bounds.items():
        average = line.target.endswith("geometric mean")
        figure = target_lines.number(line.mean if average else line.worst)
        count = "" if average or line.needed == "–" else f" ({line.met} of {line.of})"
        told = f"{figure}{count}" if figure != "–" else "not measured"
        cells.append(f"at the floor {told}" if kind == target_lines.FLOOR else told)
    return "; ".join(cells)


def _cell(line: targets.Line) -> str:
    """Such as "**0.961** (20 of 20)"; bold where the target is met."""
    shown = line.mean if line.target.endswith("geometric mean") else line.worst
    count = f"({line.met} of {line.of})"
    if shown is None:
        return "not measured" if not line.met else count
    figure = f"**{shown:.3f}**" if line.status == "met" else f"{shown:.3f}"
    return f"{figure} {count}" + (", rest not measured" if line.reason else "")


def cases_table(found: dict[str, Any]) -> Table:
    """Per case and group of dtypes: MB to read, floor, fastest backend, floor over its time."""
    headings = ["case"]
    for group in targets.GROUPS:
        headings += [f"{group}: MB", "floor µs", "best µs", "floor ÷ best"]
    times, lines = targets.Times(found), []
    for layer in targets.layers(found["run"].get("seed", 0)):
        line = [layer.name]
        for group, dtypes in targets.GROUPS.items():
            row = times.best_backend(layer.name, dtypes)
            if not layer.has(group):
                line += ["", "", "", ""]
            elif row is None:
                line += [f"{layer.read_bytes[dtypes[0]] / 1e6:.0f}", "–", "–", "–"]
            else:
                mode = f" {row['dtype'].removeprefix('fp8-')}" if group == "FP8" else ""
                line += [f"{layer.read_bytes[row['dtype']] / 1e6:.0f}", f"{row['floor_us']:.1f}"]
                line += [f"{row['kernel_us']:.1f} ({row['contender']}{mode})", f"{targets.share(row):.0%}"]
        lines.append(line)
    return headings, lines


def plain_reads(found: dict[str, Any]) -> Table | str:
    """Every size of the plain reads of these results."""
    table = reads.table(found)
    return table if table[1] else NOT_MEASURED


def peers_table(found: dict[str, Any]) -> Table:
    """Per case and dtype that a peer has: fastest backend, every peer, fastest peer over fastest backend."""
    times = targets.Times(found)
    headings = ["case", "dtype", "best backend µs", *(f"{peer} µs" for peer in times.peers), "best peer ÷ best backend"]
    lines = []
    for layer in targets.layers(found["run"].get("seed", 0)):
        for dtype in ("fp16", *targets.FP8):
            peer = times.best_peer(layer.name, dtype)
            ours = times.best_backend(layer.name, (dtype,))
            if peer is None or ours is None:
                continue
            dtypes = (dtype,) if dtype in targets.FP8 else ("fp16", "bf16")
            each = [times.us(layer.name, dtypes, name) for name in times.peers]
            line = [layer.name, dtype, f"{ours['kernel_us']:.1f} ({ours['contender']})"]
            line += ["–" if us is None else f"{us:.1f}" for us in each]
            lines.append([*line, f"{peer['kernel_us'] / ours['kernel_us']:.2f}"])
    return headings, lines


def each_peer(found: dict[str, Any]) -> Table:
    """Per peer and dtype: its cases, and its time over that of the fastest backend and of torch-triton."""
    times = targets.Times(found)
    lines = []
    for name, dtype in itertools.product(times.peers, ("fp16", *targets.FP8)):
        dtypes = (dtype,) if dtype in targets.FP8 else ("fp16", "bf16")
        over: dict[str, list[float]] = {"best": [], "torch-triton": []}
        for layer in targets.layers(found["run"].get("seed", 0)):
            peer, best = times.us(layer.name, dtypes, name), times.best_backend(layer.name, (dtype,))
            ours = times.us(layer.name, (dtype,), "torch-triton")
            if peer is not None and best is not None and ours is not None:
                over["best"].append(peer / best["kernel_us"])
                over["torch-triton"].append(peer / ours)
        if over["best"]:
            told = [f"{min(of):.2f}, {target_lines.geometric(of):.2f}, {max(of):.2f}" for of in over.values()]
            lines.append([name, dtype, str(len(over["best"])), *told])
    of = "its time ÷ {}: least, geometric mean, most"
    return ["peer", "dtype", "cases", of.format("the fastest backend's"), of.format("torch-triton's")], lines


def whole_calls(found: dict[str, Any]) -> Table:
    """Per backend, dtype and batch: GPU time of a call's kernels beside its GEMM kernel, the median of the layers, and
    that of a whole call over torch-triton's, median and largest."""
    times = targets.Times(found)
    chosen = targets.layers(found["run"].get("seed", 0))
    batches = sorted({layer.case.tokens for layer in chosen})
    lines = []
    for backend, dtype in itertools.product(BACKENDS, ("fp16", *targets.FP8)):
        beside: dict[int, list[float]] = {tokens: [] for tokens in batches}
        over = []
        for layer in chosen:
            ours, torchs = (times.row(layer.name, (dtype,), name) for name in (backend, "torch-triton"))
            if ours and ours.get("gpu_total_us"):
                beside[layer.case.tokens].append(ours["gpu_total_us"] - ours["kernel_us"])
                if torchs and torchs.get("gpu_total_us"):
                    over.append(ours["gpu_total_us"] / torchs["gpu_total_us"])
        if over:
            cells = [f"{statistics.median(us):.1f}" if us else "–" for us in beside.values()]
            lines.append([backend, dtype, *cells, f"{statistics.median(over):.2f}, {max(over):.2f}"])
    headings = ["backend", "dtype", *(f"{n} token{'s'[: n - 1]}" for n in batches), "whole call ÷ torch-triton's"]
    return headings, lines


def steps_table(path: Path) -> Table:
    """What each step predicted and measured, from a file {"steps": [{STEP_FIELDS}]} beside the results it names.

    measured: text, or {"id", "field", "before", "after"}: that field of that row in two result files beside this one,
    which is then told with its ratio; or {"file", "case", "dtype", "before", "after"}: the fastest of two variants in a
    JSON-lines file of {"variant", "case", "dtype", "us"}. UnusableFile for other fields, and for missing files.
    """
    try:
        steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
        lines = [_step(path, step) for step in steps]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise results.UnusableFile(f'{path}: not of the form {{"steps": [{{...}}]}}: {error!r}') from error
    return list(STEP_FIELDS), lines


def _step(path: Path, step: dict[str, Any]) -> list[str]:
    name = step.get("step", "a step without a name")
    if set(step) != set(STEP_FIELDS):
        raise results.UnusableFile(f"{path}: {name}: got fields {sorted(step)}; allowed: {', '.join(STEP_FIELDS)}")
    if not (path.parent / step["source file"]).exists():
        raise results.UnusableFile(f"{path}: {name}: its source file {step['source file']} is not beside it")
    measured = step["measured"]
    if not isinstance(measured, str):
        measured = _measured(path, name, measured)
    return [step["step"], step["predicted"], measured, f"`{step['source file']}`", step["verdict"]]


def _measured(path: Path, name: str, asked: dict[str, str]) -> str:
    """Such as "176.0 → 150.2 (0.853 times), kernel_us of mixtral-8x7b/..."."""
    if "file" in asked:
        return _of_variants(path, name, asked)
    values = []
    for file in (asked["before"], asked["after"]):
        rows = {row["id"]: row for row in results.load(path.parent / file)["rows"]}
        value = rows.get(asked["id"], {}).get(asked["field"])
        if value is None:
            raise results.UnusableFile(f"{path}: {name}: {file} has no {asked['field']} of {asked['id']}")
        values.append(float(value))
    before, after = values
    return f"{before:.4g} → {after:.4g} ({after / before:.3f} times), {asked['field']} of {asked['id']}"


def _of_variants(path: Path, name: str, asked: dict[str, str]) -> str:
    text = (path.parent / asked["file"]).read_text(encoding="utf-8")
    rows = [row for row in map(json.loads, text.splitlines()) if row["case"] == asked["case"]]
    values = []
    for variant in (asked["before"], asked["after"]):
        found = [row["us"] for row in rows if (row["variant"], row["dtype"]) == (variant, asked["dtype"])]
        if not found:
            raise results.UnusableFile(f"{path}: {name}: {asked['file']} has no {variant} of {asked['case']}")
        values.append(min(found))
    before, after = values
    return f"{before:.4g} → {after:.4g} µs ({after / before:.3f} times), {asked['case']} {asked['dtype']}"


def environment(found: dict[str, Any]) -> str:
    run = found["run"]
    ceilings = [one["ceilings"] for one in results.history(run) if "ceilings" in one]
    told = [
        f"{name} {_range([c[key] / 1e12 for c in ceilings if key in c], digits)} {unit}"
        for name, key, digits, unit in (
            ("read ceiling", "read_bytes_per_s", 2, "TB/s"),
            ("bf16", "bf16_flops", 0, "TFLOP/s"),
            ("FP8", "fp8_flops", 0, "TFLOP/s"),
        )
        if any(key in c for c in ceilings)
    ]
    known = run.get("versions", {})
    versions = ", ".join(f"{name} {known[name]}" for name in ("torch", "triton", "jax", "jax-triton") if name in known)
    text = f"{run['gpu']}, {run.get('date', '')[:10]}, cold L2, {len(found['rows'])} rows; {versions}. Measured in the "
    text += f"same run{'s' if len(ceilings) > 1 else ''}: {', '.join(told)}."
    if run.get("sources") != results.sources():
        text += " The kernels' sources, or their tiles, have changed since."
    return "\n".join([text, *(f"\n{note}" for note in (*tables.other_tiles(found), *targets.doubts(found)))])


def _range(values: list[float], digits: int) -> str:
    least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def summary(lines: list[targets.Line]) -> str:
    """How many targets are met, and which are not."""
    judged = [line for line in lines if line.status != "told"]
    denied = sum(bool(line.denied) for line in judged)
    missed = [line for line in judged if line.status == "missed"]
    unmeasured = [line for line in missed if line.reason]
    text = f"{len(judged) - len(missed)} of {len(judged)} lines (a target for one backend and dtype) are met"
    if denied:
        text += f"; {denied} of the missed are denied by a bound: a kernel as fast as a plain read would miss them too"
    if unmeasured:
        text += f"; {len(unmeasured)} are missed for want of a measurement"
    return f"{text}."


def _from_results(make: Callable[[dict[str, Any]], Table | str]) -> Callable[[Path, dict[str, Any]], str]:
    def block(folder: Path, merged: dict[str, Any]) -> str:
        found = load(folder)
        if found is None:
            return NOT_MEASURED
        made = make(found)
        return made if isinstance(made, str) else tables.markdown(made)

    return block


def _judged(folder: Path) -> list[targets.Line]:
    found = load(folder)
    return targets.judge(found, _launched(folder, found))


def _picture(folder: Path, merged: dict[str, Any]) -> str:
    if load(folder) is None:
        return NOT_MEASURED
    return f"![Floor over kernel time of the fastest backend](../bench/results/{folder.name}/{PICTURE})"


def _steps(folder: Path, merged: dict[str, Any]) -> str:
    path = folder / STEPS
    return tables.markdown(steps_table(path)) if path.exists() else NOT_MEASURED


def _disassembly(folder: Path, merged: dict[str, Any]) -> str:
    path = folder.parent / disassembly.COMPILED.name  # of compilers, not of a GPU
    if not path.exists():
        return NOT_MEASURED
    return tables.markdown(disassembly.table(json.loads(path.read_text(encoding="utf-8"))["rows"]))


BLOCKS: dict[str, Callable[[Path, dict[str, Any]], str]] = {
    "targets-environment": _from_results(environment),
    "disassembly": _disassembly,
    "targets-summary": lambda folder, merged: summary(_judged(folder)) if load(folder) else NOT_MEASURED,
    "targets": lambda folder, merged: tables.markdown(targets_table(_judged(folder))),
    "targets-plain-read": lambda folder, merged: tables.markdown(plain_read_table(_judged(folder))),
    "plain-reads": _from_results(lambda found: plain_reads(found)),
    "targets-cases": _from_results(cases_table),
    "targets-each-peer": _from_results(each_peer),
    "targets-peers": _from_results(peers_table),
    "whole-calls": _from_results(whole_calls),
    "targets-picture": _picture,
    "steps-taken": _steps,
}


def pictures(folder: Path) -> dict[str, tuple[list[list[Any]], Callable[[], str]]]:
    """{file name: (what it shows, how to draw it)}, empty without results."""
    found = load(folder)
    drawn = floor_picture.points(found) if found else []
    if not found or not drawn:
        return {}
    title = f"{found['run']['gpu']}, cold L2: floor over kernel time of the fastest backend (1: nothing left)"
    return {PICTURE: (drawn, lambda: floor_picture.draw(drawn, title))}
