"""Where a call runs: on the caller's stream, on its arrays' device, from several threads at once.

Streams and second devices need GPUs. What a CPU can show is shown on it: devices that are only described, two CPU
devices of JAX in a process of their own, and threads in the interpreters.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import backends
from backends import ArgumentError, BackendUnavailable, arrays
from shared import routing
from shared.problem import Problem
from tests.cases import SMALL
from tests.where import HAS_GPU, INTERPRET, NUMERICS

ROOT = Path(__file__).parents[1]
EVERY_BACKEND = pytest.mark.parametrize("backend", backends.BACKENDS)
EVERY_KIND = pytest.mark.parametrize("kind", ["torch", "jax"])
GPUS = torch.cuda.device_count()
TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason=f"needs two NVIDIA GPUs; PyTorch sees {GPUS}")

SLEEP = 400_000_000
"""Clock cycles, 0.2 s: far longer than a call and its launches, so that whoever does not wait for it is too early."""


def drawn(device: str, *, n: int = 64, seed: int = 0) -> dict[str, Any]:
    """fp16 arguments as torch tensors, with one -1 slot."""
    generator = torch.Generator().manual_seed(seed)
    ids = routing.uniform(6, 4, 2, seed=seed)
    ids[0, 1] = -1
    x, w = torch.randn(6, 64, generator=generator), torch.randn(4, n, 64, generator=generator)
    return {"x": x.half().to(device), "w": w.half().to(device), "topk_ids": torch.from_numpy(ids).to(device)}


def as_kind(call: dict[str, Any], kind: str) -> dict[str, Any]:
    return {name: arrays.to_framework(value, kind, on_gpu=HAS_GPU) for name, value in call.items()}


def reference(x: Any, w: Any, topk_ids: Any) -> np.ndarray:
    every = torch.einsum("tk,enk->ten", x.double().cpu(), w.double().cpu())
    ids = topk_ids.long().cpu()
    y = every.gather(1, ids.clamp(min=0)[:, :, None].expand(-1, -1, w.shape[1]))
    return torch.where(ids[:, :, None] < 0, 0, y).numpy()


def assert_right(y: Any, expected: np.ndarray) -> None:
    y = arrays.to_host(y).astype(np.float64)
    assert np.linalg.norm(y - expected) <= 2e-3 * np.linalg.norm(expected)  # float16 rounding is 2e-4


# Streams


@pytest.mark.gpu
@EVERY_BACKEND
def test_runs_on_the_callers_stream(backend: str) -> None:
    """On a side stream that is kept busy first: inputs are written, the call made, its result read, inputs overwritten.

    A launch on another stream would read x and w of before; a result handed back too early would be copied too early; a
    call that its stream does not wait for would see what is written afterwards.
    """
    call = drawn("cuda")
    before = {name: value.clone() for name, value in call.items()}
    new_x, new_w = torch.randn_like(call["x"].float()).half(), torch.randn_like(call["w"].float()).half()
    backends.moe_gemm(**call, backend=backend, config=SMALL)  # compiles
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        call["x"].copy_(new_x)
        call["w"].copy_(new_w)
        y = backends.moe_gemm(**call, backend=backend, config=SMALL)
        copied = y.clone()
        call["x"].zero_()
        call["w"].zero_()
    side.synchronize()
    assert_right(copied, reference(new_x, new_w, before["topk_ids"]))
    assert_right(y, reference(new_x, new_w, before["topk_ids"]))


@pytest.mark.gpu
@EVERY_BACKEND
def test_does_not_wait_for_other_streams(backend: str) -> None:
    """A torch call returns its result while another stream still sleeps. JAX's backends have streams of their own."""
    call = drawn("cuda")
    expected = reference(**call)
    busy, side = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles, and takes what memory the call below needs
        backends.moe_gemm(**call, backend=backend, config=SMALL)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(10 * SLEEP)
        slept = torch.cuda.Event()
        slept.record()
    with torch.cuda.stream(side):
        y = backends.moe_gemm(**call, backend=backend, config=SMALL)
    side.synchronize()
    finished_first = not slept.query()
    torch.cuda.synchronize()
    assert_right(y, expected)
    assert finished_first


# Devices


