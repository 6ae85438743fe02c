"""Numbers of known GPUs, from their datasheets: the one table of peaks. Measured ceilings stand in result files."""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources

from shared.checks import check_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Datasheet numbers: bytes, bytes per second, dense matrix operations per second. fp8_flops None: no FP8 unit."""

    key: str
    name: str
    capability: tuple[int, int]
    sms: int
    l2_bytes: int
    shared_memory_per_block: int
    dram_bytes_per_s: float
    fp16_flops: float
    fp8_flops: float | None
    source: str


@functools.cache
def gpus() -> dict[str, Gpu]:
    """All known GPUs by their short name."""
    table = json.loads(resources.files("shared").joinpath("data/gpus.json").read_text())
    return {key: Gpu(key=key, **{**values, "capability": tuple(values["capability"])}) for key, values in table.items()}


def gpu(key: str) -> Gpu:
    """The GPU of that short name; an unknown one is an ArgumentError that lists the known ones."""
    check_name("gpu", key, gpus())
    return gpus()[key]
