"""The column-major kernel as published in 2024: the share of its output that it writes, by counting and by running.

Its mapping has the two divisors exchanged (`shared.orders.published_2024`), so most programs land past the last tile
row and return at once. Counting needs no GPU; on one, the kernel runs into a NaN-filled output and what is no longer
NaN has been written.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from shared import models, orders, planning, routing
from shared.config import Config
from shared.problem import Problem

if TYPE_CHECKING:
    from bench.machine import Device

CONFIG = Config(block_m=16, block_n=32, block_k=64, num_warps=4, num_stages=4, swap_ab=False)
"""vLLM's default tile for small batches, which the article's kernel is derived from."""
TOKENS = (2, 8, 64, 512)
"""Batches of the article's example, from its first claim's on."""
ROUNDS = 20


def shape() -> tuple[int, int, int, int]:
    """(E, top_k, N, K): Mixtral-8x7B gate-up on two ranks, the article's example."""
    model = models.model("mixtral-8x7b")
    return model.experts, model.top_k, *model.shape("gate-up", tp=2)


def counted_coverage(tokens: int, *, seed: int = 0) -> dict[str, Any]:
    """{"tokens", "tile_rows", "coverage"}: share of the tiles in use that the published mapping visits."""
    experts, top_k, n, _ = shape()
    ids = routing.uniform(tokens, experts, top_k, seed=seed)
    tile_rows = planning.tile_rows_in_use(planning.expert_counts(ids, experts), CONFIG.block_m)
    coverage = orders.published_2024_coverage(tokens, top_k, experts, n, tile_rows, CONFIG.block_m, CONFIG.block_n)
    return {"tokens": tokens, "tile_rows": tile_rows, "coverage": coverage}


def measure(tokens: int, device: Device, *, seed: int = 0) -> dict[str, Any]:
    """The counts, and on this device: "written" share of y, "published_us" and "row_us" (the right row order)."""
    import torch

    from backends import registry
    from bench.measure import GpuTimer

    module = registry.load("torch-triton")
    experts, top_k, n, k = shape() if not device.interpret else (4, 2, 64, 64)
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": device.torch_device}
    x = torch.randn(tokens, k, **options).half()
    w = torch.empty(experts, n, k, dtype=torch.float16, device=device.torch_device)
    for expert in range(experts):
        w[expert] = torch.randn(n, k, **options) * k**-0.5
    ids = torch.from_numpy(routing.uniform(tokens, experts, top_k, seed=seed)).to(device.torch_device)
    problem = Problem.of("fp16", tokens=tokens, experts=experts, n=n, k=k, top_k=top_k)

    def run(order: str, fill: float | None = None) -> Any:
        return module.moe_gemm(
            x, w, ids, None, None,
            problem=problem, order=order, config=CONFIG, interpret=device.interpret, fill=fill,
        )  # fmt: skip

    def seconds(order: str) -> float:
        timer = GpuTimer(device.clock, device.synchronize, module.KERNEL_NAME)
        samples = []
        for _ in range(ROUNDS):
            device.flush()
            start = timer()
            run(order)
            samples.append(timer() - start)
        return statistics.median(samples)

    written = {order: 1 - float(run(order, math.nan).isnan().float().mean()) for order in ("published-2024", "row")}
    return {
        **counted_coverage(tokens, seed=seed),
        "written": written["published-2024"],
        "written_by_row": written["row"],
        "published_us": round(seconds("published-2024") * 1e6, 3),
        "row_us": round(seconds("row") * 1e6, 3),
    }
