"""Of a library's ways the fastest is measured, by the clock of the GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bench.clock import KernelRecord
from bench.contenders import fastest_way
from bench.machine import Rehearsal
from bench.sorting import Ready


def taking(milliseconds: float) -> Any:
    def call(value: int) -> int:
        time.sleep(milliseconds / 1000)
        return value

    return call


@pytest.mark.parametrize("about", [None, "a library 1.0"])
def test_the_fastest_way_is_taken_and_named(about: str | None) -> None:
    ways = {"slow": taking(6), "fast": taking(1), "middling": taking(3)}
    ready = fastest_way(Ready(ways["slow"], (7,), about=about, ways=ways), "torch", Rehearsal())
    assert ready.call is ways["fast"]
    assert ready.about == ("" if about is None else f"{about}: ") + "fast, the fastest of 3"


def test_time_on_the_host_does_not_count() -> None:
    """As it does where a call takes the host longer than the GPU."""

    class Clock:
        kernels = iter([9e-6] * 5 + [2e-6] * 5)

        def records(self) -> list[KernelRecord]:
            return [KernelRecord("kernel", next(self.kernels))] if device.called.pop("now", False) else []

    class Machine(Rehearsal):
        def __init__(self) -> None:
            self.clock: Any = Clock()
            self.called: dict[str, bool] = {}

        def synchronize(self) -> None:
            pass

    device = Machine()

    def quick() -> None:
        device.called["now"] = True

    def slow_on_the_host() -> None:
        time.sleep(0.003)
        device.called["now"] = True

    ways = {"quick": quick, "slow on the host": slow_on_the_host}
    assert fastest_way(Ready(quick, (), ways=ways), "torch", device).call is slow_on_the_host
