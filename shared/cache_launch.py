"""What the cache model (`shared/cache_model.py`) predicts for: one launch on one chip."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from shared import orders, planning
from shared.checks import ArgumentError, check_name
from shared.config import Config
from shared.gpus import Gpu
from shared.problem import Problem, ceil_div

FP4 = "fp4-w4a16"
"""4-bit weights with one scale byte per 32, 16-bit activations. Only predicted: no kernel here has it."""
DTYPES = ("fp16", "bf16", "fp8-w8a16", "fp8-w8a8", FP4)
ORDERS = (*orders.GRID_ORDERS, "popular")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """The numbers of a GPU that the model reads. flops: dense.

    shared_memory: bytes a multiprocessor has for blocks
    asynchronous:  whether its matrix instructions read shared memory by themselves (Hopper and later)
    """

    sms: int
    l2_bytes: float
    dram_bytes_per_s: float
    flops: float
    shared_memory: int = 233472
    registers: int = 65536
    asynchronous: bool = True

    def __post_init__(self) -> None:
        for name in ("sms", "l2_bytes", "dram_bytes_per_s", "flops"):
            value = getattr(self, name)
            if not value > 0:
                raise ArgumentError(f"{name}: got {value}; allowed: above 0")

    @classmethod
    def of(cls, gpu: Gpu, dtype: str) -> Chip:
        """A datasheet's numbers for a dtype; ArgumentError for fp8-w8a8 where the GPU has no FP8 unit."""
        if dtype == "fp8-w8a8" and gpu.fp8_flops is None:
            raise ArgumentError(
                f"dtype: got fp8-w8a8 on {gpu.key}, which has no FP8 unit; allowed: fp16, bf16, fp8-w8a16, {FP4}"
            )
        return cls(
            sms=gpu.sms,
            l2_bytes=gpu.l2_bytes,
            dram_bytes_per_s=gpu.dram_bytes_per_s,
            flops=gpu.fp8_flops if dtype == "fp8-w8a8" and gpu.fp8_flops is not None else gpu.fp16_flops,
            shared_memory=gpu.shared_memory_per_block + 1024,
            asynchronous=gpu.capability >= (9, 0),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: shape, routing, dtype, order, config. topk_ids (T, top_k) int, each in [-1, E)."""

    n: int
    k: int
    experts: int
    topk_ids: np.ndarray
    dtype: str
    order: str
    config: Config

    def __post_init__(self) -> None:
        check_name("dtype", self.dtype, DTYPES)
        check_name("order", self.order, ORDERS)
        for name in ("n", "k", "experts"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}: got {getattr(self, name)}; allowed: 1 or more")
        if self.topk_ids.size == 0 or self.topk_ids.max() < 0:
            raise ArgumentError(
                "routing: got no slot with an expert; allowed: one or more, as else nothing is launched"
            )
        if self.config.split_k != 1:
            raise ArgumentError(
                f"config.split_k: got {self.config.split_k}; allowed: 1 (the model knows no parts of K)"
            )

    @property
    def w_bytes(self) -> float:
        """Bytes of one weight; with 4 bits, its share of the scale as well."""
        return {"fp16": 2.0, "bf16": 2.0, FP4: 0.5 + 1 / 32}.get(self.dtype, 1.0)

    @property
    def x_bytes(self) -> int:
        return 1 if self.dtype == "fp8-w8a8" else 2

    @property
    def converts(self) -> bool:
        """Whether weights are widened in registers."""
        return self.dtype in ("fp8-w8a16", FP4)

    @property
    def expert_counts(self) -> np.ndarray:
        """Slots per expert, (E,)."""
        return planning.expert_counts(self.topk_ids, self.experts)

    @property
    def tiles(self) -> int:
        rows = planning.tile_rows_in_use(self.expert_counts, self.config.block_m)
        return rows * ceil_div(self.n, self.config.block_n)

    @property
    def needed_bytes(self) -> float:
        """What any launch must read: `Problem.read_bytes`; with 4-bit weights counted alike."""
        tokens, top_k = self.topk_ids.shape
        shape = {"tokens": tokens, "experts": self.experts, "n": self.n, "k": self.k, "top_k": top_k}
        counts = self.expert_counts.tolist()
        if self.dtype != FP4:
            return Problem.of(self.dtype, **shape).read_bytes(counts)
        fp16 = Problem.of("fp16", **shape)
        return fp16.read_bytes(counts) - fp16.weight_bytes(counts) * (1 - self.w_bytes / 2)


def blocks_per_sm(launch: Launch, chip: Chip) -> int:
    """Thread blocks that a multiprocessor holds, by shared memory, registers and warps; registers are estimated.

    Raises ArgumentError where not one fits.
    """
    config = launch.config
    stage = config.block_k * (config.block_m * launch.x_bytes + config.block_n * launch.w_bytes)
    # A stage that an asynchronous instruction still reads cannot be loaded into. Others, those of fewer than
    # 64 rows, have their operands in registers by then: Triton gives them one buffer less. 1 KiB of each block's is the
    # driver's.
    asynchronous = chip.asynchronous and (config.block_n if config.swap_ab else config.block_m) >= 64
    buffers = config.num_stages if asynchronous else max(1, config.num_stages - 1)
    if launch.k <= config.block_k:
        buffers = 1  # one K step: nothing is loaded ahead
    needed = buffers * stage + 1024
    by_shared_memory = int(chip.shared_memory // needed)
    if by_shared_memory < 1:
        raise ArgumentError(
            f"config: got {config}, which needs {needed:.0f} bytes of shared memory; allowed: {chip.shared_memory}"
        )
    threads = 32 * config.num_warps
    registers = min(255, 34 + 1.5 * config.block_m * config.block_n / threads)
    by_registers = int(chip.registers // (8 * math.ceil(registers / 8) * threads))
    return max(1, min(by_shared_memory, by_registers, 64 // config.num_warps, 32))


def deal(expert_counts: Sequence[int], top_k: int, *, seed: int) -> np.ndarray:
    """topk_ids (T, top_k) with these slots per expert, dealt at random; T = slots / top_k. A token's experts differ
    unless an expert has more slots than there are tokens."""
    slots = sum(expert_counts)
    if min(expert_counts, default=0) < 0 or slots == 0 or slots % top_k:
        raise ArgumentError(
            f"expert-counts: got {list(expert_counts)}, together {slots}; allowed: 0 or more each, together a positive "
            f"multiple of top_k = {top_k}"
        )
    tokens = slots // top_k
    rng = np.random.default_rng(seed)
    ids = np.full((tokens, top_k), -1, np.int32)
    left = np.full(tokens, top_k)
    for expert in np.argsort(-np.asarray(expert_counts), kind="stable"):
        count = expert_counts[expert]
        while count:
            # Those with the most free places first, so that the last expert still finds different tokens.
            takers = np.lexsort((rng.random(tokens), -left))[: min(count, int((left > 0).sum()))]
            ids[takers, left[takers] - 1] = expert
            left[takers] -= 1
            count -= len(takers)
    return ids
