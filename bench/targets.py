"""The speed targets, and which of them the committed results meet.

    python -m bench compare --set targets --results FILE     measures (minutes on one H200)
    python -m bench targets --from FILE                      judges; exit status 1 where a target is missed

A target holds for each backend by itself. What was not measured, failed or was wrong is a miss that says so. Floors are
those of the run that a time comes from. Megabytes are 10^6 bytes that had to be read in that dtype, decode is 64 tokens
and fewer. A backend's time is that of its fastest measured order, an FP8 time that of its faster FP8 mode.

Beside the targets stand bounds (bounds.py): what a kernel would reach that is as fast as a plain read of the same
bytes, measured in the same run (reads.py). A target above that is denied; it is missed all the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from backends.registry import BACKENDS
from bench import bounds, results
from bench.cases import TARGET_BF16_TOKENS, Case, cases
from bench.peers import PEERS
from bench.reads import PlainReads
from bench.target_lines import FLOOR, FLOOR_OVER_TIME, PLAIN, Line, Value, deny, line_of
from shared import planning, routing

FP8 = ("fp8-w8a16", "fp8-w8a8")
GROUPS: dict[str, tuple[str, ...]] = {"fp16": ("fp16",), "bf16": ("bf16",), "FP8": FP8}
DECODE_TOKENS = 64
LARGE = 200e6
SIZES = (
    ("decode, 200 MB and more", LARGE, math.inf, 0.95),
    ("decode, 50 to 200 MB", 50e6, LARGE, 0.90),
    ("decode, 15 to 50 MB", 15e6, 50e6, 0.80),
    ("decode, less than 15 MB", 0.0, 15e6, None),
)
"""(name, bytes to read from, up to, least floor / kernel time; None: no target, told all the same)."""
MANY_TOKENS = 0.85
FP8_GAIN = 1.9
PEER_WORST = 1 / 1.02
PEER_MEAN = 1.10
SPREAD = 1.05
GRAPH_US, EAGER_US = 4.0, 20.0
NAMED_PEERS = {
    "vLLM's fused MoE": "vllm",
    "triton_kernels' matmul": "triton-kernels",
    "torch._grouped_mm": "torch-grouped-mm",
    "jax.lax.ragged_dot": "jax-ragged-dot",
    "tokamax": "tokamax",
}
"""Peers that the comparison is not whole without, and what their contenders' names contain."""
PATTERN = "targets*.jsonl"
LAUNCH = ("launch.jsonl", "launch-cost.jsonl")
"""Names of the file of call costs; the first that is there is read."""
FOLDER = results.RESULTS / "h200"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A case of the targets set with what its routing says. read_bytes: by dtype."""

    case: Case
    read_bytes: dict[str, int]

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def decode(self) -> bool:
        return self.case.tokens <= DECODE_TOKENS

    def has(self, group: str) -> bool:
        """Whether the set measures this case in that dtype."""
        return group != "bf16" or self.case.tokens in TARGET_BF16_TOKENS


@functools.cache
def layers(seed: int = 0) -> tuple[Layer, ...]:
    """All cases that the targets are about."""
    found = []
    for case in cases("targets"):
        problems = {dtype: case.problem(dtype) for group in GROUPS.values() for dtype in group}
        one = problems["fp16"]
        ids = routing.make("uniform", one.tokens, one.experts, one.top_k, seed=seed)
        counts = planning.expert_counts(ids, one.experts).tolist()
        found.append(Layer(case, {dtype: problem.read_bytes(counts) for dtype, problem in problems.items()}))
    return tuple(found)


class Times:
    """The kernel times of a run, by case, dtype and contender, each in its fastest order."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._amiss: dict[tuple[str, str, str], str] = {}
        self._skipped: set[tuple[str, str, str]] = set()
        for row in found["rows"]:
            if row.get("scale_layout") == "block":
                continue
            key = (row["case"], row["dtype"], row["contender"])
            if failures := row.get("failures"):
                self._amiss[key] = f"{row['order']} order: {'; '.join(failures.values())}"
            if row.get("kernel_us"):
                best = self._rows.get(key)
                if best is None or row["kernel_us"] < best["kernel_us"]:
                    self._rows[key] = row
        for key in self._amiss:  # a time in one order does not hide a failure in another
            self._rows.pop(key, None)
        for name, reason in found["skipped"].items():
            if "/" not in name:  # the plain reads, or a batch of the published kernel
                continue
            *case, dtype, _, contender = name.split("/")
            self._amiss.setdefault(("/".join(case), dtype, contender), reason)
            self._skipped.add(("/".join(case), dtype, contender))
        self.peers = sorted({key[2] for key in (*self._rows, *self._amiss)} - set(BACKENDS))

    def row(self, case: str, dtypes: Iterable[str], contender: str) -> dict[str, Any] | None:
        """The fastest of this contender's rows in these dtypes."""
        found = [self._rows[case, dtype, contender] for dtype in dtypes if (case, dtype, contender) in self._rows]
        return min(found, key=lambda row: row["kernel_us"], default=None)

    def us(self, case: str, dtypes: Iterable[str], contender: str) -> float | None:
        row = self.row(case, dtypes, contender)
        return None if row is None else float(row["kernel_us"])

    def why_not(self, case: str, dtypes: Iterable[str], contender: str) -> str:
        """Why there is no time."""
        told = [self._amiss[case, dtype, contender] for dtype in dtypes if (case, dtype, contender) in self._amiss]
        return f"{contender}: {'; '.join(told) or 'not measured'}"

    def floor_us(self, case: str, dtype: str) -> float | None:
        """The case's floor; of several runs the longest. None where nothing of it was measured."""
        found = [float(row["floor_us"]) for key, row in self._rows.items() if key[:2] == (case, dtype)]
        return max(found, default=None)

    def best_peer(self, case: str, dtype: str) -> dict[str, Any] | None:
        """The fastest peer's row; with 2-byte weights of either kind, as they move the same bytes."""
        dtypes = (dtype,) if dtype in FP8 else ("fp16", "bf16")
        found = [row for peer in self.peers if (row := self.row(case, dtypes, peer)) is not None]
        return min(found, key=lambda row: row["kernel_us"], default=None)

    def best_backend(self, case: str, dtypes: Iterable[str]) -> dict[str, Any] | None:
        dtypes = tuple(dtypes)
        found = [row for backend in BACKENDS if (row := self.row(case, dtypes, backend)) is not None]
        return min(found, key=lambda row: row["kernel_us"], default=None)

    def measured(self, peer: str) -> bool:
        return any(key[2] == peer for key in self._rows)

    def refused_by_all(self, case: str, dtype: str) -> bool:
        """Whether each peer that has this dtype was tried with the case and refused it.

        A peer that has no time in the whole run is not there: that it refuses a case cannot be told.
        """
        rivals = [name for name, peer in PEERS.items() if dtype in peer.dtypes]
        return all((case, dtype, name) in self._skipped and self.measured(name) for name in rivals)

    def amiss(self, peer: str) -> str | None:
        return next((reason for key, reason in self._amiss.items() if key[2] == peer), None)


