"""The one door: same kind out as in, no copies where none are needed, traceable, light to import, in layers."""

from __future__ import annotations

import ast
import importlib.machinery
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import backends
from backends import arrays
from shared import models
from shared.checks import DtypeError
from shared.config import Config
from shared.orders import ORDERS
from shared.problem import Problem
from shared.reference import error_bound, moe_gemm_reference, relative_error
from tests.cases import SMALL
from tests.kinds import KINDS, E, N, T, arguments, convert, numpy_arguments
from tests.where import HAS_GPU, NUMERICS

ROOT = Path(__file__).parents[1]
JAX_BACKENDS = [name for name in backends.BACKENDS if backends.load(name).FRAMEWORK == "jax"]


def expected(dtype: str, mode: str, layout: str = "channel") -> tuple[Problem, np.ndarray]:
    given = numpy_arguments(dtype, layout)
    x, w, ids = given["x"], given["w"], given["topk_ids"]
    assert x is not None
    assert w is not None
    assert ids is not None
    problem = Problem.of(
        mode, scale_layout=layout, tokens=T, experts=E, n=N, k=w.shape[2], top_k=ids.shape[1], routing_weight=True
    )  # type: ignore[arg-type]
    reference = moe_gemm_reference(
        x, w, ids, problem=problem, w_scale=given["w_scale"], topk_weight=given["topk_weight"]
    )
    return problem, reference


def on_gpu(call: dict[str, Any], kind: str) -> dict[str, Any]:
    """torch and JAX arrays moved to the GPU, if there is one; NumPy arrays are moved by the door."""
    if not HAS_GPU or kind == "numpy":
        return call
    if kind == "torch":
        return {name: value if value is None else value.cuda() for name, value in call.items()}
    import jax

    return {
        name: value if value is None else jax.device_put(value, jax.devices("gpu")[0]) for name, value in call.items()
    }


@NUMERICS
@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "mode", "layout"), [("bf16", None, "channel"), ("fp8", "w8a8", "block")])
def test_kind_out_is_kind_in(kind: str, dtype: str, mode: str | None, layout: str, backend: str) -> None:
    call = on_gpu(arguments(kind, dtype, layout), kind)
    y = backends.moe_gemm(**call, mode=mode, backend=backend, interpret=not HAS_GPU)
    assert arrays.kind_of("y", y) == kind
    assert y.dtype == call["x"].dtype
    if kind == "torch":
        assert y.device == call["x"].device
    if kind == "jax":
        assert y.devices() == call["x"].devices()
    problem, reference = expected(dtype, "bf16" if mode is None else "fp8-w8a8", layout)
    assert relative_error(arrays.to_host(y), reference) <= error_bound(problem)
    assert np.count_nonzero(arrays.to_host(y)[1, 1]) == 0  # the -1 slot


