"""Results: one JSON line each while a run goes on, one compact file per run afterwards.

A line is written the moment its result is there, so that a run cut short keeps what it measured. The first line
says where and with what the run was made (`kind: "run"`); the others are `kind: "time"` (a benchmark), `"pair"` (an
order comparison), `"published"`, `"failed"` (a kernel that failed or was wrong, or plain reads that failed),
`"skipped"` (what cannot run here), `"notice"` (what disturbed the run) and `"reads"` (plain reads by size, of a run
about the targets; they stand with the ceilings in `run`). Times are in microseconds in both.

Times stand in one file only if they were taken on the same GPU with the same versions and settings (SETTINGS). A run
that was cut short goes on in its file behind a further `run` line, with RESUMED the same as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shared.checks import ArgumentError
from shared.config import Config

RUNS = Path(".benchmarks/moe")
RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
SETTINGS = ("gpu", "clock", "cache", "routing", "seed")
"""What two runs must share, beside the versions of all packages, for their times to stand side by side."""
RESUMED = (*SETTINGS, "rounds", "sources", "harness", "set")
"""What the two parts of a run that goes on must share: sources are a digest of the kernels' code, harness one of the
code that times them (`sources`, `harness`); set: "targets" alone is named, whose data and number of samples are
others."""
UNTOLD = ("harness",)
"""Of RESUMED, what older files do not have: nothing is known to differ there."""
TESTS = {
    "kernel": ("kernel_us", "gpu_total_us", "samples_us"),
    "kernel captured": ("kernel_captured_us", "gpu_total_captured_us", "samples_captured_us"),
    "call": ("call_us",),
    "call captured": ("call_captured_us",),
}
"""The measurements of a row, and the fields of each; the first says that it was made."""
TIMES = tuple(
    field for fields in TESTS.values() for field in fields if field.endswith("_us") and "samples" not in field
)


_ALL_FIELDS = {field for fields in TESTS.values() for field in fields} | {"tb_per_s", "share_of_read_ceiling"}
_ALL_FIELDS |= {"times_floor"}


class Journal:
    """Appends results to a JSON-lines file as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        end_at_a_line(path)

    def write(self, kind: str, **values: Any) -> None:
        append(self.path, {"kind": kind, **values})
        self.count += kind not in ("run", "reads", "notice")


def append(path: Path, value: dict[str, Any]) -> None:
    """One JSON line behind what the file holds. The first one of a run comes after `end_at_a_line`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, default=str) + "\n")


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nobody else goes on in this file meanwhile: ArgumentError where another process does. Makes the file.

    Two would measure the same, disturb each other's times, and cut or mix each other's lines.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"--out: {path} cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(f"--out: another process is writing {path}; allowed: a file of one's own") from None
        yield


def end_at_a_line(path: Path) -> None:
    """Take away the last line if it was cut off in the middle, as in a run that was killed: more lines will follow.

    Makes the file's folder where there is none. Raises UnusableFile, and leaves the file as it is, where its first line
    is no JSON object: it is none of this suite's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    first, rest = content[:whole].split(b"\n", 1)[0], content[whole:]
    if (whole and not _is_object(first)) or not (rest == b"" or rest.startswith(b"{")):
        raise UnusableFile(f"{path}: not a file of JSON lines; left as it is")
    if _is_object(rest):
        with path.open("ab") as file:
            file.write(b"\n")
    elif rest:
        with path.open("r+b") as file:
            file.truncate(whole)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def default_path() -> Path:
    """A new file, named by the time in UTC."""
    return RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%S}.jsonl"


class UnusableFile(ValueError):
    """A result file that is missing, malformed, or does not fit; the message names it and says why, in one line."""


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a run; a last line that was cut off in the middle is left out. Raises UnusableFile."""
    return json_lines(path, "kind")


def by_id(path: Path, *fields: str) -> list[dict[str, Any]]:
    """The lines of a file whose lines have ids, read as `read` does; where an id stands twice, the last counts.

    fields: what each line of the caller's kind of file has besides; UnusableFile where one lacks them.
    """
    found = list({line["id"]: line for line in json_lines(path, "id")}.values())
    for line in found:
        if lacking := [field for field in fields if field not in line]:
            raise UnusableFile(f"{path}: {line['id']} has no {', '.join(lacking)}: it is of another command")
    return found


def json_lines(path: Path, needed: str) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, each with the field `needed`; the last line may be cut off in the middle."""
    lines = _text(path).splitlines()
    found = []
    for number, line in enumerate(lines):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines) - 1:
                raise UnusableFile(f"{path}: line {number + 1} is not JSON ({error.msg})") from error
            continue
        if not isinstance(value, dict) or needed not in value:
            raise UnusableFile(f"{path}: line {number + 1} is not a result of this suite: it has no '{needed}'")
        found.append(value)
    return found


