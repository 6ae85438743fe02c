"""Do hot experts stay in L2 from one decode step to the next, and does walking them first or last help that?

A sequence of steps over one layer, routed by the same skewed popularity, without a flush in between. Before each step
so many bytes of other layers' weights are read, as a model does: none, as if the layer were alone, or more. Orders see
the same steps; `popular` walks experts by their slots in the earlier steps, hottest first, `coldest` the reverse, so
that the hottest experts are the last that L2 has seen.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench import pairs, results
from bench.cases import Case, Row
from shared import planning, routing
from shared.models import model

STEPS = 24
REPEATS = 3
BETWEEN = (0, 64 << 20, 512 << 20)
"""Bytes of other weights read between two steps."""
ORDERS = ("row", "column", "popular", "coldest")
_CASES = (
    ("qwen3-30b-a3b", "fp8-w8a8", (1, 8, 64)),
    ("olmoe-1b-7b", "fp8-w8a8", (1, 8, 64)),
    ("mixtral-8x7b", "fp8-w8a8", (8,)),
    ("qwen3-30b-a3b", "fp16", (8,)),
)
EXPONENTS = (1.2, 2.0)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Steps of one layer. exponent: of the Zipf law that experts are drawn by, the same experts hot in every step."""

    case: Case
    dtype: str
    exponent: float

    @property
    def id(self) -> str:
        return f"{self.case.name}/{self.dtype}/zipf-{self.exponent}"


def sequences() -> Iterator[Sequence]:
    for name, dtype, batches in _CASES:
        for tokens in batches:
            for exponent in EXPONENTS:
                yield Sequence(Case(model(name), "gate-up", tokens), dtype, exponent)


def run(out: Path, device: Any, *, say: Callable[[str], None]) -> None:
    """Measure the sequences that `out` lacks, one JSON line each."""
    from bench import data as bench_data
    from bench.machine import versions

    results.end_at_a_line(out)
    known = {row["id"] for row in read(out)} if out.exists() else set()
    cache: tuple[object, Any] | None = None
    for sequence in sequences():
        if sequence.id in known:
            continue
        layer = (sequence.case.model, sequence.dtype)
        if cache is None or cache[0] != layer:
            cache = None
            cache = (layer, bench_data.build(sequence.case, sequence.dtype, "channel", device=device.torch_device))
        data = bench_data.rebatch(cache[1], sequence.case, route=f"zipf-{sequence.exponent}")
        found = measure(sequence, data, device)
        found |= {"gpu": device.gpu, "versions": versions(), "date": time.strftime("%Y-%m-%d")}
        results.append(out, found)
        say(f"{sequence.id}: " + ", ".join(f"{b >> 20} MiB between: {_told(found, b)}" for b in BETWEEN))


def measure(sequence: Sequence, data: Any, device: Any) -> dict[str, Any]:
    """{"us": {bytes between: {order: [mean µs of each step over the repeats]}}, facts}."""
    import torch

    import backends
    from bench.cold import FLUSH_PER_PROGRAM, read
    from bench.contenders import prepare
    from bench.measure import GpuTimer, check, records_of

    problem = data.problem
    tokens = sequence.case.tokens
    drawn = routing.zipf(tokens * STEPS, problem.experts, problem.top_k, exponent=sequence.exponent, seed=1)
    steps = [
        torch.from_numpy(drawn[i * tokens : (i + 1) * tokens].copy()).to(device.torch_device) for i in range(STEPS)
    ]
    counts = [planning.expert_counts(step.cpu().numpy(), problem.experts) for step in steps]
    earlier = [np.sum(counts[:i], axis=0) if i else np.zeros(problem.experts) for i in range(STEPS)]
    heat = {
        sign: [torch.from_numpy((sign * past).astype(np.int32)).to(device.torch_device) for past in earlier]
        for sign in (1, -1)
    }
    config = backends.config_for(problem, backend="torch-triton", gpu="NVIDIA H200")
    other = torch.randint(-100, 100, (max(max(BETWEEN), 4) // 4,), dtype=torch.int32, device=device.torch_device)
    sums = torch.empty(-(-other.numel() // FLUSH_PER_PROGRAM), dtype=torch.int32, device=device.torch_device)

    def call(order: str, i: int) -> Any:
        popularity = {"popular": heat[1][i], "coldest": heat[-1][i]}.get(order)
        return backends.moe_gemm(
            data.x, data.w, steps[i], w_scale=data.w_scale, mode=sequence.dtype, config=config,
            order="popular" if popularity is not None else order, popularity=popularity,
        )  # fmt: skip

    contender = prepare(Row(sequence.case, sequence.dtype, "popular", "torch-triton"), data, device, config=config)
    check(contender, data, device, contender.eager)
    records = records_of(contender, device, contender.eager)
    for order in ORDERS:
        call(order, 0)  # compiles
    found: dict[str, Any] = {}
    for between in BETWEEN:
        times = {order: np.zeros((REPEATS, STEPS)) for order in ORDERS}
        for repeat in range(REPEATS):
            for order in np.random.default_rng(repeat).permutation(ORDERS):
                device.flush()
                for i in range(STEPS):
                    if between:
                        read(other[: between // 4], sums, FLUSH_PER_PROGRAM, 4096)

                    def again(order: str = order, i: int = i) -> Any:
                        return call(order, i)

                    timer = GpuTimer(device.clock, device.synchronize, contender.kernel_name, records, again)
                    start = timer()
                    call(order, i)
                    times[order][repeat, i] = timer() - start
        found[str(between)] = {order: np.round(times[order].mean(axis=0) * 1e6, 3).tolist() for order in ORDERS}
    active = [int((count > 0).sum()) for count in counts]
    again_active = [
        float(np.mean((counts[i - 1] > 0)[counts[i] > 0])) for i in range(1, STEPS)
    ]  # share of a step's experts that the step before had too
    return {
        "id": sequence.id,
        "case": sequence.case.name,
        "dtype": sequence.dtype,
        "exponent": sequence.exponent,
        "config": dataclasses.asdict(config),
        "layer_bytes": problem.experts * problem.n * problem.k * problem.w_itemsize,
        "step_bytes": round(float(np.mean(active)) * problem.n * problem.k * problem.w_itemsize),
        "repeated_experts": round(float(np.mean(again_active)), 3),
        "us": found,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The sequences of a journal."""
    return results.by_id(path)


def compare(row: dict[str, Any], between: int, better: str, worse: str) -> pairs.Comparison:
    """`worse` over `better`, step by step; the first step, which finds nothing, is left out."""
    times = row["us"][str(between)]
    return pairs.judge(np.array(times[better][1:]), np.array(times[worse][1:]))


def _told(row: dict[str, Any], between: int) -> str:
    best = {order: float(np.mean(row["us"][str(between)][order][1:])) for order in ORDERS}
    return " ".join(f"{order} {us:.1f}" for order, us in best.items())
