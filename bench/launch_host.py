"""What the host's clock times of a call, for `bench.launch_cost`: until its result is there, and its parts."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from bench.launch_step import Layer

SAMPLES = 15
IN_A_ROW = 32
"""Calls in a row before the device is waited for: few enough that their launches fit the driver's queue."""
ROUNDS = 5


def latency(contender: Any, device: Any, call: Callable[[], Any], *, flush: bool = True) -> float:
    """µs from a call to its result, the device waited for: median."""
    from bench.contenders import wait

    samples = []
    for _ in range(1 if device.interpret else SAMPLES):
        if flush:
            device.flush()
        begun = time.perf_counter()
        wait(call(), contender.framework, device)
        samples.append((time.perf_counter() - begun) * 1e6)
    return rounded(statistics.median(samples))


def in_a_row(contender: Any, layers: Sequence[Layer], device: Any) -> tuple[float, float]:
    """(µs a call until the host is free, µs a call until the last result is there) of IN_A_ROW calls: medians."""
    from bench.contenders import wait

    calls = 1 if device.interpret else IN_A_ROW
    issued, done = [], []
    for _ in range(1 if device.interpret else ROUNDS):
        wait(None, contender.framework, device)
        begun = time.perf_counter()
        for i in range(calls):
            y = contender.call(*layers[i % len(layers)].arguments)
        issued.append((time.perf_counter() - begun) / calls * 1e6)
        wait(y, contender.framework, device)
        done.append((time.perf_counter() - begun) / calls * 1e6)
    return rounded(statistics.median(issued)), rounded(statistics.median(done))


def parts(backend: str, contender: Any, device: Any) -> dict[str, float]:
    """µs of the parts of an eager call that run on the host, each timed alone in a loop.

    door:     `moe_gemm` with a backend that does nothing: checks, look-ups, kind of the arrays
    choice:   the search for the best known config, which a signature's first call makes
    backend:  the backend's own part: allocation and launches (JAX: its jitted function)
    allocate, launch: of torch-triton's part, the two allocations, and all launches of a call by kept kernels
    """
    import backends
    from bench.contenders import wait

    module = backends.load(backend)
    with _backend_that_does_nothing(module) as seen:
        contender.eager()
        (arrays, options) = seen[0]
        us = {"door": _loop(contender.eager, device)}
    problem = options["problem"]
    us["choice"] = _loop(lambda: backends.choose_config(problem, backend=backend), device)
    repeat: Any = None
    if module.FRAMEWORK == "torch":
        contender.eager()
        chosen = {name: options[name] for name in ("problem", "order", "config")}
        repeat = module.again(*(*arrays, options["popularity"]), **chosen)
    if repeat is None:
        us["backend"] = _loop(lambda: module.moe_gemm(*arrays, **options), device)
    else:
        us["backend"] = _loop(lambda: repeat(*arrays, options["popularity"]), device)
        us |= _torch_triton_parts(repeat.args[0], arrays, device)
    wait(None, contender.framework, device)
    return {name: rounded(value) for name, value in us.items()}


@contextlib.contextmanager
def _backend_that_does_nothing(module: Any) -> Iterator[list[tuple[Any, Any]]]:
    """In place of a backend. Gives the list of the (arrays, options) that its `moe_gemm` is called with.

    The door knows no call from before, and none of these afterwards.
    """
    import backends

    seen: list[tuple[Any, Any]] = []

    def nothing(*arrays: Any, **options: Any) -> Any:
        seen.append((arrays, options))
        return arrays[0]

    instead: dict[str, Any] = {"moe_gemm": nothing}
    if module.FRAMEWORK == "torch":
        instead["again"] = lambda *_, **__: lambda *arrays: arrays[0]
    with mock.patch.multiple(module, **instead), mock.patch.object(backends, "_repeats", {}):
        yield seen


def _torch_triton_parts(work: Any, arrays: tuple[Any, ...], device: Any) -> dict[str, float]:
    """work: what the calls of these arrays share (backends/torch_triton.py)."""
    kept = work.kept

    def allocate() -> tuple[Any, Any]:
        return kept.empty(*work.together), kept.empty(*work.y)

    together, y = allocate()
    given = [0 if array is None else array.data_ptr() for array in (*arrays, None)]
    addresses = (*given, *(together.data_ptr() + offset for offset in work.offsets), y.data_ptr())
    launch = _loop(lambda: kept.launch(addresses, arrays[0].device.index), device)
    return {"allocate": _loop(allocate, device), "launch": launch}


def _loop(part: Callable[[], Any], device: Any) -> float:
    """µs of one of IN_A_ROW runs of `part` with an idle device before them: median."""
    samples = []
    for _ in range(1 if device.interpret else ROUNDS):
        device.synchronize()
        begun = time.perf_counter()
        for _ in range(1 if device.interpret else IN_A_ROW):
            part()
        samples.append((time.perf_counter() - begun) * 1e6 / (1 if device.interpret else IN_A_ROW))
    device.synchronize()
    return statistics.median(samples)


def rounded(value: float) -> float:
    """µs, to two places."""
    return round(value, 2)
