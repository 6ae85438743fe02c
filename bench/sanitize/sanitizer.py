"""compute-sanitizer itself: where it is, which options it gets, and children under it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[2]
PER_PROCESS = 12
FOUND_EXIT = 86
"""Exit status of compute-sanitizer where it found something; any but Python's own."""
REMEDY = (
    "compute-sanitizer is not on PATH and not under /usr/local/cuda: it comes with the CUDA toolkit "
    "(https://developer.nvidia.com/cuda-downloads; Debian, Ubuntu: cuda-sanitizer-13-0 of NVIDIA's repository)"
)
NO_GPU = "no NVIDIA GPU that PyTorch can use: kernels have to run to be watched; `python -m bench doctor` says more"
ENVIRONMENT = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "PYTHONUNBUFFERED": "1",
}
XLA_FLAGS = "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
"""Kernels launched one by one, and no trial runs of other kernels."""


def executable() -> str | None:
    """Path of compute-sanitizer; None where there is none."""
    found = shutil.which("compute-sanitizer")
    if found is not None:
        return found
    places = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer")) + sorted(
        Path("/usr/local").glob("cuda*/compute-sanitizer/compute-sanitizer")
    )
    return str(places[-1]) if places else None


def options(tool: str, known: str) -> list[str]:
    """Options of one tool; known: the text of --help, as versions differ in what they take.

    A wrong access ends its kernel, not the context, so that the variants after it still run.
    """
    wanted = [
        ("--error-exitcode", str(FOUND_EXIT)),
        ("--target-processes", "application-only"),
        ("--print-limit", "1000"),
        ("--show-backtrace", "no"),
        ("--launch-timeout", "120"),
        ("--max-connections", "64"),
        ("--destroy-on-device-error", "kernel"),
    ]
    if tool == "memcheck":
        wanted += [("--leak-check", "no"), ("--padding", "256"), ("--report-api-errors", "no")]
    found = ["--tool", tool]
    for name, value in wanted:
        if re.search(rf"{name}\b", known):
            found += [name, value]
    return found


def environment() -> dict[str, str]:
    """The children's environment: no pooling of memory, launches one by one."""
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), XLA_FLAGS)))
    kept = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    return {**kept, **ENVIRONMENT, "XLA_FLAGS": flags}


class Launch(Protocol):
    """Runs children; a test's stands in for compute-sanitizer."""

    def __call__(self, tool: str, jobs: list[tuple[str, Any]], seconds: float) -> tuple[str, int | None]:
        """(output, exit status; None: it ran out of time) of one child over jobs, each (id, what)."""

    def stop(self) -> None:
        """End what runs; nothing is started any more."""


class Sanitizer:
    """Runs children under compute-sanitizer; `stop` ends those that run."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.version = (self._ask("--version").strip().splitlines() or ["unknown"])[-1]
        self.help = self._ask("--help")
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def _ask(self, option: str) -> str:
        answer = subprocess.run([self.path, option], capture_output=True, text=True, timeout=60)
        return answer.stdout + answer.stderr

    def __call__(self, tool: str, jobs: list[tuple[str, Any]], seconds: float) -> tuple[str, int | None]:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(jobs, file)
            file.flush()
            command = [self.path, *options(tool, self.help), sys.executable, "-m", "bench.sanitize.child", file.name]
            with self._lock:
                if self._stopped:
                    return "", None
                child = subprocess.Popen(
                    command, cwd=ROOT, env=environment(), text=True, errors="replace", start_new_session=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
                self._running.add(child)
            try:
                return child.communicate(timeout=seconds)[0], child.returncode
            except subprocess.TimeoutExpired:
                _end(child)
                return child.communicate()[0], None
            finally:
                with self._lock:
                    self._running.discard(child)

    def stop(self) -> None:
        """As in Launch."""
        with self._lock:
            self._stopped = True
            for child in self._running:
                _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # the sanitizer and the process under it
