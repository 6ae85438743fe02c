"""A stand-in for the fuzzer's worker process, which needs no framework: it dies, hangs or goes wrong as it is told."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench.fuzz.example import Draw, Program
from bench.fuzz.execute import Refused
from bench.fuzz.judge import Wrong
from bench.fuzz.worker import serve

DIES, HANGS, ERRS, WRONG, REFUSED, TOO_LARGE = 66, 67, 68, 69, 70, 71
"""N of problems that go so; all others are right."""


class Faulty:
    """In place of bench.fuzz.execute.Runner."""

    def __init__(self, program: Program) -> None:
        self.n = program.problem.n

    def check(self, draw: Draw) -> None:
        if self.n == DIES:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.n == HANGS:
            time.sleep(600)
        if self.n == ERRS:
            raise RuntimeError("an illegal memory access was encountered")
        if self.n == WRONG:
            raise Wrong("2 of 4 elements")
        if self.n == REFUSED:
            raise Refused("130000 bytes of shared memory")
        if self.n == TOO_LARGE:
            raise RuntimeError("Requested shared memory size 300 exceeds the limit")


def faulty(pipe: Connection, journal: str, interpret: bool) -> None:
    serve(pipe, Path(journal), Faulty)
