"""How the Triton kernels are launched, once for PyTorch and JAX: grids, compile-time constants, what they refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backends.compiled import Compiled, compile_ptx
from shared.config import Config
from shared.problem import SCALE_BLOCK, Problem, ceil_div

SHARED_MEMORY_LIMIT = 232448
"""Bytes of shared memory that a thread block can have on Hopper (227 KiB)."""

ALIGNMENT = 16
"""Bytes: Triton compiles one variant for pointers at multiples of it, another for any others."""

ACCUMULATORS = 160
"""Registers of a thread's 255 that sums may take: 160 rows of 128 channels fit one warp-group."""

ROWS_CHUNK = 1024
"""Channels of one program of the kernels that go over y's rows: 8 a thread of four warps, 16 bytes a load or two."""

FEW_SLOTS = 64
"""Up to so many slots one program makes the plan: it compares them pairwise, a work that grows with their square."""

ROW_CHUNK = 16384
"""Most values of a row of x that a program keeps in registers while it looks for their largest: 64 a thread."""

PUBLISHED = "published-2024"
"""The 2024 article's mapping, for its reproduction only: `backends.moe_gemm` does not know it."""


def missing_packages() -> str | None:
    """Why the kernels cannot be loaded here and what to do about it; None if they can."""
    try:
        import torch  # noqa: F401
        import triton  # noqa: F401
    except ImportError as error:
        return f"{error}; install torch and triton (pip install torch 'triton>=3.7')"
    return None


def unsupported(problem: Problem, config: Config, limit: int = SHARED_MEMORY_LIMIT) -> str | None:
    """Why the kernel cannot honour this combination; None if it can.

    limit: bytes of shared memory that a thread block can have on the GPU at hand; without one, Hopper's
    """
    if (reason := not_in_triton(config)) is not None:
        return reason
    if problem.scale_layout == "block" and SCALE_BLOCK % config.block_k:
        return (
            f"config.block_k: got {config.block_k} with one weight scale per {SCALE_BLOCK}x{SCALE_BLOCK} block; "
            f"allowed: a divisor of {SCALE_BLOCK}"
        )
    # fp8 x fp8 instructions take 32 values of K at a time.
    if problem.quantises_x and config.block_k < 32:
        return f"config.block_k: got {config.block_k} in mode fp8-w8a8; allowed: 32 or more"
    needed = config.num_stages * config.stage_bytes(problem.x_itemsize, problem.w_itemsize)
    if needed > limit:
        return (
            f"config: got {config}, which needs {needed} bytes of shared memory ({config.num_stages} stages); "
            f"allowed: {limit} {'on Hopper' if limit == SHARED_MEMORY_LIMIT else 'on this GPU'}"
        )
    accumulator = config.block_m * config.block_n
    if accumulator > ACCUMULATORS * 32 * config.num_warps:
        return (
            f"config: got a {config.block_m}x{config.block_n} float32 accumulator for {config.num_warps} warps; "
            f"allowed: at most {ACCUMULATORS * 32 * config.num_warps} elements, {ACCUMULATORS} registers a thread"
        )
    return None


def tail_rows(block_m: int) -> int:
    """Rows of a tile past its largest power of two: blocks of Triton are powers of two, so 160 rows are two of them."""
    return block_m - (1 << block_m.bit_length() - 1)


def half_tail(block_m: int) -> int:
    """Rows of a tile's tail that are multiplied alone where no more of it hold slots; 0: it is multiplied whole.

    Blocks of fewer rows than 16 are multiplied no faster.
    """
    half = tail_rows(block_m) // 2
    return half if half >= 16 else 0


def not_in_triton(config: Config) -> str | None:
    """Why Triton has no such kernel; None if it has."""
    if config.ping_pong:
        return "config.ping_pong: got True; allowed: False (Triton does not say which warps take which tile)"
    tail = tail_rows(config.block_m)
    if tail & (tail - 1):
        return f"config.block_m: got {config.block_m}; allowed: a power of two, or the sum of two (such as 160 or 192)"
    return None