@pytest.mark.gpu
@TWO_GPUS
@EVERY_KIND
@EVERY_BACKEND
def test_runs_where_its_arrays_are(backend: str, kind: str) -> None:
    """On the second GPU while the first one is current: right, there, and the first one is still current."""
    torch.cuda.set_device(0)
    call = drawn("cuda:1")
    expected = reference(**call)
    given = as_kind(call, kind)
    for mode_call in (given, given):  # compiled, then again
        y = backends.moe_gemm(**mode_call, backend=backend, config=SMALL)
        assert_right(y, expected)
    if kind == "torch":
        assert y.device == torch.device("cuda:1")
    else:
        assert y.devices() == given["x"].devices()
        assert next(iter(y.devices())).local_hardware_id == 1
    assert torch.cuda.current_device() == 0
    if kind == backends.load(backend).FRAMEWORK == "jax":
        import jax

        y = jax.jit(lambda x, w, ids: backends.moe_gemm(x, w, ids, backend=backend, config=SMALL))(*given.values())
        assert_right(y, expected)
        assert y.devices() == given["x"].devices()


@pytest.mark.gpu
@TWO_GPUS
@EVERY_BACKEND
def test_runs_on_the_callers_stream_of_the_second_gpu(backend: str) -> None:
    torch.cuda.set_device(0)
    call = drawn("cuda:1")
    new_w = torch.randn_like(call["w"].float()).half()
    backends.moe_gemm(**call, backend=backend, config=SMALL)
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream(device=1)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        call["w"].copy_(new_w)
    torch.cuda.set_device(1)
    with torch.cuda.stream(side):
        torch.cuda.set_device(0)  # the stream of device 1 stays what it is
        copied = backends.moe_gemm(**call, backend=backend, config=SMALL).clone()
    torch.cuda.set_device(0)
    side.synchronize()
    torch.cuda.synchronize(1)
    assert_right(copied, reference(call["x"], new_w, call["topk_ids"]))


@pytest.mark.gpu
@TWO_GPUS
@EVERY_KIND
@EVERY_BACKEND
@pytest.mark.parametrize("odd", ["w", "topk_ids"])
def test_two_gpus_in_one_call_are_refused(odd: str, backend: str, kind: str) -> None:
    there = as_kind(drawn("cuda:1"), kind)
    call = dict(as_kind(drawn("cuda:0"), kind), **{odd: there[odd]})
    with pytest.raises(ArgumentError, match=r"^arguments on different devices: got x on cuda:0, .*on cuda:1"):
        backends.moe_gemm(**call, backend=backend)


def fake_on(mode: Any, device: str, call: dict[str, Any]) -> dict[str, Any]:
    """Tensors that say they are on `device` and hold no data; mode: a FakeTensorMode."""
    with mode:
        return {name: torch.empty(value.shape, dtype=value.dtype, device=device) for name, value in call.items()}


def test_devices_are_compared_where_nothing_runs() -> None:
    """Two GPUs that this machine need not have: the operator's shape rule names both, in torch.compile's words too."""
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode()
    first, second = fake_on(mode, "cuda:0", drawn("cpu")), fake_on(mode, "cuda:1", drawn("cpu"))
    assert backends.moe_gemm(**second).device == torch.device("cuda:1")
    with pytest.raises(ArgumentError, match=r"^arguments on different devices: got x on cuda:0, w on cuda:1, topk_ids"):
        backends.moe_gemm(**dict(first, w=second["w"]))
    call = drawn("cpu")
    with pytest.raises(Exception, match=r"arguments on different devices: got x on cpu, w on meta, topk_ids on cpu"):
        torch.compile(backends.moe_gemm, fullgraph=True, backend="eager")(**dict(call, w=call["w"].to("meta")))


def jax_array_on(**device: Any) -> Any:
    import jax

    array = mock.Mock()
    array.__class__ = jax.Array  # for isinstance
    array.devices.return_value = [SimpleNamespace(**device)]
    array.sharding.device_set = array.devices.return_value
    return array


