"""Parts of a run that share one GPU: they compile side by side, and each takes its times while the others stand still.

Much of a run's time goes to compiling, a part of it in Python, of which a process runs one thread at a time. So the
parts of a set (`--shard`), started together with --take-turns, compile several layers at once. What runs on the GPU
beside a timed kernel would spoil its time, and compiling ends with a run of each kernel: a part takes times only while
no other does, nor runs what it has compiled. What needs the CPU alone goes on meanwhile: `tune` asks a compiler which
tiles spill.

Two files, locked by their processes, say whose turn it is. A lock ends with its process, and with those that it forked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from shared.checks import ArgumentError

_PIDS, _HOLDER = "pid-", "holder"
TELL_EVERY = 60.0
"""Seconds of waiting between two lines about it: parts compile for less than that at a time."""
_TRY_EVERY = 0.02


class Turns:
    """One process among those that share a GPU. It is nobody's turn until a first call of `alone` or `together`.

    The gate is what keeps a part that has been timed, and would compile its next layer, from passing those that wait to
    be timed: times are taken one part after the other, then all parts compile.

    folder: where the processes meet; ArgumentError where it cannot be used. say: told where one waits for long.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = print) -> None:
        self._folder, self._say = folder, say
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._gate, self._gpu = ((folder / name).open("a") for name in ("gate", "gpu"))
        except OSError as error:
            allowed = "one user's parts, with one TMPDIR"
            raise ArgumentError(
                f"--take-turns: {folder} cannot be written ({error.strerror}); allowed: {allowed}"
            ) from error
        self._pids: list[IO[str]] = []
        self._seen: set[int] = set()

    def alone(self) -> None:
        """Wait until no other process uses the GPU, and keep all others off it."""
        self._lock(self._gate, fcntl.LOCK_SH)  # kept: who waits to be timed, too, holds up those that would compile
        self._lock(self._gpu, fcntl.LOCK_EX)
        (self._folder / _HOLDER).write_text(str(os.getpid()))

    def together(self) -> None:
        """Use the GPU beside others; wait while one takes times or waits to."""
        self.leave()
        self._lock(self._gate, fcntl.LOCK_EX)
        self._lock(self._gpu, fcntl.LOCK_SH)  # at once: whoever has it for itself holds the gate as well
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """`together` for what is within, `alone` afterwards, also where that failed; an interrupt waits for nobody."""
        self.together()
        try:
            yield
        except KeyboardInterrupt:
            self.leave()
            raise
        except BaseException:
            self.alone()
            raise
        self.alone()

    def leave(self) -> None:
        """Neither time nor compile any more."""
        fcntl.flock(self._gpu, fcntl.LOCK_UN)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def _lock(self, file: IO[str], how: int) -> None:
        """Take the lock, by tries, so that a long wait can be told of and interrupted."""
        begin = told = time.monotonic()
        while True:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                now = time.monotonic()
                if now - told > TELL_EVERY:
                    self._say(f"waiting for other parts on this GPU for {now - begin:.0f} s: {self._whose_turn()}")
                    told = now
                time.sleep(_TRY_EVERY)
            else:
                return

    def _whose_turn(self) -> str:
        """For a reader who wonders."""
        holder = self._folder / _HOLDER
        pid = holder.read_text().strip() if holder.exists() else "unknown"
        return f"process {pid} took times last; their locks are in {self._folder}"

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


@contextlib.contextmanager
def place(wanted: bool, gpu: Callable[[], str], say: Callable[[str], None] = print) -> Iterator[Turns | None]:
    """This process's place among those that share a GPU, its alone at first, or None. gpu: tells its UUID."""
    if not wanted:
        yield None
        return
    turns = Turns(folder_of(gpu()), say)
    turns.alone()
    try:
        yield turns
    finally:
        turns.leave()


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


def folder_of(gpu: str) -> Path:
    """Where the processes of this user that share the GPU meet; gpu: its UUID, which is the same for all of them."""
    return Path(tempfile.gettempdir()) / f"moe-bench-turns-{os.getuid()}-{gpu}"
