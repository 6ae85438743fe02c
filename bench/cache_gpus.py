"""What the cache model says of other GPUs, and of 4-bit weights: bench/results/cache-model-gpus.json. Predictions only.

The question: does a larger L2 leave anything of what column order gains over row order?
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from bench import cache_fit, results
from bench.predict import CONVERTED
from shared import cache_model, routing
from shared.cache_launch import FP4, Chip, Launch
from shared.config import Config
from shared.gpus import gpu, gpus
from shared.models import model
from shared.problem import ceil_div

OTHER_GPUS = results.RESULTS / "cache-model-gpus.json"
MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b")
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
WEIGHTS = ("FP16", "FP8", "FP4")
TILES = ("small", "sensible")
SMALL_TILE = Config(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=4)


def sensible_tile(tokens: int, experts: int, top_k: int) -> Config:
    """block_m: the power of two that holds an active expert's average slots, 16 to 128."""
    slots = tokens * top_k
    average = ceil_div(slots, min(experts, slots))
    block_m = min(128, max(16, 1 << (average - 1).bit_length()))
    return Config(
        block_m=block_m,
        block_n=128,
        block_k=128 if block_m <= 32 else 64,
        num_warps=8 if block_m == 128 else 4,
        num_stages=4 if block_m < 128 else 3,
    )


def dtype_of(weights: str, key: str) -> str:
    """FP8 weights meet FP8 activations where the GPU has a unit for them."""
    return {"FP16": "fp16", "FP4": FP4}.get(weights) or ("fp8-w8a8" if gpu(key).fp8_flops else "fp8-w8a16")


def other_gpus(say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Bytes and times of row and column order for every GPU, weight width, model, batch and both tiles; gate-up."""
    asked = list(itertools.product(gpus(), WEIGHTS, MODELS, TOKENS, TILES))
    rows: list[dict[str, Any]] = []
    with cache_fit.processes() as pool:
        for row in pool.map(predicted_row, *zip(*asked, strict=True), chunksize=4):
            rows.append(row)
            if len(rows) % 50 == 0:
                say(f"{len(rows)} of {len(asked)}")
    return {"parameters": dataclasses.asdict(cache_model.fitted()), "gemm": "gate-up", "rows": rows}


def predicted_row(key: str, weights: str, name: str, tokens: int, tile: str) -> dict[str, Any]:
    """One row of `other_gpus`: bytes over needed bytes and µs of row and column order."""
    layer = model(name)
    n, k = layer.shape("gate-up")
    config = SMALL_TILE if tile == "small" else sensible_tile(tokens, layer.experts, layer.top_k)
    dtype = dtype_of(weights, key)
    config = config.replace(swap_ab=dtype not in CONVERTED)
    ids = routing.uniform(tokens, layer.experts, layer.top_k, seed=0)
    row: dict[str, Any] = {"gpu": key, "weights": weights, "dtype": dtype, "model": name, "tokens": tokens}
    row |= {"tile": tile, "config": str(config)}
    for order in ("row", "column"):
        launch = Launch(
            n=n, k=k, experts=layer.experts, topk_ids=ids, dtype=dtype, order=order, config=config
        )  # fmt: skip
        found = cache_model.predict(launch, Chip.of(gpu(key), dtype))
        row[order] = round(found.times_needed, 4)
        row[f"{order}_us"] = round(found.time_us, 2)
    return row
