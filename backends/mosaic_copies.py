"""What a Mosaic GPU kernel's bulk copies need and Pallas's have no argument for: how long L2 keeps what they read, and
columns of a matrix whose rows are no whole number of them.

In a kernel named by `evict_first`, copies of arrays of WEIGHT_RANK dimensions are evicted first from L2. The policy
becomes an operand of the copy instruction as Mosaic lowers it.

wgmma's operands lie in shared memory in tiles of 8 rows and a column of up to 128 bytes. Mosaic copies a slice of such
tiles at once, as one of an array that is tiled itself: of whole columns. A single column needs no tiled array, as its
tiles lie one below the other just as its rows do: TMA copies so many rows and fills what lies past their end with
zeros.

For both, `install` puts itself between JAX's Mosaic lowering and its dialect, in the whole process. What JAX alone
lowers is lowered as it was, in kernels of other names, too. A single column of a matrix whose rows are no whole number
of them, whose copy JAX alone refuses, is copied in any kernel.

Sources: the PTX manual on cp.async.bulk.tensor (`.L2::cache_hint`, tensors and their bounds, swizzles).
"""

from __future__ import annotations

import functools
import inspect
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
_OPERAND = "l2_cache_hint"


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
        if name == "_nvvm":  # of a copy that has none yet
            raise AttributeError(name)
        found = getattr(self._nvvm, name)
        return functools.partial(_copy, found) if name == _COPY and _lowering.evicts_first else found


def _copy(plain: Any, *arguments: Any, **options: Any) -> Any:
    policy = utils.c(_EVICT_FIRST, ir.IntegerType.get_signless(64))
    return plain(*arguments, **{_OPERAND: policy}, **options)


def install() -> str | None:
    """Let Mosaic's lowering ask here, once a process. None where it does; else why it cannot, and what to do about it:
    where JAX lowers copies by other means, kernels would go without the policy, and nothing but their time would tell.
    """
    mosaic: Any = launch_context
    plain: Any = getattr(getattr(mosaic, "LaunchContext", None), "async_copy", None)
    if getattr(plain, "has_policy", False):
        return None
    copy = getattr(getattr(mosaic, "nvvm", None), _COPY, None)
    lowers_by_it = _COPY in getattr(getattr(plain, "__code__", None), "co_names", ())
    if copy is None or not lowers_by_it or _OPERAND not in inspect.signature(copy).parameters:
        return (
            f"this JAX's Mosaic GPU does not lower its bulk copies by nvvm.{_COPY} with {_OPERAND}, as "
            "backends/mosaic_copies.py needs: install jax[cuda13]>=0.11,<0.12, or use another backend"
        )

    def async_copy(self: Any, *, src_ref: ir.Value, **options: Any) -> None:
        if _is_column_past_whole_ones(src_ref, options):
            options["dst_ref"] = utils.memref_fold(options["dst_ref"], 0, 3)  # (rows / 8, 1, 8, width) to (rows, width)
            options["gmem_transform"] = ()
        before = _lowering.evicts_first
        _lowering.evicts_first = ir.MemRefType(src_ref.type).rank == WEIGHT_RANK and _kernel_name().endswith(_SUFFIX)
        try:
            plain(self, src_ref=src_ref, **options)
        finally:
            _lowering.evicts_first = before

    async_copy.has_policy = True  # type: ignore[attr-defined]  # by name: this module may be imported anew
    mosaic.nvvm, mosaic.LaunchContext.async_copy = _WithPolicy(mosaic.nvvm), async_copy
    return None


def _is_column_past_whole_ones(source: ir.Value, options: dict[str, Any]) -> bool:
    """Whether a copy to shared memory is of one column of a matrix whose rows are no whole number of them."""
    match options.get("gmem_transform"):
        case (launch_context.TileTransform(tiling=(_, width)),):
            target = ir.MemRefType(options["dst_ref"].type)
            whole = ir.MemRefType(source.type).shape[-1] % width == 0
            return not whole and target.rank == 4 and target.shape[1] == 1
    return False


def _kernel_name() -> str:
    """Of the kernel that is being lowered: Mosaic gives it to the module."""
    operation: Any = ir.InsertionPoint.current.block.owner
    while operation.parent is not None:
        operation = operation.parent
    return ir.StringAttr(operation.attributes["sym_name"]).value if "sym_name" in operation.attributes else ""
