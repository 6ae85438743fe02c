"""`moe_gemm` as an operator of PyTorch, `moe_tile_order::moe_gemm`: for what records operators instead of running them.

torch.compile, torch.export, FakeTensorMode, make_fx and torch.func's transformations see one operator: its shape rule,
its batching rule, and that it has no gradient. Running it is the ordinary call, with all its checks. The door goes this
way only when somebody records (`recording`), as an operator costs the host more than a function does.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from backends import batching
from shared.checks import ArgumentError, check_one_device, no_gradient
from shared.config import Config

_NAMES = ("x", "w", "topk_ids", "w_scale", "topk_weight", "popularity")
_CONFIG_NUMBERS = tuple(f.name for f in dataclasses.fields(Config) if f.type in ("int", "bool"))
_CONFIG_FLAGS = tuple(f.name for f in dataclasses.fields(Config) if f.type == "bool")
_CONFIG_NAMES = tuple(f.name for f in dataclasses.fields(Config) if f.type == "str")


def recording(given: Sequence[Any]) -> bool:
    """Whether an operator has to be seen here: while compiling, exporting or tracing, under a mode that intercepts
    operators (FakeTensorMode, make_fx), and on tensors that do (torch.func's, FakeTensor, DTensor)."""
    if torch.compiler.is_compiling():
        return True
    if _modes() > 0 or _is_tracing() or _innermost() is not None:
        return isinstance(given[0], torch.Tensor)
    if _PLAIN.issuperset(map(type, given)) or not isinstance(given[0], torch.Tensor):
        return False
    return any(isinstance(array, torch.Tensor) and type(array) not in _PLAIN for array in given)


_modes, _is_tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
_innermost, _Interpreter = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.CInterpreter


def _inside_torch_func() -> bool:
    # By its type: compared with None, Dynamo would find an object even where there is none.
    return isinstance(_innermost(), _Interpreter)


_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}
"""Any other tensor is a subclass that may intercept operators, as FakeTensor and DTensor do."""


def call(given: Sequence[Any], config: Config | None, **options: Any) -> torch.Tensor:
    """The operator on the door's arguments; given: arrays in the order of _NAMES, None where there is none.

    TorchDynamo traces this: plain Python, and nothing that reads a shape.
    """
    by_name = dict(zip(_NAMES, given, strict=True))
    for name, array in by_name.items():
        required = name in _NAMES[:3]
        if not isinstance(array, torch.Tensor) and (required or array is not None):
            raise ArgumentError(f"{name}: got {type(array).__name__} under torch.compile; allowed there: torch.Tensor")
    check_no_gradient(given, recorded=torch.compiler.is_compiling() and _inside_torch_func())
    if config is not None and not isinstance(config, Config):
        raise ArgumentError(f"config: got {type(config).__name__}; allowed: backends.Config or None")
    # Numbers stay numbers: Dynamo may have symbols for them, which the operator's schema makes it resolve.
    numbers = [int(getattr(config, name)) for name in _CONFIG_NUMBERS] if config is not None else []
    names = {name: getattr(config, name) for name in _CONFIG_NAMES} if config is not None else {}
    text = "{" + ", ".join([f"{name!r}: {_literal(name, value)}" for name, value in {**options, **names}.items()]) + "}"
    return operator(*given, numbers, text)


def _literal(name: str, value: Any) -> str:
    """An option as `ast.literal_eval` reads it back. ArgumentError for what no option can be and no literal is."""
    if isinstance(value, str):
        return repr(value if type(value) is str else "".join(value))  # numpy.str_ shows its type
    if value is None or type(value) is bool or type(value) is int:
        return repr(value)
    raise ArgumentError(f"{name}: got {value!r} ({type(value).__name__}); allowed: a str")


