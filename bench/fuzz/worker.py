"""A process that runs examples. It may die of one: what it is about to run is in its journal file beforehand."""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.fuzz.example import Draw, Example, Program

ENDINGS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a run: Ctrl-C, and what schedulers and time limits send."""
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the processes share one GPU
    "OMP_NUM_THREADS": "1",  # and the cores
    "OPENBLAS_NUM_THREADS": "1",
}
Serve = Callable[[Connection, str, bool], None]


class Worker:
    """The parent's end of a worker process.

    Messages from it: ("start", number of the draw), then ("right",), ("refused", text), ("wrong", text) or
    ("error", text); ("done",) after the last draw. After an error it ends: its CUDA context may be broken.
    """

    def __init__(self, journal: Path, serve: Serve, *, interpret: bool) -> None:
        """serve: what the process does, `work` except in tests."""
        self.journal = journal
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(journal), interpret), daemon=True)
        self.process.start()
        theirs.close()
        self.heard = time.monotonic()

    def give(self, program: Program, draws: list[Draw]) -> None:
        self.heard = time.monotonic()
        self.pipe.send((program, draws))

    def silent(self) -> float:
        """Seconds since its last word."""
        return time.monotonic() - self.heard

    def last_words(self) -> Example | None:
        """The example that was running when the process died, from its journal."""
        if not self.journal.exists():
            return None
        return Example.from_mapping(json.loads(self.journal.read_text(encoding="utf-8")))

    def how_it_died(self) -> str:
        self.process.join(5)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"the process was killed by {signal.Signals(-code).name}"
        return f"the process ended with status {code}"

    def end(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()
        self.journal.unlink(missing_ok=True)


def work(pipe: Connection, journal: str, interpret: bool) -> None:
    from bench.fuzz.execute import Runner

    serve(pipe, Path(journal), lambda program: Runner(program, interpret=interpret))


def serve(pipe: Connection, journal: Path, make: Callable[[Program], Any]) -> None:
    """Runs what comes through the pipe until it closes. make: a program's runner, as execute.Runner."""
    for ending in ENDINGS:  # the parent's, also where a whole group gets them
        signal.signal(ending, signal.SIG_IGN)
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's word on infinities and NaN
    while True:
        try:
            program, draws = pipe.recv()
        except EOFError:
            return
        try:
            _run(pipe, journal, program, draws, make)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            # File names without their folders: the text is saved with the example, and kept.
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            places = "".join(f"  {Path(frame.filename).name}:{frame.lineno} in {frame.name}\n" for frame in frames)
            pipe.send(("error", f"{text[:2000]}\n{places}"))
            return
        journal.unlink(missing_ok=True)
        pipe.send(("done",))


def _run(pipe: Connection, journal: Path, program: Program, draws: list[Draw], make: Callable[[Program], Any]) -> None:
    from bench.fuzz.execute import Refused
    from bench.fuzz.judge import Wrong

    runner = None
    for number, draw in enumerate(draws):
        example = Example(program=program, draw=draw)
        journal.write_text(json.dumps(example.to_mapping()), encoding="utf-8")
        pipe.send(("start", number))
        answer: tuple[str, ...] = ("right",)
        try:
            runner = runner or make(program)
            runner.check(draw)
        except Refused as reason:
            pipe.send(("refused", str(reason)))
            break
        except Wrong as fault:
            answer = ("wrong", str(fault))
        pipe.send(answer)
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()  # compiled programs are not used again