def share(row: dict[str, Any]) -> float:
    """Floor over kernel time."""
    return float(row["floor_us"]) / float(row["kernel_us"])


def load(paths: Sequence[Path]) -> dict[str, Any] | None:
    """The compact results of the files of one run, which may be in several parts (shards); None for no files.

    Raises UnusableFile for files that do not belong together (GPU, versions, settings, kernel sources), and for what is
    not about the targets: a rehearsal, warm L2, another routing.
    """
    parts = [(path, results.load(path)) for path in paths]
    for path, part in parts:
        for key, wanted in (("cache", "cold"), ("routing", "uniform")):
            if part["run"].get(key) != wanted:
                raise results.UnusableFile(
                    f"{path}: {key} is {part['run'].get(key)!r}; the targets are about {wanted!r}"
                )
        if part["run"].get("clock") == "rehearsal":
            raise results.UnusableFile(f"{path}: a rehearsal on the CPU; its times mean nothing")
    parts.sort(key=lambda part: part[1]["run"].get("date", ""))
    found: dict[str, Any] | None = None
    for path, part in parts:
        if found is None:
            found = part
        elif differing := results.differences(found["run"], part["run"], (*results.SETTINGS, "sources")):
            raise results.UnusableFile(
                f"{parts[0][0]} and {path} are not parts of one run, as they differ in {'; '.join(differing)}"
            )
        else:
            found = results.combined(found, part)
    return found


