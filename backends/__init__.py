"""One door to every backend: `moe_gemm`. Importing this package imports no framework."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from backends import arrays, tuning
from backends.registry import BACKENDS, Again, Backend, BackendUnavailable, load
from backends.tuning import Choice
from shared.checks import (
    ArgumentError,
    ArraySpec,
    DtypeError,
    check_arguments,
    check_name,
    check_popularity,
    check_values,
)
from shared.config import Config
from shared.orders import ORDERS
from shared.problem import Problem

__all__ = [
    "BACKENDS",
    "ArgumentError",
    "Backend",
    "BackendUnavailable",
    "Choice",
    "Config",
    "DtypeError",
    "Problem",
    "choose_config",
    "config_for",
    "load",
    "moe_gemm",
]


def moe_gemm(
    x: Any,
    w: Any,
    topk_ids: Any,
    *,
    w_scale: Any = None,
    topk_weight: Any = None,
    mode: str | None = None,
    order: str | None = None,
    config: Config | None = None,
    backend: str = "torch-triton",
    popularity: Any = None,
    interpret: bool = False,
    validate: bool = False,
) -> Any:
    """MoE GEMM: y[t, j] = x[t] @ w[topk_ids[t, j]].T, for skinny x.

    x           (T, K) float16 or bfloat16
    w           (E, N, K) float16, bfloat16 or float8_e4m3fn, K contiguous
    topk_ids    (T, top_k) int32: expert of each slot; -1 (an expert of another rank) gives a row of zeros. A number
                outside [-1, E) is an error where it is checked (see validate), else also a row of zeros.
    w_scale     float32, FP8 only: (E, N) per channel or (E, ceil(N/128), ceil(K/128)) per block
    topk_weight (T, top_k) float32, multiplies the rows of y
    mode        None: the dtype of w says it, and FP8 means w8a16. "w8a8" quantises x per token on the fly.
    order       in which order thread blocks walk the output tiles: row, column, grouped, popular; None takes row where
                an expert's slots are likely to fit one tile of the config, as they do in nearly all measured ones, and
                column where they fill several (`backends.tuning.order_for`); without a config `choose_config` shows it
    config      tile shape; None takes the best known one, which `choose_config` shows
    backend     torch-triton, jax-triton, pallas-triton, pallas-mosaic
    popularity  (E,) int32, for order "popular" alone: experts are walked by falling popularity, such as their slots in
                earlier steps; None takes the slots of this routing
    interpret   run in the backend's interpreter, on the CPU; without it a GPU is needed
    validate    check the values of topk_ids and w_scale on device arrays too; waits for the device

    Arguments are all torch tensors, all JAX arrays or all NumPy arrays; y (T, top_k, N) is of the same kind, in the
    dtype of x. A backend of the other framework gets them through DLPack, without a copy; NumPy arrays are copied to
    the GPU and y back. Torch calls run on the current stream and wait for nothing, so a CUDA graph can capture them;
    torch.compile and torch.export see one operator. The JAX backends can be traced by jax.jit. vmap folds a batch of
    calls into one. There is no gradient. notes/guarantees.md says what holds of bits, streams and devices.

    Raises, before anything is launched: ArgumentError (a ValueError) naming the argument, what was given and what is
    allowed; DtypeError (also a TypeError) for a dtype; BackendUnavailable with the remedy.
    """
    torch_op = _torch_op or _import_torch_op()
    if torch_op is not None:
        given = (x, w, topk_ids, w_scale, topk_weight, popularity)
        if torch_op.recording(given):
            return torch_op.call(
                given, config, mode=mode, order=order, backend=backend, interpret=interpret, validate=validate
            )
    return unrecorded(
        x, w, topk_ids, w_scale, topk_weight, popularity, config=config, mode=mode, order=order, backend=backend,
        interpret=interpret, validate=validate,
    )  # fmt: skip


_torch_op: Any = None
"""The module backends.torch_op, once it has been imported: an import statement costs a call more than this name."""


def _import_torch_op() -> Any:
    """backends.torch_op where torch has been imported, else None. Another thread may be importing either just now: the
    import statement waits until that is done, where `sys.modules` would show a module with half its names."""
    global _torch_op
    if sys.modules.get("torch") is None:  # None itself is how an import of it is forbidden
        return None
    from backends import torch_op

    _torch_op = torch_op
    return torch_op


def unrecorded(
    x: Any, w: Any, topk_ids: Any, w_scale: Any, topk_weight: Any, popularity: Any, *, config: Config | None,
    mode: str | None, order: str | None, backend: str, interpret: bool, validate: bool,
) -> Any:  # fmt: skip
    """`moe_gemm` itself. What records torch operators sees it from outside only (backends/torch_op.py)."""
    given = (x, w, topk_ids, w_scale, topk_weight, popularity)
    key = repeat = None
    if not interpret and not validate:
        try:
            key = (arrays.tensors_key(*given), mode, order, config, backend)
            repeat = _repeats.get(key)
        except (AttributeError, TypeError, RuntimeError):
            # Not all are tensors, one is not strided, or no dictionary can look up an option: told below.
            key = None
    if repeat is not None:
        _torch_op.check_no_gradient(given)
        if (y := repeat(*given)) is not None:
            return y

    signatures = arrays.signatures(ARRAYS, given)
    traced = (signatures[0] is None or signatures[0][0] != "torch") and any(map(_is_traced, signatures))
    # What depends on no value is checked once; a trace, and what no dictionary can look up, each time.
    often = not traced and type(config) in _LOOKED_UP and type(mode) in _LOOKED_UP and type(order) in _LOOKED_UP
    often = often and type(backend) is str
    check = _checked if often else _checked.__wrapped__
    checked = check(signatures, mode, order, config, backend, None if _told(signatures[0]) else _gpu_name())
    problem, best, best_order, kind, device, on_cpu, module = checked
    asked, asked_order, config, order = config, order, config or best, order or best_order
    if kind == "torch":
        (_torch_op or _import_torch_op()).check_no_gradient(given)
    if traced and module.FRAMEWORK != "jax":
        raise ArgumentError(f"backend: got {backend} under jax.jit; allowed there: the JAX backends")
    if (validate or on_cpu) and not traced and device != "meta":
        check_values(problem, arrays.to_host(topk_ids), None if w_scale is None else arrays.to_host(w_scale))
    if device == "meta":
        return x.new_empty((problem.tokens, problem.top_k, problem.n))
    # A described device in place of a real one: jax.export and compiling need no GPU.
    if not (traced and arrays.has_abstract_gpu()):
        check_available = _ask_available if interpret else _check_available
        check_available(backend, module.unavailable, interpret)
    if not interpret and on_cpu and kind != "numpy" and not traced:
        raise ArgumentError(f"x: got an array on {device}; allowed: arrays on the GPU, or interpret=True for the CPU")
    if interpret and not on_cpu and not traced:
        raise ArgumentError(f"interpret: got True with arrays on {device}; allowed: arrays on the CPU")
    if problem.slots == 0:
        return arrays.empty((problem.tokens, problem.top_k, problem.n), x)

    how: dict[str, Any] = {"problem": problem, "order": order, "config": config, "interpret": interpret}
    if traced:
        from backends import jax_rules

        def run(*native: Any) -> Any:
            return module.moe_gemm(*native[:5], **how, popularity=native[5])

        again = functools.partial(
            unrecorded,
            mode=mode,
            order=asked_order,
            config=asked,
            backend=backend,
            interpret=interpret,
            validate=validate,
        )
        return jax_rules.call(run, again, dict(zip(ARRAYS, given, strict=True)))
    if kind == module.FRAMEWORK == "torch":
        y = module.moe_gemm(x, w, topk_ids, w_scale, topk_weight, **how, popularity=popularity)
        if (
            key is not None
            and (repeat := module.again(*given, problem=problem, order=order, config=config)) is not None
        ):
            if len(_repeats) >= _MOST_SIGNATURES:
                _repeats.clear()
            _repeats[key] = repeat
        return y
    with arrays.same_current_device():
        native: tuple[Any, ...] = given
        if kind != module.FRAMEWORK:
            if kind == "torch" and not interpret:
                for name, a in zip(ARRAYS, given, strict=True):
                    if a is not None:
                        arrays.check_alignment(name, a, backend)
            native = tuple(
                [None if a is None else arrays.to_framework(a, module.FRAMEWORK, on_gpu=not interpret) for a in given]
            )
        y = module.moe_gemm(*native[:5], **how, popularity=native[5])
        return y if kind == module.FRAMEWORK else arrays.from_framework(y, kind)


def _is_traced(of: arrays.Signature | None) -> bool:
    return of is not None and of[0] == "jax" and of[4] is None


ARRAYS = ("x", "w", "topk_ids", "w_scale", "topk_weight", "popularity")
_LOOKED_UP = {str, Config, type(None)}
"""Types of options that a dictionary can look up."""


_MOST_SIGNATURES = 4096
_repeats: dict[tuple[Any, ...], Again] = {}
"""Torch calls that have gone all the way, by `arrays.tensors_key` and options: how such a call is made again.

