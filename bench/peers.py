"""What PyTorch and JAX offer for the same product without a kernel of one's own: rows beside the backends.

A peer gets its own best layout outside the timed span: token rows already gathered and sorted by expert, FP8
activations already quantised, its output left in sorted order. The backends do all of that inside a call, so a peer's
time stands beside their kernel time, not their call time. Its kernel time is the GPU time of all its kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.data import Data, quantise_token, to_jax, to_torch

RAGGED_DOT_LIMIT = 8 << 30
"""Bytes of the widened left operand past which jax.lax.ragged_dot is not tried: on a GPU, XLA may lower it to a
masked product over (E, S, K)."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """name in tables; dtypes it exists for; `prepare(data)` gives (call, arguments, framework).

    call(*arguments) computes y in sorted order, (S, N), and does not wait for the device.
    """

    name: str
    framework: str
    dtypes: tuple[str, ...]
    prepare: Callable[[Data], tuple[Callable[..., Any], tuple[Any, ...]]]


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


def _torch_grouped_mm(data: Data) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch

    rows = sort_slots(data)
    ends = torch.from_numpy(rows.ends).to(data.x.device)
    return lambda x, w, offs: torch._grouped_mm(x, w.transpose(1, 2), offs=offs), (rows.x, data.w, ends)


def _torch_loop(data: Data) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch

    rows = sort_slots(data)
    spans = rows.spans()
    y = torch.empty(rows.x.shape[0], data.problem.n, dtype=rows.x.dtype, device=rows.x.device)

    def call(x: Any, w: Any) -> Any:
        for expert, a, b in spans:
            torch.mm(x[a:b], w[expert].T, out=y[a:b])
        return y

    return call, (rows.x, data.w)


def _jax_ragged_dot(data: Data) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import jax
    import torch

    problem = data.problem
    widened = problem.experts * problem.slots * problem.k * problem.x_itemsize
    if widened > RAGGED_DOT_LIMIT:
        raise NotImplementedError(
            f"jax.lax.ragged_dot may widen its left operand to {widened / 1e9:.0f} GB (E x S x K) on a GPU"
        )
    rows = sort_slots(data)
    w_ekn = data.w.transpose(1, 2).contiguous()  # (E, K, N), the layout that it takes without transposing inside
    sizes = torch.from_numpy(data.counts.astype(np.int32)).to(data.x.device)
    if data.x.is_cuda:
        torch.cuda.synchronize()
    return jax.jit(jax.lax.ragged_dot), tuple(to_jax(array) for array in (rows.x, w_ekn, sizes))


def _torch_scaled_grouped_mm(data: Data) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch

    rows = sort_slots(data)
    q, scale = quantise_token(rows.x)
    ends = torch.from_numpy(rows.ends).to(data.x.device)

    def call(q: Any, w: Any, scale: Any, w_scale: Any, offs: Any) -> Any:
        return torch._scaled_grouped_mm(q, w.transpose(1, 2), scale, w_scale, offs=offs, out_dtype=torch.bfloat16)

    return call, (q, data.w, scale, data.w_scale, ends)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch-grouped-mm", "torch", ("bf16",), _torch_grouped_mm),
        Peer("torch-cublas-loop", "torch", ("fp16", "bf16"), _torch_loop),
        Peer("jax-ragged-dot", "jax", ("fp16", "bf16"), _jax_ragged_dot),
        Peer("torch-scaled-grouped-mm", "torch", ("fp8-w8a8",), _torch_scaled_grouped_mm),
    )
}
