"""Peers that are libraries of their own: vLLM's fused MoE kernel, OpenAI's triton_kernels, Google's tokamax.

They are measured where they can be imported; bench/README.md says how to install them. What a library does before its
GEMM is done here beforehand, in plain torch, into the arrays that its kernel reads: routing, sorting, quantised
activations, weights in the layout that it wants.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.data import Data, quantise_token, to_jax
from bench.sorting import Ready, sort_slots

if TYPE_CHECKING:
    import torch

DTYPES = ("fp16", "bf16", "fp8-w8a16", "fp8-w8a8")
"""A row for each: where a library has no kernel for a dtype, the row says so."""
_VLLM = "vllm.model_executor.layers.fused_moe.fused_moe"


def missing(module: str, remedy: str) -> str | None:
    """Why a library cannot be imported here and what to do about it; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # compiled parts that do not fit fail in many ways
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{module.split('.')[0]} cannot be imported ({type(error).__name__}: {first}): {remedy}"
    return None


def _load(module: str, remedy: str) -> Any:
    reason = missing(module, remedy)
    if reason is not None:
        raise NotImplementedError(reason)
    return importlib.import_module(module)


# vLLM


def vllm_missing() -> str | None:
    return missing(_VLLM, "pip install vllm")


def vllm_fused_moe(data: Data, gemm: str) -> Ready:
    """vLLM's Triton kernel, by its own launcher, with the config that vLLM takes for this layer and batch.

    FP8: per-channel weight scales and per-token activation scales. One config file serves both GEMMs of a layer, named
    by the intermediate size; where vLLM ships none for this shape and GPU, its default config is what its users get.
    """
    if data.problem.dtype == "fp8-w8a16":
        raise NotImplementedError("vLLM's Triton kernel widens int8 weights, not FP8 ones: its fp8-w8a16 is Marlin's")
    module = _load(_VLLM, "pip install vllm")
    if not hasattr(module, "invoke_fused_moe_triton_kernel"):
        raise NotImplementedError("this vLLM has no invoke_fused_moe_triton_kernel: pip install 'vllm>=0.33'")
    import torch
    import triton.language as tl

    problem = data.problem
    fp8 = problem.is_fp8
    selector = "fp8_w8a8" if fp8 else None
    with _without_warnings("vllm"):
        config, about = vllm_config(module, problem, gemm, selector)
    arrays = vllm_assignment(data.topk_ids, config["BLOCK_SIZE_M"], problem.experts)
    x, x_scale = quantise_token(data.x) if fp8 else (data.x, None)
    compute = {"float16": tl.float16, "bfloat16": tl.bfloat16}[problem.activation]
    dtype = data.x.dtype

    def call(x: Any, w: Any, x_scale: Any, w_scale: Any, sorted_ids: Any, expert_ids: Any, padded: Any) -> Any:
        y = torch.empty(problem.tokens, problem.top_k, problem.n, dtype=dtype, device=x.device)
        module.invoke_fused_moe_triton_kernel(
            x, w, y, x_scale, w_scale, None, sorted_ids, expert_ids, padded, False, problem.top_k, config,
            compute_type=compute, use_fp8_w8a8=fp8, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False,
            per_channel_quant=fp8, block_shape=None,
        )  # fmt: skip
        return y

    arguments = (x, data.w, None if x_scale is None else x_scale[:, None], data.w_scale, *arrays)
    return Ready(call, arguments, in_slots=True, about=about)


