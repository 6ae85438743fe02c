"""A peer made ready, and the way between slots and rows sorted by expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.data import Data, to_torch


@dataclasses.dataclass(frozen=True)
class Ready:
    """`call(*arguments)` computes y on the device and does not wait for it.

    in_slots:    y is (T, top_k, N), a slot's row at its place; else (S, N) sorted by expert, as `sort_slots` sorts
    kernel_name: substring of the names of the kernels that are its kernel time; None: all that it launches
    about:       version and config, to be told with its times
    ways:        by name, calls that compute the same by other implementations or configs, call one of them: the one
                 that takes the GPU the least time is to be measured (`bench.contenders.fastest_way`)
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    in_slots: bool = False
    kernel_name: str | None = None
    about: str | None = None
    ways: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def to_y(self, data: Data, result: Any) -> Any:
        """The result of a call -> torch (T, top_k, N); slots of no expert are zeros."""
        if not self.in_slots:
            return unsort(data, result)
        return to_torch(result).masked_fill((data.topk_ids < 0)[..., None], 0)


@dataclasses.dataclass(frozen=True)
class Sorted:
    """Slots sorted by expert, slots of no expert left out.

    x: (S, K) rows in that order; slot: (S,) their slot numbers; ends: (E,) where each expert's rows end, int32
    """

    x: Any
    slot: np.ndarray
    ends: np.ndarray

    def spans(self) -> list[tuple[int, int, int]]:
        """(expert, first row, end row) of the experts that have rows."""
        starts = np.concatenate([[0], self.ends[:-1]])
        spans = zip(starts.tolist(), self.ends.tolist(), strict=True)
        return [(expert, a, b) for expert, (a, b) in enumerate(spans) if b > a]


def sort_slots(data: Data) -> Sorted:
    import torch

    ids = data.topk_ids.cpu().numpy().reshape(-1)
    order = np.argsort(ids, kind="stable")
    slot = order[ids[order] >= 0]
    token = torch.from_numpy(slot // data.problem.top_k).to(data.x.device)
    return Sorted(data.x[token].contiguous(), slot, np.cumsum(data.counts).astype(np.int32))


def unsort(data: Data, y_sorted: Any) -> Any:
    """(S, N) in sorted order, torch or JAX -> torch (T, top_k, N); slots of no expert are zeros."""
    import torch

    problem = data.problem
    y_sorted = to_torch(y_sorted)
    y = torch.zeros(problem.slots, problem.n, dtype=y_sorted.dtype, device=y_sorted.device)
    y[torch.from_numpy(sort_slots(data).slot).to(y.device)] = y_sorted
    return y.view(problem.tokens, problem.top_k, problem.n)
