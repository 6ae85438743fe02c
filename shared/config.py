"""One configuration object for every backend: tile shape and launch parameters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from shared.checks import ArgumentError, check_fields, check_name
from shared.keys import Key

MOST_STAGES = 16
REDUCTIONS = ("two-pass", "atomic", "atomic-fp32")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Config(Key):
    """Tile shape and launch parameters of one GEMM launch. All backends take the same object.

    block_m:    rows (slots) of an output tile, a multiple of 16 (in Triton a power of two or the sum of two); an
                expert's tiles hold a multiple of it
    block_n:    columns (output channels) of an output tile
    block_k:    depth of one step of the stream over K
    num_warps:  warps of 32 threads in a thread block; four make one Hopper warp-group. pallas-mosaic: warps that
                multiply, beside one warp-group that fetches
    num_stages: depth of the software pipeline that loads x and w ahead of the matrix instruction
    group_m:    tile rows walked together by order "grouped"; the other orders do not read it
    swap_ab:    weights are the matrix instruction's left operand, so that its 64-row side is filled by output
                channels and the tokens take the narrow side; the accumulator is (block_n, block_m)
    split_k:    thread blocks that share one output tile, each with its part of K (`k_steps_per_split`); for launches
                with fewer tiles than the GPU has multiprocessors, in pallas-mosaic's clusters with more, too
    reduction:  how the parts become y where split_k > 1; with split_k = 1 it is not read
                "two-pass":    float32 partial sums in memory, added in a fixed order by a second kernel: the same bits
                               in every run. pallas-mosaic, in 2, 4 or 8 parts of low tiles and N a multiple of 8: in
                               the shared memory of a thread block cluster, with no second kernel
                "atomic-fp32": float32 atomic additions into a zeroed buffer, which a second kernel rounds to y; the
                               order of the additions, and with it the last bits, varies from run to run
                "atomic":      each part scaled, rounded to y's dtype and added to a zeroed y atomically: no second
                               kernel, but split_k roundings, and bits that vary from run to run
    ping_pong:  two warp-groups multiply and take a thread block's tiles in turn, one storing its tile while the other
                multiplies; False: they share each tile. pallas-mosaic alone has it

    Raises ArgumentError where a value is not allowed on any GPU or backend. What a particular backend or GPU
    cannot honour, that backend refuses (`backends.moe_gemm` raises before it launches anything).
    """

    block_m: int = 16
    block_n: int = 128
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 4
    group_m: int = 8
    swap_ab: bool = True
    split_k: int = 1
    reduction: str = "two-pass"
    ping_pong: bool = False

    def __post_init__(self) -> None:
        _check_integer("block_m", self.block_m)
        if self.block_m < 16 or self.block_m % 16:
            raise ArgumentError(f"config.block_m: got {self.block_m}; allowed: a multiple of 16")
        for name in ("block_n", "block_k"):
            _check_integer(name, getattr(self, name))
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ArgumentError(f"config.{name}: got {value}; allowed: a power of two, 16 or more")
        _check_integer("num_warps", self.num_warps)
        if self.num_warps not in (1, 2, 4, 8, 16, 32):
            raise ArgumentError(f"config.num_warps: got {self.num_warps}; allowed: 1, 2, 4, 8, 16, 32")
        _check_integer("num_stages", self.num_stages)
        if not 1 <= self.num_stages <= MOST_STAGES:
            raise ArgumentError(f"config.num_stages: got {self.num_stages}; allowed: 1 to {MOST_STAGES}")
        _check_integer("group_m", self.group_m)
        if self.group_m < 1:
            raise ArgumentError(f"config.group_m: got {self.group_m}; allowed: 1 or more")
        for name in ("swap_ab", "ping_pong"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"config.{name}: got {getattr(self, name)!r}; allowed: True or False")
        _check_integer("split_k", self.split_k)
        if not 1 <= self.split_k <= 64:
            raise ArgumentError(f"config.split_k: got {self.split_k}; allowed: 1 to 64")
        check_name("config.reduction", self.reduction, REDUCTIONS)

    def __str__(self) -> str:
        swap = " swap" if self.swap_ab else ""
        split = f" split{self.split_k} {self.reduction}" if self.split_k > 1 else ""
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k} w{self.num_warps} s{self.num_stages} g{self.group_m}"
            f"{swap}{split}{' ping-pong' if self.ping_pong else ''}"
        )

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal Config back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        return cls.from_mapping(json.loads(text))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """Config from a mapping of field names; an unknown name is an ArgumentError, not ignored."""
        check_fields("config", values, cls)
        return cls(**values)

    def replace(self, **changes: Any) -> Config:
        return dataclasses.replace(self, **changes)

    @property
    def deterministic(self) -> bool:
        """Whether the same inputs give the same bits in every run."""
        return self.split_k == 1 or self.reduction == "two-pass"

    def k_steps_per_split(self, k: int) -> int:
        """Steps of block_k that one part of K takes; the last parts may have fewer, down to none."""
        steps = -(-k // self.block_k)
        return -(-steps // self.split_k)

    def parts(self, k: int) -> int:
        """Parts of K that have a step: split_k, or fewer where K has few steps. The others are not launched."""
        steps = -(-k // self.block_k)
        return -(-steps // self.k_steps_per_split(k))

    def reduction_of(self, k: int) -> str:
        """How parts of K become y: `reduction`, or "none" where there is one part."""
        return self.reduction if self.parts(k) > 1 else "none"

    def rounded_parts(self, k: int) -> int:
        """Parts that are rounded to y's dtype and added in it; 1 where the sum is rounded once."""
        return self.parts(k) if self.reduction == "atomic" else 1

    def stage_bytes(self, x_itemsize: int, w_itemsize: int) -> int:
        """Bytes of one pipeline stage: one K step of x and of w in shared memory."""
        return self.block_k * (self.block_m * x_itemsize + self.block_n * w_itemsize)


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"config.{name}: got {value!r} ({type(value).__name__}); allowed: an int")
