"""Later calls through the door: found by one key, made by the backend's `again`, and looked at as the first one was.

Triton compiles for sm_90 beside a made-up driver (tests/test_launch_again.py), and the door takes CPU tensors for a
GPU's. What runs on a GPU is held by the tests of results, streams and graphs, whose later calls all come this way.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import backends
from backends import ArgumentError, DtypeError, arrays
from tests.cases import SMALL
from tests.test_launch_again import TRITON, Driver, drawn, driver, torch_triton, unaligned  # noqa: F401

pytestmark = TRITON
Call = Callable[..., torch.Tensor]


@pytest.fixture
def door(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:  # noqa: F811
    """`backends.moe_gemm`, for which the CPU is a GPU, with no call before it."""
    described = arrays.spec

    def spec(name: str, of: arrays.Signature) -> Any:
        found = described(name, of)
        return dataclasses.replace(found, device="cuda:0") if found.device == "cpu" else found

    monkeypatch.setattr(arrays, "spec", spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch_triton, "_shared_memory_limit", lambda: 232448)
    monkeypatch.setattr(backends, "_repeats", {})
    for cached in (backends._checked, backends._check_available):
        cached.cache_clear()

    def call(**given: Any) -> torch.Tensor:
        return backends.moe_gemm(**{"config": SMALL, "order": "row", "mode": "w8a8"} | given)

    yield call
    for cached in (backends._checked, backends._check_available):
        cached.cache_clear()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The problem of each call that goes all the way to the backend."""
    seen, original = [], torch_triton.moe_gemm

    def spy(*given: Any, **options: Any) -> Any:
        seen.append(options["problem"])
        return original(*given, **options)

    monkeypatch.setattr(torch_triton, "moe_gemm", spy)
    return seen


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in rows that stand 16 elements further apart."""
    room = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 16, dtype=tensor.dtype)
    room[..., : tensor.shape[-1]] = tensor
    return room[..., : tensor.shape[-1]]


def columns_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def test_a_later_call_is_found_at_once_and_runs_on_its_own_arrays(
    door: Call, driver: Driver, slow: list[Any]  # noqa: F811
) -> None:  # fmt: skip
    first, second = drawn(), drawn()
    door(**first)
    y = door(**second)
    driver.stream = 9
    z = door(**second)
    assert len(slow) == 1
    assert driver.dispatched == 2
    assert [stream for _, _, stream, _ in driver.launched] == [7] * 4 + [9] * 2
    gemm = driver.launched[3][3]
    assert (gemm[1], gemm[2], gemm[9]) == (second["w"].data_ptr(), second["w_scale"].data_ptr(), y.data_ptr())
    assert y.data_ptr() != z.data_ptr()
    assert (y.shape, y.dtype, y.stride()) == ((4, 2, 64), torch.bfloat16, (128, 64, 1))
    assert y.untyped_storage().nbytes() == y.nbytes, "y keeps what the kernels hand to one another"


OTHERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "x-fp16": lambda given: {"x": given["x"].half()},
    "x-rows-apart": lambda given: {"x": padded(given["x"])},
    "x-one-row-repeated": lambda given: {"x": given["x"][:1].expand(4, 64)},
    "w-rows-apart": lambda given: {"w": padded(given["w"])},
    "w-one-expert-repeated": lambda given: {"w": given["w"][:1].expand(3, 64, 64)},
    "fewer-tokens": lambda given: {"x": given["x"][:2], "topk_ids": given["topk_ids"][:2]},
    "ids-columns-first": lambda given: {"topk_ids": columns_first(given["topk_ids"])},
    "ids-repeated-columns-first": lambda given: {"topk_ids": given["topk_ids"][:1].expand(4, 2)},
    "scales-columns-first": lambda given: {"w_scale": columns_first(given["w_scale"])},
    "x-unaligned": lambda given: {"x": unaligned(given["x"])},
    "w-unaligned": lambda given: {"w": unaligned(given["w"])},
    "block-scales": lambda given: {"w_scale": torch.ones(3, 1, 1)},
    "routing-weight": lambda given: {"topk_weight": torch.ones(4, 2)},
    "mode": lambda given: {"mode": "w8a16"},
    "order": lambda given: {"order": "column"},
    "config": lambda given: {"config": SMALL.replace(num_stages=3)},
    "no-config": lambda given: {"config": None},
    "popular": lambda given: {"order": "popular"},
    "popularity": lambda given: {"order": "popular", "popularity": torch.arange(3, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_differs_is_not_taken_for_the_one_before(
    name: str, door: Call, driver: Driver, slow: list[Any]  # noqa: F811
) -> None:  # fmt: skip
    """It goes all the way, and so does neither of the two once both are known, unless arrays must be copied first."""
    given = drawn()
    other = given | OTHERS[name](given)
    for call in (given, other, given):
        door(**call)
    assert len(slow) == 2
    codes = [[code for _, code, *_ in driver.launched[at : at + 2]] for at in (0, 2, 4)]
    assert codes[0] == codes[2]
    copied = "columns-first" in name
    assert (codes[0] == codes[1]) is (copied or name == "fewer-tokens")
    door(**other)
    assert len(slow) == (3 if copied or "unaligned" in name else 2)
    if copied:
        ids, scales = driver.launched[-2][3][0], driver.launched[-1][3][2]
        assert (ids, scales) != (other["topk_ids"].data_ptr(), other["w_scale"].data_ptr()), "read as if row by row"


def test_popularity_is_each_calls_own(door: Call, driver: Driver) -> None:  # noqa: F811
    given = drawn()
    door(**given, order="popular", popularity=torch.arange(3, dtype=torch.int32))
    popularity = torch.arange(3, dtype=torch.int32)
    door(**given, order="popular", popularity=popularity)
    assert driver.dispatched == 2
    assert driver.launched[-2][3][1] == popularity.data_ptr()


def test_what_is_wrong_with_a_later_call_is_said(door: Call, driver: Driver) -> None:  # noqa: F811
    given = drawn()
    door(**given)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"topk_ids": given["topk_ids"].long()}, "topk_ids: got dtype int64"),
        ({"topk_ids": given["topk_ids"][:3]}, "topk_ids: got T = 3"),
        ({"w_scale": given["w_scale"][:, :63]}, "w_scale: got shape"),
        ({"w_scale": None}, "w_scale: got None"),
        ({"topk_weight": torch.ones(4, 2).half()}, "topk_weight: got dtype float16"),
        ({"popularity": torch.arange(3, dtype=torch.int32)}, "popularity: got"),
        ({"w": given["w"].to("meta")}, "different devices"),
        ({"w": given["w"].view(torch.uint8).numpy()}, "w"),
        ({"topk_ids": given["topk_ids"].to_sparse()}, "topk_ids: got a tensor of layout torch.sparse_coo"),
        ({"x": given["x"].to_sparse_csr()}, "x: got a tensor of layout torch.sparse_csr"),
        ({"order": "rows"}, "order: got 'rows'"),
        ({"order": ["row"]}, "order: got"),
        ({"config": {}}, "config: got dict"),
        ({"mode": "w8a9"}, "mode: got"),
    ]
    for change, says in wrong:
        with pytest.raises(ArgumentError, match=says):
            door(**given | change)
    with pytest.raises(DtypeError, match="x: got None"):
        door(**given | {"x": None})
    assert len(driver.launched) == 2
    assert door(**{name: array if array is None else array.to("meta") for name, array in given.items()}).is_meta


def test_gradients_values_and_hooks_are_looked_at_on_every_call(door: Call, driver: Driver) -> None:  # noqa: F811
    from torch.autograd import forward_ad
    from triton import knobs

    given = drawn()
    door(**given)
    wanting = given | {"x": given["x"].clone().requires_grad_()}
    for _ in range(2):
        with pytest.raises(ArgumentError, match="x: got a tensor that requires a gradient"):
            door(**wanting)
        with torch.no_grad():
            door(**wanting)
    with forward_ad.dual_level():
        door(**given)
        dual = forward_ad.make_dual(given["x"], torch.ones_like(given["x"]))
        with pytest.raises(ArgumentError, match="x: got a tensor with a tangent"):
            door(**given | {"x": dual})
    with pytest.raises(ArgumentError, match="topk_ids: got 3"):
        door(**given | {"topk_ids": torch.full((4, 2), 3, dtype=torch.int32)}, validate=True)
    dispatched = driver.dispatched
    knobs.runtime.launch_enter_hook.add(print)
    try:
        door(**given)
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert driver.dispatched == dispatched + 2
    door(**given)
    assert driver.dispatched == dispatched + 2


def test_what_records_operators_sees_a_later_call(door: Call, driver: Driver) -> None:  # noqa: F811
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    given = drawn()
    door(**given)
    launched = len(driver.launched)
    with FakeTensorMode() as mode:
        fake = {name: None if array is None else mode.from_tensor(array) for name, array in given.items()}
        assert type(door(**fake)).__name__ == "FakeTensor"
    assert len(driver.launched) == launched
    present = {name: array for name, array in given.items() if array is not None}
    traced = make_fx(lambda *arrays: door(**dict(zip(present, arrays, strict=True))), tracing_mode="fake")(
        *present.values()
    )
    assert "moe_tile_order.moe_gemm" in traced.code
    assert len(driver.launched) == launched


def test_every_thread_has_the_context_before_it_launches(
    door: Call, driver: Driver, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    given, bound, ys = drawn(), [], []
    door(**given)
    monkeypatch.setattr(torch_triton, "_bind_context", lambda device: bound.append(threading.get_ident()))
    threads = [threading.Thread(target=lambda: ys.append(door(**given))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({y.data_ptr() for y in ys}) == 4, "threads share a result"
    assert len(bound) == 4
    assert len(driver.launched) == 2 * 5
    works = [driver.launched[i][3][3] for i in range(2, 10) if driver.launched[i][0] == "prepare_kernel"]
    assert len(works) == 4


def test_another_device_is_made_current_for_the_call(
    door: Call, driver: Driver, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    from backends.triton_again import Kept

    given, current = drawn(), [1]
    door(**given)

    class Device:
        def __init__(self, device: Any) -> None: ...
        def __enter__(self) -> None:
            current.append(0)

        def __exit__(self, *_: Any) -> None:
            current.pop()

    seen = []
    launch = Kept.launch
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(Kept, "is_current", lambda self, index: current[-1] == 0)
    monkeypatch.setattr(Kept, "launch", lambda self, *given: seen.append(current[-1]) or launch(self, *given))
    door(**given)
    assert seen == [0]
    assert current == [1]


def test_signatures_are_forgotten_before_there_are_too_many(door: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_MOST_SIGNATURES", 2)
    given = drawn()
    for order in ("row", "column", "grouped", "row"):
        door(**given, order=order)
        assert 1 <= len(backends._repeats) <= 2


def test_the_launch_report_times_the_parts_of_such_a_call(
    door: Call,
    driver: Driver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The door around a backend that does nothing, and the backend's part alone; calls behind them are as before."""
    from types import SimpleNamespace

    from bench import contenders, launch_host, launch_tables

    given = drawn()
    door(**given)
    launched = len(driver.launched)
    monkeypatch.setattr(contenders, "wait", lambda *_: None)
    monkeypatch.setattr(launch_host, "ROUNDS", 1)
    monkeypatch.setattr(launch_host, "IN_A_ROW", 2)
    device = SimpleNamespace(interpret=False, synchronize=lambda: None)
    contender = SimpleNamespace(framework="torch", eager=lambda: door(**given))
    parts = launch_host.parts("torch-triton", contender, device)
    assert set(parts) == set(launch_tables.PARTS)
    kernels = len(driver.launched) - launched
    assert kernels == 2 * (1 + 2 + 2), "one call, two of the backend's part, two of its launches"
    door(**given)
    assert driver.dispatched == 2