def committed(folder: Path = FOLDER) -> list[Path]:
    """The files that a GPU's folder holds about the targets."""
    return sorted(folder.glob(PATTERN))


def launch_file(folder: Path) -> Path | None:
    """What `launch` measured, in the folder of the results."""
    return next((folder / name for name in LAUNCH if (folder / name).exists()), None)


def launches(path: Path | None, found: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Call costs by backend, case and dtype, in the fields of `_cost`; none where there is no file.

    The last line of a cell counts. UnusableFile where the file is of another GPU than the kernel times.
    """
    if path is None:
        return []
    gpu = found["run"]["gpu"] if found else None
    lines = {}
    for line in results.json_lines(path, "backend"):
        if gpu and line.get("gpu") not in (None, gpu):
            raise results.UnusableFile(f"{path}: of {line['gpu']}; the kernel times are of {gpu}")
        lines[line["backend"], line.get("case"), line.get("dtype")] = _flat(line)
    return list(lines.values())


def _flat(line: dict[str, Any]) -> dict[str, Any]:
    """A line with its times as fields of their own, where it has them in "us": a layer is of a graph or jit."""
    us = line.get("us")
    if not isinstance(us, dict):
        return line
    layer = "graph_layer_us" if line["backend"].startswith("torch") else "jit_layer_us"
    names = {"kernel_us": "kernel", "eager_steady_us": "steady", layer: "layer"}
    names |= {"layer_kernel_us": "layer_kernel", "layer_overhead_us": "layer_overhead"}
    return line | {field: us.get(name) for field, name in names.items()}


def judge(found: dict[str, Any] | None, launched: Sequence[dict[str, Any]] = ()) -> list[Line]:
    """Every target, for every backend and dtype that it is about. found: None where nothing was measured."""
    times = Times(found or {"rows": [], "skipped": {}})
    reads = PlainReads(found)
    chosen = layers(found["run"].get("seed", 0) if found else 0)
    lines = []
    for name, least, most, bound in SIZES:
        for group, dtypes in GROUPS.items():

            def sized(
                layer: Layer, group: str = group, first: str = dtypes[0], least: float = least, most: float = most
            ) -> bool:
                return layer.decode and layer.has(group) and least <= layer.read_bytes[first] < most

            lines += _floor_lines(times, reads, [layer for layer in chosen if sized(layer)], name, group, bound)
    for group in GROUPS:
        many = [layer for layer in chosen if not layer.decode and layer.has(group)]
        lines += _floor_lines(times, reads, many, "128 to 512 tokens", group, MANY_TOKENS)
    large = [layer for layer in chosen if layer.decode and layer.read_bytes["fp16"] >= LARGE]
    gain = "fp16 time / FP8 time, decode, 200 MB and more"
    limits = [bounds.gain(reads, layer, FP8) for layer in large]
    for backend in BACKENDS:
        values = [_gain(times, layer.name, backend) for layer in large]
        # Not denied by the ratio of plain reads, which a slower fp16 kernel exceeds: that is told beside it.
        lines.append(line_of(gain, "FP8", backend, values, ">=", FP8_GAIN))
    lines.append(bounds.line(gain, "FP8", PLAIN, limits, FP8_GAIN))
    every_dtype = [dtype for group in GROUPS.values() for dtype in group]
    for dtype in every_dtype:
        lines += _peer_lines(times, reads, [layer for layer in chosen if layer.has(dtype)], dtype)
    lines.append(_peers_there(times))
    for dtype in every_dtype:
        values = [_spread(times, layer.name, dtype) for layer in chosen if layer.has(dtype)]
        lines.append(line_of("slowest backend / fastest", dtype, "all backends", values, "<=", SPREAD))
    return [*lines, *_call_lines(launched)]


def met(lines: Sequence[Line]) -> bool:
    return all(line.status != "missed" for line in lines)


def _floor_lines(
    times: Times, reads: PlainReads, chosen: Sequence[Layer], name: str, group: str, bound: float | None
) -> list[Line]:
    """Floor over kernel time, a line for each backend and one for a plain read; none where the set has no such case."""
    if not chosen:
        return []
    target = f"{FLOOR_OVER_TIME}, {name}"
    most = bounds.of_floors(times, reads, chosen, GROUPS[group])
    lines = []
    for backend in BACKENDS:
        values, beside = [], []
        for layer in chosen:
            row = times.row(layer.name, GROUPS[group], backend)
            if row is None:
                values.append(Value(layer.name, None, times.why_not(layer.name, GROUPS[group], backend)))
            else:
                values.append(Value(layer.name, share(row)))
                beside.append(bounds.over_time(reads, layer, row))
        read = bounds.line(target, group, backend, beside, None)
        line = line_of(target, group, backend, values, ">=", bound, judged=bound is not None)
        line = dataclasses.replace(line, read_worst=read.worst, read_mean=read.mean)
        if bound is not None:
            line = deny(line, values, most, bound, "a plain read of these bytes reaches {:.3f}")
        lines.append(line)
    return [*lines, bounds.line(target, group, PLAIN, most, bound)]


def _gain(times: Times, case: str, backend: str) -> Value:
    """fp16's time over that of the faster FP8 mode."""
    two_bytes, fp8 = times.us(case, ("fp16",), backend), times.us(case, FP8, backend)
    if two_bytes is None or fp8 is None:
        return Value(case, None, times.why_not(case, ("fp16",) if two_bytes is None else FP8, backend))
    return Value(case, two_bytes / fp8)


def _peer_lines(times: Times, reads: PlainReads, chosen: Sequence[Layer], dtype: str) -> list[Line]:
    """Fastest peer's time over each backend's, worst case and geometric mean. An FP8 mode has peers of that mode.

    Cases that every peer was tried with and refuses are left out: there is nobody to compare with.
    """
    alone = [layer for layer in chosen if times.refused_by_all(layer.name, dtype)]
    left_out = f"{len(alone)} more cases, such as {alone[0].name}, are refused by every peer" if alone else ""
    chosen = [layer for layer in chosen if layer not in alone]
    rivals = [(layer, dtype, peer) for layer in chosen if (peer := times.best_peer(layer.name, dtype)) is not None]
    there = {layer.name for layer, _, _ in rivals}
    without = [Value(one.name, None, f"no peer's time in {dtype}") for one in chosen if one.name not in there]
    limits = {
        kind: _worst_and_mean(bounds.of_peers(reads, rivals, kind) + without, dtype, kind, left_out)
        for kind in (PLAIN, FLOOR)
    }
    denied = bounds.denied_mean({kind: mean for kind, (_, mean) in limits.items()}, PEER_MEAN)
    lines = []
    for backend in BACKENDS:
        values = list(without)
        for layer, _, peer in rivals:
            ours = times.us(layer.name, (dtype,), backend)
            name = f"{layer.name} {dtype} ({peer['contender']})"
            if ours is None:
                values.append(Value(name, None, times.why_not(layer.name, (dtype,), backend)))
            else:
                values.append(Value(name, peer["kernel_us"] / ours))
        worst, mean = _worst_and_mean(values, dtype, backend, left_out)
        lines += [worst, dataclasses.replace(mean, denied=denied if mean.status == "missed" else "")]
    return [*lines, *limits[PLAIN], *limits[FLOOR]]


def _worst_and_mean(values: Sequence[Value], dtype: str, backend: str, left_out: str) -> tuple[Line, Line]:
    """The two lines about peers of a backend or, told, of a bound."""
    worst = line_of("best peer's time / time, each case", dtype, backend, values, ">=", PEER_WORST)
    worst = dataclasses.replace(worst, left_out=left_out)
    passes = worst.mean is not None and not worst.reason and worst.mean >= PEER_MEAN
    mean = dataclasses.replace(
        worst, target="best peer's time / time, geometric mean", needed=f">= {PEER_MEAN:.3g}",
        met=sum(value.value is not None and value.value >= PEER_MEAN for value in values),
        status="met" if passes else "missed",
    )  # fmt: skip
    if worst.is_bound:
        return dataclasses.replace(worst, status="told"), dataclasses.replace(mean, status="told")
    return worst, mean


def _peers_there(times: Times) -> Line:
    """Whether each peer that the comparison names was measured at all."""
    there, reasons = 0, []
    for name, part in NAMED_PEERS.items():
        known = [peer for peer in times.peers if part in peer.replace("_", "-")]
        if any(times.measured(peer) for peer in known):
            there += 1
        else:
            why = next((reason for peer in known if (reason := times.amiss(peer))), "no rows")
            reasons.append(f"{name} ({why})")
    status: Literal["met", "missed"] = "missed" if reasons else "met"
    reason = f"not measured: {'; '.join(reasons)}" if reasons else ""
    needed = f"rows of all {len(NAMED_PEERS)}"
    return Line("peers that were measured", "", "", needed, None, None, None, there, len(NAMED_PEERS), status, reason)


def _spread(times: Times, case: str, dtype: str) -> Value:
    """Slowest backend over fastest, named."""
    us = {backend: times.us(case, (dtype,), backend) for backend in BACKENDS}
    lacking = [backend for backend, value in us.items() if value is None]
    known = {backend: value for backend, value in us.items() if value is not None}
    if lacking:
        return Value(case, None, times.why_not(case, (dtype,), lacking[0]))
    slowest = max(known, key=known.__getitem__)
    return Value(f"{case} ({slowest})", known[slowest] / min(known.values()))


def _call_lines(launched: Sequence[dict[str, Any]]) -> list[Line]:
    """Call time less kernel time: a CUDA graph and torch eager for torch's backends, inside jax.jit for JAX's."""
    lines = []
    for backend in BACKENDS:
        rows = [row for row in launched if row["backend"] == backend]
        targets: tuple[tuple[str, str, float | None], ...] = (("inside jax.jit", "jit_layer_us", None),)
        if backend.startswith("torch"):
            targets = (("CUDA graph", "graph_layer_us", GRAPH_US), ("torch eager", "eager_steady_us", EAGER_US))
        for name, field, bound in targets:
            values = [_cost(row, field) for row in rows]
            line = line_of(
                f"call - kernel, {name}", "", backend, values, "<=", bound,
                mean=lambda us: sorted(us)[len(us) // 2], unit=" µs",
            )  # fmt: skip
            if bound is None:
                line = dataclasses.replace(line, needed="to be told")
            if not rows:
                line = dataclasses.replace(line, reason=f"not measured: no {LAUNCH[0]}, or nothing of it there")
            lines.append(line)
    return lines


def _cost(row: dict[str, Any], field: str) -> Value:
    """µs of a call that its kernel does not take. Of a layer of a step as `launch` has it, round by round; else by the
    kernel's time in that layer where there is one, else its own."""
    name = " ".join(str(row[key]) for key in ("case", "dtype") if row.get(key))
    kernel = "kernel_us" if field == "eager_steady_us" or row.get("layer_kernel_us") is None else "layer_kernel_us"
    for needed in (field, kernel):
        if not isinstance(row.get(needed), (int, float)):
            return Value(name, None, str(row.get("failed") or f"{needed} is {row.get(needed)}"))
    if field != "eager_steady_us" and row.get("layer_overhead_us") is not None:
        return Value(name, row["layer_overhead_us"])
    return Value(name, row[field] - row[kernel])


def doubts(found: dict[str, Any] | None) -> list[str]:
    """What made times doubtful, and how many; and kernels that are faster than a bound."""
    if found is None:
        return []
    counts = Counter(notice for row in found["rows"] for notice in row.get("notices", ()))
    told = [
        f"{count} time{'s are' if count > 1 else ' is'} doubtful: {notice}" for notice, count in counts.most_common()
    ]
    return told + bounds.doubts(found, layers(found["run"].get("seed", 0)))


def told(lines: Sequence[Line]) -> str:
    """How many lines are missed, and how many of those no kernel could meet."""
    judged = [line for line in lines if line.status != "told"]
    missed = [line for line in judged if line.status == "missed"]
    if not missed:
        return f"all {len(judged)} met"
    denied = sum(bool(line.denied) for line in missed)
    return f"{len(missed)} of {len(judged)} missed" + (f", {denied} of them denied by a bound" if denied else "")