def warp_group(config: Config) -> bool:
    """Whether the tile is a warp-group instruction's: four warps, 64 rows of its left operand."""
    return config.num_warps % 4 == 0 and (config.block_n if config.swap_ab else config.block_m) >= 64


def reads_words(problem: Problem, config: Config, *, w_stride_e: int, w_stride_n: int, w_address: int = 0) -> bool:
    """Whether the GEMM kernel reads e4m3 weights as 32-bit words, and a step of K is two products (`widen_half`).

    It does so where weights are widened in registers, as the left operand of a warp-group instruction, and activations
    are scaled beforehand, so that `prepare_kernel` can bring their values to the products' order at no cost. Words
    need whole steps of K, and rows of weights that start at multiples of ALIGNMENT. Strides in elements: bytes, here.
    """
    widened_left = problem.dtype == "fp8-w8a16" and problem.scales_x and config.swap_ab and warp_group(config)
    whole = problem.k % config.block_k == 0 and config.block_k >= 32
    return widened_left and whole and all(at % ALIGNMENT == 0 for at in (w_address, w_stride_e, w_stride_n))


def gemm_grid(problem: Problem, order: str, config: Config) -> int:
    """Programs of one GEMM launch: the most tiles that any routing can need, times the parts of K."""
    tile_cols = problem.tile_cols(config.block_n)
    if order == PUBLISHED:
        return published_grid_m(problem, config) * tile_cols
    return problem.max_tile_rows(config.block_m) * tile_cols * config.parts(problem.k)


