"""The run: plants first, then variants in batches, each result with its reason."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.sanitize.matrix import Variant, selected
from bench.sanitize.output import Finding, Output, is_ours, parse
from bench.sanitize.sanitizer import PER_PROCESS, Launch


@dataclasses.dataclass(frozen=True)
class Plant:
    """kernel: its name in bench.sanitize.planted; found: what the tool's finding has to say."""

    tool: str
    kernel: str
    what: str
    found: str

    @property
    def id(self) -> str:
        return f"{self.tool}/{self.kernel}"


PLANTS = (
    Plant("memcheck", "planted_overrun", "write one element past a PyTorch allocation", r"Invalid __global__ write"),
    Plant("memcheck", "planted_triton_overrun", "the same in JAX, by a Triton kernel", r"Invalid __global__ write"),
    Plant("racecheck", "planted_race", "shared memory written and read without a barrier", r"Race reported"),
    Plant("initcheck", "planted_unwritten", "read of memory that no one wrote", r"Uninitialized __global__"),
    Plant("synccheck", "planted_barrier", "a block's barrier that half of a warp passes by", r"Barrier error detected"),
)

BULK_STORE = Plant("initcheck", "control_bulk_store", "memory that TMA wrote, read", r"Uninitialized __global__")
"""No fault. Where it is reported, the tool does not see what bulk copies write (`matrix.Variant.to_json`)."""


@dataclasses.dataclass
class Result:
    """status: clean; errors (the tool found some); wrong (the result is); failed (it raised, or ended the process);
    refused (the backend does not take it, with its reason); not run.

    count: findings in our kernels; elsewhere: in kernels of the framework, which do not count
    """

    tool: str
    backend: str
    variant: str
    status: str
    count: int = 0
    reason: str | None = None
    elsewhere: list[str] = dataclasses.field(default_factory=list)
    seconds: float | None = None

    @property
    def bad(self) -> bool:
        return self.status not in ("clean", "refused")


def batch(launch: Launch, tool: str, mine: Sequence[Variant], seconds: float, *, in_place: bool) -> Iterator[Result]:
    """Run variants in one child, and again in further ones what a child that ended early left over.

    in_place: findings appear between the lines of their variant. Otherwise, or where some appear outside of any, the
    variants run once more, a process each, and what is found in a process belongs to its variant.
    """
    left = list(mine)
    while left:
        text, code = launch(tool, [(v.id, v.to_json(tool)) for v in left], seconds)
        output = parse(text)
        found = sum(map(len, output.findings.values()))
        unclear = bool(output.findings.get(None)) or bool(output.summary and not found)
        if len(left) > 1 and (unclear or (found and not in_place)):
            for variant in left:
                yield from batch(launch, tool, [variant], seconds, in_place=in_place)
            return
        if len(left) == 1 and unclear:
            everything = [finding for findings in output.findings.values() for finding in findings]
            output.findings = {left[0].id: everything or [Finding(f"{output.summary} errors that are not printed")]}
        done = [v for v in left if v.id in output.ended]
        for variant in done:
            yield _judge(tool, variant, output, trusted=in_place and code is None)
        left = [v for v in left if v.id not in output.ended]
        if left and (left[0].id in output.begun or not done):  # the child ended in the middle of it, or never began
            yield _ended_early(tool, left.pop(0), output, code, text, seconds)


def _judge(tool: str, variant: Variant, output: Output, *, trusted: bool) -> Result:
    """trusted: what ended is judged though the sanitizer did not come to its end, as its findings appear at once."""
    told = output.ended[variant.id]
    findings = output.findings.get(variant.id, [])
    # A wrong access is an error wherever it is: a framework's kernel may have followed an index of ours.
    ours = [finding for finding in findings if tool == "memcheck" or is_ours(finding)]
    elsewhere = sorted({str(finding) for finding in findings if finding not in ours})
    result = Result(tool, variant.backend, variant.id, "clean", len(ours), None, elsewhere, told.get("seconds"))
    if ours:
        result.status, result.reason = "errors", str(ours[0])
    elif told["status"] != "right":
        result.status, result.reason = told["status"], told.get("reason")
    elif output.summary is None and not trusted:
        result.status, result.reason = "not run", "the sanitizer did not come to its end: " + "; ".join(output.told[:2])
    elif problems := [line for line in output.told if "Internal" in line]:
        result.status, result.reason = "not run", f"the sanitizer failed: {problems[0]}"
    return result