@NUMERICS
@pytest.mark.parametrize("order", ORDERS)
def test_door_hands_everything_on(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """order, config, mode, scales, routing weight and popularity reach the backend as given."""
    module = backends.load("torch-triton")
    seen: dict[str, Any] = {}
    original = module.moe_gemm

    def spy(*native: Any, **options: Any) -> Any:
        seen.update(options, native=native)
        return original(*native, **options)

    monkeypatch.setattr(module, "moe_gemm", spy)
    monkeypatch.setattr(backends, "_repeats", {})  # a call from before would not come by the spy again
    call = on_gpu(arguments("torch", "fp8", "block"), "torch")
    if order == "popular":
        call["popularity"] = on_gpu({"": convert(np.array([3, 0, 7, 1], np.int32), "torch")}, "torch")[""]
    config = SMALL.replace(group_m=3, split_k=2)
    backends.moe_gemm(**call, mode="w8a16", order=order, config=config, interpret=not HAS_GPU)
    assert seen["order"] == order
    assert seen["config"] is config
    assert (seen["problem"].dtype, seen["problem"].scale_layout, seen["problem"].routing_weight) == (
        "fp8-w8a16",
        "block",
        True,
    )
    assert seen["popularity"] is call.get("popularity")
    for passed, name in zip(seen["native"], ("x", "w", "topk_ids", "w_scale", "topk_weight"), strict=True):
        assert passed is call[name]


@pytest.mark.parametrize(("dtype", "mode"), [("fp8", None), ("fp8", "w8a8")])
def test_fp8_means_w8a16_unless_asked(dtype: str, mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module = backends.load("torch-triton")
    monkeypatch.setattr(module, "moe_gemm", lambda *a, problem, **k: seen.append(problem.dtype) or a[0])
    backends.moe_gemm(**arguments("torch", dtype), mode=mode, interpret=True)
    assert seen == ["fp8-w8a16" if mode is None else "fp8-w8a8"]


# No copies


def pointer(array: Any) -> int:
    return array.data_ptr() if hasattr(array, "data_ptr") else array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8"])
@pytest.mark.parametrize(
    ("kind", "framework"), [("torch", "jax"), ("jax", "torch"), ("torch", "torch"), ("jax", "jax")]
)
def test_frameworks_share_memory(kind: str, framework: str, dtype: str) -> None:
    """DLPack: the weights are at the same address after the crossing. JAX takes buffers aligned to 64 bytes."""
    w = arguments(kind, dtype)["w"]
    if kind == "torch" and pointer(w) % 64:
        import torch

        room = torch.empty(w.numel() * w.element_size() + 64, dtype=torch.uint8)
        start = -room.data_ptr() % 64
        aligned = room[start : start + w.numel() * w.element_size()].view(w.dtype).view(w.shape)
        aligned.view(torch.uint8).copy_(w.view(torch.uint8))
        w = aligned
    there = arrays.to_framework(w, framework, on_gpu=False)
    assert pointer(there) == pointer(w)
    back = arrays.from_framework(there, kind)
    assert pointer(back) == pointer(w)
    assert arrays.to_host(back).tobytes() == arrays.to_host(w).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8"])
@pytest.mark.parametrize(("kind", "framework"), [("torch", "jax"), ("jax", "torch")])
def test_frameworks_share_gpu_memory(kind: str, framework: str, dtype: str) -> None:
    w = on_gpu(arguments(kind, dtype), kind)["w"]
    assert pointer(arrays.to_framework(w, framework, on_gpu=True)) == pointer(w)


def test_numpy_shares_cpu_memory_with_torch() -> None:
    for dtype in ("fp16", "bf16", "fp8"):
        w = numpy_arguments(dtype)["w"]
        assert w is not None
        tensor = arrays.numpy_to_torch(w)
        assert tensor.data_ptr() == w.ctypes.data
        assert arrays.torch_to_numpy(tensor).ctypes.data == w.ctypes.data
        assert arrays.torch_to_numpy(tensor).dtype == w.dtype


# Tracing


@NUMERICS
@pytest.mark.parametrize("backend", JAX_BACKENDS)
@pytest.mark.parametrize(("dtype", "mode"), [("fp16", None), ("fp8", "w8a8")])
def test_traceable_by_jit(backend: str, dtype: str, mode: str | None) -> None:
    """One trace serves all routings: planning has static shapes and reads nothing on the host."""
    import jax

    traces = []

    @jax.jit
    def call(x: Any, w: Any, topk_ids: Any, w_scale: Any, topk_weight: Any) -> Any:
        traces.append(x.shape)
        return backends.moe_gemm(
            x, w, topk_ids, w_scale=w_scale, topk_weight=topk_weight, mode=mode, backend=backend, config=SMALL,
            interpret=not HAS_GPU,
        )  # fmt: skip

    given = on_gpu(arguments("jax", dtype), "jax")
    problem, reference = expected(dtype, "fp16" if mode is None else "fp8-w8a8")
    assert relative_error(np.asarray(call(**given)), reference) <= error_bound(problem)
    # everything to one expert, with the same compiled program
    other = dict(given, topk_ids=jax.numpy.full_like(given["topk_ids"], 1))
    host = {name: None if value is None else np.asarray(value) for name, value in other.items()}
    reference = moe_gemm_reference(
        host["x"], host["w"], host["topk_ids"], problem=problem, w_scale=host["w_scale"],
        topk_weight=host["topk_weight"],
    )  # fmt: skip
    assert relative_error(np.asarray(call(**other)), reference) <= error_bound(problem)
    assert len(traces) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "w8a8"])