def check_no_gradient(given: Sequence[Any], *, recorded: bool = False) -> None:
    """ArgumentError where autograd or forward-mode differentiation would have to go through the call.

    given: as in `call`. recorded: Dynamo traces this inside of torch.func.
    """
    backward, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    if not backward and not forward:
        return
    if not forward and not recorded:
        for tensor in given:
            if tensor is not None and tensor.requires_grad:
                break
        else:
            return  # as nearly every eager call does
    for name, tensor in zip(_NAMES, given, strict=True):
        if tensor is None:
            continue
        # Dynamo knows of torch.func's gradients from results of operators alone: a view is one, and costs nothing.
        seen = tensor.view_as(tensor) if recorded else tensor
        if backward and seen.requires_grad:
            raise ArgumentError(no_gradient(name, "a tensor that requires a gradient"))
        if forward and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ArgumentError(no_gradient(name, "a tensor with a tangent (forward-mode differentiation)"))


@torch.library.custom_op(
    "moe_tile_order::moe_gemm",
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor topk_ids, Tensor? w_scale, Tensor? topk_weight, Tensor? popularity, "
    "int[] config, str options) -> Tensor",
    # x keeps the strides that the caller gave it: backends of JAX refuse rows with gaps, which Inductor likes to make.
    tags=(torch.Tag.needs_exact_strides,),
)
def operator(
    x: torch.Tensor,
    w: torch.Tensor,
    topk_ids: torch.Tensor,
    w_scale: torch.Tensor | None,
    topk_weight: torch.Tensor | None,
    popularity: torch.Tensor | None,
    config: Sequence[int],
    options: str,
) -> torch.Tensor:
    """config: the numbers of a Config in the order of its fields, or none for None. options: the door's other arguments
    and the names in the Config, as a Python literal: {"mode": None, "order": "row", ..., "reduction": "two-pass"}."""
    from backends import unrecorded

    keywords = ast.literal_eval(options)
    names = {name: keywords.pop(name) for name in _CONFIG_NAMES if name in keywords}
    chosen = _config(config, names) if config else None
    return unrecorded(x, w, topk_ids, w_scale, topk_weight, popularity, config=chosen, **keywords)


def _config(numbers: Sequence[int], names: dict[str, str]) -> Config:
    values: dict[str, Any] = dict(zip(_CONFIG_NUMBERS, numbers, strict=True))
    flags = {name: bool(values[name]) for name in _CONFIG_FLAGS}
    return Config(**{**values, **flags, **names})


@operator.register_fake
def _shape(
    x: Any, w: Any, topk_ids: Any, w_scale: Any, topk_weight: Any, popularity: Any, config: Any, options: str
) -> torch.Tensor:
    """y (T, top_k, N). Sizes may be symbolic, so ranks and devices are all that is checked before the call runs."""
    for name, array, rank in (("x", x, 2), ("w", w, 3), ("topk_ids", topk_ids, 2)):
        if array.ndim != rank:
            raise ArgumentError(f"{name}: got rank {array.ndim}; allowed: rank {rank}")
    given = zip(_NAMES, (x, w, topk_ids, w_scale, topk_weight, popularity), strict=True)
    check_one_device({name: str(array.device) for name, array in given if array is not None})
    return x.new_empty((x.shape[0], topk_ids.shape[1], w.shape[1]))


@operator.register_vmap
def _batched(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[torch.Tensor, int]:
    *arrays, config, options = given
    # The batch axis first; strides as they come, since the operator's rules on them are about x and w as given.
    moved = [a if d is None or a is None else a.movedim(d, 0) for a, d in zip(arrays, in_dims, strict=False)]
    batched = {name: dim is not None for name, dim in zip(_NAMES, in_dims, strict=False)}
    calls = torch.arange(info.batch_size, dtype=torch.int32, device=arrays[2].device)
    one = batching.fold(dict(zip(_NAMES, moved, strict=True)), batched, calls, torch)
    y = operator(*(one[name] for name in _NAMES), config, options)
    return y.reshape(info.batch_size, moved[2].shape[-2], *y.shape[1:]), 0


def _refuse_gradient(ctx: Any, inputs: tuple[Any, ...], output: Any) -> NoReturn:
    """Called by autograd before the result is handed out, so that the call fails and not a later backward()."""
    names = [name for name, array in zip(_NAMES, inputs, strict=False) if getattr(array, "requires_grad", False)]
    raise ArgumentError(no_gradient(names[0] if names else "x", "a tensor that requires a gradient"))


operator.register_autograd(lambda ctx, gradient: None, setup_context=_refuse_gradient)
