"""JAX-Triton: launches the Triton kernels on JAX arrays through jax-triton, inside jax.jit."""

from __future__ import annotations

import functools
import re
import zlib
from typing import TYPE_CHECKING, Any

from backends import triton_launch
from backends.compiled import Compiled, compile_ptx
from shared.config import Config
from shared.problem import Problem

if TYPE_CHECKING:
    import jax

NAME = "jax-triton"
FRAMEWORK = "jax"
KERNEL_NAME = "moe_gemm_kernel"


def unavailable(*, interpret: bool) -> str | None:
    """Why this backend cannot run here and what to do about it; None if it can."""
    try:
        import jax
        import jax_triton  # noqa: F401
    except Exception as error:
        # jax-triton raises more than ImportError where its versions of jax and triton do not fit together.
        return (
            f"{type(error).__name__}: {error}; install versions that fit together "
            "(jax>=0.11,<0.12 with jax-triton>=0.4.1 and triton>=3.7)"
        )
    if interpret:
        return triton_launch.missing_packages()  # the interpreter computes on CPU tensors
    if not any(device.platform == "gpu" for device in jax.devices()):
        return (
            "JAX sees no CUDA GPU; run on a machine with an NVIDIA GPU and jax[cuda13], "
            "or pass interpret=True for the CPU"
        )
    return None


def unsupported(problem: Problem, config: Config) -> str | None:
    return triton_launch.unsupported(problem, config)


def moe_gemm(
    x: jax.Array,
    w: jax.Array,
    topk_ids: jax.Array,
    w_scale: jax.Array | None,
    topk_weight: jax.Array | None,
    *,
    problem: Problem,
    order: str,
    config: Config,
    interpret: bool = False,
    fill: float | None = None,
    popularity: jax.Array | None = None,
) -> jax.Array:
    """y (T, top_k, N) in the dtype of x; arguments as in shared/problem.py, already checked. Traceable by jax.jit.

    fill: value that y, and the float32 sums over parts of K, are filled with before a kernel writes them, so that an
    unwritten element shows. popularity: (E,) int32, read by order "popular" alone; None: the slot counts of this call.
    """
    return _jitted()(
        x,
        w,
        topk_ids,
        w_scale,
        topk_weight,
        popularity if order == "popular" else None,
        problem=problem,
        order=order,
        config=config,
        interpret=interpret,
        fill=fill,
    )


@functools.cache
def _jitted() -> Any:
    import jax

    return jax.jit(_moe_gemm, static_argnames=("problem", "order", "config", "interpret", "fill"))


