"""What Triton can do and Pallas's Triton lowering does not offer.

`dot_fp8`, `wide_load`, `wide_store`, `load_pairs`, `widen_pairs` and `atomic_add` are JAX primitives of our own, made
with internals of JAX (0.11).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core as jax_core
from jax._src import tree_util
from jax._src.lib.mlir import ir
from jax._src.lib.triton import dialect as triton_dialect
from jax._src.pallas import core as pallas_core
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.triton import lowering
from jax._src.state import discharge
from jax._src.state import primitives as state_primitives
from jax._src.state import types as state_types
from jax.experimental.pallas import triton as plt
from jax.interpreters import mlir

IMPRECISE_ACCUMULATIONS = 2**30
"""Triton's own default on Hopper: partial sums stay in the matrix unit's accumulator over the whole of K."""

_dot_fp8_p = jax_core.Primitive("dot_fp8")
_wide_load_p = jax_core.Primitive("wide_load")
_wide_store_p = jax_core.Primitive("wide_store")
_load_pairs_p = jax_core.Primitive("load_pairs")
_widen_pairs_p = jax_core.Primitive("widen_pairs")
_atomic_add_p = jax_core.Primitive("relaxed_atomic_add")


def dot_fp8(left: jax.Array, right: jax.Array, acc: jax.Array) -> jax.Array:
    """acc + left @ right.T: left (M, K), right (N, K), both float8_e4m3fn; acc (M, N), float32.

    Pallas lowers `lax.dot_general` to a tt.dot that promises to promote every partial sum. Triton then widens both
    operands to float16 instead of using Hopper's e4m3 instruction, which cannot keep that promise.
    """
    return _dot_fp8_p.bind(left, right, acc)


def wide_load(ref: Any, mask: jax.Array | None, other: float | None) -> jax.Array:
    """`pallas.triton.load` with 64-bit offsets: for one-byte arrays of more than 2**31 and at most 2**32 elements.

    Pallas computes offsets in 32 bits, signed, up to 2**32 bytes; only past that in 64.
    """
    base, transforms = state_primitives.get_ref_and_transforms(ref, None, "wide_load")
    flat, tree = tree_util.tree_flatten((base, transforms, mask, other))
    return _wide_load_p.bind(*flat, args_tree=tree, cache_modifier=None, eviction_policy=None, is_volatile=False)


def wide_store(ref: Any, value: jax.Array, mask: jax.Array | None) -> None:
    """`pallas.triton.store` with 64-bit offsets, as `wide_load`."""
    base, transforms = state_primitives.get_ref_and_transforms(ref, None, "wide_store")
    flat, tree = tree_util.tree_flatten((base, transforms, value, mask))
    _wide_store_p.bind(*flat, args_tree=tree, eviction_policy=None)


def load(ref: Any, index: tuple[jax.Array, ...], mask: jax.Array | None) -> jax.Array:
    """ref[index]; zero where the mask is false."""
    other = None if mask is None else 0.0
    if needs_wide_offsets(ref):
        return wide_load(ref.at[index], mask, other)
    return plt.load(ref.at[index], mask=mask, other=other)


def store(ref: Any, index: tuple[jax.Array, ...], value: jax.Array, mask: jax.Array) -> None:
    """ref[index] = value where the mask is true."""
    if needs_wide_offsets(ref):
        wide_store(ref.at[index], value, mask)
    else:
        plt.store(ref.at[index], value, mask=mask)


def load_pairs(ref: Any) -> jax.Array:
    """ref[..., pair] of a one-byte array whose last axis is even, as int16: bytes 2 * pair and, above it, 2 * pair + 1.

    ref is indexed by integer arrays. The array starts at an even address, as JAX's arrays do.
    """
    base, transforms = state_primitives.get_ref_and_transforms(ref, None, "load_pairs")
    flat, tree = tree_util.tree_flatten((base, transforms))
    return _load_pairs_p.bind(*flat, args_tree=tree)


def widen_pairs(pairs: jax.Array, byte: int) -> jax.Array:
    """Byte 0, the lower, or 1 of each element (int16), an e4m3 value, as float16."""
    return _widen_pairs_p.bind(pairs, byte=byte)


def atomic_add(ref: Any, value: jax.Array, mask: jax.Array) -> None:
    """ref += value where the mask is true, atomically; float16, bfloat16 or float32. ref is indexed by integer arrays.

    Pallas's own `atomic_add` refuses bfloat16, its interpreter refuses masks, and each of its additions waits for all
    earlier accesses to memory and holds up later ones (acquire-release), of which sums need nothing.
    """
    base, transforms = state_primitives.get_ref_and_transforms(ref, None, "atomic_add")
    flat, tree = tree_util.tree_flatten((base, transforms, value, mask))
    _atomic_add_p.bind(*flat, args_tree=tree)


def needs_wide_offsets(ref: Any) -> bool:
    return ref.dtype.itemsize == 1 and 2**31 < ref.size <= 2**32


@_dot_fp8_p.def_abstract_eval
def _dot_fp8_shape(left: Any, right: Any, acc: Any) -> Any:
    if (left.shape[1], left.shape[0], right.shape[0]) != (right.shape[1], *acc.shape):
        raise ValueError(f"dot_fp8: shapes {left.shape}, {right.shape}, {acc.shape} do not fit (M, K), (N, K), (M, N)")
    return acc


@lowering.register_lowering(_dot_fp8_p)
def _dot_fp8_triton(_context: Any, left: Any, right: Any, acc: Any) -> Any:
    right = triton_dialect.trans(right, (1, 0))
    return triton_dialect.dot(left, right, acc, max_num_imprecise_acc=IMPRECISE_ACCUMULATIONS)


def _dot_fp8_interpreted(left: jax.Array, right: jax.Array, acc: jax.Array) -> jax.Array:
    return acc + lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


mlir.register_lowering(_dot_fp8_p, mlir.lower_fun(_dot_fp8_interpreted, multiple_results=False))

_wide_load_p.def_effectful_abstract_eval(pallas_primitives._load_abstract_eval)
discharge.register_discharge_rule(_wide_load_p)(pallas_primitives._load_discharge_rule)


_wide_store_p.def_effectful_abstract_eval(pallas_primitives._swap_abstract_eval)
discharge.register_discharge_rule(_wide_store_p)(pallas_primitives._swap_discharge_rule)


def _claiming_more(context: Any) -> Any:
    """The lowering looks at an array's size to choose 32 or 64 bits. Four times the rows makes it choose 64, and
    changes no stride."""
    info, *others = context.block_infos
    array = info.full_shape_dtype
    claimed = jax_core.ShapedArray((array.shape[0] * 4, *array.shape[1:]), array.dtype)
    return context.replace(block_infos=[dataclasses.replace(info, full_shape_dtype=claimed), *others])


@lowering.register_lowering(_wide_load_p)
def _wide_load_triton(context: Any, *flat: Any, **parameters: Any) -> Any:
    return lowering._masked_load_lowering_rule(_claiming_more(context), *flat, **parameters)


@lowering.register_lowering(_wide_store_p)
def _wide_store_triton(context: Any, *flat: Any, **parameters: Any) -> Any:
    return lowering._masked_swap_lowering_rule(_claiming_more(context), *flat, **parameters)


@_load_pairs_p.def_effectful_abstract_eval
def _load_pairs_shape(*flat: Any, args_tree: Any) -> Any:
    ref = pallas_core.TransformedRef(*args_tree.unflatten(flat))
    return jax_core.ShapedArray(ref.shape, jnp.int16), {state_types.ReadEffect(0)}


@discharge.register_discharge_rule(_load_pairs_p)
def _load_pairs_interpreted(context: Any, *flat: Any, args_tree: Any) -> Any:
    ref, (indexer,) = args_tree.unflatten(flat)
    pairs = lax.bitcast_convert_type(ref.reshape(*ref.shape[:-1], ref.shape[-1] // 2, 2), jnp.int16)
    return (None,) * len(context.in_avals), pairs[indexer.indices]


@lowering.register_lowering(_load_pairs_p)
def _load_pairs_triton(context: Any, *flat: Any, args_tree: Any) -> Any:
    info, *_ = context.block_infos
    pointer, (indexer,) = args_tree.unflatten(flat)
    *rows, row = info.full_shape_dtype.shape
    # Of an array of up to 2**32 bytes no pair's offset passes 2**31: needs no `needs_wide_offsets`.
    pairs = dataclasses.replace(info, full_shape_dtype=jax_core.ShapedArray((*rows, row // 2), jnp.int16))
    space = triton_dialect.PointerType(pointer.type).address_space
    pair = triton_dialect.PointerType.get(ir.IntegerType.get_signless(16), space)
    pointer = triton_dialect.bitcast(pair, pointer)
    return lowering._load(lowering._compute_pointers_from_indices(pointer, pairs, indexer))


@_widen_pairs_p.def_abstract_eval
def _widen_pairs_shape(pairs: Any, byte: int) -> Any:
    return jax_core.ShapedArray(pairs.shape, jnp.float16)


@lowering.register_lowering(_widen_pairs_p)
def _widen_pairs_triton(_context: Any, pairs: Any, byte: int) -> Any:
    """Two elements at a time. Of Triton's own operations LLVM makes four instructions to bring two bytes together.

    Both bytes' conversions permute alike, and ptxas does that once for both. One operation with two results would be
    an operand that Triton takes the second of through shared memory.
    """
    code = (
        "{ .reg .b32 apart; .reg .b16 half<2>; prmt.b32 apart, $1, 0, 0x3120; mov.b32 {half0, half1}, apart;"
        f" cvt.rn.f16x2.e4m3x2 $0, half{byte}; }}"
    )
    result = ir.RankedTensorType.get(ir.RankedTensorType(pairs.type).shape, ir.F16Type.get())
    return triton_dialect.elementwise_inline_asm(
        [result], code, constraints="=r,r", pure=True, packed_element=2, args=[pairs]
    )


def _widen_pairs_interpreted(pairs: jax.Array, byte: int) -> jax.Array:
    values = lax.shift_right_logical(pairs, jnp.int16(8 * byte)).astype(jnp.int8)
    return lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float16)


mlir.register_lowering(_widen_pairs_p, mlir.lower_fun(_widen_pairs_interpreted, multiple_results=False))


_atomic_add_p.def_effectful_abstract_eval(pallas_primitives._swap_abstract_eval)


@discharge.register_discharge_rule(_atomic_add_p)
def _atomic_add_interpreted(context: Any, *flat: Any, args_tree: Any) -> Any:
    ref, (indexer,), value, mask = args_tree.unflatten(flat)
    # Masked elements add 0 to the first. Others that lie outside are not dropped: they add where they show.
    indices = tuple(jnp.where(mask, index, 0) for index in indexer.indices)
    after = ref.at[indices].add(jnp.where(mask, value, 0), mode="clip")
    return (after,) + (None,) * (len(context.in_avals) - 1), ref[indices]


@lowering.register_lowering(_atomic_add_p)
def _atomic_add_triton(context: Any, *flat: Any, args_tree: Any) -> Any:
    info, *_ = context.block_infos
    pointer, (indexer,), value, mask = args_tree.unflatten(flat)
    pointers = lowering._compute_pointers_from_indices(pointer, info, indexer)
    return lowering._atomic_rmw(
        triton_dialect.RMWOp.FADD, pointers, value, mask=mask, semantic=triton_dialect.MemSemantic.RELAXED
    )
