"""Run a Triton kernel on CPU tensors in this process, with Triton's own interpreter.

Triton decides when a function is decorated whether it will be compiled or interpreted (TRITON_INTERPRET=1), for its own
standard library too, so a process normally has one or the other. Here the kernels' files are loaded a second time with
interpretation on, and while such a kernel runs Triton's library functions are interpreted ones as well; afterwards
everything is as before. One launch at a time.

Triton 3.8's interpreter multiplies the bit patterns of bfloat16 operands in tl.dot (triton issue 11584), truncates
float32 to bfloat16, rounds halves to FP8 up without a carry, adds floats of 16 bits atomically not at all, and knows no
PTX. While it runs here, its conversions, its dot, its atomic addition and the kernels' own instructions are NumPy's and
ml_dtypes' instead: round to nearest even, FP8 saturating as the hardware's conversion does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

_lock = threading.RLock()


def launch(kernel_name: str, grid: int, *arguments: Any, **constants: Any) -> None:
    """Interpret `kernel_name` over a one-dimensional grid. Arguments: CPU tensors and numbers."""
    with interpreting():
        getattr(shipped(), kernel_name)[(grid,)](*arguments, **constants)


@functools.cache
def shipped() -> SimpleNamespace:
    """What second copies of the kernels' files define, whose functions are interpreted."""
    files = ("backends.triton_prepare", "backends.triton_kernel")
    return SimpleNamespace(**{name: member for file in files for name, member in vars(twin(file)).items()})


@functools.cache
def twin(module: str, of_shipped: tuple[str, ...] = ()) -> ModuleType:
    """A second copy of a module of kernels, whose functions are interpreted. To be called while `interpreting`.

    of_shipped: functions of the shipped kernels that it imports: it gets those that are interpreted.
    """
    original = importlib.util.find_spec(module)
    assert original is not None
    assert original.origin is not None
    package, _, file = module.rpartition(".")
    name = f"{package}._interpreted_{file}"
    spec = importlib.util.spec_from_file_location(name, original.origin)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    spec.loader.exec_module(copy)
    for function in of_shipped:
        setattr(copy, function, getattr(shipped(), function))
    return copy


@functools.cache
def _library_functions() -> list[tuple[Any, str, Any]]:
    """(module, name, interpreted function) for each @triton.jit function of Triton's own language library."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, Any] = {}
    replaced = []
    for module in _language():
        for name, member in list(vars(module).items()):
            if isinstance(member, JITFunction):
                twin = interpreted.setdefault(id(member), InterpretedFunction(member.fn))
                replaced.append((module, name, twin))
    return replaced


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Triton's library functions are interpreted ones meanwhile; one thread at a time."""
    # What is imported meanwhile is interpreted for good: the shipped kernels' own modules are to be the compiled ones.
    from backends import triton_kernel, triton_prepare  # noqa: F401

    with _lock, _interpreted_library():
        yield


@contextlib.contextmanager
def _interpreted_library() -> Iterator[None]:
    import triton
    from triton.runtime.interpreter import InterpreterBuilder

    before = triton.knobs.runtime.interpret
    # Triton's interpreter replaces builtins of its language while a kernel runs and puts back those of the kernel's own
    # imports, but not those that library functions import: left so, nothing could be compiled afterwards.
    kept = [(owner, dict(vars(owner))) for owner in (*_language(), InterpreterBuilder)]
    try:
        triton.knobs.runtime.interpret = True
        for module, name, twin in _library_functions():
            setattr(module, name, twin)
        ours = {
            "create_dot": _dot, "cast_impl": _cast, "create_fp_to_fp": _cast, "create_atomic_rmw": _atomic_add,
            "create_inline_asm": _inline_asm,
        }  # fmt: skip
        for name, exact in ours.items():
            setattr(InterpreterBuilder, name, exact)
        yield
    finally:
        for owner, members in kept:
            _put_back(owner, members)
        triton.knobs.runtime.interpret = before


