"""Split K in `pallas_triton`: the kernel that clears what parts of K are added to, and the one that makes y of sums.

Both go over the rows of y, one program a slot and ROWS_CHUNK channels. Their names begin with the GEMM kernel's, so
that whoever times kernels by that name counts them in.
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


def zeros(shape: jax.ShapeDtypeStruct, before: jax.Array | None, interpret: bool) -> jax.Array:
    """An array (S, N) or (1, S, N) of zeros, in the buffer of `before` where that is given."""
    slots, n_size = shape.shape[-2:]

    def moe_gemm_pallas_triton_zero(*refs: Any) -> None:
        out = refs[-1]
        slot, n = _program(n_size)
        target = out.at[slot, n] if len(out.shape) == 2 else out.at[0, slot, n]
        plt.store(target, jnp.zeros(ROWS_CHUNK, out.dtype), mask=n < n_size)

    return _call(moe_gemm_pallas_triton_zero, [], shape, before, slots * ceil_div(n_size, ROWS_CHUNK), interpret)


def reduce_parts(arrays: dict[str, jax.Array], problem: Problem, y_before: jax.Array | None, interpret: bool) -> Any:
    """y (S, N) from sums (parts, S, N), float32: added from the first part to the last, scaled as the GEMM kernel does.

    arrays: "sums", "topk_ids" (S,), and where the problem has them "w_scale" (its block scales have been applied),
    "x_scale" (T,), "topk_weight" (S,). Slots without an expert get zeros; nobody has written their sums.
    """
    parts, slots, n_size = arrays["sums"].shape
    names = list(arrays)

    def moe_gemm_pallas_triton_reduce(*refs: Any) -> None:
        ref, y = dict(zip(names, refs, strict=False)), refs[-1]
        slot, n = _program(n_size)
        valid = n < n_size
        expert = ref["topk_ids"][slot]
        has_expert = (expert >= 0) & (expert < problem.experts)
        acc = jnp.zeros(ROWS_CHUNK, jnp.float32)
        for part in range(parts):
            acc += plt.load(ref["sums"].at[part, slot, n], mask=valid & has_expert, other=0.0)
        if problem.scale_layout == "channel":
            acc *= plt.load(ref["w_scale"].at[jnp.where(has_expert, expert, 0), n], mask=valid, other=0.0)
        if problem.scales_x:
            acc *= ref["x_scale"][lax.div(slot, problem.top_k)]
        if problem.routing_weight:
            acc *= ref["topk_weight"][slot]
        acc = jnp.where(has_expert, acc, 0.0)  # a scale may be NaN
        plt.store(y.at[slot, n], acc.astype(y.dtype), mask=valid)

    y_type = jax.ShapeDtypeStruct((slots, n_size), jnp.dtype(problem.activation))
    programs = slots * ceil_div(n_size, ROWS_CHUNK)
    return _call(moe_gemm_pallas_triton_reduce, list(arrays.values()), y_type, y_before, programs, interpret)


def _program(n_size: int) -> tuple[jax.Array, jax.Array]:
    """Slot and channels of this program."""
    pid, chunks = pl.program_id(0), ceil_div(n_size, ROWS_CHUNK)
    return lax.div(pid, chunks), lax.rem(pid, chunks) * ROWS_CHUNK + lax.iota(jnp.int32, ROWS_CHUNK)


def _call(
    kernel: Any, operands: list[jax.Array], out: jax.ShapeDtypeStruct, before: jax.Array | None, programs: int,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """The kernel's output, in the buffer of `before` where that is given: its last operand, which it does not read."""
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(programs,),
        input_output_aliases={} if before is None else {len(operands): 0},
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
    )(*operands, *([] if before is None else [before]))
