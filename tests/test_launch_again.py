"""Later calls of one signature: checked by a look-up, launched without Triton's dispatch, and refused as the first.

Triton compiles for sm_90 here, beside a driver that loads and launches nothing but writes down what it is asked to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import backends
from backends import ArgumentError, Config, arrays, triton_launch
from shared.problem import Problem
from tests import test_streams as streams
from tests.cases import SMALL
from tests.kinds import KINDS, E, arguments
from tests.test_arguments import BAD, Bad, keep_strides
from tests.where import HAS_GPU

torch_triton = backends.load("torch-triton")
STEPS = ["prepare_kernel", "moe_gemm_kernel"]
TRITON = pytest.mark.skipif(HAS_GPU, reason="the driver here is a made-up one")
PROBLEM = Problem.of("fp8-w8a8", tokens=4, experts=3, n=64, k=64, top_k=2)


@dataclasses.dataclass
class Driver:
    """In place of Triton's CUDA driver. launched: (kernel, code, stream, arguments) of each launch."""

    stream: int = 7
    device: int = 0
    launched: list[tuple[str, int, int, tuple[Any, ...]]] = dataclasses.field(default_factory=list)
    dispatched: int = 0
    loaded: int = 0
    unloaded: list[int] = dataclasses.field(default_factory=list)
    load_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.utils = self

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, ...]:
        time.sleep(self.load_seconds)
        self.loaded += 1
        return self.loaded, self.loaded, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        self.unloaded.append(module)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, code: int, *rest: Any) -> None:
            assert code not in (None, *self.unloaded), "launched without its code"
            self.launched.append((source.name, code, stream, rest[4:]))

        return launch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    from triton.runtime import driver as active
    from triton.runtime.jit import JITFunction

    found, run = Driver(), JITFunction.run

    def counted(kernel: Any, *given: Any, **options: Any) -> Any:
        found.dispatched += 1
        return run(kernel, *given, **options)

    kernels = [triton_launch.kernel(name) for name in STEPS]
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(JITFunction, "run", counted)
    monkeypatch.setattr(active, "_active", found)
    for forgotten in (torch_triton._work.cache_clear, *(kernel.device_caches.clear for kernel in kernels)):
        forgotten()
    yield found
    for forgotten in (torch_triton._work.cache_clear, *(kernel.device_caches.clear for kernel in kernels)):
        forgotten()


def drawn(problem: Problem = PROBLEM) -> dict[str, torch.Tensor | None]:
    w_dtype = torch.float8_e4m3fn if problem.is_fp8 else getattr(torch, problem.activation)
    return {
        "x": torch.zeros(problem.tokens, problem.k, dtype=getattr(torch, problem.activation)),
        "w": torch.zeros(problem.experts, problem.n, problem.k, dtype=w_dtype),
        "topk_ids": torch.zeros(problem.tokens, problem.top_k, dtype=torch.int32),
        "w_scale": torch.ones(problem.w_scale_shape) if problem.w_scale_shape else None,
        "topk_weight": torch.ones(problem.tokens, problem.top_k) if problem.routing_weight else None,
    }