def _language() -> list[Any]:
    """Modules and classes of Triton's language, in which kernels look things up."""
    import triton.language as tl

    modules = [m for name, m in sys.modules.items() if name == "triton.language" or name.startswith("triton.language.")]
    return [*modules, tl.core.tensor, tl.core.tensor_descriptor_base]


def _put_back(owner: Any, members: dict[str, Any]) -> None:
    """Members that were replaced. Names that are new stay: the interpreter's rewritten functions look them up."""
    now = dict(vars(owner))
    for name, member in members.items():
        if now.get(name) is not member:
            setattr(owner, name, member)


def _dot(builder: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
    """accumulator + a @ b in float32. Handles carry bfloat16 as uint16 and e4m3 as uint8, as the interpreter does."""
    product = np.matmul(_values(a), _values(b), dtype=np.float32)
    return type(a)(product + accumulator.data, accumulator.dtype.scalar)


def _atomic_add(builder: Any, operation: Any, pointers: Any, addend: Any, mask: Any, *semantics: Any) -> Any:
    """What memory held. One program runs at a time, and no program adds to an element twice: load, add, store."""
    from triton._C.libtriton import ir

    if operation != ir.ATOMIC_OP.FADD:
        raise NotImplementedError(f"atomic {operation} is not interpreted; FADD is")
    before = builder.create_masked_load(pointers, mask, None, None, None, False)
    with np.errstate(over="ignore"):
        total = _values(before) + _values(addend)
    if addend.dtype.scalar.name in _STORED_AS_INTEGER:
        dtype, _ = _STORED_AS_INTEGER[addend.dtype.scalar.name]
        total = total.astype(dtype).view(np.uint16)
    builder.create_masked_store(pointers, type(addend)(total, addend.dtype), mask, None, None)
    return before


def _inline_asm(builder: Any, code: str, constraints: str, values: Any, types: Any, pure: bool, pack: int) -> Any:
    """The kernels' instructions in PTX, by name: two of a word's e4m3 values as a word of two float16."""
    from backends import triton_kernel

    halves = (triton_kernel.WIDEN_LOWER.value, triton_kernel.WIDEN_UPPER.value)
    if code not in halves:
        raise NotImplementedError(f"no NumPy for {code!r}; there is for `widen_half`'s instructions")
    (words,) = values
    pair = (words.data.view(np.uint32) >> (16 * halves.index(code))).astype(np.uint16)
    wide = pair[..., None].view(ml_dtypes.float8_e4m3fn).astype(np.float16)
    widened = type(words)(wide.view(np.int32)[..., 0], words.dtype.scalar)
    return SimpleNamespace(get_result=lambda index: widened)


def _cast(builder: Any, source: Any, target_type: Any, *rounding_mode: Any) -> Any:
    target = target_type.scalar
    values = _values(source)
    if target.name in _STORED_AS_INTEGER:
        dtype, limit = _STORED_AS_INTEGER[target.name]
        values = values.astype(np.float32)
        values = values if limit is None else np.clip(values, -limit, limit)
        data = values.astype(dtype).view(np.uint8 if dtype.itemsize == 1 else np.uint16)
    else:
        from triton.runtime.interpreter import _get_np_dtype

        data = values.astype(_get_np_dtype(target_type))
    return type(source)(data, target)


_STORED_AS_INTEGER = {
    "bf16": (np.dtype(ml_dtypes.bfloat16), None),
    "fp8e4nv": (np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
}


def _values(handle: Any) -> np.ndarray:
    """The numbers that a handle's data stands for; float32 where NumPy has no such dtype of its own."""
    name = handle.dtype.scalar.name
    if name not in _STORED_AS_INTEGER:
        return handle.data
    dtype, _ = _STORED_AS_INTEGER[name]
    return handle.data.view(dtype).astype(np.float32)
