"""What the Mosaic GPU kernel makes of a problem and a config: which way rows come and go, what it takes of an SM, and
what it refuses."""

from __future__ import annotations

import math

import jax.numpy as jnp

from shared.config import Config
from shared.problem import SCALE_BLOCK, Problem, ceil_div

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one thread block can have on Hopper."""
SHARED_MEMORY_PER_SM = 228 * 1024
"""Bytes of shared memory that the thread blocks of one SM have together, 1 KiB of each taken by the system."""
TOKENS = 8
"""Tokens that every tile reads together, where they are no more: wgmma's least number of columns."""
SLOTS = 256
"""Up to so many slots `mosaic_rows.all_tokens` compares them pairwise, which grows with their square."""
TOKEN_SLOTS = 31
"""Slots of a token that a mask of 32 bits has a bit for, the sign aside."""
GATHERED_ROWS = 48
"""Rows of the tallest tile whose rows of x the kernel gathers. With 160, one warp-group's copies took longer than the
matrix instructions; between these nothing was measured."""
WORD, WORDS_OF = 4, 16
"""Weights that a thread reads at a time, side by side in memory, of so many values of K: of a matrix instruction on
2-byte values."""
OUTPUT_ROWS = 32
"""Rows of an output tile that are stored at once."""
CLUSTERS = (2, 4, 8)
"""Thread blocks of a cluster that adds up the parts of a split K, one a part. Every GPU with clusters allows 8."""
REGISTERS_OF_THREE = 160
FETCH_REGISTERS, COMPUTE_REGISTERS = 40, 232
"""Registers of a thread. Three warp-groups that share an SM's have REGISTERS_OF_THREE each, or a few more; where those
that multiply need more, the one that fetches gives up what it does not need."""
KEPT_IN_L2 = 13 << 20
"""Bytes, about a quarter of an H200's L2. Up to so many of x and y, weights are evicted first: with more, most kernels
got slower by it; why was not found out (*What each step predicted* in notes/performance.md). Of more sorted rows of x
than that no copy is made (`gathers`). Between 11.5 and 14.7 million nothing was measured."""
SWIZZLES = (128, 64, 32)
"""Bytes: widths of the column in which wgmma's operands lie in shared memory, 8 rows high, the widest the best."""
SHARED_ALIGNMENT = 1024
"""Bytes: each shared-memory array starts at a multiple of this (the period of the 128-byte swizzle)."""