def published_grid_m(problem: Problem, config: Config) -> int:
    """The article's padded number of tile rows."""
    return -(-(problem.slots + problem.experts * (config.block_m - 1)) // config.block_m)


def gemm_constants(
    problem: Problem, order: str, config: Config, *, x_stride: int, w_stride_e: int, w_stride_n: int, words: bool
) -> dict[str, Any]:
    """Compile-time arguments of `moe_gemm_kernel`. Strides in elements; words: as `reads_words`."""
    return {
        "x_stride": x_stride,
        "w_stride_e": w_stride_e,
        "w_stride_n": w_stride_n,
        "N": problem.n,
        "K": problem.k,
        "TOP_K": problem.top_k,
        "SCALES": problem.scale_layout or "none",
        "QUANTISED_X": problem.quantises_x,
        "SCALED_X": problem.scales_x,
        "ROUTING_WEIGHT": problem.routing_weight,
        "ORDER": order,
        "PUBLISHED_GRID_M": published_grid_m(problem, config) if order == PUBLISHED else 0,
        "BLOCK_M": config.block_m,
        "TAIL": tail_rows(config.block_m),
        "HALF": half_tail(config.block_m),
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "SWAP_AB": config.swap_ab,
        "PARTS": config.parts(problem.k),
        "REDUCTION": config.reduction_of(problem.k),
        "W_WORDS": words,
    }


def sums_shape(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Shape of the float32 sums over parts of K that `moe_gemm_kernel_reduce` reads."""
    parts = config.parts(problem.k) if config.reduction == "two-pass" else 1
    return parts, problem.slots, problem.n


def rows_grid(problem: Problem) -> int:
    """Programs of `moe_gemm_kernel_zero` and of `moe_gemm_kernel_reduce`."""
    return problem.slots * ceil_div(problem.n, ROWS_CHUNK)


def zero_constants(problem: Problem) -> dict[str, Any]:
    """Compile-time arguments of `moe_gemm_kernel_zero`."""
    return {"N": problem.n, "CHUNK": ROWS_CHUNK}


def reduce_constants(problem: Problem, config: Config) -> dict[str, Any]:
    """Compile-time arguments of `moe_gemm_kernel_reduce`. Block scales have been applied by then."""
    return {
        "E": problem.experts,
        "N": problem.n,
        "TOP_K": problem.top_k,
        "CHANNEL_SCALES": problem.scale_layout == "channel",
        "SCALED_X": problem.scales_x,
        "ROUTING_WEIGHT": problem.routing_weight,
        "PARTS": sums_shape(problem, config)[0],
        "CHUNK": ROWS_CHUNK,
    }


def kernel(name: str) -> Any:
    """The @triton.jit function of this name."""
    from backends import triton_kernel, triton_prepare

    return getattr(triton_prepare if name == "prepare_kernel" else triton_kernel, name)


def planners(problem: Problem) -> int:
    """Programs of `prepare_kernel` that plan."""
    return 1 if problem.slots <= FEW_SLOTS else problem.experts + 1


def prepare_grid(problem: Problem) -> int:
    return planners(problem) + (problem.tokens if problem.scales_x else 0)


def prepare_constants(
    problem: Problem, block_m: int, popularity: str = "none", *, x_stride: int, halves_of: int = 0
) -> dict[str, Any]:
    """Compile-time arguments of `prepare_kernel`.

    popularity: as `popularity_of` has it; x_stride: in elements; halves_of: block_k where the GEMM `reads_words`, or 0
    """
    few = problem.slots <= FEW_SLOTS
    scaled = problem.scales_x
    return {
        "E": problem.experts,
        "MAX_TILE_ROWS": problem.max_tile_rows(block_m),
        "BLOCK_M": block_m,
        "BUCKETS": max(16, 1 << problem.experts.bit_length()),
        "CHUNK": max(16, power_of_two(problem.slots)) if few else 128 if problem.slots <= 128 else 1024,
        "POPULARITY": popularity,
        "PLANNERS": planners(problem),
        "SCALED_X": scaled,
        # Without scaling these say nothing, and must not tell two variants apart.
        "x_stride": x_stride if scaled else 0,
        "K": problem.k if scaled else 0,
        "K_CHUNK": min(ROW_CHUNK, max(256, power_of_two(problem.k))) if scaled else 0,
        "HALVES_OF": halves_of,
        "num_warps": 8 if few or scaled else 4,
    }


def power_of_two(least: int) -> int:
    """The least power of two that is no less than this, for 1 or more."""
    return 1 << (least - 1).bit_length()


def popularity_of(order: str, popularity: Any) -> str:
    """By what the plan orders experts: "none" (their number), "counts" (slots of this call) or "given"."""
    if order != "popular":
        return "none"
    return "counts" if popularity is None else "given"


def compile_only(problem: Problem, order: str, config: Config) -> Compiled:
    """Compile the GEMM kernel for sm_90 without a device: compact x and w."""
    x_stride, w_stride_e, w_stride_n = problem.k, problem.n * problem.k, problem.k
    words = reads_words(problem, config, w_stride_e=w_stride_e, w_stride_n=w_stride_n)
    constants = gemm_constants(
        problem, order, config, x_stride=x_stride, w_stride_e=w_stride_e, w_stride_n=w_stride_n, words=words
    )
    sums_only = config.reduction_of(problem.k) in ("two-pass", "atomic-fp32")
    types = [
        f"*{x_type(problem)}", f"*{w_type(problem)}", *["*fp32"] * 3, *["*i32"] * 4,
        "*fp32" if sums_only else f"*{TYPES[problem.activation]}", "i32",
    ]  # fmt: skip
    return compile_kernel(kernel("moe_gemm_kernel"), types, constants, config)


TYPES = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv"}
"""Triton's names of dtypes."""


def x_type(problem: Problem) -> str:
    """Triton's name of the dtype that the GEMM kernel reads x in."""
    return TYPES[problem.kernel_x_dtype]


def w_type(problem: Problem) -> str:
    """Triton's name of the dtype of w."""
    return TYPES["float8_e4m3fn" if problem.is_fp8 else problem.activation]


def compile_kernel(kernel: Any, types: Sequence[str], constants: Mapping[str, Any], config: Config) -> Compiled:
    """A @triton.jit function compiled for sm_90 without a device, pointers aligned to 16 bytes.

    types: Triton's names of the types of its first parameters, such as "*fp16"; constants: the others' values
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict(zip(kernel.arg_names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = [index for index, kind in enumerate(types) if kind.startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=dict(constants),
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compile_ptx(compiled.asm["ptx"], compiled.metadata.shared)