def test_capturable_in_a_cuda_graph(mode: str | None) -> None:
    """Captured with every token on expert 0, replayed with other routings: equal to an eager call, bit for bit."""
    import torch

    call = on_gpu(arguments("torch", "fp16" if mode is None else "fp8"), "torch")
    static_ids = torch.zeros_like(call["topk_ids"])
    captured = dict(call, topk_ids=static_ids)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backends.moe_gemm(**captured, mode=mode)  # compile first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = backends.moe_gemm(**captured, mode=mode)
    for ids in (call["topk_ids"], call["topk_ids"].flip(0), torch.full_like(static_ids, -1), static_ids.clone()):
        static_ids.copy_(ids)
        graph.replay()
        torch.cuda.synchronize()
        eager = backends.moe_gemm(**dict(call, topk_ids=ids.clone()), mode=mode)
        assert torch.equal(y, eager)


# Import and layers


def imported_by(statement: str) -> set[str]:
    """Top-level modules in sys.modules after a statement, in a fresh interpreter."""
    code = f"{statement}\nimport sys; print('modules:', *sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(result.stdout.split("modules:")[1].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import backends",
        "import backends; backends.BACKENDS; backends.Config(); backends.ArgumentError",
        "import shared.problem, shared.models, shared.routing, shared.planning, shared.orders, shared.fp8, "
        "shared.reference, shared.config, shared.checks, shared.gpus",
    ],
)
def test_importing_imports_no_framework(statement: str) -> None:
    assert not imported_by(statement) & {"torch", "jax", "jaxlib", "triton", "jax_triton"}


SLOW_IMPORT = """
import importlib.abc, importlib.machinery, sys, threading
import torch
import backends

began, go_on = threading.Event(), threading.Event()

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "backends.torch_op":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module
        def exec_module(module):
            began.set()
            assert go_on.wait(60)  # in sys.modules by now, with no name of its own
            run(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Slow())
said = []

def call():
    x, w = torch.ones(1, 32, dtype=torch.float16), torch.ones(1, 16, 32, dtype=torch.float16)
    try:
        backends.moe_gemm(x, w, torch.zeros(1, 1, dtype=torch.int32))
    except Exception as error:
        said.append(type(error).__name__)

first, second = threading.Thread(target=call), threading.Thread(target=call)
first.start()
assert began.wait(60)
second.start()
second.join(1)
go_on.set()
first.join(60)
second.join(60)
print(*said)
"""


def test_a_call_waits_for_another_threads_import() -> None:
    """Tensors on the CPU: both calls are refused in the door's own words, and neither meets a module half imported."""
    result = subprocess.run([sys.executable, "-c", SLOW_IMPORT], cwd=ROOT, capture_output=True, text=True)
    refused = "ArgumentError" if HAS_GPU else "BackendUnavailable"
    assert result.stdout.split() == [refused, refused], result.stderr


def test_a_framework_that_is_being_imported_has_no_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    half = types.ModuleType("jax")
    half.__spec__ = importlib.machinery.ModuleSpec("jax", None)
    half.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", half)
    assert arrays.imported("jax") is None
    assert arrays.kind_of("x", torch.ones(1)) == "torch"
    with pytest.raises(DtypeError, match="x: got list"):
        arrays.kind_of("x", [1])


def test_torch_calls_do_not_import_jax() -> None:
    statement = (
        "import numpy as np, backends\n"
        "x, w, ids = np.ones((1, 32), np.float16), np.ones((1, 64, 32), np.float16), np.zeros((1, 1), np.int32)\n"
        "assert (backends.moe_gemm(x, w, ids, interpret=True) == 32).all()"
    )
    found = imported_by(statement)
    assert "torch" in found
    assert not found & {"jax", "jaxlib"}


