"""PyTorch-Triton: launches the Triton kernels on torch tensors, on the caller's current stream."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from backends import triton_launch
from backends.compiled import Compiled
from shared.checks import ArgumentError
from shared.config import Config
from shared.problem import Problem

if TYPE_CHECKING:
    import torch

    from backends.registry import Again
    from backends.triton_again import Kept

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
    work = _work_of(x, w, popularity, problem, order, config)
    rows = (topk_ids, w_scale, topk_weight, popularity)
    given: tuple[Any, ...] = (x, w, *(None if array is None else array.contiguous() for array in rows))
    if work.kept is not None and not interpret and fill is None and (y := _again(work, *given)) is not None:
        return y

    import torch

    buffers: dict[str, Any] = dict(zip(_GIVEN, given, strict=True))
    for name, shape, dtype in work.buffers:
        buffers[name] = torch.empty(shape, device=x.device, dtype=dtype)
        if fill is not None and name in ("y", "sums"):
            buffers[name].fill_(fill)
    launch = _launch_interpreted if interpret else _launch
    kernels = [
        launch(step.kernel, step.grid, (*(buffers[name] for name in step.buffers), *step.numbers), step.constants)
        for step in work.steps
    ]
    if not interpret and None not in kernels:
        _keep(work, buffers, kernels)
    return buffers["y"]


def again(
    x: torch.Tensor, w: torch.Tensor, topk_ids: torch.Tensor, w_scale: torch.Tensor | None,
    topk_weight: torch.Tensor | None, popularity: torch.Tensor | None, *, problem: Problem, order: str, config: Config,
) -> Again | None:  # fmt: skip
    """How a call of `moe_gemm` with such arrays is made again; None where it kept no kernels, or has to copy first."""
    work = _work_of(x, w, popularity, problem, order, config)
    rows = (topk_ids, w_scale, topk_weight, popularity)
    copied = any(array is not None and not array.is_contiguous() for array in rows)
    return None if work.kept is None or copied else functools.partial(_again, work)


_GIVEN = ("x", "w", "topk_ids", "w_scale", "topk_weight", "popularity")
_APART = 256
"""Bytes: buffers of one allocation start at multiples of it, as allocations of their own do."""


class Step(NamedTuple):
    """One launch: a kernel, its grid, its buffers by name, numbers behind them, constants."""

    kernel: str
    grid: int
    buffers: tuple[str, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]


Layout = tuple[tuple[int, ...], tuple[int, ...], "torch.dtype"]
"""Shape, strides in elements, dtype."""


@dataclasses.dataclass
class Work:
    """What all calls of one signature share.

    steps:    the launches, in order
    buffers:  (name, shape, dtype) of what a call allocates; y is the last one
    offsets:  bytes, of all but y in one allocation
    together: (shape, strides, dtype) of that allocation
    y:        the same of y
    kept:     the steps' compiled kernels for aligned buffers, once there are any
    """

    steps: list[Step]
    buffers: list[tuple[str, tuple[int, ...], torch.dtype]]
    offsets: list[int]
    together: Layout
    y: Layout
    kept: Kept | None = None


@functools.lru_cache(maxsize=1024)
def _work(
    problem: Problem, order: str, config: Config, by: str, x_stride: int, w_stride_e: int, w_stride_n: int,
    words: bool, x_dtype: torch.dtype, w_dtype: torch.dtype, device: torch.device,
) -> Work:  # fmt: skip
    """The launches of a call and what it allocates. by: as `triton_launch.popularity_of`; strides in elements;
    words: as `triton_launch.reads_words`.

    dtypes and the device are here because kernels are compiled for them.
    """
    import torch

    slots = (problem.slots,)
    rows = problem.max_tile_rows(config.block_m)
    reduction = config.reduction_of(problem.k)
    buffers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "sorted_slot": ((rows * config.block_m,), torch.int32),
        "tile_expert": ((rows,), torch.int32),
        "tile_rows": ((1,), torch.int32),
    }
    # A pointer that a kernel does not touch still has to be one: tile_rows stands in.
    span = popularity = x_scale = "tile_rows"
    scaled, sums = "x", "y"
    w_scale = "w_scale" if problem.is_fp8 else "tile_rows"
    topk_weight = "topk_weight" if problem.routing_weight else "tile_rows"
    if by != "none":
        span = "tile_span"
        popularity = "popularity" if by == "given" else "tile_rows"
        buffers[span] = ((2 * rows,), torch.int32)
    if problem.scales_x:
        scaled, x_scale = "scaled", "x_scale"
        buffers[scaled] = ((problem.tokens, problem.k), getattr(torch, problem.kernel_x_dtype))
        buffers[x_scale] = ((problem.tokens,), torch.float32)
    if reduction in ("two-pass", "atomic-fp32"):
        sums = "sums"
        buffers[sums] = (triton_launch.sums_shape(problem, config), torch.float32)
    buffers["y"] = ((problem.tokens, problem.top_k, problem.n), x_dtype)

    plan = ("sorted_slot", "tile_expert", "tile_rows")
    of_x = ("x", scaled, x_scale) if problem.scales_x else ("tile_rows",) * 3
    prepared = ("topk_ids", popularity, of_x[0], *plan, span, *of_x[1:])
    halves_of = config.block_k if words else 0
    constants = triton_launch.prepare_constants(problem, config.block_m, by, x_stride=x_stride, halves_of=halves_of)
    prepare_grid = triton_launch.prepare_grid(problem)
    steps = [Step("prepare_kernel", prepare_grid, prepared, slots, constants)]
    if problem.scales_x:
        x_stride = problem.k
    rows_grid = triton_launch.rows_grid(problem)
    if reduction in ("atomic", "atomic-fp32"):
        constants = triton_launch.zero_constants(problem)
        steps.append(Step("moe_gemm_kernel_zero", rows_grid, (sums,), slots, constants))
    constants = triton_launch.gemm_constants(
        problem, order, config, x_stride=x_stride, w_stride_e=w_stride_e, w_stride_n=w_stride_n, words=words
    )
    constants |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    scales = (w_scale, x_scale, topk_weight)
    gemm_grid = triton_launch.gemm_grid(problem, order, config)
    steps.append(Step("moe_gemm_kernel", gemm_grid, (scaled, "w", *scales, *plan, span, sums), slots, constants))
    if sums == "sums":
        constants = triton_launch.reduce_constants(problem, config)
        steps.append(Step("moe_gemm_kernel_reduce", rows_grid, (sums, "topk_ids", *scales, "y"), slots, constants))

    offsets, size = [], 0
    for shape, dtype in list(buffers.values())[:-1]:
        offsets.append(size)
        size += -(-math.prod(shape) * dtype.itemsize // _APART) * _APART
    y_shape = buffers["y"][0]
    return Work(
        steps,
        [(name, *of) for name, of in buffers.items()],
        offsets,
        together=((size,), (1,), torch.uint8),
        y=(y_shape, (problem.top_k * problem.n, problem.n, 1), x_dtype),
    )


def _work_of(
    x: torch.Tensor, w: torch.Tensor, popularity: torch.Tensor | None, problem: Problem, order: str, config: Config
) -> Work:
    by = triton_launch.popularity_of(order, popularity)
    w_stride_e, w_stride_n, _ = w.stride()
    words = triton_launch.reads_words(
        problem, config, w_stride_e=w_stride_e, w_stride_n=w_stride_n, w_address=w.data_ptr()
    )
    x_stride = _row_stride(x)
    return _work(problem, order, config, by, x_stride, w_stride_e, w_stride_n, words, x.dtype, w.dtype, x.device)


def _again(
    work: Work, x: torch.Tensor, w: torch.Tensor, topk_ids: torch.Tensor, w_scale: torch.Tensor | None,
    topk_weight: torch.Tensor | None, popularity: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    """y by the kept kernels, with one allocation beside it; None where these arrays need other kernels.

    All arrays but x and w are contiguous. Every eager call comes by: no loop where the arrays are known.
    """
    kept, device = work.kept, x.device
    assert kept is not None
    if not kept.is_current(device.index):
        import torch

        with torch.cuda.device(device):
            return _again(work, x, w, topk_ids, w_scale, topk_weight, popularity)
    _bind_context(device)
    (size, one, uint8), (shape, strides, dtype) = work.together, work.y
    together, y = kept.empty(size, one, uint8), kept.empty(shape, strides, dtype)
    start, of_y = together.data_ptr(), y.data_ptr()
    of_x, of_w, of_ids = x.data_ptr(), w.data_ptr(), topk_ids.data_ptr()
    of_scale = 0 if w_scale is None else w_scale.data_ptr()
    of_weight = 0 if topk_weight is None else topk_weight.data_ptr()
    of_popularity = 0 if popularity is None else popularity.data_ptr()
    if not kept.usable(of_x | of_w | of_ids | of_scale | of_weight | of_popularity | start | of_y):
        return None
    addresses = (of_x, of_w, of_ids, of_scale, of_weight, of_popularity, *[start + at for at in work.offsets], of_y)
    kept.launch(addresses, device.index or 0)
    return y


_dispatching: dict[tuple[object, ...], threading.Lock] = {}
_bound = threading.local()


def _bind_context(device: torch.device) -> None:
    """Give this thread the CUDA context of `device`, the current one, once: a new thread has none until a call of
    CUDA's runtime has run in it, and Triton launches through the driver, which asks for one."""
    try:
        known = _bound.devices
    except AttributeError:
        known = _bound.devices = set()
    if device not in known:
        if device.type == "cuda":
            import torch

            torch.empty(1, dtype=torch.uint8, device=device).zero_()  # a call that CUDA graphs can capture, too
        known.add(device)


def _keep(work: Work, buffers: dict[str, Any], kernels: list[Any]) -> None:
    """Keep the kernels that Triton compiled for a call with these buffers, if other calls may use them."""
    from backends import triton_again

    kept = triton_again.Kept(buffers["y"].device.type)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in buffers.values()]
    if not kept.usable(functools.reduce(operator.or_, addresses)):
        return
    names = list(buffers)
    for step, kernel in zip(work.steps, kernels, strict=True):
        parameters = triton_launch.kernel(step.kernel).arg_names[len(step.buffers) + len(step.numbers) :]
        values = (*step.numbers, *(step.constants[name] for name in parameters))
        kept.add(kernel, step.grid, [names.index(name) for name in step.buffers], values)
    work.kept = kept


def compile_only(problem: Problem, order: str, config: Config) -> Compiled:
    """The GEMM kernel compiled for sm_90, with no device needed."""
    return triton_launch.compile_only(problem, order, config)


def _launch(kernel_name: str, grid: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """The kernel as Triton compiled it for these arguments."""
    import torch
    from triton.runtime.errors import OutOfResources

    # Two threads that dispatch one variant at once would compile it twice, or launch what has not been loaded yet.
    one_at_a_time = _dispatching.setdefault((kernel_name, *constants.items()), threading.Lock())
    with torch.cuda.device(arguments[0].device), one_at_a_time:
        _bind_context(arguments[0].device)
        try:
            return triton_launch.kernel(kernel_name)[(grid,)](*arguments, **constants)
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