It stands before `_checked`, which needs a signature of each array first and leaves the backend to be called.
"""


class Checked(NamedTuple):
    """What the checks find. config, order: the caller's, or the best known ones; device: of x, as ArraySpec has it."""

    problem: Problem
    config: Config
    order: str
    kind: str
    device: str | None
    on_cpu: bool
    module: Backend


@functools.lru_cache(maxsize=_MOST_SIGNATURES)
def _checked(
    signatures: tuple[arrays.Signature | None, ...], mode: str | None, order: str | None, config: Config | None,
    backend: str, gpu: str | None,
) -> Checked:  # fmt: skip
    """All checks that read no value, and the choice of the config; a call of the same signature finds them done.

    signatures: of the arrays, as in ARRAYS. gpu: the GPU's name where x does not say it. What is refused is not kept.
    """
    if order is not None:
        check_name("order", order, ORDERS)
    module = load(backend)
    spec = {name: None if of is None else arrays.spec(name, of) for name, of in zip(ARRAYS, signatures, strict=True)}
    for name in ("x", "w", "topk_ids"):
        if spec[name] is None:
            raise DtypeError(f"{name}: got None; allowed: a torch.Tensor, a jax.Array or a numpy.ndarray")
    of_popularity = spec.pop("popularity")
    problem = check_arguments(**spec, mode=mode)  # type: ignore[arg-type]
    x, w = spec["x"], spec["w"]
    assert x is not None
    assert w is not None
    check_popularity(of_popularity, order, w)
    _check_strides(x, w, module)
    if config is not None and not isinstance(config, Config):
        raise ArgumentError(f"config: got {type(config).__name__}; allowed: backends.Config or None")
    if config is None:
        config = config_for(problem, backend=backend, gpu=gpu or _gpu_name(signatures[0]))
    with arrays.current(signatures[0]):
        refusal = module.unsupported(problem, config)
    if refusal is not None:
        raise ArgumentError(refusal)
    on_cpu = x.kind == "numpy" or "cpu" in (x.device or "").lower()
    return Checked(problem, config, order or tuning.order_for(problem, config), x.kind, x.device, on_cpu, module)


