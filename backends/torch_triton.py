"""PyTorch-Triton: launches the kernels of triton_kernel.py on torch tensors, on the caller's current stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends import triton_launch
from backends.compiled import Compiled
from shared.checks import ArgumentError
from shared.config import Config
from shared.problem import Problem

if TYPE_CHECKING:
    import torch

NAME = "torch-triton"
FRAMEWORK = "torch"
KERNEL_NAME = "moe_gemm_kernel"


def unavailable(*, interpret: bool) -> str | None:
    """Why this backend cannot run here and what to do about it; None if it can."""
    missing = triton_launch.missing_packages()
    if missing is not None:
        return missing
    import torch

    if not interpret and not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU; run on a machine with an NVIDIA GPU, or pass interpret=True for the CPU"
    return None


def unsupported(problem: Problem, config: Config) -> str | None:
    return triton_launch.unsupported(problem, config, _shared_memory_limit())


def moe_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    topk_ids: torch.Tensor,
    w_scale: torch.Tensor | None,
    topk_weight: torch.Tensor | None,
    *,
    problem: Problem,
    order: str,
    config: Config,
    interpret: bool = False,
    fill: float | None = None,
) -> torch.Tensor:
    """y (T, top_k, N) in the dtype of x; arguments as in shared/problem.py, already checked.

    fill: value that y is filled with before the kernel writes it, so that an unwritten element shows. No host
    synchronisation: the call can be captured in a CUDA graph. Raises ArgumentError where the compiled kernel needs more
    shared memory than the GPU has.
    """
    import torch

    launch = _launch_interpreted if interpret else _launch
    device = x.device
    max_tile_rows = problem.max_tile_rows(config.block_m)
    sorted_slot, tile_expert, tile_rows = (
        torch.empty(size, device=device, dtype=torch.int32)
        for size in (max_tile_rows * config.block_m, max_tile_rows, 1)
    )
    topk_ids = topk_ids.contiguous()
    launch(
        "plan_kernel",
        triton_launch.plan_grid(problem),
        (topk_ids, sorted_slot, tile_expert, tile_rows, problem.slots),
        triton_launch.plan_constants(problem, config.block_m),
    )

    x_scale = None
    scaled = x
    if problem.scales_x:
        scaled = torch.empty(x.shape, device=device, dtype=getattr(torch, problem.kernel_x_dtype))
        x_scale = torch.empty(problem.tokens, device=device, dtype=torch.float32)
        constants = triton_launch.scale_constants(problem, _row_stride(x))
        launch("scale_kernel", problem.tokens, (x, scaled, x_scale), constants)

    shape = (problem.tokens, problem.top_k, problem.n)
    y = torch.empty(shape, device=device, dtype=x.dtype)
    if fill is not None:
        y.fill_(fill)
    # A pointer that the kernel does not read still has to be one: tile_rows stands in.
    pointers = (
        scaled,
        w,
        tile_rows if w_scale is None else w_scale.contiguous(),
        tile_rows if x_scale is None else x_scale,
        tile_rows if topk_weight is None else topk_weight.contiguous(),
        sorted_slot,
        tile_expert,
        tile_rows,
        y,
    )
    constants = triton_launch.gemm_constants(
        problem, order, config, x_stride=_row_stride(scaled), w_stride_e=w.stride(0), w_stride_n=w.stride(1)
    )
    grid = triton_launch.gemm_grid(problem, order, config)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launch("moe_gemm_kernel", grid, (*pointers, problem.slots), constants | options)
    return y


def compile_only(problem: Problem, order: str, config: Config) -> Compiled:
    """The GEMM kernel compiled for sm_90, with no device needed."""
    return triton_launch.compile_only(problem, order, config)


def _launch(kernel_name: str, grid: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    import torch
    from triton.runtime.errors import OutOfResources

    from backends import triton_kernel

    with torch.cuda.device(arguments[0].device):
        try:
            getattr(triton_kernel, kernel_name)[(grid,)](*arguments, **constants)
        except OutOfResources as error:
            raise ArgumentError(f"config: the compiled {kernel_name} does not fit this GPU: {error}") from error


def _launch_interpreted(kernel_name: str, grid: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    from backends import triton_interpreter

    triton_interpreter.launch(kernel_name, grid, *arguments, **constants)


def _row_stride(x: torch.Tensor) -> int:
    """Stride of x's rows, in elements; a single row may claim any stride, which would only compile another variant."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _shared_memory_limit() -> int:
    import torch

    if not torch.cuda.is_available():
        return triton_launch.SHARED_MEMORY_LIMIT
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return getattr(properties, "shared_memory_per_block_optin", triton_launch.SHARED_MEMORY_LIMIT)
