"""One door to every backend: `moe_gemm`. Importing this package imports no framework."""

from __future__ import annotations

import functools
import sys
from typing import Any

from backends import arrays, tuning
from backends.registry import BACKENDS, Backend, BackendUnavailable, load
from backends.tuning import Choice
from shared.checks import ArgumentError, DtypeError, check_arguments, check_name, check_popularity, check_values
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
    order: str = "column",
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
    order       in which order thread blocks walk the output tiles: row, column, grouped, popular
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
    options: dict[str, Any] = {
        "mode": mode, "order": order, "backend": backend, "interpret": interpret, "validate": validate
    }  # fmt: skip
    if "torch" in sys.modules:
        from backends import torch_op

        given = (x, w, topk_ids, w_scale, topk_weight, popularity)
        if torch_op.recording(given):
            return torch_op.call(given, config, **options)
    return unrecorded(x, w, topk_ids, w_scale, topk_weight, popularity, config=config, **options)


def unrecorded(
    x: Any, w: Any, topk_ids: Any, w_scale: Any, topk_weight: Any, popularity: Any, *, config: Config | None,
    mode: str | None, order: str, backend: str, interpret: bool, validate: bool,
) -> Any:  # fmt: skip
    """`moe_gemm` itself. What records torch operators sees it from outside only (backends/torch_op.py)."""
    check_name("order", order, ORDERS)
    module = load(backend)
    given = {"x": x, "w": w, "topk_ids": topk_ids, "w_scale": w_scale, "topk_weight": topk_weight}
    given["popularity"] = popularity
    spec = {name: None if array is None else arrays.describe(name, array) for name, array in given.items()}
    for name in ("x", "w", "topk_ids"):
        if spec[name] is None:
            raise DtypeError(f"{name}: got None; allowed: a torch.Tensor, a jax.Array or a numpy.ndarray")
    of_popularity = spec.pop("popularity")
    problem = check_arguments(**spec, mode=mode)  # type: ignore[arg-type]
    check_popularity(of_popularity, order, spec["w"])  # type: ignore[arg-type]
    kind = spec["x"].kind  # type: ignore[union-attr]
    _check_strides(spec, module)
    if kind == "torch":
        from backends import torch_op

        torch_op.check_no_gradient(given)
    traced = any(arrays.is_traced(array) for array in given.values() if array is not None)
    if traced and module.FRAMEWORK != "jax":
        raise ArgumentError(f"backend: got {backend} under jax.jit; allowed there: the JAX backends")

    on_cpu = kind == "numpy" or "cpu" in (spec["x"].device or "").lower()  # type: ignore[union-attr]
    if (validate or on_cpu) and not traced and spec["x"].device != "meta":  # type: ignore[union-attr]
        check_values(problem, arrays.to_host(topk_ids), None if w_scale is None else arrays.to_host(w_scale))

    if config is not None and not isinstance(config, Config):
        raise ArgumentError(f"config: got {type(config).__name__}; allowed: backends.Config or None")
    asked_config = config
    config = config or config_for(problem, backend=backend, gpu=_gpu_name(x))
    with arrays.current_device(x):
        refusal = module.unsupported(problem, config)
    if refusal is not None:
        raise ArgumentError(refusal)
    if spec["x"].device == "meta":  # type: ignore[union-attr]
        return x.new_empty((problem.tokens, problem.top_k, problem.n))
    # A described device in place of a real one: jax.export and compiling need no GPU.
    reason = None if traced and arrays.has_abstract_gpu() else module.unavailable(interpret=interpret)
    if reason is not None:
        raise BackendUnavailable(f"backend {backend} cannot run here: {reason}")
    if not interpret and on_cpu and kind != "numpy" and not traced:
        raise ArgumentError(
            f"x: got an array on {spec['x'].device}; allowed: arrays on the GPU, or interpret=True for the CPU"  # type: ignore[union-attr]
        )
    if interpret and not on_cpu and not traced:
        raise ArgumentError(
            f"interpret: got True with arrays on {spec['x'].device}; allowed: arrays on the CPU"  # type: ignore[union-attr]
        )
    if problem.slots == 0:
        return arrays.empty((problem.tokens, problem.top_k, problem.n), x)

    def run(*arguments: Any) -> Any:
        *others, heat = arguments
        return module.moe_gemm(
            *others, problem=problem, order=order, config=config, interpret=interpret, popularity=heat
        )

    if traced:
        from backends import jax_rules

        again = functools.partial(
            unrecorded, mode=mode, order=order, config=asked_config, backend=backend, interpret=interpret,
            validate=validate,
        )  # fmt: skip
        return jax_rules.call(run, again, given)
    with arrays.same_current_device():
        native = [
            None if array is None else arrays.to_framework(array, module.FRAMEWORK, on_gpu=not interpret)
            for array in given.values()
        ]
        return arrays.from_framework(run(*native), kind)


def choose_config(problem: Problem, *, backend: str = "torch-triton", gpu: str | None = None) -> Choice:
    """The config that `moe_gemm` takes when given none, and where it comes from.

    gpu: the GPU's name as its driver gives it, "NVIDIA H200" say; None: the one in this machine, if any.
    """
    load(backend)
    return tuning.choose(problem, backend, _gpu_name() if gpu is None else gpu)


def config_for(problem: Problem, *, backend: str = "torch-triton", gpu: str | None = None) -> Config:
    """As `choose_config`, the config alone."""
    return choose_config(problem, backend=backend, gpu=gpu).config


def _check_strides(spec: dict[str, Any], module: Backend) -> None:
    """x's rows must be contiguous, and JAX arrays have no strides at all: copying w silently would cost its bytes."""
    if not spec["x"].inner_contiguous():
        raise ArgumentError(f"x: got strides {spec['x'].strides}; allowed: the last dimension (K) contiguous, stride 1")
    if module.FRAMEWORK == "jax":
        for name in ("x", "w"):
            if not spec[name].compact():
                raise ArgumentError(
                    f"{name}: got strides {spec[name].strides} for backend {module.NAME}; allowed: compact row-major "
                    "(JAX arrays have no strides; make it contiguous)"
                )


def _gpu_name(x: Any = None) -> str | None:
    """Name of the GPU that x is on; where it is on none, of the first one that a loaded framework sees; else None."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(x, torch.Tensor) and x.is_cuda:
        return torch.cuda.get_device_name(x.device)
    if jax is not None and isinstance(x, jax.Array) and not arrays.is_traced(x):
        (device,) = x.devices()
        if device.platform == "gpu":
            return device.device_kind
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if jax is not None and jax.default_backend() == "gpu":
        return jax.devices()[0].device_kind
    return None