def load(path: Path) -> dict[str, Any]:
    """Compact results of a file of either kind: a run's JSON lines or a compact file. Raises UnusableFile."""
    if path.suffix == ".jsonl":
        lines = read(path)
        try:
            found = compact(lines)
        except UnusableFile as error:
            raise UnusableFile(f"{path}: {error}") from error
    else:
        try:
            found = json.loads(_text(path))
        except json.JSONDecodeError as error:
            raise UnusableFile(f"{path}: not JSON ({error.msg}, line {error.lineno})") from error
    if not isinstance(found, dict) or not isinstance(found.get("run"), dict) or "gpu" not in found["run"]:
        raise UnusableFile(f"{path}: not a result file of this suite: it does not say where its run was made")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFile(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def compact(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """{"run", "rows", "pairs", "published", "skipped"} and, if there are any, "notices": the times of one row together.

    A row has the facts of `measure.facts`, the errors, and those of TIMES that were measured; `samples_us` are its
    kernel times. Where an id was measured twice, the last counts. A measurement that failed has no time but a line in
    the row's "failures", {test: reason}; a row whose result was wrong has no times of that run at all.

    Raises UnusableFile where the file's runs may not stand side by side.
    """
    found: dict[str, Any] | None = None
    for run, part in _parts(lines):
        content = _compact_one(run, part)
        if found is None:
            found = content
        elif differing := differences(found["run"], run):
            raise UnusableFile(f"one file holds runs that differ in {'; '.join(differing)}; only one may be in it")
        else:
            found = combined(found, content)
    return found or _compact_one({}, [])


def _parts(lines: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(values of the run line, lines behind it) of each run in a file."""
    parts: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for line in lines:
        if line["kind"] == "run":
            parts.append(({key: value for key, value in line.items() if key != "kind"}, []))
        else:
            if not parts:
                parts.append(({}, []))
            parts[-1][1].append(line)
    return parts


def _compact_one(run: dict[str, Any], lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    pairs: dict[str, dict[str, Any]] = {}
    published: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    notices: list[str] = []
    wrong: set[str] = set()
    for line in lines:
        values = {key: value for key, value in line.items() if key != "kind"}
        if line["kind"] == "time":
            rows[values["id"]] = _updated(rows.get(values["id"]), values)
        elif line["kind"] == "failed" and "case" in values:
            test, reason, status = (values.pop(key) for key in ("test", "reason", "status"))
            failure = {"failures": {test: f"{status}: {reason}"}}
            rows[values["id"]] = _updated(rows.get(values["id"]), values | failure)
            wrong |= {values["id"]} if status == "wrong" else set()
        elif line["kind"] == "pair":
            pairs[values["id"]] = values
        elif line["kind"] == "published":
            published[values["id"]] = values
        elif line["kind"] == "reads":
            run = {**run, "reads": values["sizes"]}
        elif line["kind"] == "notice":
            notices.append(values["text"])
        else:
            skipped[values["id"]] = values["reason"]
    for name in wrong:
        rows[name] = {key: value for key, value in rows[name].items() if key not in _ALL_FIELDS}
    found = {"run": run, "rows": list(rows.values()), "pairs": list(pairs.values())}
    found |= {"published": list(published.values()), "skipped": skipped}
    return found | ({"notices": list(dict.fromkeys(notices))} if notices else {})


def measured(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """{(id, test): row} of what a run that goes on need not measure again. test: of TESTS, "pair" or "published".

    What ended the process stands among them: it would end the next one too.
    """
    done = {
        (row["id"], test): row
        for row in found["rows"]
        for test, fields in TESTS.items()
        if fields[0] in row or row.get("fatal")
    }
    done |= {(pair["id"], "pair"): pair for pair in found["pairs"]}
    return done | {(item["id"], "published"): item for item in found["published"]}


def _updated(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The row with its new times; of another config or other sources, nothing of the old row stays.

    A measurement that failed takes the place of its earlier time, a wrong result that of all times of the row.
    """
    if old is None or ("config" in old and "config" in new and of_another_kernel(old, new)):
        return new
    failed = new.get("failures", {})
    gone = {field for test in failed for field in TESTS.get(test, ())}
    if any(reason.startswith("wrong") for reason in failed.values()):
        gone = _ALL_FIELDS
    kept = {key: value for key, value in old.items() if key not in gone}
    if "kernel_us" in kept and "kernel_us" not in new:  # a kernel time keeps the floor of its own run
        new = {key: value for key, value in new.items() if key not in _OF_THE_RUN}
    row = {**kept, **new}
    failures = {
        test: reason for test, reason in old.get("failures", {}).items() if TESTS.get(test, ("",))[0] not in new
    }
    notices = list(dict.fromkeys((*old.get("notices", ()), *new.get("notices", ()))))
    for key, value in (("failures", failures | failed), ("notices", notices)):
        row.pop(key, None)
        if value:
            row[key] = value
    return row


_OF_THE_RUN = ("floor_us", "read_ceiling_tb_per_s", "state_before", "state_after", "harness")
"""What a row says of the run that its kernel time comes from."""


def of_another_kernel(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether two results of one id are of different configs, or known to be of different sources."""
    a, b = old.get("sources"), new.get("sources")
    return config_of(old) != config_of(new) or (a is not None and b is not None and a != b)


@functools.cache
def sources() -> str:
    """Digest of the kernels' code and tuned tiles (backends/, shared/*.py), so that a changed kernel shows.

    It says nothing of the code under bench/ that takes the times: that is `harness`, which makes no time another's.
    """
    return _digest((*ROOT.glob("backends/**/*.py"), *ROOT.glob("backends/tuned/*.json"), *ROOT.glob("shared/*.py")))


def sources_and(*modules: str) -> str:
    """Digest of `sources` and these modules of bench/: of what times of kernels beside the shipped one depend on."""
    digest = hashlib.sha256(sources().encode())
    for name in modules:
        digest.update((ROOT / "bench" / f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]


HARNESS = (
    "clock", "cold", "contenders", "data", "libraries", "machine", "measure", "pairs", "peers", "published",
    "read_kernel", "reads", "suite", "turns",
)  # fmt: skip
"""Modules of bench/ that decide what a sample is: its data, its flush, its clock, which calls, and the plain reads."""


@functools.cache
def harness() -> str:
    """Digest of the modules HARNESS, which decide how a time is taken. Results from before it was kept have none.

    Not of what reads results (tables, reports), nor of bench/conftest.py, which only picks what is measured.
    """
    return _digest(ROOT / "bench" / f"{name}.py" for name in HARNESS)


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def code() -> dict[str, str]:
    """{"sources", "harness"} as a result carries them."""
    return {"sources": sources(), "harness": harness()}


def config_of(row: dict[str, Any]) -> Config | None:
    """The row's config; fields that came after the row was measured have their defaults. None: a peer."""
    config = row.get("config")
    if config is None:
        return None
    known = {field.name for field in dataclasses.fields(Config)}
    if unknown := sorted(set(config) - known):
        raise UnusableFile(f"{row.get('id')}: its config has fields {unknown}, which this version does not know")
    return Config(**config)


def differences(a: dict[str, Any], b: dict[str, Any], settings: Iterable[str] = SETTINGS) -> list[str]:
    """What keeps the times of two runs from standing side by side, such as "torch: 2.11.0 and 2.12.0". Not another
    pytest-benchmark, which runs the rounds: what a sample is, is told by this suite's own clock and flush."""
    compared = [key for key in settings if key not in UNTOLD or (key in a and key in b)]
    found = [f"{key}: {a.get(key)} and {b.get(key)}" for key in compared if a.get(key) != b.get(key)]
    ours, theirs = a.get("versions", {}), b.get("versions", {})
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name) and name != "pytest-benchmark"]
    return found + [f"{name}: {ours.get(name)} and {theirs.get(name)}" for name in names]


@dataclasses.dataclass(frozen=True)
class Added:
    """Where a run was put. new, updated: ids of its rows; replaced: those of `updated` whose earlier times were of
    another config or other sources and are gone."""

    path: Path
    new: list[str]
    updated: list[str]
    replaced: list[str]

    def __str__(self) -> str:
        text = f"added to {self.path}: {len(self.new)} new rows, {len(self.updated)} measured again"
        if self.replaced:
            text += f", of which {len(self.replaced)} with another config or source: their earlier times are left out"
        return text


def add(run: Path, *, results: Path = RESULTS, name: str | None = None, into: str | None = None) -> Added:
    """Keep a run: as the compact file <results>/<gpu>/<name>.json, or merged into the one that `into` names.

    name: None takes the date of the run. An existing file of that name is written anew.
    into: name of an existing file of this GPU. Rows by id: new times update, others stay; both runs' dates are kept.

    Raises UnusableFile for a rehearsal, whose times mean nothing; for a file that is none of this suite's; and with
    `into` where GPU, versions or settings differ, with what differs.
    """
    from bench.machine import gpu_key

    found = load(run)
    if found["run"]["clock"] == "rehearsal":
        raise UnusableFile(f"{run}: a rehearsal on the CPU; its times mean nothing and are not kept")
    folder = results / gpu_key(found["run"]["gpu"])
    if into is None:
        path = folder / f"{name or found['run']['date'][:10]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump(found), encoding="utf-8")
        return Added(path, new=[row["id"] for row in found["rows"]], updated=[], replaced=[])
    path = folder / f"{into.removesuffix('.json')}.json"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.json"))) or "none"
        raise UnusableFile(f"into: got {into!r}; results of {found['run']['gpu']} that are kept: {known}")
    kept = load(path)
    if differing := differences(kept["run"], found["run"]):
        raise UnusableFile(f"{run}: cannot be merged into {path}, as they differ in {'; '.join(differing)}")
    before = {row["id"]: row for row in kept["rows"]}
    again = [row for row in found["rows"] if row["id"] in before]
    added = Added(
        path,
        new=[row["id"] for row in found["rows"] if row["id"] not in before],
        updated=[row["id"] for row in again],
        replaced=[row["id"] for row in again if of_another_kernel(before[row["id"]], row)],
    )
    path.write_text(dump(combined(kept, found)), encoding="utf-8")
    return added


def combined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Two compact results as one, in the order of the old one. The caller has seen to it that they may be.

    run: that of the old, with "runs": date, rounds, ceilings and plain reads of each.
    """
    rows = {row["id"]: row for row in old["rows"]}
    for row in new["rows"]:
        rows[row["id"]] = _updated(rows.get(row["id"]), row)
    parts = {
        part: list({item["id"]: item for item in (*old[part], *new[part])}.values()) for part in ("pairs", "published")
    }
    skipped = {key: reason for key, reason in (old["skipped"] | new["skipped"]).items() if key not in rows}
    runs = {json.dumps(run, sort_keys=True): run for run in (*history(old["run"]), *history(new["run"]))}
    run = old["run"] | {"runs": sorted(runs.values(), key=lambda run: run.get("date", ""))}
    notices = list(dict.fromkeys((*old.get("notices", ()), *new.get("notices", ()))))
    found = {"run": run, "rows": list(rows.values()), **parts, "skipped": skipped}
    return found | ({"notices": notices} if notices else {})


def history(run: dict[str, Any]) -> list[dict[str, Any]]:
    """{"date", "rounds", "ceilings", "reads"} of each run that the results come from, as far as it has them."""
    return run.get("runs") or [{key: run[key] for key in ("date", "rounds", "ceilings", "reads") if key in run}]


def dump(found: dict[str, Any]) -> str:
    """JSON with one row per line, so that diffs are readable."""
    parts = []
    for key, value in found.items():
        if isinstance(value, list):
            body = ",\n".join(json.dumps(item) for item in value)
            parts.append(f'"{key}": [\n{body}\n]')
        else:
            parts.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def committed(results: Path = RESULTS) -> dict[str, list[dict[str, Any]]]:
    """Compact results by GPU folder, oldest first; other files (pytest-benchmark's) are left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(results.glob("*/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "run" in content:
            found.setdefault(path.parent.name, []).append(content)
    return found