def call(given: dict[str, Any], problem: Problem = PROBLEM, order: str = "row", config: Config = SMALL) -> torch.Tensor:
    return torch_triton.moe_gemm(*given.values(), problem=problem, order=order, config=config)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and strides, one element further on."""
    room = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    found = room[1:].view(tensor.shape)
    assert found.data_ptr() % 16
    return found


@TRITON
def test_a_later_call_launches_the_same_kernels_on_its_own_arrays(driver: Driver) -> None:
    first, second = drawn(), drawn()
    call(first)
    assert driver.dispatched == 2
    driver.stream = 8
    y = call(second)
    assert driver.dispatched == 2, "the second call went through Triton's dispatch"
    assert [name for name, *_ in driver.launched] == STEPS * 2
    (prepare, gemm), (prepare2, gemm2) = driver.launched[:2], driver.launched[2:]
    for before, after in ((prepare, prepare2), (gemm, gemm2)):
        assert before[1] == after[1]
        assert (before[2], after[2]) == (7, 8)
        assert len(before[3]) == len(after[3])
        numbers = [value for value in before[3] if not isinstance(value, torch.Tensor)]
        assert list(after[3][-len(numbers) :]) == numbers, "numbers and constants"
    pointers = {name: value.data_ptr() for name, value in second.items() if value is not None}
    assert prepare2[3][0] == pointers["topk_ids"]
    assert prepare2[3][2] == pointers["x"]
    assert (gemm2[3][1], gemm2[3][2]) == (pointers["w"], pointers["w_scale"])
    assert gemm2[3][9] == y.data_ptr()
    # What one kernel writes, the next one reads: the plan in three buffers, x in fp8 with its scales.
    sorted_slot, tile_expert, tile_rows, _, scaled, x_scale = prepare2[3][3:9]
    assert (sorted_slot, tile_expert, tile_rows) == gemm2[3][5:8]
    assert (scaled, x_scale) == (gemm2[3][0], gemm2[3][3])
    work = sorted({sorted_slot, tile_expert, tile_rows, scaled, x_scale})
    assert len(work) == 5
    sizes = {sorted_slot: 4 * 16 * PROBLEM.max_tile_rows(16), tile_expert: 4 * PROBLEM.max_tile_rows(16)}
    sizes |= {tile_rows: 4, scaled: PROBLEM.tokens * PROBLEM.k, x_scale: 4 * PROBLEM.tokens}
    for start, end in itertools.pairwise(work):
        assert start + sizes[start] <= end, "buffers overlap"


@TRITON
@pytest.mark.parametrize("odd", ["x", "w", "topk_ids", "w_scale"])
def test_kernels_for_aligned_pointers_are_not_used_for_others(driver: Driver, odd: str) -> None:
    given = drawn()
    moved = dict(given, **{odd: unaligned(given[odd])})  # type: ignore[arg-type]
    call(moved)
    call(given)
    assert driver.dispatched == 4, "kernels for unaligned pointers were kept"
    call(moved)
    assert driver.dispatched == 6, "kernels for aligned pointers were used"
    call(given)
    assert driver.dispatched == 6
    codes = [{step[0]: step[1] for step in driver.launched[i : i + 2]} for i in range(0, 8, 2)]
    assert codes[0] == codes[2] != codes[1] == codes[3]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize("odd", ["x", "w", "topk_ids"])
def test_unaligned_arrays_between_aligned_ones_are_right(odd: str, backend: str) -> None:
    """Kernels kept from aligned calls read 16 bytes at a time, which faults or misreads at other addresses."""
    given = streams.drawn("cuda")
    moved = dict(given, **{odd: unaligned(given[odd])})
    moved[odd].copy_(given[odd])
    expected = streams.reference(**given)
    door = functools.partial(backends.moe_gemm, backend=backend, config=SMALL)
    for one in (given, given, moved, given, moved):
        if one is moved and backends.load(backend).FRAMEWORK == "jax":
            with pytest.raises(ArgumentError, match=f"{odd}: got a tensor whose address is"):
                door(**one)
        else:
            streams.assert_right(door(**one), expected)


def test_addresses_that_xla_does_not_take_are_refused_by_name() -> None:
    tensor = torch.zeros(64, dtype=torch.float16)
    assert tensor.data_ptr() % 16 == 0
    arrays.check_alignment("x", tensor, "jax-triton")
    arrays.check_alignment("x", tensor[8:], "jax-triton")
    with pytest.raises(ArgumentError, match=r"x: got a tensor whose address is 2 past a multiple of 16 bytes.*clone"):
        arrays.check_alignment("x", tensor[1:], "jax-triton")


@TRITON
def test_launches_past_tritons_launcher_are_its_own(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C function gets what Triton's launcher object hands to it; but where that does more, the object itself."""
    from triton.backends.nvidia.driver import CudaLauncher

    from backends import triton_again

    told: list[tuple[Any, ...]] = []
    compiled = torch_triton._launch(
        "moe_gemm_kernel_zero", 1, (torch.zeros(64), 1), {"N": 64, "CHUNK": 1024}
    )  # fmt: skip
    run = object.__new__(CudaLauncher)
    vars(run).update(
        launch=lambda *given: told.append(given), num_ctas=1, gsan_enabled=False, launch_pdl=False,
        launch_cooperative_grid=False, arg_annotations=["annotation"], kernel_signature=b"signature",
        global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
    )  # fmt: skip
    monkeypatch.setattr(compiled, "_run", run)
    assert compiled.run is run
    run(3, 1, 1, 7, compiled.function, compiled.packed_metadata, None, None, None, 16, 1, 64, 1024)
    kept = triton_again.Kept()
    kept.add(compiled, 3, [0], (1, 64, 1024))
    kept.launch([16], 0)
    assert told[0] == told[1]
    assert kept._launches[0][0] is run.launch
    for name in ("global_scratch_size", "profile_scratch_size", "gsan_enabled"):
        with monkeypatch.context() as patch:
            patch.setattr(run, name, 1)
            assert triton_again.launcher(compiled)[0] is not run.launch


