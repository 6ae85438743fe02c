"""Parts of a run that share one GPU: they compile side by side, and each takes its times while the others stand still.

Most of a run's time goes to compiling, much of it in Python, of which a process runs one thread at a time. So the parts
of a set (`--shard`), started together with --take-turns, compile several layers at once. What runs on the GPU beside a
timed kernel would spoil its time, and compiling ends with a run of each kernel: a part takes times only while no other
does, nor compiles.

Two files, locked by their processes, say whose turn it is. A lock ends with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PIDS = "pid-"


class Turns:
    """One process among those that share a GPU. It is nobody's turn until a first call of `alone` or `together`.

    The gate is what keeps a part that has been timed, and would compile its next layer, from passing those that wait to
    be timed: times are taken one part after the other, then all parts compile.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._gate, self._gpu = ((folder / name).open("w") for name in ("gate", "gpu"))
        self._pids: list[IO[str]] = []
        self._seen: set[int] = set()

    def alone(self) -> None:
        """Wait until no other process uses the GPU, and keep all others off it."""
        fcntl.flock(self._gate, fcntl.LOCK_SH)  # kept: who waits to be timed, too, holds up those that would compile
        fcntl.flock(self._gpu, fcntl.LOCK_EX)

    def together(self) -> None:
        """Use the GPU beside others; wait while one takes times or waits to."""
        self.leave()
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        fcntl.flock(self._gpu, fcntl.LOCK_SH)  # at once: whoever has it for itself holds the gate as well
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """`together` for what is within, `alone` afterwards, whatever became of it."""
        self.together()
        try:
            yield
        finally:
            self.alone()

    def leave(self) -> None:
        """Neither time nor compile any more."""
        fcntl.flock(self._gpu, fcntl.LOCK_UN)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def join(self, pids: set[int]) -> None:
        """Tell the others by which process ids, the driver's, this one uses the GPU."""
        for pid in pids:
            file = (self._folder / f"{_PIDS}{pid}").open("w")
            fcntl.flock(file, fcntl.LOCK_EX)
            self._pids.append(file)

    def pids(self) -> set[int]:
        """What those have told that have joined and live, or did at an earlier call: one that ends is on the GPU for a
        while after its locks are gone."""
        paths = self._folder.glob(f"{_PIDS}*")
        self._seen |= {int(path.name.removeprefix(_PIDS)) for path in paths if _is_held(path)}
        return set(self._seen)


def beside_others(turns: Turns | None) -> contextlib.AbstractContextManager[None]:
    """Turns.shared; nothing where no other process shares the GPU."""
    return contextlib.nullcontext() if turns is None else turns.shared()


def _is_held(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def folder_of(gpu_id: str) -> Path:
    """Where the processes of this user that share the GPU meet."""
    return Path(tempfile.gettempdir()) / f"moe-bench-turns-{os.getuid()}-{gpu_id}"