def unsupported(problem: Problem, config: Config) -> str | None:
    """None where problem and config can be honoured; else the reason, with what is allowed."""
    if not config.swap_ab:
        return "config.swap_ab: got False; allowed: True (the weights are always wgmma's left operand here)"
    if config.num_warps not in (4, 8):
        return f"config.num_warps: got {config.num_warps}; allowed: 4, 8 (warp-groups of four warps that multiply)"
    if config.ping_pong and config.num_warps != 8:
        return f"config.num_warps: got {config.num_warps} with ping_pong; allowed: 8 (two warp-groups take turns)"
    if config.ping_pong and config.split_k > 1:
        return f"config.split_k: got {config.split_k} with ping_pong; allowed: 1 (turns are of whole tiles)"
    if channels_of_group(config) < 64:
        least = 64 * sharing_groups(config)
        return f"config.block_n: got {config.block_n}; allowed: {least} or more with that num_warps"
    if not 64 <= config.block_n <= 256:
        return f"config.block_n: got {config.block_n}; allowed: 64, 128, 256 (wgmma's 64 rows; a TMA box's 256)"
    if config.block_m > 256:
        return f"config.block_m: got {config.block_m}; allowed: up to 256 (wgmma's columns)"
    if config.num_stages < 2:
        return "config.num_stages: got 1; allowed: 2 or more (one stage is read while another is filled)"
    if config.block_k * problem.w_itemsize < 32:
        return f"config.block_k: got {config.block_k}; allowed: {32 // problem.w_itemsize} or more (one wgmma's depth)"
    accumulator = _accumulator_registers(config)
    if accumulator > (allowed_registers := 160 if config.ping_pong else 128):
        return f"config {config} needs {accumulator} accumulator registers a thread; allowed: {allowed_registers}"
    if config.ping_pong and (registers := registers_of_thread(problem, config)) > COMPUTE_REGISTERS:
        return f"config {config} needs {registers} registers a thread; allowed: {COMPUTE_REGISTERS}"
    if problem.dtype == "fp8-w8a16" and config.block_n * config.block_k > 2**15:
        return f"config {config}: block_n * block_k is {config.block_n * config.block_k}; allowed with fp8-w8a16: 32768"
    if problem.scale_layout == "block":
        for name, value in (("block_n", config.block_n), ("block_k", config.block_k)):
            if value > SCALE_BLOCK:
                return f"config.{name}: got {value}; allowed with block scales: up to {SCALE_BLOCK}, one scale per step"
    needed = shared_bytes(problem, config)
    if needed > SHARED_MEMORY:
        return f"config {config} needs {needed} bytes of shared memory; allowed on Hopper: {SHARED_MEMORY}"
    return None


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory of a thread block: the stages of x and w, the output tile, barriers of each stage."""
    height = tile_height(problem, config)
    arrays = [
        config.num_stages * height * config.block_k * problem.x_itemsize,
        config.num_stages * config.block_n * config.block_k * problem.w_itemsize,
        math.prod(output_shape(problem, config)) * sum_dtype(problem, config).itemsize,
    ]
    barriers = 8 * config.num_stages * (1 + warp_groups(config) // sharing_groups(config))
    if adds_in_cluster(problem, config):
        arrays.append(8 * warp_groups(config))  # barriers that are told of parts
        barriers += 8 * warp_groups(config)
    return sum(round_up(size, SHARED_ALIGNMENT) for size in arrays) + round_up(barriers, 128)


def reads_all_tokens(problem: Problem) -> bool:
    """Whether every tile reads all tokens.

    A token in two columns of one tile, with two routing weights, cannot be: so not where top_k weights meet a token.
    """
    one_weight = not problem.routing_weight or problem.top_k == 1
    few = problem.tokens <= TOKENS and problem.slots <= SLOTS and problem.top_k <= TOKEN_SLOTS
    return few and one_weight


def tile_height(problem: Problem, config: Config) -> int:
    """Rows of an output tile."""
    return TOKENS if reads_all_tokens(problem) else config.block_m


def gathers(problem: Problem, config: Config) -> bool:
    """Whether the kernel gathers a tile's rows of x itself.

    It then copies them for each column of tiles anew, by threads, which is slower than TMA: worth it where L2 would not
    hold a copy of them sorted by expert, which then is written to memory and read from there beside the weights.
    """
    sorted_bytes = problem.slots * problem.k * problem.x_itemsize
    low = config.block_m <= GATHERED_ROWS and registers_of_thread(problem, config) <= REGISTERS_OF_THREE
    return not reads_all_tokens(problem) and low and sorted_bytes > KEPT_IN_L2


def adds_in_cluster(problem: Problem, config: Config) -> bool:
    """Whether a cluster of thread blocks, one a part of K, adds the parts up in its shared memory: of tiles that are
    stored at once, each row to its slot. On a GPU: in Pallas's interpreter, where threads store nothing of their own,
    they are added as other parts are, and the caller has to see to it."""
    divides = config.parts(problem.k) in CLUSTERS and config.reduction == "two-pass"
    return divides and config.block_m <= OUTPUT_ROWS and problem.n % 8 == 0


def scatters(problem: Problem, config: Config, *, interpret: bool = False) -> bool:
    """Whether the kernel stores each row of y to its slot. By 16 bytes at a time, so not rows of other lengths."""
    whole = config.parts(problem.k) == 1 or (adds_in_cluster(problem, config) and not interpret)
    return whole and problem.n % 8 == 0


def reads_words(problem: Problem, config: Config) -> bool:
    """Whether each thread reads WORD e4m3 weights at a time: where x is scaled beforehand, which brings it to the order
    that this gives a matrix instruction at no cost. Words take registers of their own until they are widened."""
    room = registers_of_thread(problem, config) < COMPUTE_REGISTERS
    return problem.dtype == "fp8-w8a16" and problem.scales_x and problem.k % WORDS_OF == 0 and room


def column_width(block_k: int, itemsize: int) -> int:
    """Bytes: the widest column that a K step of such values is made of."""
    return next(width for width in SWIZZLES if block_k * itemsize % width == 0)


def weight_pieces(problem: Problem, config: Config) -> int:
    """Pieces in which the weights of a K step are fetched and multiplied: one, or where their rows are no whole number
    of columns (`mosaic_copies`), a piece a column."""
    width = column_width(config.block_k, problem.w_itemsize)
    return 1 if problem.k * problem.w_itemsize % width == 0 else config.block_k * problem.w_itemsize // width


def evicts_weights_first(problem: Problem, config: Config) -> bool:
    """Whether L2 is to evict weights, which are read once at decode, before what the kernel reads or writes besides.

    The rows of x are there from the start, those of y come meanwhile: half of them on average. Measured with uniform
    routing, where an expert's slots fit one tile row; with more tile rows weights are read again, and out of L2 maybe
    not as often.
    """
    rows = problem.tokens if gathers(problem, config) else problem.slots
    return rows * problem.k * problem.x_itemsize + problem.write_bytes() // 2 <= KEPT_IN_L2


def output_shape(problem: Problem, config: Config) -> tuple[int, int, int, int]:
    """Shared memory through which warp-groups store what they have of a tile: (warp-groups, slots, rows, channels).

    Tall tiles pass through two slots of OUTPUT_ROWS rows in turn; the memory serves as stages instead.
    """
    height = tile_height(problem, config)
    slots, rows = (1, height) if height <= OUTPUT_ROWS else (2, OUTPUT_ROWS)
    return warp_groups(config), slots, rows, channels_of_group(config)


def blocks_per_sm(problem: Problem, config: Config) -> int:
    """Thread blocks that fit an SM's shared memory and registers, 4 at most; num_stages decides.

    Several hide each other's latencies: one widens weights or stores its tile while another multiplies. Registers are
    estimated, from above (`tests/test_mosaic.py` holds the estimate to what is compiled).
    """
    by_memory = SHARED_MEMORY_PER_SM // (shared_bytes(problem, config) + 1024)
    registers = registers_of_thread(problem, config)
    if config.num_warps == 8 and registers > REGISTERS_OF_THREE:
        return 1
    # The rows' scales stand beside the sums at a tile's end, when no widened weights do any more.
    registers += max(0, tile_height(problem, config) // 4 - _widened_registers(problem, config))
    if adds_in_cluster(problem, config):
        registers += 8 * config.parts(problem.k)  # what a thread adds up at once
    by_registers = 65536 // ((32 * config.num_warps + 128) * round_up(min(255, registers), 8))
    return max(1, min(4, by_memory, by_registers))


def registers_of_thread(problem: Problem, config: Config) -> int:
    """Registers of a thread: its part of the sums, of the widened weights, and what addresses take."""
    # With block scales a step's sums stand beside the total: counted for whole tiles, which they may make too large.
    sums = 2 if config.ping_pong and problem.scale_layout == "block" else 1
    return 40 + sums * _accumulator_registers(config) + _widened_registers(problem, config)


def _widened_registers(problem: Problem, config: Config) -> int:
    """Of a thread of the warp-groups that multiply: its weights of a K step as float16."""
    return channels_of_group(config) * config.block_k // 256 if problem.dtype == "fp8-w8a16" else 0


def _accumulator_registers(config: Config) -> int:
    """Of a thread of the warp-groups that multiply."""
    return channels_of_group(config) * config.block_m // 128


def sum_dtype(problem: Problem, config: Config) -> jnp.dtype:
    """dtype of an output tile in shared memory: float32 for parts of K, which are rounded after they are added."""
    rounds = config.parts(problem.k) == 1 or config.reduction == "atomic"
    return jnp.dtype(problem.activation if rounds else "float32")


def heights_up_to(last: int) -> list[int]:
    """Rows of x that a tile may multiply, rising to `last`: a tile takes the least that has all its slots."""
    return [h for h in (8, 16, 32, 64, 96, 128, 192) if h < last] + [last]


def warp_groups(config: Config) -> int:
    """Warp-groups of a thread block that multiply; one more fetches."""
    return config.num_warps // 4


def sharing_groups(config: Config) -> int:
    """Warp-groups that multiply one tile, each a share of its channels."""
    return 1 if config.ping_pong else warp_groups(config)


def channels_of_group(config: Config) -> int:
    """Channels of a tile that one warp-group multiplies."""
    return config.block_n // sharing_groups(config)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple
