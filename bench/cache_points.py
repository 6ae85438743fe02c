"""The launches that the cache model is held against: what counters are read for, and which of them fit its parameters.

They span dtypes, tile shapes, orders, even and skewed routing, experts far above and far below the size of L2. Whole
groups are kept for judging, so that the model is judged on shapes that it has not seen.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from backends.triton_launch import PUBLISHED
from bench.points import Point
from bench.published import CONFIG, TOKENS
from shared.config import Config
from shared.orders import GRID_ORDERS


@dataclasses.dataclass(frozen=True)
class Group:
    """Points of one theme. fits: whether the model's parameters are fitted on them."""

    name: str
    fits: bool
    points: tuple[Point, ...]


def tile(dtype: str, block_m: int, block_n: int = 128) -> Config:
    """A tile as it would be used: one or two blocks on an SM, K steps of 128 bytes (256 for small FP8 tiles)."""
    small = block_m <= 32
    block_k = {"fp16": 128 if small else 64, "fp8-w8a16": 128, "fp8-w8a8": 256 if small else 128}[dtype]
    swap_ab = dtype != "fp8-w8a16"
    num_warps = 8 if block_m * block_n > 128 * 128 else 4
    num_stages = 4 if block_m * block_n < 128 * 128 else 3
    return Config(
        block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages, swap_ab=swap_ab
    )


def _points(
    model: str,
    tokens: tuple[int, ...],
    tiles: tuple[tuple[int, int], ...],
    *,
    dtypes: tuple[str, ...] = ("fp16",),
    orders: tuple[str, ...] = ("row", "column"),
    routings: tuple[str, ...] = ("uniform",),
    gemm: str = "gate-up",
    tp: int | None = None,
    backend: str = "torch-triton",
) -> Iterator[Point]:
    # Data is made anew for each (dtype, tokens, routing): those are the outer loops.
    for dtype, batch, routing, shape, order in itertools.product(dtypes, tokens, routings, tiles, orders):
        yield Point(
            model=model, gemm=gemm, tp=tp, tokens=batch, dtype=dtype, routing=routing, backend=backend, order=order,
            config=tile(dtype, *shape),
        )  # fmt: skip


def article_points() -> list[Point]:
    """The article's example at its kernel's tile: the published mapping, and both right orders."""
    return [
        Point(model="mixtral-8x7b", tokens=tokens, order=order, config=CONFIG)
        for tokens in TOKENS
        for order in ("row", "column", PUBLISHED)
    ]


def other_points() -> list[Point]:
    """Every backend once, and pallas-mosaic where its orders differ most: it reads rows of x gathered beforehand."""
    decode = Config(block_m=16, block_n=128, block_k=128, num_stages=4)
    found = [
        Point(model="qwen3-30b-a3b", tokens=64, backend=backend, order=order, config=decode)
        for backend in ("torch-triton", "jax-triton", "pallas-triton", "pallas-mosaic")
        for order in ("row", "column")
    ]
    for model, dtype, config in (
        ("qwen3-30b-a3b", "fp16", Config(block_m=64, block_n=128, block_k=64, num_stages=4)),
        ("mixtral-8x7b", "fp8-w8a8", Config(block_m=64, block_n=128, block_k=128, num_stages=8)),
    ):
        found += [
            Point(model=model, tokens=512, dtype=dtype, backend="pallas-mosaic", order=order, config=config)
            for order in GRID_ORDERS
        ]
    return found