def test_configs_and_grids_are_of_the_arrays_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of one machine may differ: the tuned config, the limits and the SM count are those of x's."""
    from torch._subclasses import FakeTensorMode

    from backends import _gpu_name, pallas_mosaic

    on_second = fake_on(FakeTensorMode(), "cuda:1", drawn("cpu"))["x"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {getattr(device, 'index', 'current')}")
    assert _gpu_name(arrays.signature("x", on_second)) == "GPU 1"
    of_jax = arrays.signature("x", jax_array_on(platform="gpu", device_kind="GPU of JAX"))
    assert _gpu_name(of_jax) == "GPU of JAX"

    hopper = jax_array_on(platform="gpu", device_kind="small Hopper", core_count=78, compute_capability="9.0")
    assert pallas_mosaic._sms(hopper) == 78
    other = jax_array_on(platform="gpu", device_kind="NVIDIA A100", core_count=108, compute_capability="8.0")
    problem = Problem.of("fp16", tokens=6, experts=4, n=64, k=64, top_k=2)
    with pytest.raises(
        BackendUnavailable, match=r"pallas-mosaic cannot run on .*NVIDIA A100 has compute capability 8.0"
    ):
        pallas_mosaic.moe_gemm(other, None, None, None, None, problem=problem, order="row", config=SMALL)  # type: ignore[arg-type]

    made_current = []
    monkeypatch.setattr(
        torch.cuda, "device_of", lambda tensor: made_current.append(tensor.device.index) or mock.MagicMock()
    )
    with arrays.current_device(on_second):
        assert made_current == [1]


TWO_CPU_DEVICES = """
import jax, numpy as np, backends
from tests.cases import SMALL
from tests.test_streams import drawn, reference, assert_right
first, second = jax.devices()
call = drawn("cpu")
expected = reference(**call)
there = {name: jax.device_put(value.numpy(), second) for name, value in call.items()}
here = {name: jax.device_put(value.numpy(), first) for name, value in call.items()}
try:
    backends.moe_gemm(**dict(there, w=here["w"]), backend="pallas-triton", interpret=True)
except backends.ArgumentError as error:
    print(error)
for backend in ("jax-triton", "pallas-triton"):
    def f(x, w, topk_ids):
        return backends.moe_gemm(x, w, topk_ids, backend=backend, interpret=True, config=SMALL)
    y = f(**there) if backend == "jax-triton" else jax.jit(f)(**there)
    assert_right(y, expected)
    print(backend, *y.devices())
"""


@pytest.mark.interpret
def test_jax_arrays_stay_on_their_device() -> None:
    """A process with two CPU devices: arrays of the second one give a result there; arrays of both are refused."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", TWO_CPU_DEVICES], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    error, *lines = result.stdout.splitlines()
    assert error.startswith("arguments on different devices: got x on cpu:1, w on cpu:0, topk_ids on cpu:1")
    assert [line.split()[1] for line in lines] == ["cpu:1"] * 2


# Threads


def together(*work: Callable[[], Any]) -> list[Any]:
    """Results of functions that are called at the same moment, each in a thread of its own."""
    start = threading.Barrier(len(work))
    results: list[Any] = [None] * len(work)

    def run(i: int) -> None:
        start.wait(60)
        try:
            results[i] = work[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@NUMERICS
@EVERY_BACKEND
def test_threads_at_once(backend: str) -> None:
    """Three threads, two shapes, first calls (which compile) and later ones: the bits of calls one after another.

    N is a number of this test's own for each backend, so that nothing has compiled these shapes before.
    """
    kind = backends.load(backend).FRAMEWORK
    n = 72 + 16 * backends.BACKENDS.index(backend)
    calls = [as_kind(drawn("cuda" if HAS_GPU else "cpu", n=n + 8 * (i % 2), seed=i), kind) for i in range(3)]
    runs = 20 if HAS_GPU else 2

    def work(call: dict[str, Any]) -> list[bytes]:
        door = functools.partial(backends.moe_gemm, **call, backend=backend, config=SMALL, interpret=INTERPRET)
        return [arrays.to_host(door()).tobytes() for _ in range(runs)]

    at_once = together(*(lambda call=call: work(call) for call in calls))
    alone = [work(call)[0] for call in calls]
    assert len(set(alone)) == 3
    for i, results in enumerate(at_once):
        assert set(results) == {alone[i]}, f"thread {i}"
    for call, y in zip(calls, alone, strict=True):
        tensors = {name: torch.from_numpy(arrays.to_host(value).copy()) for name, value in call.items()}
        assert_right(np.frombuffer(y, np.float16).reshape(6, 2, -1), reference(**tensors))


@pytest.mark.gpu
@TWO_GPUS
@EVERY_BACKEND
def test_threads_on_two_gpus_at_once(backend: str) -> None:
    calls = [drawn(f"cuda:{i}", n=448, seed=i) for i in range(2)]

    def work(call: dict[str, Any]) -> list[Any]:
        return [backends.moe_gemm(**call, backend=backend, config=SMALL) for _ in range(20)]

    for call, results in zip(calls, together(*(lambda call=call: work(call) for call in calls)), strict=True):
        for y in results:
            assert y.device == call["x"].device
            assert_right(y, reference(**call))


def test_the_current_device_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX makes the device of its arrays current for the thread, and PyTorch would go on there."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device))
    call = {name: value.numpy() for name, value in drawn("cpu").items()}
    module = backends.load("pallas-triton")
    launch = module.moe_gemm

    def as_jax_does(*arguments: Any, **options: Any) -> Any:
        torch.cuda.set_device(1)
        return launch(*arguments, **options)

    monkeypatch.setattr(module, "moe_gemm", as_jax_does)
    backends.moe_gemm(**call, backend="pallas-triton", config=SMALL, interpret=True)
    assert current == [0]
