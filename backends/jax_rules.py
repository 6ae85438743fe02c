"""What JAX's transformations make of `moe_gemm`: vmap folds a batch of calls into one, a derivative is refused.

Only under a trace; a call on arrays goes straight to its backend. `jax.jit`, `jax.checkpoint`, `lax.scan`, `shard_map`
and `jax.export` need no rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from backends import batching
from shared.checks import ArgumentError, no_gradient


def call(run: Callable[..., jax.Array], door: Callable[..., jax.Array], given: dict[str, Any]) -> jax.Array:
    """run(*given.values()), with rules.

    run:   the backend, for exactly these shapes; arrays in the order of `given`
    door:  `moe_gemm` with its options bound, for other shapes; arrays by name
    """
    names = tuple(given)

    @custom_vmap
    def batched(*arrays: jax.Array | None) -> jax.Array:
        return run(*arrays)

    @batched.def_vmap
    def fold(size: int, in_batched: list[Any], *arrays: Any) -> tuple[jax.Array, bool]:
        by_name = dict(zip(names, arrays, strict=True))
        has_batch = {name: flag is True for name, flag in zip(names, in_batched, strict=True)}
        one = batching.fold(by_name, has_batch, jnp.arange(size, dtype=jnp.int32), jnp)
        y = door(**one)
        return y.reshape(size, by_name["topk_ids"].shape[-2], *y.shape[1:]), True

    @jax.custom_jvp
    def differentiable(*arrays: jax.Array | None) -> jax.Array:
        return batched(*arrays)

    def refuse(primals: Any, tangents: Any) -> NoReturn:
        asked = [name for name, t in zip(names, tangents, strict=True) if t is not None and type(t) is not SymbolicZero]
        raise ArgumentError(no_gradient(asked[0] if asked else "x", "an array under jax.grad, vjp or jvp"))

    differentiable.defjvp(refuse, symbolic_zeros=True)
    return differentiable(*given.values())
