"""A batch of calls as one call: what vmap makes of `moe_gemm`, in torch and in JAX.

B calls that share their weights are one call of B * T tokens. B calls with weights of their own are one call of B * T
tokens and B * E experts: call b's expert e becomes expert b * E + e.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.checks import ArgumentError

OF_EXPERTS = ("w", "w_scale", "popularity")


def fold(given: Mapping[str, Any], batched: Mapping[str, bool], calls: Any, xp: Any) -> dict[str, Any]:
    """Arguments of the one call, by name; y (B * T, top_k, N) of it, reshaped, is y (B, T, top_k, N).

    given:   arrays by name, each with an axis B in front where `batched` says so; None where there is none
    calls:   (B,) int32, 0 to B - 1, where the arrays are
    xp:      the arrays' module, torch or jax.numpy

    An expert number outside [-1, E) stays outside [-1, B * E). Raises ArgumentError where w_scale has the batch axis
    and w has not, which would copy w B times.
    """
    size = calls.shape[0]
    own_weights = batched["w"]
    if given["w_scale"] is not None and batched["w_scale"] and not own_weights:
        raise ArgumentError("w_scale: got a batch axis under vmap, but w has none; allowed: both or neither")

    def folded(name: str) -> Any:
        array = given[name]
        if array is None:
            return None
        if name in OF_EXPERTS and not own_weights:  # popularity only orders the experts: one call has one
            return xp.amax(array, 0) if batched[name] else array
        if not batched[name]:
            array = xp.broadcast_to(array, (size, *array.shape))
        if name == "topk_ids" and own_weights:
            experts = given["w"].shape[1]
            own = array + calls.reshape(size, 1, 1) * experts
            array = xp.where(array < 0, array, xp.where(array < experts, own, size * experts))
        return array.reshape(size * array.shape[1], *array.shape[2:])

    return {name: folded(name) for name in given}