def _moe_gemm(
    x: jax.Array,
    w: jax.Array,
    topk_ids: jax.Array,
    w_scale: jax.Array | None,
    topk_weight: jax.Array | None,
    popularity: jax.Array | None,
    *,
    problem: Problem,
    order: str,
    config: Config,
    interpret: bool,
    fill: float | None,
) -> jax.Array:
    import jax
    import jax.numpy as jnp

    launch = _launch_interpreted if interpret else _launch
    slots = {"slots": problem.slots}

    w_stride_e, w_stride_n = problem.n * problem.k, problem.k
    words = triton_launch.reads_words(problem, config, w_stride_e=w_stride_e, w_stride_n=w_stride_n)
    halves_of = config.block_k if words else 0
    max_tile_rows = problem.max_tile_rows(config.block_m)
    by = triton_launch.popularity_of(order, popularity)
    # A pointer that a kernel does not touch still has to be one: here topk_ids, below tile_rows stands in.
    popularity_ptr = topk_ids if popularity is None else popularity
    inputs = {"topk_ids_ptr": topk_ids, "popularity_ptr": popularity_ptr, "x_ptr": x, **slots}
    outputs = {
        "sorted_slot_ptr": jax.ShapeDtypeStruct((max_tile_rows * config.block_m,), jnp.int32),
        "tile_expert_ptr": jax.ShapeDtypeStruct((max_tile_rows,), jnp.int32),
        "tile_rows_ptr": jax.ShapeDtypeStruct((1,), jnp.int32),
        "tile_span_ptr": jax.ShapeDtypeStruct((1 if by == "none" else max_tile_rows, 2), jnp.int32),
        "scaled_ptr": jax.ShapeDtypeStruct(x.shape if problem.scales_x else (1,), problem.kernel_x_dtype),
        "x_scale_ptr": jax.ShapeDtypeStruct((problem.tokens if problem.scales_x else 1,), jnp.float32),
    }
    sorted_slot, tile_expert, tile_rows, tile_span, *of_x = launch(
        "prepare_kernel",
        triton_launch.prepare_grid(problem),
        inputs,
        outputs,
        triton_launch.prepare_constants(problem, config.block_m, by, x_stride=problem.k, halves_of=halves_of),
    )
    scaled, x_scale = of_x if problem.scales_x else (x, None)

    scales = {
        "w_scale_ptr": tile_rows if w_scale is None else w_scale,
        "x_scale_ptr": tile_rows if x_scale is None else x_scale,
        "topk_weight_ptr": tile_rows if topk_weight is None else topk_weight,
    }
    y_type = jax.ShapeDtypeStruct((problem.tokens, problem.top_k, problem.n), x.dtype)
    reduction = config.reduction_of(problem.k)
    out: Any = y_type
    if reduction in ("two-pass", "atomic-fp32"):
        out = jax.ShapeDtypeStruct(triton_launch.sums_shape(problem, config), jnp.float32)
    rows_grid = triton_launch.rows_grid(problem)
    if reduction in ("atomic", "atomic-fp32"):
        zero = triton_launch.zero_constants(problem)
        (out,) = launch("moe_gemm_kernel_zero", rows_grid, slots, {"sums_ptr": out}, zero, fill)

    arguments = {
        "x_ptr": scaled,
        "w_ptr": w,
        **scales,
        "sorted_slot_ptr": sorted_slot,
        "tile_expert_ptr": tile_expert,
        "tile_rows_ptr": tile_rows,
        "tile_span_ptr": tile_span,
        **slots,
    }
    constants = triton_launch.gemm_constants(
        problem, order, config, x_stride=problem.k, w_stride_e=w_stride_e, w_stride_n=w_stride_n, words=words
    )
    grid = triton_launch.gemm_grid(problem, order, config)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    (y,) = launch("moe_gemm_kernel", grid, arguments, {"y_ptr": out}, constants | options, fill)

    if reduction in ("two-pass", "atomic-fp32"):
        arguments = {"sums_ptr": y, "topk_ids_ptr": topk_ids, **scales, **slots}
        constants = triton_launch.reduce_constants(problem, config)
        (y,) = launch("moe_gemm_kernel_reduce", rows_grid, arguments, {"y_ptr": y_type}, constants, fill)
    return y


def compile_only(problem: Problem, order: str, config: Config) -> Compiled:
    """The GEMM kernel as jax-triton compiles it for sm_90: lowered from `moe_gemm` itself, with no device needed."""

    from backends import xla_compile

    def call(x: jax.Array, w: jax.Array, ids: jax.Array, w_scale: Any, topk_weight: Any) -> jax.Array:
        return moe_gemm(x, w, ids, w_scale, topk_weight, problem=problem, order=order, config=config)

    module = xla_compile.lower(call, xla_compile.argument_types(problem)).compiler_ir()
    for operation in xla_compile.custom_calls(module):
        compiled = _read_kernel(zlib.decompress(operation.attributes["mhlo.backend_config"]["opaque"].value_bytes))
        if compiled is not None:
            return compiled
    raise RuntimeError(f"jax-triton's lowering holds no {KERNEL_NAME}")


