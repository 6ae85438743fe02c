"""What input is refused, and how it is said: the argument, what was given, what is allowed.

Everything here works on descriptions of arrays (`ArraySpec`), so that torch tensors, JAX arrays and tracers and
NumPy arrays meet the same checks before anything is launched.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shared.problem import Problem


class ArgumentError(ValueError):
    """An argument that the spec does not allow. The message names it, what was given and what is allowed."""


class DtypeError(ArgumentError, TypeError):
    """An argument whose dtype the chosen mode does not take."""


def no_gradient(argument: str, got: str) -> str:
    """What an ArgumentError says where a derivative with respect to `argument` is asked for."""
    return (
        f"{argument}: got {got}; allowed: none, moe_gemm has no derivative, backward or forward "
        "(torch: detach it, or call under torch.no_grad(); JAX: jax.lax.stop_gradient)"
    )


def check_name(argument: str, given: object, known: Iterable[str]) -> None:
    """Raise ArgumentError, with the known names and the nearest of them, unless `given` is one of `known`."""
    known = tuple(known)
    if isinstance(given, str) and given in known:
        return
    near = difflib.get_close_matches(given, known, n=1) if isinstance(given, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ArgumentError(f"{argument}: got {given!r}; known: {', '.join(known)}{hint}")


def check_fields(argument: str, given: Iterable[str], kind: type) -> None:
    """Raise ArgumentError unless all names that are given are fields of this dataclass."""
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(given) - known):
        raise ArgumentError(f"{argument}: got unknown fields {unknown}; allowed: {sorted(known)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Description of one array argument.

    dtype: NumPy's name ("float16", "float8_e4m3fn", "int32", ...); strides: in elements, None if row-major by
    construction; device: a string that is equal for two arrays on the same device, None if traced; kind: "torch",
    "jax" or "numpy".
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None
    device: str | None
    kind: str

    def inner_contiguous(self) -> bool:
        return self.strides is None or 0 in self.shape or self.shape[-1] == 1 or self.strides[-1] == 1

    def compact(self) -> bool:
        """Row-major without gaps."""
        if self.strides is None or 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


MODES = ("fp16", "bf16", "fp8-w8a16", "fp8-w8a8")
_MODE_ALIASES = {"w8a16": "fp8-w8a16", "w8a8": "fp8-w8a8"}
_FP8 = "float8_e4m3fn"


def check_arguments(
    x: ArraySpec,
    w: ArraySpec,
    topk_ids: ArraySpec,
    *,
    w_scale: ArraySpec | None,
    topk_weight: ArraySpec | None,
    mode: str | None,
) -> Problem:
    """The Problem that these arguments state, or an ArgumentError.

    mode None means: the dtype of w says it; FP8 weights are taken as fp8-w8a16, which leaves x as it is.
    """
    from shared.problem import SCALE_BLOCK, Problem, ceil_div

    arguments = {"x": x, "w": w, "topk_ids": topk_ids, "w_scale": w_scale, "topk_weight": topk_weight}
    _check_rank("x", x, 2, "(T, K)")
    _check_rank("w", w, 3, "(E, N, K)")
    _check_rank("topk_ids", topk_ids, 2, "(T, top_k)")

    tokens, k = x.shape
    experts, n, w_k = w.shape
    top_k = topk_ids.shape[1]
    if w_k != k:
        raise ArgumentError(f"w: got K = {w_k} (shape {w.shape}); allowed: K = {k}, the last dimension of x {x.shape}")
    if topk_ids.shape[0] != tokens:
        raise ArgumentError(
            f"topk_ids: got T = {topk_ids.shape[0]} (shape {topk_ids.shape}); allowed: T = {tokens}, as x {x.shape}"
        )
    for name, size, argument in (("E", experts, "w"), ("N", n, "w"), ("K", k, "w"), ("top_k", top_k, "topk_ids")):
        if size < 1:
            raise ArgumentError(f"{argument}: got {name} = 0 (shape {arguments[argument].shape}); allowed: 1 or more")  # type: ignore[union-attr]

    if x.dtype not in ("float16", "bfloat16"):
        raise DtypeError(f"x: got dtype {x.dtype}; allowed: float16, bfloat16")
    if w.dtype not in ("float16", "bfloat16", _FP8):
        raise DtypeError(f"w: got dtype {w.dtype}; allowed: float16, bfloat16, {_FP8}")
    if topk_ids.dtype != "int32":
        allowed = "int32" + (" (expert numbers fit: cast it)" if topk_ids.dtype in ("int64", "uint32", "int16") else "")
        raise DtypeError(f"topk_ids: got dtype {topk_ids.dtype}; allowed: {allowed}")
    dtype = _resolve_mode(mode, x, w)

    scale_layout = None
    if w.dtype == _FP8:
        channel = (experts, n)
        block = (experts, ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK))
        allowed = f"(E, N) = {channel}, or per {SCALE_BLOCK}x{SCALE_BLOCK} block {block}"
        if w_scale is None:
            raise ArgumentError(f"w_scale: got None with {_FP8} weights; allowed: float32 of shape {allowed}")
        if w_scale.shape not in (channel, block):
            raise ArgumentError(f"w_scale: got shape {w_scale.shape}; allowed: {allowed}")
        scale_layout = "channel" if w_scale.shape == channel else "block"
        _check_dtype("w_scale", w_scale, "float32")
    elif w_scale is not None:
        raise ArgumentError(f"w_scale: got shape {w_scale.shape} with {w.dtype} weights; allowed: None")

    if topk_weight is not None:
        if topk_weight.shape != topk_ids.shape:
            raise ArgumentError(
                f"topk_weight: got shape {topk_weight.shape}; allowed: {topk_ids.shape}, the shape of topk_ids"
            )
        _check_dtype("topk_weight", topk_weight, "float32")

    if not w.inner_contiguous():
        raise ArgumentError(
            f"w: got strides {w.strides} (elements); allowed: the last dimension (K) contiguous, stride 1"
        )
    for name, spec in arguments.items():
        if spec is not None and spec.kind != x.kind:
            raise DtypeError(f"{name}: got a {spec.kind} array; allowed: {x.kind}, the kind of x")
    check_one_device({name: spec.device for name, spec in arguments.items() if spec is not None})
    if n * k >= 2**31:
        raise ArgumentError(f"w: got N * K = {n * k}; allowed: below 2**31 for one expert")

    return Problem(
        tokens=tokens,
        experts=experts,
        n=n,
        k=k,
        top_k=top_k,
        dtype=dtype,
        activation=x.dtype,
        scale_layout=scale_layout,  # type: ignore[arg-type]
        routing_weight=topk_weight is not None,
    )


def check_popularity(popularity: ArraySpec | None, order: str | None, w: ArraySpec) -> None:
    """popularity (E,) int32 goes with order "popular" alone."""
    if popularity is None:
        return
    if order != "popular":
        raise ArgumentError(f'popularity: got an array with order {order!r}; allowed: None, or order "popular"')
    if popularity.shape != w.shape[:1]:
        raise ArgumentError(f"popularity: got shape {popularity.shape}; allowed: (E,) = {w.shape[:1]}")
    _check_dtype("popularity", popularity, "int32")
    if popularity.kind != w.kind:
        raise DtypeError(f"popularity: got a {popularity.kind} array; allowed: {w.kind}, the kind of w")
    check_one_device({"w": w.device, "popularity": popularity.device})


def check_values(problem: Problem, topk_ids: np.ndarray, w_scale: np.ndarray | None) -> None:
    """Checks that read the data: expert numbers in [-1, E), scales finite and positive. Host arrays only."""
    bad = (topk_ids < -1) | (topk_ids >= problem.experts)
    if bad.any():
        token, slot = (int(i) for i in np.argwhere(bad)[0])
        raise ArgumentError(
            f"topk_ids: got {int(topk_ids[token, slot])} at [{token}, {slot}] ({int(bad.sum())} such); "
            f"allowed: -1 to {problem.experts - 1} (E = {problem.experts})"
        )
    if w_scale is not None:
        bad = ~(np.isfinite(w_scale) & (w_scale > 0))
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ArgumentError(
                f"w_scale: got {float(w_scale[where])} at {list(where)} ({int(bad.sum())} such); "
                "allowed: finite and above 0"
            )


def _resolve_mode(mode: str | None, x: ArraySpec, w: ArraySpec) -> str:
    if mode is not None:
        mode = _MODE_ALIASES.get(mode, mode) if isinstance(mode, str) else mode
        check_name("mode", mode, (*MODES, *(_MODE_ALIASES if mode not in MODES else ())))
    else:
        mode = {"float16": "fp16", "bfloat16": "bf16", _FP8: "fp8-w8a16"}[w.dtype]
    needed_w = {"fp16": "float16", "bf16": "bfloat16"}.get(mode, _FP8)
    if w.dtype != needed_w:
        raise DtypeError(f"w: got dtype {w.dtype} in mode {mode}; allowed: {needed_w}")
    if mode in ("fp16", "bf16") and x.dtype != needed_w:
        raise DtypeError(f"x: got dtype {x.dtype} in mode {mode}; allowed: {needed_w}, the dtype of w")
    return mode


def _check_rank(name: str, spec: ArraySpec, rank: int, shape: str) -> None:
    if len(spec.shape) != rank:
        raise ArgumentError(f"{name}: got rank {len(spec.shape)} (shape {spec.shape}); allowed: rank {rank}, {shape}")


def _check_dtype(name: str, spec: ArraySpec, dtype: str) -> None:
    if spec.dtype != dtype:
        raise DtypeError(f"{name}: got dtype {spec.dtype}; allowed: {dtype}")


def check_one_device(device_of: Mapping[str, str | None]) -> None:
    """device_of: each argument's device; None where it is not known yet."""
    devices = {name: device for name, device in device_of.items() if device is not None}
    if len(set(devices.values())) > 1:
        raise ArgumentError(
            "arguments on different devices: got "
            + ", ".join(f"{name} on {device}" for name, device in devices.items())
            + "; allowed: all on one device"
        )
