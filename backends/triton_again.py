"""Launches of kernels that Triton has compiled for an earlier call, without its dispatch.

`kernel[grid](...)` looks at every argument of every launch to find the variant that it has compiled, which costs the
host several times what the launch itself does. Calls that share shapes, strides, dtypes, device and config share their
variants, but for what is looked at here, call by call. What Triton's dispatch depends on:

    dtypes of buffers, numbers, constants, options      the same in all calls that share a `Kept`
    device                                              the same
    pointers at multiples of 16 bytes or not            `usable`: all must be, else the call takes Triton's dispatch
    hooks and knobs (profilers, debugging, inspection)  `usable`: none may be set, else the same
    stream                                              the current one of that device, at each launch
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime import driver

from backends.triton_launch import ALIGNMENT


class Kept:
    """The launches of one kind of call, with the kernels that its buffers' alignment and no hook led to."""

    def __init__(self, device_type: str = "cuda") -> None:
        self.empty = allocator(device_type)
        self._launches: list[tuple[Any, ...]] = []
        self._alive: list[CompiledKernel] = []

    def add(self, compiled: CompiledKernel, grid: int, buffers: Sequence[int], values: Sequence[Any]) -> None:
        """One more launch. compiled: as it has been launched once, so that its code is loaded.

        buffers: which of the addresses that `launch` gets it takes; values: its arguments behind them, constants too.
        """
        pick = operator.itemgetter(*buffers) if len(buffers) > 1 else lambda addresses: (addresses[buffers[0]],)
        # Held on to: Triton unloads a kernel's code with its object, and its cache may have put another in its place.
        self._alive.append(compiled)
        self._launches.append((*launcher(compiled), grid, pick, tuple(values)))

    def usable(self, bits: int) -> bool:
        """Whether a call may use kept kernels, and its own may be kept. bits: of all its addresses, or-ed together."""
        return bits % ALIGNMENT == 0 and not watched()

    def is_current(self, device: int | None) -> bool:
        """Whether launches go to this device as things are; None: a device that has no number."""
        return device is None or device == driver.active.get_current_device()

    def launch(self, addresses: Sequence[int], device: int) -> None:
        """All launches, on the current stream of the device, which is the current one."""
        stream = driver.active.get_current_stream(device)
        for run, function, cooperative, dependent, metadata, kinds, types, grid, pick, values in self._launches:
            # The five: launch metadata, two hooks, two kinds of scratch memory, none of which there is.
            run(
                grid, 1, 1, stream, function, cooperative, dependent, metadata, None, None, None, None, None,
                kinds, types, pick(addresses) + values,
            )  # fmt: skip


def allocator(device_type: str) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """empty(shape, strides, dtype) on the current device: `torch.empty_strided` past PyTorch's dispatcher.

    It is what the code that TorchInductor generates allocates with. Nothing listens to the dispatcher here: a call that
    something records is an operator, and never comes this far (backends/torch_op.py).
    """
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}")


def launcher(compiled: CompiledKernel) -> tuple[Any, ...]:
    """(run, function, cooperative, dependent, metadata, kinds, types), as `Kept.launch` hands them to `run`.

    Triton's launcher object asks, launch by launch, whether the kernel needs scratch memory or a sanitizer watches it.
    Neither changes once the kernel is loaded: where there is none, `run` is the C function behind the object, whose
    arguments are known of Triton 3.8; in other versions it goes through the object.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    known = triton.__version__.startswith("3.8.") and isinstance(run, CudaLauncher)
    if known and not (run.global_scratch_size or run.profile_scratch_size or run.gsan_enabled):
        options = (run.launch_cooperative_grid, run.launch_pdl)
        return run.launch, function, *options, metadata, run.arg_annotations, run.kernel_signature

    def through_triton(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *rest[-1])

    return through_triton, function, False, False, metadata, None, None


def watched() -> bool:
    """Whether something hooks into Triton's dispatch, or compiles kernels otherwise than a plain call does."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or runtime.add_stages_inspection_hook
        or runtime.jit_cache_hook
        or runtime.debug
        or knobs.compilation.instrumentation_mode
    )