def _read_kernel(message: bytes) -> Compiled | None:
    """The GEMM kernel out of a serialised jaxlib TritonKernelCall; None if it is another kernel's.

    Protocol-buffer fields of the kernel, in this order: 1 name, 2 num_warps, 3 shared memory bytes, 4 PTX.
    """
    found = re.search(rb"\x0a.%s\x10[\x00-\x7f]\x18([\x80-\xff]*[\x00-\x7f])\x22" % KERNEL_NAME.encode(), message, re.S)
    if found is None:
        return None
    shared_bytes = sum((byte & 0x7F) << (7 * i) for i, byte in enumerate(found[1]))
    end = found.end()
    length = shift = 0
    while True:
        byte = message[end]
        end += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return compile_ptx(message[end : end + length].decode(), shared_bytes)


def _launch(
    kernel_name: str,
    grid: int,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    constants: dict[str, Any],
    fill: float | None = None,
) -> list[jax.Array]:
    """Results in the order of `outputs`: types, or, for a launch with one output, an array that the kernel works on.

    fill: as moe_gemm's, for a launch with one output.
    """
    import jax
    import jax.numpy as jnp
    import jax_triton

    kernel = triton_launch.kernel(kernel_name)
    _check_order(kernel_name, inputs, outputs)
    given = any(isinstance(out, jax.Array) for out in outputs.values())
    if fill is None and not given:
        return jax_triton.triton_call(
            **inputs, kernel=kernel, grid=grid, out_type=list(outputs.values()), name=kernel_name, **constants
        )
    ((name, out),) = outputs.items()
    before = out if fill is None or given else jnp.full(out.shape, fill, out.dtype)
    y = jax.new_ref(before)  # the kernel writes into this buffer
    jax_triton.triton_call(**inputs, **{name: y}, kernel=kernel, grid=grid, out_type=[], name=kernel_name, **constants)
    return [y[...]]


def _check_order(kernel_name: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """jax-triton 0.4.1 hands a kernel the input buffers and then the output buffers, whatever its parameters' order."""
    arrays = [name for name, value in inputs.items() if not isinstance(value, int)]
    parameters = [name for name in triton_launch.kernel(kernel_name).arg_names if name in (*arrays, *outputs)]
    if parameters != [*sorted(arrays, key=parameters.index), *outputs]:
        raise RuntimeError(f"{kernel_name}: takes {parameters}; allowed: outputs {list(outputs)} last, in this order")


def _launch_interpreted(
    kernel_name: str,
    grid: int,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    constants: dict[str, Any],
    fill: float | None = None,
) -> list[jax.Array]:
    """As `_launch`, through Triton's interpreter on the host. Outputs start as NaN bytes, which look right nowhere."""
    import jax
    import numpy as np

    from backends import arrays, triton_interpreter

    _check_order(kernel_name, inputs, outputs)
    scalars = {name: value for name, value in inputs.items() if isinstance(value, int)}
    given = {name: out for name, out in outputs.items() if isinstance(out, jax.Array)}
    operands = {name: value for name, value in inputs.items() if name not in scalars} | given
    types = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outputs.values()]

    def empty(out: jax.ShapeDtypeStruct) -> np.ndarray:
        poison = bytearray(b"\xff" * (out.size * out.dtype.itemsize))
        array = np.frombuffer(poison, out.dtype).reshape(out.shape)
        if fill is not None:
            array[...] = fill
        return array

    def on_host(*values: jax.Array) -> list[np.ndarray]:
        host = {name: np.asarray(value) for name, value in zip(operands, values, strict=True)}
        results = {
            name: host[name].copy() if name in given else empty(out) for name, out in zip(outputs, types, strict=True)
        }
        tensors = {name: arrays.numpy_to_torch(array) for name, array in (host | results).items()}
        triton_interpreter.launch(kernel_name, grid, **tensors, **scalars, **constants)
        return list(results.values())

    return jax.pure_callback(on_host, types, *operands.values())
