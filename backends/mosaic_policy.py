"""How long L2 keeps what a Mosaic GPU kernel's bulk copies read: Pallas's copies have no argument for it.

In a kernel named by `evict_first`, copies of arrays of WEIGHT_RANK dimensions are evicted first from L2. The policy
becomes an operand of the copy instruction as Mosaic lowers it; what other kernels copy is left as it was.

Source: the PTX manual on cp.async.bulk.tensor, `.L2::cache_hint`.
"""

from __future__ import annotations

import threading
from typing import Any

from jax.experimental.mosaic.gpu import launch_context, utils
from jaxlib.mlir import ir

WEIGHT_RANK = 3
"""Dimensions of the weights (E, N, K); the tokens have two."""
_SUFFIX = "_evict_first"
_EVICT_FIRST = 0x12F0000000000000
"""The policy that createpolicy.fractional.L2::evict_first makes for all of the data. CUTLASS has the value as
TMA::CacheHintSm90::EVICT_FIRST."""
_COPY = "cp_async_bulk_tensor_shared_cluster_global"


def evict_first(name: str) -> str:
    """Name of the kernel `name` that reads its weights so: the lowering knows it by its name."""
    return name + _SUFFIX


class _Lowering(threading.local):
    evicts_first = False
    """Whether the copy that this thread lowers has the policy."""


_lowering = _Lowering()


class _WithPolicy:
    """Mosaic's nvvm dialect, whose bulk copy has the policy where `_lowering` says so."""

    def __init__(self, nvvm: Any) -> None:
        self._nvvm = nvvm

    def __getattr__(self, name: str) -> Any:
        if name != _COPY or not _lowering.evicts_first:
            return getattr(self._nvvm, name)
        return self._copy

    def _copy(self, *arguments: Any, **options: Any) -> Any:
        policy = utils.c(_EVICT_FIRST, ir.IntegerType.get_signless(64))
        return getattr(self._nvvm, _COPY)(*arguments, l2_cache_hint=policy, **options)


def install() -> None:
    """Let Mosaic's lowering ask here, once. Raises ImportError where this JAX lowers copies by other means: a kernel
    without the policy is slower, and nothing else would tell."""
    mosaic: Any = launch_context
    if isinstance(mosaic.nvvm, _WithPolicy):
        return
    if not hasattr(mosaic.nvvm, _COPY):
        raise ImportError(f"Mosaic GPU of this JAX has no nvvm.{_COPY}: backends/mosaic_policy.py is written for 0.11")
    mosaic.nvvm = _WithPolicy(mosaic.nvvm)
    plain = mosaic.LaunchContext.async_copy

    def async_copy(self: Any, *, src_ref: ir.Value, **options: Any) -> None:
        before = _lowering.evicts_first
        _lowering.evicts_first = ir.MemRefType(src_ref.type).rank == WEIGHT_RANK and _kernel_name().endswith(_SUFFIX)
        try:
            plain(self, src_ref=src_ref, **options)
        finally:
            _lowering.evicts_first = before

    mosaic.LaunchContext.async_copy = async_copy


def _kernel_name() -> str:
    """Of the kernel that is being lowered: Mosaic gives it to the module."""
    operation: Any = ir.InsertionPoint.current.block.owner
    while operation.parent is not None:
        operation = operation.parent
    return ir.StringAttr(operation.attributes["sym_name"]).value
