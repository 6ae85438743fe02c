"""Compile a JAX function for an H100 with XLA's own compiler, on a machine that has no GPU.

jaxlib's CUDA plugin compiles for a described device as it does for a present one, so what comes out is the code that a
GPU run would load: XLA brings its own Triton, whose version is not that of the `triton` package.
"""

from __future__ import annotations

import functools
import importlib
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from backends.compiled import Compiled, compile_ptx
from shared.problem import Problem

DEVICE_KIND = "NVIDIA H100 80GB HBM3"

_TARGET = f"""
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: 132  fpus_per_core: 128  threads_per_warp: 32
  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98  device_memory_size: 84978434048
}}
platform_name: "CUDA"
device_description_str: "{DEVICE_KIND}"
"""


def lower(function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct | None]) -> jax.stages.Lowered:
    """`function` lowered for platform "cuda" and an H100, from shapes and dtypes alone."""
    device = jax.sharding.AbstractDevice(device_kind=DEVICE_KIND, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def argument_types(problem: Problem) -> tuple[jax.ShapeDtypeStruct | None, ...]:
    """Shapes and dtypes of x, w, topk_ids, w_scale and topk_weight of a problem."""
    slots = (problem.tokens, problem.top_k)
    w_dtype = "float8_e4m3fn" if problem.is_fp8 else problem.activation
    return (
        jax.ShapeDtypeStruct((problem.tokens, problem.k), problem.activation),
        jax.ShapeDtypeStruct((problem.experts, problem.n, problem.k), w_dtype),
        jax.ShapeDtypeStruct(slots, "int32"),
        jax.ShapeDtypeStruct(problem.w_scale_shape, "float32") if problem.w_scale_shape else None,
        jax.ShapeDtypeStruct(slots, "float32") if problem.routing_weight else None,
    )


def custom_calls(module: Any) -> Iterator[Any]:
    """The custom calls of a lowered module, in program order."""
    for region in module.operation.regions:
        for block in region:
            for operation in block:
                if operation.operation.name == "stablehlo.custom_call":
                    yield operation.operation
                yield from custom_calls(operation)


def compile_kernel(function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct]) -> Compiled:
    """The one GPU kernel that `function` consists of, compiled for sm_90a.

    Raises RuntimeError where XLA makes another number of kernels of it, or refuses it (too much shared memory).
    """
    from jax._src.lib import _jax
    from jaxlib import xla_client

    module = lower(function, arguments).compiler_ir()
    with _loading:
        devices = _devices()
    with tempfile.TemporaryDirectory() as folder:
        options = xla_client.CompileOptions()
        options.num_replicas = options.num_partitions = 1
        options.env_option_overrides = [
            ("xla_dump_to", folder),
            ("xla_dump_hlo_as_text", True),
            ("xla_dump_emitter_re", "ptx"),  # every pass (".*") would be 40 MB of text and take ten times as long
            ("xla_gpu_autotune_level", "0"),  # there is no device to time on
        ]
        devices[0].client.compile(module, _jax.DeviceList(tuple(devices[:1])), options)
        ptx = [path.read_text() for path in Path(folder).glob("*.ptx")]
        thunks = "".join(path.read_text() for path in Path(folder).glob("*thunk_sequence.txt"))
    shared = re.findall(r"shared_memory: (\d+) bytes", thunks)
    if len(ptx) != 1 or len(shared) != 1 or ptx[0].count(".entry") != 1:
        raise RuntimeError(f"expected one kernel; XLA made {len(ptx)} PTX files of it and these steps:\n{thunks}")
    # XLA writes PTX ISA 9.0. The ptxas that the triton package ships reads 8.8, and nothing newer is used.
    return compile_ptx(re.sub(r"(?m)^\.version 9\.\d", ".version 8.8", ptx[0]), int(shared[0]))


_loading = threading.Lock()
"""The plugin can be loaded once in a process."""


@functools.cache
def _devices() -> list[Any]:
    """The described H100, as devices that can be compiled for and not run on."""
    from jax._src import xla_bridge
    from jaxlib import xla_client

    options = {"target_config": _TARGET, "topology": "1x1x1"}
    try:
        topology = xla_bridge.make_pjrt_topology("cuda", "h100", **options)
    except NotImplementedError:
        # JAX registers the plugin only where a CUDA driver answers; its compiler needs none.
        api = xla_client.load_pjrt_plugin_dynamically("cuda", plugin_library())
        topology = xla_client.make_c_api_device_topology(api, "h100", **options)
    return topology._make_compile_only_devices()


def plugin_library() -> str:
    """Path of JAX's CUDA plugin, the library that has its compilers. Raises RuntimeError where it is not installed."""
    for name in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        try:
            path = importlib.import_module(name)._get_library_path()
        except ImportError:
            continue
        if path is not None:
            return str(path)
    raise RuntimeError("JAX's CUDA plugin is not installed; install jax[cuda13]")