def vllm_config(module: Any, problem: Any, gemm: str, selector: str | None) -> tuple[dict[str, Any], str]:
    """(config, where it is from) as vLLM chooses it. module: vLLM's fused_moe."""
    n, k = problem.n, problem.k
    inner, hidden = (n // 2, k) if gemm == "gate-up" else (k, n)
    w1, w2 = (problem.experts, 2 * inner, hidden), (problem.experts, hidden, inner)
    config = dict(module.try_get_optimal_moe_config(w1, w2, problem.top_k, selector, problem.tokens))
    tuned = module.get_moe_configs(problem.experts, inner, selector) is not None
    name = module.get_config_file_name(problem.experts, inner, selector)
    version = getattr(importlib.import_module("vllm"), "__version__", "of unknown version")
    source = f"its file {name}" if tuned else f"its default, as it has no file {name}"
    return config, f"vLLM {version}, {source}: {config}"


def vllm_assignment(topk_ids: torch.Tensor, block_m: int, experts: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(sorted_token_ids, expert_ids, num_tokens_post_padded), as vLLM's compiled moe_align_block_size fills them.

    sorted_token_ids: slots by expert, each expert's padded to block_m with S; None where slots are at most a quarter of
    the experts, when vLLM sorts nothing and gives each slot a tile row of its own.
    """
    import torch

    flat = topk_ids.reshape(-1).to(torch.int32).contiguous()
    slots, device = flat.numel(), flat.device
    if slots * 4 <= experts:
        return None, flat, torch.full((1,), slots * block_m, dtype=torch.int32, device=device)
    size = slots + experts * (block_m - 1)
    if slots < experts:
        size = min(slots * block_m, size)
    order = torch.argsort(flat, stable=True)
    order = order[flat[order] >= 0]
    expert = flat[order].long()
    counts = torch.bincount(expert, minlength=experts)
    rows = (counts + block_m - 1) // block_m
    first = (torch.cumsum(rows, 0) - rows) * block_m
    rank = torch.arange(order.numel(), device=device) - (torch.cumsum(counts, 0) - counts)[expert]
    sorted_ids = torch.full((size,), slots, dtype=torch.int32, device=device)
    sorted_ids[first[expert] + rank] = order.to(torch.int32)
    expert_ids = torch.full((-(-size // block_m),), -1, dtype=torch.int32, device=device)
    tile_expert = torch.repeat_interleave(torch.arange(experts, device=device), rows)
    expert_ids[: tile_expert.numel()] = tile_expert.to(torch.int32)
    return sorted_ids, expert_ids, (rows.sum() * block_m).to(torch.int32).reshape(1)


@contextlib.contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Keeps a library's warnings of missing tuned configs out of the progress lines: `about` says what it took."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# triton_kernels

_TRITON_KERNELS = (
    "pip install 'triton_kernels @ git+https://github.com/triton-lang/triton.git@v3.5.1#subdirectory=python/"
    "triton_kernels', or vLLM's copy (vllm/third_party) on PYTHONPATH; the package of that name on PyPI is another"
)


def triton_kernels_missing() -> str | None:
    return missing("triton_kernels.matmul_ogs", _TRITON_KERNELS)


def triton_kernels_matmul(data: Data, gemm: str) -> Ready:
    """matmul_ogs with its own choice of tiles (opt_flags), gathering x's rows, y in sorted order.

    Its FP8 inputs have one scale per tensor or expert. Channel and token scales are therefore applied by a
    multiplication behind it, which counts in GPU total but not in its kernel time.
    """
    problem = data.problem
    if problem.dtype == "fp8-w8a16":
        raise NotImplementedError("triton_kernels.matmul_ogs multiplies FP8 weights with FP8 activations only")
    if int(data.counts.sum()) != problem.slots:
        raise NotImplementedError("triton_kernels' routing has no slots without an expert (-1)")
    ogs = _load("triton_kernels.matmul_ogs", _TRITON_KERNELS)
    routing = _load("triton_kernels.routing", _TRITON_KERNELS)
    import torch

    flat = data.topk_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    back = torch.argsort(order, stable=True)
    counts = torch.from_numpy(data.counts.astype(np.int32)).to(flat.device)
    tiles = routing.compute_expt_data_torch(counts, problem.experts, problem.slots)
    route = routing.RoutingData(None, counts, problem.experts, problem.top_k, tiles)
    gather = routing.GatherIndx(src_indx=order.to(torch.int32), dst_indx=back.to(torch.int32))
    if not problem.is_fp8:
        w = data.w.transpose(1, 2).contiguous()  # (E, K, N): as its own benchmark holds 16-bit weights
        return Ready(lambda x, w: ogs.matmul_ogs(x, w, None, route, gather_indx=gather), (data.x, w))

    q, x_scale = quantise_token(data.x)
    assert data.w_scale is not None
    scale = data.w_scale[flat[order].long()] * x_scale[order // problem.top_k][:, None]
    precision = ogs.PrecisionConfig(out_dtype=torch.bfloat16)

    def call(q: Any, w: Any, scale: Any) -> Any:
        y = ogs.matmul_ogs(q, w.transpose(1, 2), None, route, gather_indx=gather, precision_config=precision)
        return y.mul_(scale)

    return Ready(call, (q, data.w, scale), kernel_name="matmul_ogs", about="scales applied behind its kernel")


# tokamax

_TOKAMAX = "pip install tokamax"
_MOVED = 256.0
"""A factor that scales get from x, beforehand: scales of 1e-4 would be subnormal in float16."""


def tokamax_missing() -> str | None:
    return missing("tokamax", _TOKAMAX)


def tokamax_ragged_dot(data: Data, gemm: str) -> Ready:
    """tokamax.ragged_dot by the fastest of a few of its implementations and configs on this GPU, rows of x sorted.

    It has no tuned configs for an H200: its own choice is among the ways, and `about` names what was fastest. Its
    group bookkeeping is part of every call. fp8-w8a16: x and scales in float16, as its kernel widens weights to the
    scales' dtype and Hopper widens e4m3 to float16 only.
    """
    if data.problem.dtype == "fp8-w8a8":
        raise NotImplementedError("tokamax.ragged_dot widens FP8 activations before its Hopper kernel")
    tokamax = _load("tokamax", _TOKAMAX)
    import jax
    import torch

    rows = sort_slots(data)
    sizes = torch.from_numpy(data.counts.astype(np.int32)).to(data.x.device)
    if data.problem.is_fp8:
        assert data.w_scale is not None
        scale = (data.w_scale * _MOVED).to(torch.float16)[:, None].contiguous()  # (E, 1, N)
        x = (rows.x.float() / _MOVED).to(torch.float16)
        given: tuple[Any, ...] = (x, data.w, sizes, scale)  # (E, N, K): its FP8 kernel's own layout
    else:
        given = (rows.x, data.w.transpose(1, 2).contiguous(), sizes)  # (E, K, N): what its 16-bit kernels read
    if data.x.is_cuda:
        torch.cuda.synchronize()
    arguments = tuple(to_jax(array) for array in given)

    def dot(implementation: Any, x: Any, w: Any, sizes: Any, scale: Any = None) -> Any:
        if scale is not None:
            qarray = importlib.import_module("qwix").QArray
            w = qarray(qvalue=w.mT, scale=scale, qtype=w.dtype)
        return tokamax.ragged_dot(x, w, sizes, implementation=implementation, preferred_element_type=out)

    out = jax.numpy.dtype(data.problem.activation)
    named = {name: jax.jit(functools.partial(dot, one)) for name, one in _tokamax_ways(data).items()}
    with _without_warnings("absl"):
        refused = _refused(named, arguments)
    ways = {name: way for name, way in named.items() if name not in refused}
    if not ways:
        raise NotImplementedError(f"tokamax.ragged_dot: {'; '.join(f'{n}: {why}' for n, why in refused.items())}")
    told = f"tokamax {tokamax.__version__}"
    if refused:
        told += "; refused: " + "; ".join(f"{name}: {why}" for name, why in refused.items())
    return Ready(next(iter(ways.values())), arguments, about=told, ways=ways)


def _tokamax_ways(data: Data) -> dict[str, Any]:
    """Implementations by a name that tells their config. Without a GPU, only XLA's has anything to run on."""
    if not data.x.is_cuda:
        return {"xla": "xla"}
    known = importlib.import_module("tokamax._src.ops.ragged_dot.api").IMPLEMENTATIONS
    ways: dict[str, Any] = {"mosaic, its own config": "mosaic"}
    per_expert = data.problem.slots / max(1, int((data.counts > 0).sum()))
    block_m = next(m for m in (16, 32, 64, 128) if m >= min(per_expert, 128))
    minor = importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_gpu_common").MatmulDimension.M
    # 16-bit weights stand in the instruction's right operand there, tokens in its 64-row side.
    sides = (block_m,) if data.problem.is_fp8 else (max(64, block_m),)
    for side in sides:
        for persistent in (False, True):
            told = f"mosaic {side}x64x128 s4{' persistent' if persistent else ''}"
            mosaic = known["mosaic_gpu"]
            config = mosaic.config_cls(
                block_m=side, block_n=64, block_k=128, num_stages=4, split_k=1, persistent=persistent,
                grid_minor_dim=minor, grid_tile_width=1,
            )  # fmt: skip
            ways[told] = (mosaic.replace(config=config),)
    if "triton" in known and not data.problem.is_fp8:  # its Triton kernel reads (E, K, N) alone
        triton = known["triton"]
        config = triton.config_cls(block_m=block_m, block_n=128, block_k=64, num_warps=4, num_stages=4)
        ways[f"triton {block_m}x128x64 s4"] = (triton.replace(config=config),)
    return ways


def _refused(ways: Mapping[str, Callable[..., Any]], arguments: Sequence[Any]) -> dict[str, str]:
    """{name: why} of the ways that fail. Each is compiled by its first call, all side by side."""
    import jax

    def first(way: Callable[..., Any]) -> str | None:
        try:
            jax.block_until_ready(way(*arguments))
        except Exception as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]
        return None

    with concurrent.futures.ThreadPoolExecutor(len(ways)) as pool:
        reasons = dict(zip(ways, pool.map(first, ways.values()), strict=True))
    return {name: reason for name, reason in reasons.items() if reason is not None}
