"""Many examples over worker processes: nothing found is lost, and what kills a process is found as well.

Hypothesis draws the programs and the draws of data from one seed, so a run can be repeated. Failing examples are saved
at once, then shrunk in worker processes of their own life, then saved again in their simplest form.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bench.fuzz.example import Draw, Example, Program, save
from bench.fuzz.programs import COMPILED, INTERPRETED, Limits, draws, programs
from bench.fuzz.shrink import shrink
from bench.fuzz.worker import ENDINGS, ENVIRONMENT, Serve, Worker, work

ROOT = Path(__file__).parents[2]
REGRESSIONS = ROOT / "tests" / "regressions"
PROGRAMS_A_LIST = 20
MOST_FAILURES = 10
"""Failing examples of one backend after which its run ends: they have one cause, most likely."""
SHRINK_SECONDS = 90.0
TOLD_EVERY = 5.0
_TOO_LARGE = re.compile(r"shared memory.*(exceed|limit|resource)|out of resource|RESOURCE_EXHAUSTED", re.I | re.S)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """examples, draws: per backend, per program.

    seconds:  after which nothing new is started; None: no limit
    patience: seconds without a word from a process after which it hangs; a program's first example compiles
    """

    backends: tuple[str, ...]
    examples: int
    seed: int
    jobs: int
    interpret: bool
    draws: int
    seconds: float | None = None
    patience: float = 180.0
    regressions: Path = REGRESSIONS
    shrink: bool = True

    @property
    def limits(self) -> Limits:
        return INTERPRETED if self.interpret else COMPILED


@dataclasses.dataclass
class Failure:
    """kind: wrong, error, died or hangs; text: what was seen; path: where the example is saved."""

    example: Example
    kind: str
    text: str
    path: Path | None = None
    shrunk: bool = False
    note: str = ""


@dataclasses.dataclass
class Result:
    """Counts by backend. refused: programs by the reason that the backend or its compiler gave."""

    options: Options
    examples: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    programs: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refused: dict[str, collections.Counter[str]] = dataclasses.field(default_factory=dict)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    stopped: str | None = None
    seconds: float = 0.0

    def to_mapping(self) -> dict[str, Any]:
        o = self.options
        return {
            "seed": o.seed,
            "interpret": o.interpret,
            "jobs": o.jobs,
            "draws_per_program": o.draws,
            "examples_asked": o.examples,
            "examples": {name: self.examples[name] for name in o.backends},
            "programs": {name: self.programs[name] for name in o.backends},
            "refused": {name: dict(self.refused.get(name, {})) for name in o.backends},
            "failures": [
                {
                    "kind": f.kind,
                    "text": f.text,
                    "example": str(f.example),
                    "saved": None if f.path is None else f.path.name,
                    "shrunk": f.shrunk,
                    "note": f.note,
                }
                for f in self.failures
            ],
            "stopped": self.stopped,
            "seconds": round(self.seconds, 1),
        }


Task = tuple[Program, list[Draw]]


def tasks(backend: str, options: Options) -> list[Task]:
    """Different programs, each with its draws of data; the same for the same seed and version of Hypothesis."""
    count = -(-options.examples // options.draws)
    # In lists: Hypothesis draws an example near to those before it, but the items of one list apart from each other.
    many = st.lists(programs(backend, options.limits), min_size=PROGRAMS_A_LIST, max_size=PROGRAMS_A_LIST)
    found = dict.fromkeys(itertools.chain(*_drawn(many, 2 + 2 * count // PROGRAMS_A_LIST, options.seed)))
    lists = _drawn(st.lists(draws(), min_size=options.draws, max_size=options.draws), count, options.seed + 1)
    numbers = itertools.count(options.seed * options.examples)
    return [
        (program, [dataclasses.replace(draw, seed=next(numbers)) for draw in data])
        for program, data in zip(itertools.islice(found, count), itertools.cycle(lists), strict=False)
    ]


def _drawn(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count, phases=[Phase.generate], database=None, deadline=None, derandomize=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """In the block the first of ENDINGS raises KeyboardInterrupt, and those after it are ignored: what was found is
    kept, however often a run is told to end. Only a main thread can do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, frame: object) -> None:
        ignore_endings()
        raise KeyboardInterrupt

    before = {ending: signal.signal(ending, first) for ending in ENDINGS}
    try:
        yield
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler)


def ignore_endings() -> None:
    """From here on in the block of `ended_in_order`: as what is left to do is short."""
    if threading.current_thread() is threading.main_thread():
        for ending in ENDINGS:
            signal.signal(ending, signal.SIG_IGN)