def _ended_early(tool: str, variant: Variant, output: Output, code: int | None, text: str, seconds: float) -> Result:
    findings = output.findings.get(variant.id, [])
    if findings:
        return Result(tool, variant.backend, variant.id, "errors", len(findings), str(findings[0]))
    if code is None:
        return Result(tool, variant.backend, variant.id, "not run", reason=f"stopped after {seconds:.0f} s")
    last = " ".join((text.strip().splitlines() or ["no output"])[-1].split())[:300]
    reason = f"the process ended with status {code}: {last}"
    return Result(tool, variant.backend, variant.id, "failed", reason=reason)


def check_plants(launch: Launch, tools: Sequence[str], jobs: int, seconds: float) -> list[dict[str, Any]]:
    """{"tool", "kernel", "what", "caught", "in_place", "reason"} of each plant, run between faultless launches.

    caught: the finding that was made, or None; in_place: whether it appeared between the plant's own lines.
    """

    with _pool(launch, jobs) as pool:
        chosen = [plant for plant in PLANTS if plant.tool in tools]
        return list(pool.map(lambda plant: check_plant(launch, plant, seconds), chosen))


def check_plant(launch: Launch, plant: Plant, seconds: float) -> dict[str, Any]:
    """One row of `check_plants`."""
    names = [("before", "planted_nothing"), (plant.id, plant.kernel), ("after", "planted_nothing")]
    text, code = launch(plant.tool, names, seconds)
    output = parse(text)
    everything = [(name, finding) for name, findings in output.findings.items() for finding in findings]
    right = [(name, finding) for name, finding in everything if re.search(plant.found, finding.what)]
    caught = right[0] if right else None
    reason = None
    if caught is None:
        lines = [line for line in text.strip().splitlines() if not line.startswith("@@begin")]
        reason = f"exit status {code}; {' | '.join(lines[-4:])[:600] or 'no output'}"
    return {
        "tool": plant.tool,
        "kernel": plant.kernel,
        "what": plant.what,
        "caught": None if caught is None else str(caught[1]),
        "in_place": caught is not None and all(name == plant.id for name, _ in right),
        "reason": reason,
    }


@contextlib.contextmanager
def _pool(launch: Launch, jobs: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads that each wait for a child; Ctrl-C ends the children, which it does not reach by itself."""
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        yield pool
    except BaseException:
        launch.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def run(
    launch: Launch,
    *,
    tools: Sequence[str],
    backends: Sequence[str],
    keyword: str,
    full: bool,
    jobs: int,
    seconds: float,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The report; `keep` gets it after every batch. Raises ArgumentError where nothing is selected.

    {"plants", "results", "complete"}; complete is False until all have run. Where a plant is missed, nothing else runs.
    """
    chosen = selected(tools, backends, keyword, full=full)
    total = sum(map(len, chosen.values()))
    report: dict[str, Any] = {"plants": check_plants(launch, tools, jobs, seconds), "results": [], "complete": False}
    if any(v.backend == "pallas-mosaic" for v in chosen.get("initcheck", [])):
        control = check_plant(launch, BULK_STORE, seconds)
        report["controls"] = [{name: control[name] for name in ("tool", "kernel", "what")}]
        report["controls"][0]["reported"] = control["caught"]
    keep(report)
    for plant in report["plants"]:
        say(f"{plant['tool']:<10} planted fault ({plant['what']}): {'caught' if plant['caught'] else 'MISSED'}")
    if any(plant["caught"] is None for plant in report["plants"]):
        return report
    in_place = {tool: all(p["in_place"] for p in report["plants"] if p["tool"] == tool) for tool in tools}
    batches = [
        (tool, list(part))
        for tool, mine in chosen.items()
        for backend in backends
        for part in itertools.batched([v for v in mine if v.backend == backend], PER_PROCESS)
    ]
    batches.sort(key=lambda item: item[0] != "racecheck")  # the slowest first

    def one(item: tuple[str, list[Variant]]) -> list[Result]:
        return list(batch(launch, item[0], item[1], seconds, in_place=in_place[item[0]]))

    with _pool(launch, jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(one, item) for item in batches]):
            found = done.result()
            report["results"] += [dataclasses.asdict(result) for result in found]
            keep(report)
            bad = [result for result in found if result.bad]
            say(
                f"[{len(report['results'])}/{total}] {found[0].tool} {found[0].backend}: "
                f"{len(found) - len(bad)} of {len(found)} clean or refused"
                + "".join(f"\n    {result.variant}: {result.status}: {result.reason}" for result in bad)
            )
    report["complete"] = True
    keep(report)
    return report
