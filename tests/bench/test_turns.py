"""Parts of a run that share a GPU: nothing uses it beside one that takes times, and all of them come to an end."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import machine, results
from bench import turns as turns_module
from bench.turns import Turns
from bench.watch import Others
from shared.checks import ArgumentError

ROOT = Path(__file__).parents[2]
PARTS, LAYERS = 4, 3


def test_who_is_alone_is_alone_and_who_compiles_does_so_beside_others(tmp_path: Path) -> None:
    spans: list[tuple[str, int, float, float]] = []

    def part(number: int) -> None:
        turns = Turns(tmp_path)
        turns.alone()
        for _ in range(LAYERS):
            for what, wait, seconds in (("together", turns.together, 0.03), ("alone", turns.alone, 0.01)):
                wait()
                begin = time.monotonic()
                time.sleep(seconds * (1 + number / PARTS))
                spans.append((what, number, begin, time.monotonic()))
        turns.leave()

    threads = [threading.Thread(target=part, args=(number,), daemon=True) for number in range(PARTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(spans) == 2 * LAYERS * PARTS, "some part waits for ever"
    beside = [(a, b) for a, b in itertools.combinations(spans, 2) if max(a[2], b[2]) < min(a[3], b[3])]
    assert not [pair for pair in beside if "alone" in (pair[0][0], pair[1][0])]
    assert len({frozenset((a[1], b[1])) for a, b in beside}) == PARTS * (PARTS - 1) // 2, (
        "every two compile side by side"
    )


def begins_to_wait(call: Callable[[], None]) -> threading.Thread:
    """A thread with a call that does not come back yet."""
    waiting = threading.Thread(target=call, daemon=True)
    waiting.start()
    waiting.join(timeout=0.3)
    assert waiting.is_alive()
    return waiting


def test_a_part_that_ends_leaves_its_turn_and_its_place(tmp_path: Path) -> None:
    """However it ends: a lock is its process's."""
    code = f"import bench.turns, pathlib; turns = bench.turns.Turns(pathlib.Path({str(tmp_path)!r})); "
    code += "turns.alone(); turns.join({7}); print('ready', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    turns = Turns(tmp_path)
    assert turns.pids() == {7}
    waiting = begins_to_wait(turns.together)
    child.kill()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    child.wait()
    assert turns.pids() == {7}, "it may be seen on the GPU for a while"
    assert Turns(tmp_path).pids() == set()


def compile_beside(turns: Turns, other: Turns | None, ends_by: BaseException) -> None:
    with turns.shared():
        if other is not None:
            other.together()
        raise ends_by


def test_a_long_wait_is_told_and_an_interrupt_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(turns_module, "TELL_EVERY", 0.05)
    first, second = Turns(tmp_path), Turns(tmp_path, say=told.append)
    first.alone()
    waiting = begins_to_wait(second.alone)
    assert told
    assert f"process {os.getpid()} took times last; their locks are in {tmp_path}" in told[0]
    first.leave()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    second.leave()
    # Compiling beside another: an interrupt does not wait for that one, an error does.
    with pytest.raises(KeyboardInterrupt):
        compile_beside(second, first, KeyboardInterrupt())
    first.leave()
    with pytest.raises(ValueError, match="wrong"):
        compile_beside(second, None, ValueError("wrong"))
    waiting = begins_to_wait(first.together)  # its times go on alone
    second.leave()
    waiting.join(timeout=10)
    first.leave()


def test_parts_meet_however_the_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "smi", lambda fields: {"uuid": "GPU-1"})
    assert machine.gpu_uuid() == "GPU-1"
    monkeypatch.setattr(machine, "smi", lambda fields: {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert machine.gpu_uuid() == "3"
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(
        ArgumentError, match=r"--take-turns: .*file/turns cannot be written .*; allowed: one user's parts"
    ):
        Turns(file / "turns")


def test_parts_that_share_the_gpu_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes are not told as others; a stranger's is."""
    shown = [{"pid": pid, "name": "python", "mib": 1} for pid in (11, 22, 33)]
    mine, other = Turns(tmp_path), Turns(tmp_path)
    other.join({22})
    device = machine.Machine.__new__(machine.Machine)
    device._read, device._processes, device._turns = (lambda: {}), (lambda *, fresh=False: shown), mine
    device._others = Others(11, [])
    device._others.among(shown[:1])
    assert [process["pid"] for process in device.state()["others"]] == [33]
    device._turns = None
    assert [process["pid"] for process in device.state()["others"]] == [22, 33]


def test_two_parts_rehearsed_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / f"{part}.jsonl" for part in (1, 2)]
    command = [sys.executable, "-m", "pytest", "bench", "-q", "--rehearse", "--rounds=1", "--take-turns", "-k"]
    keyword = "test_kernel_time and not captured and fp16/column/torch-triton"
    parts = [
        subprocess.Popen(
            [*command, keyword, f"--results={path}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
        for path in paths
    ]  # fmt: skip
    said = [part.communicate(timeout=300)[0].decode() for part in parts]
    assert [part.returncode for part in parts] == [0, 0], said
    for path in paths:
        found = results.compact(results.read(path))
        assert found["rows"]
        assert found["run"]["take_turns"] is True
