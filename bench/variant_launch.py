"""How the kernels of variant_kernels.py are launched: as torch-triton launches the shipped one, planning included."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from backends import torch_triton, triton_launch
from backends.compiled import Compiled
from shared.checks import ArgumentError, check_name
from shared.config import Config
from shared.problem import Problem

if TYPE_CHECKING:
    import torch

ORDERS = ("row", "column")
WARP_GROUP_ROWS = 64
"""Rows of the left operand that one warp-group multiplies at once."""
TMA_ALIGNMENT = 16
"""Bytes that the rows of a descriptor start at multiples of."""
REGISTERS = 65536
"""Of an SM."""
BLOCK_RESERVE = 1024
"""Bytes of shared memory that a thread block takes beside its own, on Hopper."""
INTERPRETED_PROGRAMS = 3
"""Of a persistent kernel in the interpreter: fewer than tiles, so that each takes several."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A kernel of variant_kernels.py with these of its features on."""

    persistent: bool = False
    tma: bool = False
    gathered: bool = False
    flatten: bool = False
    warp_specialise: bool = False

    @property
    def kernel(self) -> str:
        return "moe_gemm_kernel_persistent" if self.persistent else "moe_gemm_kernel_tma"

    @property
    def switches(self) -> dict[str, bool]:
        """Compile-time arguments of the persistent kernel beside those of the shipped one."""
        names = {"TMA": self.tma, "GATHERED": self.gathered, "FLATTEN": self.flatten}
        return names | {"WARP_SPECIALISE": self.warp_specialise}


VARIANTS = {
    "tma": Variant(tma=True),
    "persistent": Variant(persistent=True),
    "persistent-flattened": Variant(persistent=True, flatten=True),
    "tma-persistent": Variant(persistent=True, tma=True),
    "tma-persistent-flattened": Variant(persistent=True, tma=True, flatten=True),
    "tma-persistent-gathered": Variant(persistent=True, tma=True, gathered=True),
    "tma-persistent-gathered-warp-specialised": Variant(persistent=True, tma=True, gathered=True, warp_specialise=True),
}


def unsupported(problem: Problem, variant: Variant, config: Config) -> str | None:
    """Why the variant cannot honour this combination; None if it can."""
    if problem.scale_layout == "block":
        return "scale_layout: got block; allowed for variants: channel"
    if config.parts(problem.k) > 1:
        return f"config.split_k: got {config.split_k}; allowed for variants: 1"
    if triton_launch.tail_rows(config.block_m):
        return f"config.block_m: got {config.block_m}; allowed for variants: a power of two"
    if variant.tma and problem.k * problem.w_itemsize % TMA_ALIGNMENT:
        return f"k: got {problem.k}; allowed for TMA: rows of a multiple of {TMA_ALIGNMENT} bytes"
    if variant.tma and config.block_n > 256:
        return f"config.block_n: got {config.block_n}; allowed for TMA: at most 256, the rows of a box"
    left = config.block_n if config.swap_ab else config.block_m
    if variant.warp_specialise and (left != WARP_GROUP_ROWS or config.num_warps != 4):
        return f"config: got {config}; allowed for warp specialisation: 4 warps, {WARP_GROUP_ROWS} rows on the left"
    return triton_launch.unsupported(problem, config, torch_triton._shared_memory_limit())


def moe_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    topk_ids: torch.Tensor,
    w_scale: torch.Tensor | None = None,
    topk_weight: torch.Tensor | None = None,
    *,
    problem: Problem,
    order: str,
    config: Config,
    variant: Variant,
    interpret: bool = False,
) -> torch.Tensor:
    """y (T, top_k, N) by a variant; arguments as of backends/torch_triton.py, x and w contiguous.

    With `variant.gathered`, torch brings rows of x into the plan's order first, in kernels of other names.
    """
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    check_name("order", order, ORDERS)
    if (reason := unsupported(problem, variant, config)) is not None:
        raise ArgumentError(reason)
    strides = (torch_triton._row_stride(x), *w.stride()[:2])
    work = torch_triton._work(problem, order, config, "none", *strides, False, x.dtype, w.dtype, x.device)
    given = {"x": x, "w": w, "topk_ids": topk_ids.contiguous(), "w_scale": w_scale, "topk_weight": topk_weight}
    buffers: dict[str, Any] = given | {
        name: torch.empty(shape, device=x.device, dtype=dtype) for name, shape, dtype in work.buffers
    }
    launch = torch_triton._launch_interpreted if interpret else torch_triton._launch
    *before, gemm = work.steps
    for step in before:
        launch(step.kernel, step.grid, (*(buffers[name] for name in step.buffers), *step.numbers), step.constants)
    arguments: list[Any] = [buffers[name] for name in gemm.buffers] + list(gemm.numbers)
    k = problem.k
    if variant.tma:
        arguments[1] = TensorDescriptor(w, [w.shape[0] * w.shape[1], k], [k, 1], [config.block_n, config.block_k])
    if variant.gathered:
        rows = _gathered(arguments[0], buffers["sorted_slot"], problem)
        arguments[0] = TensorDescriptor(rows, list(rows.shape), [k, 1], [config.block_m, config.block_k])
    constants = _constants(variant, gemm.constants)
    grid = gemm.grid
    if interpret:
        _launch_interpreted(variant.kernel, min(grid, INTERPRETED_PROGRAMS) if variant.persistent else grid,
                            arguments, constants)  # fmt: skip
    else:
        _launch(variant, grid, arguments, constants)
    return buffers["y"]


