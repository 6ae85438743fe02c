"""Which experts each token goes to: seeded generators and recorded routings. All give topk_ids (T, top_k) int32."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shared.checks import ArgumentError


def uniform(tokens: int, experts: int, top_k: int, *, seed: int) -> np.ndarray:
    """top_k different experts per token, all equally likely."""
    return zipf(tokens, experts, top_k, exponent=0.0, seed=seed)


def zipf(tokens: int, experts: int, top_k: int, *, exponent: float, seed: int) -> np.ndarray:
    """top_k different experts per token; the expert of popularity rank r is drawn with weight r**-exponent.

    Ranks are dealt to experts at random. Drawing without replacement by the Gumbel-top-k method: the top_k largest
    of log(weight) + Gumbel noise.
    """
    _check(tokens, experts, top_k)
    if exponent < 0:
        raise ArgumentError(f"exponent: got {exponent}; allowed: 0 (uniform) or more")
    rng = np.random.default_rng(seed)
    log_weight = -exponent * np.log(1.0 + rng.permutation(experts))
    keys = log_weight + rng.gumbel(size=(tokens, experts))
    return np.argsort(-keys, axis=1, kind="stable")[:, :top_k].astype(np.int32)


def one_expert(tokens: int, experts: int, top_k: int, *, expert: int = 0) -> np.ndarray:
    """Every slot to one expert: the most skewed routing, and the one where tile rows share the most weights."""
    if not 0 <= expert < experts:
        raise ArgumentError(f"expert: got {expert}; allowed: 0 to {experts - 1}")
    return np.full((tokens, top_k), expert, np.int32)


def recorded(path: str | Path, experts: int) -> np.ndarray:
    """topk_ids (T, top_k) recorded in a .npy file; any integer dtype, each in [-1, E)."""
    ids = np.load(path, allow_pickle=False)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or ids.shape[1] == 0:
        raise ArgumentError(f"{path}: got shape {ids.shape}, dtype {ids.dtype}; allowed: integers of shape (T, top_k)")
    if ids.size and (ids.min() < -1 or ids.max() >= experts):
        raise ArgumentError(f"{path}: got expert numbers {ids.min()} to {ids.max()}; allowed: -1 to {experts - 1}")
    return ids.astype(np.int32)


def make(spec: str, tokens: int, experts: int, top_k: int, *, seed: int) -> np.ndarray:
    """Routing by its name: "uniform", "zipf-1.2", "one-expert", or the path of a recorded .npy file."""
    if spec == "uniform":
        return uniform(tokens, experts, top_k, seed=seed)
    if spec.startswith("zipf-"):
        try:
            exponent = float(spec.removeprefix("zipf-"))
        except ValueError:
            raise ArgumentError(f"routing: got {spec!r}; allowed: zipf-EXPONENT, such as zipf-1.2") from None
        return zipf(tokens, experts, top_k, exponent=exponent, seed=seed)
    if spec == "one-expert":
        return one_expert(tokens, experts, top_k)
    if spec.endswith(".npy"):
        ids = recorded(spec, experts)
        if ids.shape != (tokens, top_k):
            raise ArgumentError(f"routing: got shape {ids.shape} in {spec}; allowed: {(tokens, top_k)}")
        return ids
    raise ArgumentError(f"routing: got {spec!r}; allowed: uniform, zipf-EXPONENT, one-expert, or a .npy file")


def _check(tokens: int, experts: int, top_k: int) -> None:
    if tokens < 0 or experts < 1:
        raise ArgumentError(f"routing: got {tokens} tokens and {experts} experts; allowed: tokens >= 0, experts >= 1")
    if not 1 <= top_k <= experts:
        raise ArgumentError(f"top_k: got {top_k}; allowed: 1 to {experts}, as a token's experts differ")