def run(options: Options, journals: Path, say: Callable[[str], None], serve: Serve = work) -> Result:
    """Fuzz as the options say. journals: folder for the workers' journals. KeyboardInterrupt ends it in order.

    serve: what a worker process does; tests put another in.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if options.interpret:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    result = Result(options)
    begin = time.monotonic()
    pool = _Pool(options, journals, result, say, serve)
    try:
        pool.hire()
        waiting = [tasks(backend, options) for backend in options.backends]
        # In turn, so that a run cut short has seen every backend.
        pool.fuzz(task for turn in itertools.zip_longest(*waiting) for task in turn if task is not None)
        if options.shrink and result.failures:
            pool.shrink()
    except KeyboardInterrupt:
        result.stopped = "interrupted"
    finally:
        pool.end()
        result.seconds = time.monotonic() - begin
    return result


@dataclasses.dataclass
class _Job:
    """What a worker is at. at: number of the draw that runs; shrinking: the failure that is being shrunk, if any."""

    program: Program
    draws: list[Draw]
    at: int = 0
    shrinking: _Shrinking | None = None

    @property
    def example(self) -> Example:
        return Example(program=self.program, draw=self.draws[self.at])


@dataclasses.dataclass
class _Shrinking:
    failure: Failure
    steps: Generator[Example, bool, Example]
    deadline: float
    best: Example
    reproduced: bool = False


class _Pool:
    def __init__(
        self, options: Options, journals: Path, result: Result, say: Callable[[str], None], serve: Serve
    ) -> None:
        self.options, self.result, self.say, self.serve = options, result, say, serve
        self.journals = journals
        self.begin = self.told = time.monotonic()
        self.numbers = itertools.count(1)
        self.jobs: dict[Worker, _Job | None] = {}

    # Fuzzing

    def hire(self) -> None:
        """All workers, so that they import the frameworks meanwhile."""
        o = self.options
        for _ in range(min(o.jobs, -(-o.examples // o.draws) * len(o.backends))):
            self._hire()

    def fuzz(self, waiting: Iterable[Task]) -> None:
        queue = collections.deque(waiting)
        while queue or any(self.jobs.values()):
            if self._late() and queue:
                self.result.stopped = "time limit"
                queue.clear()
            for worker in [w for w, job in self.jobs.items() if job is None]:
                while queue and self._enough(queue[0][0].backend):
                    queue.popleft()
                if queue:
                    self._give(worker, _Job(*queue.popleft()))
            for _ in range(self._listen()):
                if queue:
                    self._hire()
            self._tell(f"{len(queue)} programs to go")

    def _late(self) -> bool:
        return self.options.seconds is not None and time.monotonic() - self.begin > self.options.seconds

    def _enough(self, backend: str) -> bool:
        return sum(f.example.program.backend == backend for f in self.result.failures) >= MOST_FAILURES

    # Shrinking

    def shrink(self) -> None:
        """Each failure down to its simplest form; the first of each backend and kind, as others look like it."""
        seen: set[tuple[str, str]] = set()
        queue: collections.deque[Failure] = collections.deque()
        for failure in self.result.failures:
            kind = failure.example.program.backend, failure.kind
            if kind in seen:
                failure.note = "not shrunk: an earlier failure of this backend and kind was"
            else:
                seen.add(kind)
                queue.append(failure)
        self.say(f"shrinking {len(queue)} of {len(self.result.failures)} failing examples")
        while queue or any(self.jobs.values()):
            while queue and len(self.jobs) < self.options.jobs and None not in self.jobs.values():
                self._hire()
            for worker in [w for w, job in self.jobs.items() if job is None]:
                if queue:
                    failure = queue.popleft()
                    deadline = time.monotonic() + SHRINK_SECONDS
                    state = _Shrinking(failure, shrink(failure.example), deadline, failure.example)
                    self._give(worker, _Job(failure.example.program, [failure.example.draw], shrinking=state))
            self._listen()
            self._tell("shrinking")

    def _shrunk_to(self, worker: Worker, job: _Job, kind: str, text: str) -> None:
        """A candidate was tried: on to the next, or the end."""
        state = job.shrinking
        assert state is not None
        failed = kind == state.failure.kind
        if not state.reproduced:
            if not failed:
                state.failure.note = f"not reproduced in a fresh call: {kind} {text}".strip()
                return self._free(worker)
            state.reproduced = True
            advance: Callable[[], Example] = lambda: next(state.steps)  # noqa: E731
        else:
            if failed:
                state.best = job.example
                state.failure.text = text
            advance = lambda: state.steps.send(failed)  # noqa: E731
        try:
            if time.monotonic() > state.deadline:
                raise StopIteration
            candidate = advance()
        except StopIteration:
            self._finish(state)
            return self._free(worker)
        following = _Job(candidate.program, [candidate.draw], shrinking=state)
        if worker not in self.jobs:  # it died of this one
            worker = self._hire()
        self._give(worker, following)

    def _finish(self, state: _Shrinking) -> None:
        failure = state.failure
        old = failure.path
        failure.example, failure.shrunk = state.best, True
        self._save(failure)
        if old is not None and old != failure.path:
            old.unlink(missing_ok=True)
        self.say(f"shrunk to: {failure.example}\n    {failure.text.splitlines()[0]}\n    {failure.path}")

    # Workers

    def _hire(self) -> Worker:
        self.journals.mkdir(parents=True, exist_ok=True)
        journal = self.journals / f"worker-{next(self.numbers)}.json"
        worker = Worker(journal, self.serve, interpret=self.options.interpret)
        self.jobs[worker] = None
        return worker

    def _give(self, worker: Worker, job: _Job) -> None:
        self.jobs[worker] = job
        with contextlib.suppress(OSError):  # it is dead: _listen will notice
            worker.give(job.program, job.draws)

    def _free(self, worker: Worker) -> None:
        if worker in self.jobs:
            self.jobs[worker] = None

    def _dismiss(self, worker: Worker) -> None:
        self.jobs.pop(worker, None)
        worker.end()

    def end(self) -> None:
        for worker in list(self.jobs):
            self._dismiss(worker)
        if self.journals.exists() and not any(self.journals.iterdir()):
            self.journals.rmdir()

    def _listen(self) -> int:
        """Takes in what workers say; how many of them have ended."""
        before = set(self.jobs)
        by_pipe = {worker.pipe: worker for worker, job in self.jobs.items() if job is not None}
        for pipe in wait(list(by_pipe), timeout=0.5):
            worker = by_pipe[pipe]  # type: ignore[index]
            worker.heard = time.monotonic()
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):
                self._ended(worker, "died", worker.how_it_died())
            else:
                self._heard(worker, *message)
        for worker, job in list(self.jobs.items()):
            if job is not None and worker.silent() > self.options.patience:
                self._ended(worker, "hangs", f"no answer for {self.options.patience:.0f} s: killed")
        return len(before - set(self.jobs))

    def _heard(self, worker: Worker, kind: str, told: Any = "") -> None:
        job = self.jobs[worker]
        assert job is not None
        if kind == "start":
            job.at = told
        elif kind == "error":
            self._ended(worker, kind, told)
        elif job.shrinking is not None:
            if kind != "done":  # of the candidate before: its answer came earlier
                self._shrunk_to(worker, job, kind, told)
        elif kind == "done":
            self._free(worker)
        elif kind == "refused":
            self._refused(job.program.backend, told)
        else:
            self._count(job)
            if kind == "wrong":
                self._failed(Failure(job.example, kind, told))

    def _ended(self, worker: Worker, kind: str, text: str) -> None:
        """What a worker ran when it ended has failed; the program's other draws are given up."""
        job = self.jobs[worker]
        assert job is not None
        example = worker.last_words() or job.example
        self._dismiss(worker)
        if job.shrinking is not None:
            self._shrunk_to(worker, job, kind, text)
        elif kind == "error" and _TOO_LARGE.search(text):
            self._refused(job.program.backend, "compiler: " + text.splitlines()[0][:200])
        else:
            self._count(job)
            self._failed(Failure(example, kind, text))

    def _count(self, job: _Job) -> None:
        self.result.examples[job.program.backend] += 1
        self.result.programs[job.program.backend] += job.at == 0

    def _refused(self, backend: str, reason: str) -> None:
        reason = re.sub(r"\d+", "#", reason)  # one line for all sizes
        self.result.refused.setdefault(backend, collections.Counter())[reason] += 1

    def _failed(self, failure: Failure) -> None:
        if self._enough(failure.example.program.backend):
            return
        self._save(failure)
        self.result.failures.append(failure)
        self.say(f"FAILED ({failure.kind}): {failure.example}\n    {failure.text.splitlines()[0]}\n    {failure.path}")

    def _save(self, failure: Failure) -> None:
        o = self.options
        found = {"kind": failure.kind, "text": failure.text, "seed": o.seed, "interpret": o.interpret}
        failure.path = save(failure.example, o.regressions, **found, shrunk=failure.shrunk)

    def _tell(self, what: str) -> None:
        if time.monotonic() - self.told < TOLD_EVERY:
            return
        self.told = time.monotonic()
        counts = ", ".join(f"{name} {self.result.examples[name]}" for name in self.options.backends)
        self.say(f"{self.told - self.begin:4.0f} s: {counts}; {len(self.result.failures)} failed; {what}")


def dump(result: Result, path: Path, **facts: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, **result.to_mapping()}, indent=1, default=str) + "\n", encoding="utf-8")