def groups() -> list[Group]:
    """Every group, in the order in which counters are read."""
    fp8 = ("fp8-w8a8",)
    w8a16 = ("fp8-w8a16",)
    both = ("fp16", "fp8-w8a8")
    return [
        Group("mixtral fp16, small tiles", True, tuple(_points("mixtral-8x7b", (2, 64, 128, 512), ((16, 128),)))),
        Group(
            "mixtral fp16, larger tiles",
            False,
            tuple(_points("mixtral-8x7b", (128, 512), ((64, 128), (128, 256)), orders=GRID_ORDERS)),
        ),
        Group(
            "mixtral w8a8",
            True,
            tuple(_points("mixtral-8x7b", (128, 512), ((16, 128), (64, 128)), dtypes=fp8, orders=GRID_ORDERS)),
        ),
        Group("mixtral w8a16", False, tuple(_points("mixtral-8x7b", (128, 512), ((16, 128),), dtypes=("fp8-w8a16",)))),
        Group(
            "mixtral TP4 fp16 (N = 7168)",
            True,
            tuple(_points("mixtral-8x7b", (128, 512), ((16, 128), (64, 128)), tp=4)),
        ),
        Group(
            "mixtral TP4 w8a8 (N = 7168)", False, tuple(_points("mixtral-8x7b", (512,), ((16, 128),), dtypes=fp8, tp=4))
        ),
        Group(
            "mixtral down",
            True,
            tuple(_points("mixtral-8x7b", (128, 512), ((16, 128), (64, 128)), dtypes=both, gemm="down")),
        ),
        Group(
            "mixtral down, wide tiles",
            False,
            tuple(_points("mixtral-8x7b", (512,), ((64, 256), (32, 64)), dtypes=both, gemm="down", orders=GRID_ORDERS)),
        ),
        Group(
            "mixtral skewed",
            False,
            tuple(
                _points(
                    "mixtral-8x7b", (512,), ((16, 128), (64, 128)), dtypes=both, routings=("zipf-1.2", "one-expert")
                )
            ),
        ),
        Group("qwen3", True, tuple(_points("qwen3-30b-a3b", (512, 2048), ((16, 128), (64, 128)), dtypes=both))),
        Group(
            "qwen3 skewed",
            False,
            tuple(_points("qwen3-30b-a3b", (512, 2048), ((16, 128),), dtypes=both, routings=("zipf-1.2",))),
        ),
        Group("deepseek", False, tuple(_points("deepseek-v3", (128, 1024), ((16, 128),), dtypes=both))),
        Group("gpt-oss", False, tuple(_points("gpt-oss-120b", (512,), ((16, 128), (64, 128))))),
        Group("olmoe", False, tuple(_points("olmoe-1b-7b", (512,), ((16, 128),), dtypes=both))),
        Group("mixtral-8x22b", False, tuple(_points("mixtral-8x22b", (256,), ((16, 128), (64, 128)), dtypes=fp8))),
        # Weights that are widened, and one stream of weights for many tile rows.
        Group(
            "mixtral w8a16, other batches",
            True,
            tuple(_points("mixtral-8x7b", (64, 256, 1024), ((16, 128), (64, 128)), dtypes=w8a16)),
        ),
        Group("qwen3 w8a16", True, tuple(_points("qwen3-30b-a3b", (512, 2048), ((16, 128), (64, 128)), dtypes=w8a16))),
        Group(
            "mixtral TP4 w8a8, other batches",
            True,
            tuple(_points("mixtral-8x7b", (256, 1024), ((16, 128), (64, 128)), dtypes=fp8, tp=4)),
        ),
        Group(
            "mixtral skewed, other batches",
            True,
            tuple(
                _points(
                    "mixtral-8x7b",
                    (256,),
                    ((16, 128), (64, 128)),
                    dtypes=("fp16", "fp8-w8a8"),
                    routings=("zipf-2.0", "one-expert"),
                )
            ),
        ),
        Group(
            "mixtral TP4 w8a8, larger tiles",
            False,
            tuple(_points("mixtral-8x7b", (128, 512), ((32, 128), (64, 128)), dtypes=fp8, tp=4)),
        ),
        Group(
            "mixtral w8a16, larger tiles",
            False,
            tuple(_points("mixtral-8x7b", (512,), ((32, 128), (64, 128)), dtypes=w8a16, orders=GRID_ORDERS)),
        ),
        Group(
            "mixtral down w8a16",
            False,
            tuple(_points("mixtral-8x7b", (512,), ((16, 128), (64, 128)), dtypes=w8a16, gemm="down")),
        ),
        Group(
            "mixtral one expert",
            False,
            tuple(
                _points(
                    "mixtral-8x7b",
                    (128,),
                    ((16, 128), (64, 128)),
                    dtypes=("fp16", "fp8-w8a8", "fp8-w8a16"),
                    routings=("one-expert",),
                )
            ),
        ),
        Group(
            "deepseek down",
            False,
            tuple(_points("deepseek-v3", (1024,), ((16, 128),), dtypes=("fp16", "fp8-w8a8"), gemm="down")),
        ),
    ]
