"""Of a library's ways the fastest is measured, by the clock of the GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bench import cases
from bench.clock import KernelRecord
from bench.contenders import Contender, fastest_way
from bench.machine import Rehearsal


def taking(milliseconds: float) -> Any:
    def call(value: int) -> int:
        time.sleep(milliseconds / 1000)
        return value

    return call


def contender(call: Any, *arguments: int, about: str | None = None) -> Contender:
    row = cases.rows("rehearsal")[0]
    return Contender(row, "torch", call, arguments, lambda y: y, None, None, None, about=about)


@pytest.mark.parametrize("about", [None, "a library 1.0"])
def test_the_fastest_way_is_taken_and_named(about: str | None) -> None:
    ways = {"slow": taking(6), "fast": taking(1), "middling": taking(3)}
    found = fastest_way(contender(ways["slow"], 7, about=about), ways, Rehearsal())
    assert found.call is ways["fast"]
    assert found.about == ("" if about is None else f"{about}: ") + "fast, the fastest of 3"


def test_time_on_the_host_does_not_count() -> None:
    """As it does where a call takes the host longer than the GPU."""

    class Clock:
        name = "of the test"

        def __init__(self) -> None:
            self.ran: list[KernelRecord] = []

        def records(self) -> list[KernelRecord]:
            found, self.ran = self.ran, []
            return found

        def reset(self) -> None:
            self.ran = []

    class Machine(Rehearsal):
        def __init__(self) -> None:
            self.clock: Any = Clock()

        def synchronize(self) -> None:
            pass

    device = Machine()

    def quick() -> None:
        device.clock.ran = [KernelRecord("kernel", 9e-6)]

    def slow_on_the_host() -> None:
        time.sleep(0.003)
        device.clock.ran = [KernelRecord("kernel", 2e-6)]

    ways = {"quick": quick, "slow on the host": slow_on_the_host}
    assert fastest_way(contender(quick), ways, device).call is slow_on_the_host


@pytest.mark.parametrize(("reduction", "counted"), [("two-pass", "moe_gemm_mosaic"), ("atomic", None)])
def test_a_kernel_that_adds_parts_of_k_counts(reduction: str, counted: str | None) -> None:
    """By its name, where all that a split K needs has the GEMM kernel's; else all kernels of the call count."""
    import jax

    from bench import data
    from bench.contenders import prepare
    from shared.config import Config

    row = next(row for row in cases.rows("rehearsal") if (row.contender, row.dtype) == ("pallas-mosaic", "fp16"))
    built = data.build(row.case, row.dtype, "channel", device="cpu")
    config = Config(block_m=16, block_n=64, block_k=32, num_stages=2, split_k=2, reduction=reduction)
    found = prepare(row, built, Rehearsal(), config=config)
    assert found.kernel_name == counted
    names = str(jax.make_jaxpr(found.call)(*found.arguments))
    assert ("name=moe_gemm_mosaic_reduce" in names) == (reduction == "two-pass")
