"""Arrays of torch, JAX and NumPy: described for the checks, and carried from one to another.

torch and JAX exchange through DLPack without a copy, on the CPU and on a GPU. NumPy arrays (FP8 and bfloat16 through
ml_dtypes) share memory with the CPU; for a GPU they are copied to it, and the result back.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from shared.checks import ArgumentError, ArraySpec, DtypeError

# Dtypes that NumPy has only through ml_dtypes cross to torch as integers of the same size, then viewed.
_CARRIERS = {"float8_e4m3fn": np.uint8, "bfloat16": np.int16}
_ML_DTYPES = {name: np.dtype(getattr(ml_dtypes, name)) for name in _CARRIERS}


def imported(framework: str) -> Any:
    """The module "torch" or "jax"; None where it has not been imported, or another thread is still at it.

    An array of a framework exists only once the framework is imported, and a module has its names only then.
    """
    module = sys.modules.get(framework)
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module


def kind_of(name: str, array: Any) -> str:
    """ "torch", "jax" or "numpy"; DtypeError naming the argument for anything else."""
    if isinstance(array, np.ndarray):
        return "numpy"
    for kind, type_name in (("torch", "Tensor"), ("jax", "Array")):
        module = imported(kind)
        if module is not None and isinstance(array, getattr(module, type_name)):
            return kind
    raise DtypeError(f"{name}: got {type(array).__name__}; allowed: a torch.Tensor, a jax.Array or a numpy.ndarray")


def is_traced(array: Any) -> bool:
    """Whether this is a JAX tracer, whose values and device are not known yet."""
    jax = imported("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


def has_abstract_gpu() -> bool:
    """Whether JAX traces for a GPU that is only described (jax.sharding.use_abstract_mesh)."""
    import jax

    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "gpu"


def current_device(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes the GPU of a torch tensor torch's current one; other arrays leave it as it is."""
    torch = imported("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return contextlib.nullcontext()
    return torch.cuda.device_of(array)


def current(of: Signature | None) -> contextlib.AbstractContextManager[Any]:
    """As `current_device`, for an array of this signature."""
    if of is None or of[0] != "torch" or of[4].type != "cuda":
        return contextlib.nullcontext()
    return sys.modules["torch"].cuda.device(of[4])


def describe(name: str, array: Any) -> ArraySpec:
    """ArraySpec of one argument."""
    return spec(name, signature(name, array))


Signature = tuple[str, Any, Any, Any, Any]
"""(kind, shape, dtype, strides in elements or None, device): all that checks without values depend on.

Each as its framework has it, so that a signature is quickly made and quickly looked up. device: of JAX a Sharding, None
under a trace.
"""


def signature(name: str, array: Any) -> Signature:
    """Signature of one argument; DtypeError naming it where it is no array."""
    torch = imported("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if array.layout is not torch.strided:
            raise ArgumentError(
                f"{name}: got a tensor of layout {array.layout}; allowed: torch.strided ({name}.to_dense() is)"
            )
        if array.is_neg():  # memory holds the values' negatives, as of `z.conj().imag`: kernels read memory
            raise ArgumentError(f"{name}: got a tensor with the negative bit set; allowed: {name}.resolve_neg()")
        return "torch", array.shape, array.dtype, array.stride(), array.device
    if isinstance(array, np.ndarray):
        return "numpy", array.shape, array.dtype, array.strides, None
    kind = kind_of(name, array)
    return kind, array.shape, array.dtype, None, None if is_traced(array) else array.sharding


def signatures(names: Sequence[str], given: Sequence[Any]) -> tuple[Signature | None, ...]:
    """`signature` of each argument, None of None; plain tensors without a call each, as every eager call comes by."""
    torch = imported("torch")
    tensor, strided = (None, None) if torch is None else (torch.Tensor, torch.strided)
    return tuple(
        [
            None
            if a is None
            else ("torch", a.shape, a.dtype, a.stride(), a.device)
            if type(a) is tensor and a.layout is strided and not a.is_neg()
            else signature(name, a)
            for name, a in zip(names, given, strict=True)
        ]
    )


def tensors_key(x: Any, w: Any, topk_ids: Any, w_scale: Any, topk_weight: Any, popularity: Any) -> tuple[Any, ...]:
    """What `signatures` reads of torch tensors, without a loop, as every eager call comes by; AttributeError of others.

    Strides of x and w, if they are not contiguous; of the others, which kernels read row by row, whether they are.
    """
    return (
        x.is_contiguous() or x.stride(), x.shape, x.dtype, x.device, x.is_neg(),
        w.is_contiguous() or w.stride(), w.shape, w.dtype, w.device, w.is_neg(),
        topk_ids.is_contiguous(), topk_ids.shape, topk_ids.dtype, topk_ids.device,
        None
        if w_scale is None
        else (w_scale.is_contiguous(), w_scale.shape, w_scale.dtype, w_scale.device, w_scale.is_neg()),
        None
        if topk_weight is None
        else (
            topk_weight.is_contiguous(), topk_weight.shape, topk_weight.dtype, topk_weight.device, topk_weight.is_neg()
        ),
        None
        if popularity is None
        else (popularity.is_contiguous(), popularity.shape, popularity.dtype, popularity.device),
    )  # fmt: skip


def spec(name: str, of: Signature) -> ArraySpec:
    """What a signature says, in words that all frameworks share."""
    kind, shape, dtype, strides, device = of
    if kind == "jax" and not all(isinstance(size, int) for size in shape):
        raise ArgumentError(f"{name}: got the symbolic shape {shape}; allowed: numbers (one export per shape)")
    shape = tuple(int(size) for size in shape)
    if kind == "torch":
        said = str(dtype).removeprefix("torch.")
        return ArraySpec(shape=shape, dtype=said, strides=strides, device=str(device), kind=kind)
    if kind == "jax":
        return ArraySpec(shape=shape, dtype=dtype.name, strides=None, device=_jax_device(name, device), kind=kind)
    strides = tuple(stride // dtype.itemsize for stride in strides)
    return ArraySpec(shape=shape, dtype=dtype.name, strides=strides, device="cpu", kind=kind)


def to_host(array: Any) -> np.ndarray:
    """The values as a NumPy array; waits for the device and copies from it."""
    if isinstance(array, np.ndarray):
        return array
    if kind_of("array", array) == "torch":
        return torch_to_numpy(array.detach().cpu())
    return np.asarray(array)


def numpy_to_torch(array: np.ndarray) -> Any:
    """CPU tensor over the same memory; a read-only array (JAX's) is copied, as torch cannot promise not to write."""
    import torch

    carrier = _CARRIERS.get(array.dtype.name)
    source = array if carrier is None else array.view(carrier)
    if not source.flags.writeable:
        source = source.copy()
    tensor = torch.from_numpy(source)
    return tensor if carrier is None else tensor.view(getattr(torch, array.dtype.name))


def torch_to_numpy(tensor: Any) -> np.ndarray:
    """NumPy array over the same memory as a CPU tensor."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _CARRIERS:
        return tensor.numpy()
    carrier = {np.uint8: torch.uint8, np.int16: torch.int16}[_CARRIERS[name]]
    return tensor.view(carrier).numpy().view(_ML_DTYPES[name])


def to_framework(array: Any, framework: str, *, on_gpu: bool) -> Any:
    """`array` as a torch tensor or a JAX array. on_gpu: NumPy arrays go to the GPU instead of staying on the CPU."""
    kind = kind_of("array", array)
    if kind == framework:
        return array
    if kind == "numpy":
        if framework == "torch":
            tensor = numpy_to_torch(array)
            return tensor.cuda() if on_gpu else tensor
        import jax

        return jax.device_put(array, jax.devices("gpu" if on_gpu else "cpu")[0])
    if framework == "torch":
        import torch

        return torch.from_dlpack(array)
    import jax

    # DLPack refuses tensors that require a gradient, under torch.no_grad() too, and those of a GPU that is not current.
    with current_device(array):
        return jax.dlpack.from_dlpack(array.detach())


ALIGNMENT = 16
"""Bytes: XLA's programs take no array of a GPU at another address."""


def check_alignment(name: str, tensor: Any, backend: str) -> None:
    """ArgumentError where a torch tensor's address does not suit XLA, which would say so after the launch."""
    if tensor.data_ptr() % ALIGNMENT:
        raise ArgumentError(
            f"{name}: got a tensor whose address is {tensor.data_ptr() % ALIGNMENT} past a multiple of {ALIGNMENT} "
            f"bytes; allowed with backend {backend}: multiples of {ALIGNMENT} (such as {name}.clone() has); "
            "torch-triton takes any address"
        )


def from_framework(array: Any, kind: str) -> Any:
    """The result, back as the kind of array that the caller passed."""
    if kind == "numpy":
        return to_host(array)
    return to_framework(array, kind, on_gpu=False)


def empty(shape: tuple[int, ...], like: Any) -> Any:
    """An array of no elements: `like`'s kind, dtype and device."""
    kind = kind_of("x", like)
    if kind == "torch":
        return like.new_empty(shape)
    if kind == "numpy":
        return np.empty(shape, like.dtype)
    import jax.numpy as jnp

    return jnp.zeros(shape, like.dtype)


def _jax_device(name: str, sharding: Any) -> str | None:
    if sharding is None:
        return None
    devices = sharding.device_set
    if len(devices) > 1:
        raise ArgumentError(f"{name}: got an array sharded over {len(devices)} devices; allowed: one device")
    return str(next(iter(devices)))


@contextlib.contextmanager
def same_current_device() -> Iterator[None]:
    """Leaves the thread's current CUDA device as it was: JAX makes that of its arrays current, and PyTorch sees it."""
    torch = imported("torch")
    if torch is None or not torch.cuda.is_initialized():
        yield
        return
    before = torch.cuda.current_device()
    try:
        yield
    finally:
        if torch.cuda.current_device() != before:
            torch.cuda.set_device(before)
