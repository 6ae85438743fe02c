"""What PyTorch, JAX and libraries offer for the same product without a kernel of one's own: rows beside the backends.

A peer gets its own best layout outside the timed span: token rows already gathered and sorted by expert or the arrays
that say so, FP8 activations already quantised, its output left as it writes it. The backends do all of that inside a
call, so a peer's time stands beside their kernel time, not their call time. Its kernel time is the GPU time of all its
kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import libraries
from bench.data import Data, quantise_token, to_jax
from bench.sorting import Ready, sort_slots

RAGGED_DOT_LIMIT = 8 << 30
"""Bytes of the widened left operand past which jax.lax.ragged_dot is not tried: on a GPU, XLA may lower it to a
masked product over (E, S, K)."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """name in tables; dtypes that it has rows for; `prepare(data, gemm)` makes it ready for one of them.

    `prepare` raises NotImplementedError, with the reason and the remedy, where the peer cannot be had or cannot do it.
    missing(): why it cannot be imported here, None if it can.
    """

    name: str
    framework: str
    dtypes: tuple[str, ...]
    prepare: Callable[[Data, str], Ready]
    missing: Callable[[], str | None] = lambda: None


def _torch_grouped_mm(data: Data, gemm: str) -> Ready:
    import torch

    rows = sort_slots(data)
    ends = torch.from_numpy(rows.ends).to(data.x.device)
    return Ready(lambda x, w, offs: torch._grouped_mm(x, w.transpose(1, 2), offs=offs), (rows.x, data.w, ends))


def _torch_loop(data: Data, gemm: str) -> Ready:
    import torch

    rows = sort_slots(data)
    spans = rows.spans()
    y = torch.empty(rows.x.shape[0], data.problem.n, dtype=rows.x.dtype, device=rows.x.device)

    def call(x: Any, w: Any) -> Any:
        for expert, a, b in spans:
            torch.mm(x[a:b], w[expert].T, out=y[a:b])
        return y

    return Ready(call, (rows.x, data.w))


def _jax_ragged_dot(data: Data, gemm: str) -> Ready:
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
    return Ready(jax.jit(jax.lax.ragged_dot), tuple(to_jax(array) for array in (rows.x, w_ekn, sizes)))


def _torch_scaled_grouped_mm(data: Data, gemm: str) -> Ready:
    import torch

    rows = sort_slots(data)
    q, scale = quantise_token(rows.x)
    ends = torch.from_numpy(rows.ends).to(data.x.device)

    def call(q: Any, w: Any, scale: Any, w_scale: Any, offs: Any) -> Any:
        return torch._scaled_grouped_mm(q, w.transpose(1, 2), scale, w_scale, offs=offs, out_dtype=torch.bfloat16)

    return Ready(call, (q, data.w, scale, data.w_scale, ends))


PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch-grouped-mm", "torch", ("bf16",), _torch_grouped_mm),
        Peer("torch-cublas-loop", "torch", ("fp16", "bf16"), _torch_loop),
        Peer("jax-ragged-dot", "jax", ("fp16", "bf16"), _jax_ragged_dot),
        Peer("torch-scaled-grouped-mm", "torch", ("fp8-w8a8",), _torch_scaled_grouped_mm),
        Peer("vllm-fused-moe", "torch", libraries.DTYPES, libraries.vllm_fused_moe, libraries.vllm_missing),
        Peer(
            "triton-kernels-matmul",
            "torch",
            libraries.DTYPES,
            libraries.triton_kernels_matmul,
            libraries.triton_kernels_missing,
        ),
        Peer("tokamax-ragged-dot", "jax", libraries.DTYPES, libraries.tokamax_ragged_dot, libraries.tokamax_missing),
    )
}