def _ask_available(backend: str, unavailable: Callable[..., str | None], interpret: bool) -> None:
    """BackendUnavailable with the reason and the remedy."""
    reason = unavailable(interpret=interpret)
    if reason is not None:
        raise BackendUnavailable(f"backend {backend} cannot run here: {reason}")


_check_available = functools.lru_cache(_ask_available)
"""The same, for a GPU: a backend that could run here once is not asked again."""


def choose_config(problem: Problem, *, backend: str = "torch-triton", gpu: str | None = None) -> Choice:
    """The config and order that `moe_gemm` takes when given none, and where the config comes from.

    gpu: the GPU's name as its driver gives it, "NVIDIA H200" say; None: the one in this machine, if any.
    """
    load(backend)
    return tuning.choose(problem, backend, _gpu_name() if gpu is None else gpu)


def config_for(problem: Problem, *, backend: str = "torch-triton", gpu: str | None = None) -> Config:
    """As `choose_config`, the config alone."""
    return choose_config(problem, backend=backend, gpu=gpu).config


def _check_strides(x: ArraySpec, w: ArraySpec, module: Backend) -> None:
    """x's rows must be contiguous, and JAX arrays have no strides at all: copying w silently would cost its bytes."""
    if not x.inner_contiguous():
        raise ArgumentError(f"x: got strides {x.strides}; allowed: the last dimension (K) contiguous, stride 1")
    if module.FRAMEWORK == "jax":
        for name, spec in (("x", x), ("w", w)):
            if not spec.compact():
                raise ArgumentError(
                    f"{name}: got strides {spec.strides} for backend {module.NAME}; allowed: compact row-major "
                    "(JAX arrays have no strides; make it contiguous)"
                )


def _told(x: arrays.Signature | None) -> bool:
    """Whether `_gpu_name` of this signature is the same in every call: x's GPU, or, of JAX, what JAX sees."""
    return x is not None and x[4] is not None and (x[0] == "jax" or x[4].type == "cuda")


def _gpu_name(x: arrays.Signature | None = None) -> str | None:
    """Name of the GPU that x is on; where it is on none, of the first one that a loaded framework sees; else None."""
    torch, jax = arrays.imported("torch"), arrays.imported("jax")
    if x is not None and x[0] == "torch" and x[4].type == "cuda":
        return torch.cuda.get_device_name(x[4])  # type: ignore[union-attr]
    if x is not None and x[0] == "jax" and x[4] is not None:
        (device,) = x[4].device_set
        if device.platform == "gpu":
            return device.device_kind
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if jax is not None and jax.default_backend() == "gpu":
        return jax.devices()[0].device_kind
    return None