@TRITON
def test_kept_kernels_stay_loaded(driver: Driver) -> None:
    """Triton unloads a kernel's code when the kernel is collected, which is when its cache holds another."""
    given = drawn()
    call(given)
    for name in STEPS:
        triton_launch.kernel(name).device_caches.clear()
    gc.collect()
    call(given)
    assert driver.dispatched == len(STEPS)
    assert driver.unloaded == []


@TRITON
def test_threads_that_start_with_one_signature_load_each_kernel_once(driver: Driver) -> None:
    """And none launches what another is still loading."""
    driver.load_seconds = 0.05
    given, problems = drawn(), []

    def work() -> None:
        try:
            call(given)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert driver.loaded == len(STEPS)
    assert len(driver.launched) == 4 * len(STEPS)


@TRITON
def test_a_thread_gets_the_context_before_its_first_launch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all kernels are kept from another thread's calls."""
    from backends import torch_triton

    bound: list[tuple[int, int]] = []
    monkeypatch.setattr(
        torch_triton, "_bind_context", lambda device: bound.append((threading.get_ident(), len(driver.launched)))
    )
    given = drawn()
    call(given)
    before = len(driver.launched)
    thread = threading.Thread(target=call, args=(given,))
    thread.start()
    thread.join()
    assert len(driver.launched) > before
    assert (thread.ident, before) in bound


@TRITON
def test_profilers_and_knobs_see_every_launch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    given = drawn()
    call(given)
    seen: list[Any] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        call(given)
        assert driver.dispatched == 4
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    monkeypatch.setattr(knobs.runtime, "debug", True)
    call(given)
    assert driver.dispatched == 6
    monkeypatch.setattr(knobs.runtime, "debug", False)
    call(given)
    assert driver.dispatched == 6


@TRITON
def test_launches_go_to_the_current_device_only(driver: Driver) -> None:
    from backends.triton_again import Kept

    driver.device = 0
    assert Kept().is_current(0)
    assert not Kept().is_current(1)


