"""Split K in Pallas: the kernel that clears what parts of K are added to, and the one that makes y of sums.

Both go over the rows of y, one program a slot and ROWS_CHUNK channels, lowered through Triton; `pallas_mosaic` has use
for the second, as Mosaic GPU cannot gather by index. Their names begin with the GEMM kernel's, so that whoever times
kernels by that name counts them in.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from shared.problem import Problem, ceil_div

ROWS_CHUNK = 1024
"""Channels of a program: 8 a thread of four warps, 16 bytes a load or two."""


def zeros(shape: jax.ShapeDtypeStruct, before: jax.Array | None, interpret: bool, *, name: str) -> jax.Array:
    """An array (S, N) or (1, S, N) of zeros, in the buffer of `before` where that is given. name: the kernel's"""
    slots, n_size = shape.shape[-2:]

    def zero(*refs: Any) -> None:
        out = refs[-1]
        slot, n = _program(n_size)
        target = out.at[slot, n] if len(out.shape) == 2 else out.at[0, slot, n]
        plt.store(target, jnp.zeros(ROWS_CHUNK, out.dtype), mask=n < n_size)

    programs = slots * ceil_div(n_size, ROWS_CHUNK)
    return _call(zero, [], shape, before, programs, interpret, name)


def reduce_parts(
    arrays: dict[str, jax.Array], problem: Problem, y_before: jax.Array | None, interpret: bool, *, name: str
) -> jax.Array:
    """y (S, N) from float32 sums: added from the first part to the last, scaled as the GEMM kernel does it.

    arrays: "sums" (parts, S, N), or, with "position" (S,), (parts, rows, N or more), in which it names each slot's row;
    "topk_ids" (S,); and as far as sums are not scaled yet "w_scale" (E, N), "x_scale" (T,) and "topk_weight" (S,).
    Slots without an expert get zeros; nobody has written their sums. name: the kernel's
    """
    parts, n_size = arrays["sums"].shape[0], problem.n
    names = list(arrays)

    def reduce(*refs: Any) -> None:
        ref, y = dict(zip(names, refs, strict=False)), refs[-1]
        slot, n = _program(n_size)
        valid = n < n_size
        expert = ref["topk_ids"][slot]
        has_expert = (expert >= 0) & (expert < problem.experts)
        row = jnp.where(has_expert, ref["position"][slot], 0) if "position" in ref else slot
        acc = jnp.zeros(ROWS_CHUNK, jnp.float32)
        for part in range(parts):
            acc += plt.load(ref["sums"].at[part, row, n], mask=valid & has_expert, other=0.0)
        if "w_scale" in ref:
            acc *= plt.load(ref["w_scale"].at[jnp.where(has_expert, expert, 0), n], mask=valid, other=0.0)
        if "x_scale" in ref:
            acc *= ref["x_scale"][lax.div(slot, problem.top_k)]
        if "topk_weight" in ref:
            acc *= ref["topk_weight"][slot]
        acc = jnp.where(has_expert, acc, 0.0)  # a scale may be NaN
        plt.store(y.at[slot, n], acc.astype(y.dtype), mask=valid)

    y_type = jax.ShapeDtypeStruct((problem.slots, n_size), jnp.dtype(problem.activation))
    programs = problem.slots * ceil_div(n_size, ROWS_CHUNK)
    return _call(reduce, list(arrays.values()), y_type, y_before, programs, interpret, name)


def _program(n_size: int) -> tuple[jax.Array, jax.Array]:
    """Slot and channels of this program."""
    pid, chunks = pl.program_id(0), ceil_div(n_size, ROWS_CHUNK)
    return lax.div(pid, chunks), lax.rem(pid, chunks) * ROWS_CHUNK + lax.iota(jnp.int32, ROWS_CHUNK)


def _call(
    kernel: Any, operands: list[jax.Array], out: jax.ShapeDtypeStruct, before: jax.Array | None, programs: int,
    interpret: bool, name: str,
) -> jax.Array:  # fmt: skip
    """The kernel's output, in the buffer of `before` where that is given: its last operand, which it does not read."""
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(programs,),
        input_output_aliases={} if before is None else {len(operands): 0},
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name=name,
    )(*operands, *([] if before is None else [before]))