def imports_of(path: Path) -> set[str]:
    """Full names of modules that a file imports anywhere, inside functions and under TYPE_CHECKING too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("path", files("shared"), ids=lambda path: path.name)
def test_shared_knows_no_framework_and_nothing_above_it(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imports_of(path)}
    assert not tops & {"torch", "jax", "jaxlib", "triton", "jax_triton", "backends", "bench", "tests"}
    assert tops <= set(sys.stdlib_module_names) | {"numpy", "ml_dtypes", "shared"}


BACKEND_MODULES = {f"backends.{name.replace('-', '_')}" for name in backends.BACKENDS}


@pytest.mark.parametrize("path", files("backends"), ids=lambda path: path.name)
def test_backends_know_nothing_above_them_and_not_each_other(path: Path) -> None:
    imported = imports_of(path)
    assert not {name.partition(".")[0] for name in imported} & {"bench", "tests"}
    if path.name == "registry.py":
        return
    own = f"backends.{path.stem}"
    assert not (imported & BACKEND_MODULES) - {own}


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_backend_has_what_the_door_needs(name: str) -> None:
    module = backends.load(name)
    assert name == module.NAME
    assert module.FRAMEWORK in ("torch", "jax")
    assert module.KERNEL_NAME
    assert f"backends.{name.replace('-', '_')}" == module.__name__


# Configs


def test_config_for_is_what_a_call_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in backends.BACKENDS:
        module = backends.load(name)
        monkeypatch.setattr(module, "moe_gemm", lambda *a, config, problem, **k: seen.append((config, problem)) or a[0])
        backends.moe_gemm(**arguments("numpy"), backend=name, interpret=True)
        config, problem = seen[-1]
        assert config == backends.config_for(problem, backend=name)
    assert len(seen) == len(backends.BACKENDS)


@pytest.mark.parametrize(("tokens", "found"), [(4, "row"), (40, "column")])
@pytest.mark.parametrize("given", [None, "grouped"])
def test_without_an_order_the_tile_decides(
    monkeypatch: pytest.MonkeyPatch, tokens: int, found: str, given: str | None
) -> None:
    """2 experts: 40 tokens are 20 slots each, which a tile of 16 rows does not hold."""
    seen = []
    monkeypatch.setattr(backends.load("torch-triton"), "moe_gemm", lambda *a, order, **k: seen.append(order) or a[0])
    x, w = np.zeros((tokens, 32), np.float16), np.zeros((2, 16, 32), np.float16)
    ids = np.zeros((tokens, 1), np.int32)
    order = {} if given is None else {"order": given}
    backends.moe_gemm(x, w, ids, config=Config(block_m=16), interpret=True, **order)
    assert seen == [given or found]


def test_choice_says_where_it_comes_from() -> None:
    problem = models.model("mixtral-8x7b").problem("gate-up", 8, "fp16")
    measured = backends.choose_config(problem, gpu="NVIDIA H200")
    assert "measured on NVIDIA H200" in measured.source
    unknown = backends.choose_config(problem, gpu="NVIDIA Nothing")
    assert unknown.source == "rule of thumb, no measured entry for NVIDIA Nothing"
    # A batch far from any that was measured does not get a tiny batch's tile.
    far = backends.choose_config(models.model("mixtral-8x7b").problem("gate-up", 10**6, "fp16"), gpu="NVIDIA H200")
    assert far.source.startswith("rule of thumb")
    assert far.config.block_m > backends.choose_config(problem).config.block_m


def test_where_torch_is_forbidden_the_door_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in sys.modules is how imports are forbidden: arrays of JAX and NumPy need no torch."""
    monkeypatch.setattr(backends, "_torch_op", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert backends._import_torch_op() is None
    assert arrays.imported("torch") is None
