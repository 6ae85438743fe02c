"""What a later call through the door depends on, item by item, and what it does not (tests/test_repeats.py)."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from backends import ArgumentError
from shared.problem import Problem
from tests.cases import SMALL
from tests.test_launch_again import TRITON, Driver, drawn, driver, torch_triton, unaligned  # noqa: F401
from tests.test_repeats import Call, door, slow  # noqa: F401

pytestmark = TRITON


@pytest.mark.parametrize("name", ["topk_ids", "w_scale", "topk_weight", "popularity"])
def test_each_array_of_routing_is_looked_at_on_every_call(
    name: str, door: Call, driver: Driver, slow: list[Any]  # noqa: F811
) -> None:  # fmt: skip
    """Behind a call with all of them: another dtype, device, shape, stride or alignment of any one."""
    given = drawn() | {"topk_weight": torch.ones(4, 2), "popularity": torch.arange(3, dtype=torch.int32)}
    ordered = functools.partial(door, order="popular")
    ordered(**given)
    ordered(**given)
    assert (len(slow), driver.dispatched) == (1, 2)
    array = given[name]
    assert array is not None
    for wrong, says in (
        (array.double(), f"{name}: got dtype float64"),
        (array.to("meta"), "different devices"),
        (torch.cat([array, array]), f"{name}: got"),
        (array[None], f"{name}: got"),
    ):
        with pytest.raises(ArgumentError, match=says):
            ordered(**given | {name: wrong})
    apart = torch.zeros(*array.shape, 2, dtype=array.dtype)[..., 0]
    assert not apart.is_contiguous()
    launched = len(driver.launched)
    ordered(**given | {name: apart})
    assert len(slow) == 2, "read as if row by row"
    pointers = [value for launch in driver.launched[launched:] for value in launch[3]]
    assert apart.data_ptr() not in pointers
    dispatched = driver.dispatched
    ordered(**given | {name: unaligned(array)})
    assert driver.dispatched == dispatched + 2, "kernels for aligned pointers were used"
    ordered(**given)
    assert (len(slow), driver.dispatched) == (3, dispatched + 2)


@pytest.mark.parametrize("name", ["x", "w", "w_scale", "topk_weight"])
def test_a_negated_view_is_refused_in_every_call(name: str, door: Call, driver: Driver) -> None:  # noqa: F811
    """Memory of such a view holds the negatives of its values; a kernel would read those."""
    given = drawn() | {"topk_weight": torch.ones(4, 2)}
    negated = torch._neg_view(given[name])
    assert negated.is_contiguous()
    for _ in range(2):  # the first call of a signature and a later one
        with pytest.raises(ArgumentError, match=rf"{name}: got a tensor with the negative bit .*{name}.resolve_neg"):
            door(**given | {name: negated})
        door(**given)


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ("runtime", "launch_enter_hook"), ("runtime", "launch_exit_hook"), ("runtime", "add_stages_inspection_hook"),
        ("runtime", "jit_cache_hook"), ("runtime", "debug"), ("compilation", "instrumentation_mode"),
    ],
)  # fmt: skip
def test_no_kept_kernel_is_launched_while_anything_watches(
    knobs: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    from backends import triton_again

    assert triton_again.Kept("cpu").usable(0)
    monkeypatch.setattr(getattr(triton.knobs, knobs), name, print)
    assert not triton_again.Kept("cpu").usable(0)


class Name(str):
    """A name that is no plain string, as members of an Enum of strings are."""


def test_equal_options_and_strides_of_one_element_are_the_same_call(
    door: Call, driver: Driver, slow: list[Any]  # noqa: F811
) -> None:  # fmt: skip
    problem = Problem.of("fp16", tokens=1, experts=1, n=64, k=64, top_k=1)
    given = drawn(problem)
    odd = {"x": given["x"].as_strided((1, 64), (3, 1)), "w": given["w"].as_strided((1, 64, 64), (7, 64, 1))}
    odd["topk_ids"] = given["topk_ids"].as_strided((1, 1), (9, 4))  # type: ignore[union-attr]
    door(**given, mode="fp16")
    door(**given | odd, mode=Name("fp16"), order=Name("row"), backend=Name("torch-triton"), config=SMALL.replace())
    assert len(slow) == 1
    numbers = [[value for value in launch[3] if not isinstance(value, torch.Tensor)] for launch in driver.launched]
    assert all(after[-len(before) :] == before for before, after in zip(numbers[:2], numbers[2:], strict=True))


def test_what_pytorch_is_set_to_does_not_change_a_later_call(
    door: Call, driver: Driver, slow: list[Any]  # noqa: F811
) -> None:  # fmt: skip
    """Where tensors are made by default, deterministic algorithms, autocast, inference."""
    given = drawn()
    door(**given)
    with torch.inference_mode():
        assert door(**given).is_inference()
    with torch.autocast("cpu", dtype=torch.float16):
        assert door(**given).dtype == torch.bfloat16
    with torch.device("meta"):
        assert door(**given).device.type == "cpu"
    torch.use_deterministic_algorithms(True)
    try:
        door(**given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(slow) == 1
    assert driver.dispatched == 2


def test_no_array_of_a_call_is_held_on_to(door: Call, driver: Driver) -> None:  # noqa: F811
    given = drawn()
    held = [weakref.ref(array) for array in given.values() if array is not None]
    for _ in range(2):
        held.append(weakref.ref(door(**given)))
    given.clear()
    driver.launched.clear()
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


def test_each_thread_binds_the_context_of_each_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, Any]] = []

    def empty(*_: Any, device: torch.device, **__: Any) -> torch.Tensor:
        bound.append((threading.get_ident(), device))
        return torch.zeros(1)

    devices = [torch.device("cuda", 6), torch.device("cuda", 7)]

    def bind() -> None:
        for device in (*devices, *devices):
            torch_triton._bind_context(device)

    monkeypatch.setattr(torch, "empty", empty)
    threads = [threading.Thread(target=bind) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert [device for _, device in bound] == devices * 2