def _gathered(x: torch.Tensor, sorted_slot: torch.Tensor, problem: Problem) -> torch.Tensor:
    """(max_tile_rows * BLOCK_M, K): x's row of each slot of the plan. Padding has any row, as its products go unread.

    Bytes are moved, as torch indexes no FP8.
    """
    import torch

    token = sorted_slot.clamp(0, problem.slots - 1).long() // problem.top_k
    return x.contiguous().view(torch.uint8)[token].view(x.dtype)


def _constants(variant: Variant, shipped: dict[str, Any]) -> dict[str, Any]:
    """Of the shipped kernel's constants and options those that the variant's kernel has, and its switches."""
    from bench import variant_kernels

    known = {*getattr(variant_kernels, variant.kernel).arg_names, "num_warps", "num_stages"}
    return {name: value for name, value in (shipped | variant.switches).items() if name in known}


_programs: dict[tuple[object, ...], int] = {}
_compiling: dict[tuple[object, ...], threading.Lock] = {}


def _launch(variant: Variant, grid: int, arguments: list[Any], constants: dict[str, Any]) -> None:
    """On the current stream. A persistent kernel has as many programs as the GPU holds at once, or as tiles."""
    from bench import variant_kernels

    kernel = getattr(variant_kernels, variant.kernel)
    dtypes = tuple(argument.dtype for argument in arguments[2:-1])
    key = (variant, *constants.items(), *dtypes)
    with _compiling.setdefault(key, threading.Lock()):  # else two threads would compile one kernel twice
        if variant.persistent:
            if key not in _programs:
                _programs[key] = _resident_programs(kernel.warmup(*arguments, grid=(1,), **constants))
            grid = min(grid, _programs[key])
        kernel[(grid,)](*arguments, **constants)


def _resident_programs(compiled: Any) -> int:
    """Thread blocks of this kernel that the GPU holds at once: by shared memory, registers and threads of its SMs."""
    import torch

    compiled._init_handles()
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    threads = compiled.metadata.num_warps * 32  # warps that specialisation adds counted in
    registers = -(-compiled.n_regs // 8) * 8 * threads
    by = (
        gpu.shared_memory_per_multiprocessor // (compiled.metadata.shared + BLOCK_RESERVE),
        REGISTERS // registers,
        gpu.max_threads_per_multi_processor // threads,
    )
    return max(1, min(by)) * gpu.multi_processor_count


def _launch_interpreted(kernel_name: str, grid: int, arguments: list[Any], constants: dict[str, Any]) -> None:
    from backends import triton_interpreter

    with triton_interpreter.interpreting():
        kernels = triton_interpreter.twin("bench.variant_kernels", ("locate_tile",))
        getattr(kernels, kernel_name)[(grid,)](*arguments, **constants)


def compile_only(problem: Problem, order: str, config: Config, variant: Variant) -> Compiled:
    """The variant's kernel compiled for sm_90 without a device: compact x and w."""
    from bench import variant_kernels

    strides = {"x_stride": problem.k, "w_stride_e": problem.n * problem.k, "w_stride_n": problem.k}
    constants = _constants(variant, triton_launch.gemm_constants(problem, order, config, **strides, words=False))
    x, w = triton_launch.x_type(problem), triton_launch.w_type(problem)
    types = [
        f"tensordesc<{x}[{config.block_m},{config.block_k}]>" if variant.gathered else f"*{x}",
        f"tensordesc<{w}[{config.block_n},{config.block_k}]>" if variant.tma else f"*{w}",
        *["*fp32"] * 3, *["*i32"] * 4, f"*{triton_launch.TYPES[problem.activation]}", "i32",
    ]  # fmt: skip
    return triton_launch.compile_kernel(getattr(variant_kernels, variant.kernel), types, constants, config)
