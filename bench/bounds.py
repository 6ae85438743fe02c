"""What no kernel could better: the targets' figures for one that is as fast as a plain read, or that is at the floor.

A kernel of a case reads its bytes, so it takes as long as the fastest plain read of so many (reads.py), or as its
floor where that is longer: where operations bound it. That is evidence, not proof: another reader might be faster. A
kernel that is faster than the plain read would show it, and `doubts` says where one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bench.reads import PlainReads
from bench.target_lines import FLOOR, PLAIN, Line, Value, line_of

if TYPE_CHECKING:
    from bench.targets import Layer, Times

NO_READS = "no plain read of so many bytes in these results"
_FASTER = 1.02
"""How many times as fast as a plain read a kernel is that casts doubt on it: both times have their noise."""
Rivals = Sequence[tuple["Layer", str, dict[str, Any]]]
"""(case, dtype, row of the fastest peer)"""


def line(target: str, dtype: str, kind: str, values: Sequence[Value], bound: float | None) -> Line:
    """The line of a bound: told. kind: PLAIN or FLOOR, in place of a backend."""
    return line_of(target, dtype, kind, values, ">=", bound, judged=False)


def least_us(reads: PlainReads, size: int, floor_us: float) -> float | None:
    """The least µs for so many bytes and that floor: a plain read's, or the floor where that is longer."""
    us = reads.us(size)
    return None if us is None else max(us, floor_us)


def of_floors(times: Times, reads: PlainReads, chosen: Iterable[Layer], dtypes: Sequence[str]) -> list[Value]:
    """Floor over time of a plain read of the same bytes, of each case; of several dtypes the most."""
    values = []
    for layer in chosen:
        shares: list[float] = []
        reason = NO_READS
        for dtype in dtypes:
            floor_us = times.floor_us(layer.name, dtype)
            if floor_us is None:
                reason = f"no floor in {dtype}, as nothing of it was measured"
            elif us := least_us(reads, layer.read_bytes[dtype], floor_us):
                shares.append(floor_us / us)
        values.append(Value(layer.name, max(shares)) if shares else Value(layer.name, None, reason))
    return values


def over_time(reads: PlainReads, layer: Layer, row: dict[str, Any]) -> Value:
    """Plain read (or the floor where that is longer) over the kernel's time."""
    us = least_us(reads, layer.read_bytes[row["dtype"]], row["floor_us"])
    return Value(layer.name, None, NO_READS) if us is None else Value(layer.name, us / row["kernel_us"])


def gain(reads: PlainReads, layer: Layer, dtypes: Iterable[str]) -> Value:
    """Plain read of the fp16 bytes over that of the bytes in these dtypes, the fewest."""
    two_bytes = reads.us(layer.read_bytes["fp16"])
    fewer = reads.us(min(layer.read_bytes[dtype] for dtype in dtypes))
    if two_bytes is None or fewer is None:
        return Value(layer.name, None, NO_READS)
    return Value(layer.name, two_bytes / fewer)


def of_peers(reads: PlainReads, rivals: Rivals, kind: str) -> list[Value]:
    """Fastest peer's time over a plain read of the same bytes (PLAIN), or over the floor (FLOOR)."""
    values = []
    for layer, dtype, peer in rivals:
        name, floor_us = f"{layer.name} {dtype} ({peer['contender']})", float(peer["floor_us"])
        us = floor_us if kind == FLOOR else least_us(reads, layer.read_bytes[dtype], floor_us)
        values.append(Value(name, None, NO_READS) if us is None else Value(name, peer["kernel_us"] / us))
    return values


def denied_mean(limits: dict[str, Line], bound: float) -> str:
    """Why no kernel could have this geometric mean, empty where one could. limits: lines of the bounds by kind."""
    for kind, told in ((FLOOR, "at the floor"), (PLAIN, "as fast as a plain read")):
        mean = limits[kind].mean
        if mean is not None and not limits[kind].reason and mean < bound:  # not of a part of the cases
            return f"denied: {told} it would be {mean:.3f}"
    return ""


def doubts(found: dict[str, Any], layers: Iterable[Layer]) -> list[str]:
    """Kernels that are faster than the plain read of their bytes, which is no bound then."""
    reads, read_bytes = PlainReads(found), {layer.name: layer.read_bytes for layer in layers}
    faster = []
    for row in found["rows"]:
        us = reads.us(read_bytes.get(row["case"], {}).get(row["dtype"], 0))
        if us is not None and row.get("kernel_us") and us > _FASTER * row["kernel_us"]:
            faster.append((row["kernel_us"] / us, row["id"]))
    if not faster:
        return []
    least, name = min(faster)
    return [
        f"doubtful bound: {len(faster)} kernel times are below that of a plain read of the same bytes, the farthest "
        f"at {least:.3f} of it ({name})"
    ]