SIGNATURE: dict[str, Any] = {
    "problem": PROBLEM, "order": "row", "config": SMALL, "by": "none", "x_stride": 64, "w_stride_e": 4096,
    "w_stride_n": 64, "words": False, "x_dtype": torch.bfloat16, "w_dtype": torch.float8_e4m3fn,
    "device": torch.device("cuda:0"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("problem", dataclasses.replace(PROBLEM, tokens=5)),
        ("problem", dataclasses.replace(PROBLEM, dtype="fp8-w8a16")),
        ("problem", dataclasses.replace(PROBLEM, scale_layout="block")),
        ("problem", dataclasses.replace(PROBLEM, routing_weight=True)),
        ("order", "column"),
        ("config", SMALL.replace(num_stages=3)),
        ("config", SMALL.replace(split_k=2)),
        ("by", "counts"),
        ("x_stride", 72),
        ("w_stride_e", 8192),
        ("w_stride_n", 72),
        ("words", True),
        ("x_dtype", torch.float16),
        ("w_dtype", torch.float8_e5m2),
        ("device", torch.device("cuda:1")),
    ],
)
def test_what_kernels_depend_on_is_part_of_the_key(name: str, other: Any) -> None:
    one = torch_triton._work(*SIGNATURE.values())
    assert torch_triton._work(*SIGNATURE.values()) is one
    assert torch_triton._work(*dict(SIGNATURE, **{name: other}).values()) is not one


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_wrong_after_right_is_refused_and_right_again_is_not(
    bad: Bad, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind not in bad.kinds:
        pytest.skip(f"{bad.name} is no error with {kind} arrays")
    from tests.kinds import numpy_arguments

    module = backends.load("torch-triton")
    monkeypatch.setattr(module, "moe_gemm", lambda x, *_, **__: x)
    given = numpy_arguments(bad.dtype)
    right = arguments(kind, bad.dtype)
    wrong = {name: keep_strides(value, kind) for name, value in (given | bad.change(given)).items()}
    for _ in range(2):
        backends.moe_gemm(**right, interpret=True)
        with pytest.raises(bad.error) as caught:
            backends.moe_gemm(**wrong, interpret=True)
        for part in bad.says:
            assert part in str(caught.value)


def test_values_and_gradients_are_looked_at_on_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = backends.load("torch-triton")
    monkeypatch.setattr(module, "moe_gemm", lambda x, *_, **__: x)
    given = arguments("torch")
    backends.moe_gemm(**given, interpret=True)
    given["topk_ids"][0, 0] = E
    with pytest.raises(ArgumentError, match="topk_ids: got 4"):
        backends.moe_gemm(**given, interpret=True)
    given["topk_ids"][0, 0] = 0
    given["x"].requires_grad_()
    with pytest.raises(ArgumentError, match="x: got a tensor that requires a gradient"):
        backends.moe_gemm(**given, interpret=True)
    with torch.no_grad():
        backends.moe_gemm(**given, interpret=True)


def test_another_device_of_the_same_shapes_is_another_signature() -> None:
    given = arguments("torch")
    del given["topk_weight"]
    assert backends.moe_gemm(**{n: v if v is None else v.to("meta") for n, v in given.items()}).device.type == "meta"
    with pytest.raises(ArgumentError, match="different devices"):
        backends.moe_gemm(**dict(given, w=given["w"].to("meta")), interpret=True)
    assert arrays.signature("x", given["x"]) != arrays.signature("x", given["x"].to("meta"))


def test_what_no_dictionary_can_look_up_is_refused_by_name() -> None:
    given = arguments("torch")
    with pytest.raises(ArgumentError, match="mode: got"):
        backends.moe_gemm(**given, mode=["fp16"], interpret=True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="order: got"):
        backends.moe_gemm(**given, order=["row"], interpret=True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="config: got dict"):
        backends.moe_gemm(**given, config={}, interpret=True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="backend: got"):
        backends.moe_gemm(**given, backend=["torch-triton"], interpret=True)  # type: ignore[arg-type]


def test_keys_equal_by_value_and_leave_their_hash_behind() -> None:
    one, same, other = SMALL, SMALL.replace(), SMALL.replace(group_m=3)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != dataclasses.asdict(one)
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one
    assert "_hash" in vars(one)
    assert "_hash" not in vars(copy), "strings hash differently in another process"
    assert hash(copy) == hash(one)
