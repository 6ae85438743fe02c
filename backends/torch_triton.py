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
    popularity: torch.Tensor | None = None,
) -> torch.Tensor:
    """y (T, top_k, N) in the dtype of x; arguments as in shared/problem.py, already checked.

    fill: value that y, and the float32 sums over parts of K, are filled with before a kernel writes them, so that an
    unwritten element shows. popularity: (E,) int32, read by order "popular" alone; None: the slot counts of this call.
    No host synchronisation: the call can be captured in a CUDA graph. Raises ArgumentError where the compiled kernel
    needs more shared memory than the GPU has.
    """
    import torch

    launch = _launch_interpreted if interpret else _launch
    device = x.device
    max_tile_rows = problem.max_tile_rows(config.block_m)
    by = triton_launch.popularity_of(order, popularity)
    sorted_slot, tile_expert, tile_rows, tile_span = (
        torch.empty(size, device=device, dtype=torch.int32)
        for size in (max_tile_rows * config.block_m, max_tile_rows, 1, 0 if by == "none" else 2 * max_tile_rows)
    )
    topk_ids = topk_ids.contiguous()
    # A pointer that a kernel does not touch still has to be one: tile_rows stands in.
    plan_pointers = (
        topk_ids,
        popularity.contiguous() if popularity is not None and by == "given" else tile_rows,
        sorted_slot,
        tile_expert,
        tile_rows,
        tile_rows if by == "none" else tile_span,
    )
    plan_constants = triton_launch.plan_constants(problem, config.block_m, by)
    launch("plan_kernel", triton_launch.plan_grid(problem), (*plan_pointers, problem.slots), plan_constants)

    x_scale = None
    scaled = x
    if problem.scales_x:
        scaled = torch.empty(x.shape, device=device, dtype=getattr(torch, problem.kernel_x_dtype))
        x_scale = torch.empty(problem.tokens, device=device, dtype=torch.float32)
        constants = triton_launch.scale_constants(problem, _row_stride(x))
        launch("scale_kernel", problem.tokens, (x, scaled, x_scale), constants)

    y = _buffer((problem.tokens, problem.top_k, problem.n), x.dtype, device, fill)
    scales = (
        tile_rows if w_scale is None else w_scale.contiguous(),
        tile_rows if x_scale is None else x_scale,
        tile_rows if topk_weight is None else topk_weight.contiguous(),
    )
    reduction = config.reduction_of(problem.k)
    sums = y
    if reduction in ("two-pass", "atomic-fp32"):
        sums = _buffer(triton_launch.sums_shape(problem, config), torch.float32, device, fill)
    rows_grid = triton_launch.rows_grid(problem)
    if reduction in ("atomic", "atomic-fp32"):
        launch("moe_gemm_kernel_zero", rows_grid, (sums, problem.slots), triton_launch.zero_constants(problem))

    span = tile_rows if by == "none" else tile_span
    pointers = (scaled, w, *scales, sorted_slot, tile_expert, tile_rows, span, sums)
    constants = triton_launch.gemm_constants(
        problem, order, config, x_stride=_row_stride(scaled), w_stride_e=w.stride(0), w_stride_n=w.stride(1)
    )
    grid = triton_launch.gemm_grid(problem, order, config)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launch("moe_gemm_kernel", grid, (*pointers, problem.slots), constants | options)

    if sums is not y:
        constants = triton_launch.reduce_constants(problem, config)
        launch("moe_gemm_kernel_reduce", rows_grid, (sums, topk_ids, *scales, y, problem.slots), constants)
    return y


def _buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: float | None) -> torch.Tensor:
    import torch

    buffer = torch.empty(shape, device=device, dtype=dtype)
    return buffer if fill is None else buffer.fill_(fill)


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
