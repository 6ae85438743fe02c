"""What is run under a sanitizer: backend x shape x dtype x order, small, each with its data and reference.

Every variant runs under memcheck. The other tools, which are slower and look for what hardly depends on the
combination, take a subset: every dtype in two shapes and two orders, every shape and way of split-K in two dtypes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from bench import selection
from shared import config as configs
from shared import fp8, reference
from shared.config import Config
from shared.orders import ORDERS
from shared.problem import Problem, ScaleLayout

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
DTYPES: tuple[tuple[str, ScaleLayout], ...] = (
    ("fp16", "channel"), ("bf16", "channel"), ("fp8-w8a16", "channel"), ("fp8-w8a16", "block"),
    ("fp8-w8a8", "channel"), ("fp8-w8a8", "block"),
)  # fmt: skip
CONFIG = Config(block_m=16, block_n=64, block_k=64, num_stages=3, group_m=2)
TALL = Config(block_m=48, block_n=128, block_k=64, num_warps=8, num_stages=3, group_m=2)
"""In Triton two blocks of rows; in pallas-mosaic two warp-groups that multiply, a tile that is stored in chunks."""
TURNS = TALL.replace(ping_pong=True)
"""Of pallas-mosaic: two warp-groups that take tiles in turn."""
CLUSTERS = CONFIG.replace(split_k=2)
"""Of pallas-mosaic: tiles whose parts of K a thread block cluster adds up."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One kind of problem. ids: topk_ids (T, top_k) as nested tuples."""

    reason: str
    ids: tuple[tuple[int, ...], ...]
    experts: int
    n: int
    k: int


_FEW = ((0, 3), (3, 1), (3, 0), (0, 1))
"""Expert 2 has no token."""
_MANY = (*[(1, 1)] * 17, *[(0, 3)] * 3, (-1, 3), (-1, -1))
"""34 slots of expert 1: three tile rows, so that orders differ; expert 2 has none; three slots of other ranks."""
SHAPES = {
    "ragged": Shape("N and K leave part of a tile; rows are whole 32-byte units: TMA reads them", _FEW, 4, 200, 288),
    "unaligned": Shape("N and K odd: no row starts at a multiple of anything", _FEW, 4, 65, 33),
    "empty": Shape("an expert without tokens, -1 slots, one expert with three tile rows", _MANY, 4, 128, 128),
    "tall": Shape("34 slots of one expert in a tile of 48 rows", _MANY, 4, 200, 288),
    "turns": Shape("the same, more tiles than an H200 has SMs: thread blocks take several", _MANY, 4, 6400, 288),
    "gathers": Shape("the same, rows of x gathered as if L2 kept no sorted copy of them", _MANY, 4, 6400, 288),
    "clusters": Shape("the same, K split in two, which thread block clusters add up", _MANY, 4, 6400, 288),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One launch to be watched. reduction: None without split-K."""

    backend: str
    shape: str
    dtype: str
    scale_layout: ScaleLayout
    order: str
    reduction: str | None = None

    @property
    def id(self) -> str:
        """Such as torch-triton/ragged/fp8-w8a8.block/column, or torch-triton/split-k-two-pass/fp16/row."""
        shape = self.shape if self.reduction is None else f"split-k-{self.reduction}"
        return "/".join((self.backend, shape, dtype_name(self.dtype, self.scale_layout), self.order))

    @property
    def problem(self) -> Problem:
        shape = SHAPES[self.shape]
        return Problem.of(
            self.dtype,
            scale_layout=self.scale_layout,
            tokens=len(shape.ids),
            top_k=len(shape.ids[0]),
            experts=shape.experts,
            n=shape.n,
            k=shape.k,
            routing_weight=True,
        )

    @property
    def config(self) -> Config:
        if self.reduction is None:
            return {"tall": TALL, "turns": TURNS, "clusters": CLUSTERS}.get(self.shape, CONFIG)
        split: dict[str, Any] = {"split_k": 3, "reduction": self.reduction}
        return CONFIG.replace(**split)

    def to_json(self, tool: str) -> dict[str, Any]:
        """What a child needs. Output is filled with NaN first, so that an unwritten element shows; not for initcheck,
        which would take it for written.

        initcheck does not see what TMA writes (the control in `run` shows it), and would report every read of what
        pallas-mosaic stored: there, zeros are written first. Inputs and what lies in between are watched all the same.
        """
        fill: float | None = float("nan")
        if tool == "initcheck":
            fill = 0.0 if self.backend == "pallas-mosaic" else None
        return {
            "backend": self.backend,
            "order": self.order,
            "problem": dataclasses.asdict(self.problem),
            "config": dataclasses.asdict(self.config),
            "ids": SHAPES[self.shape].ids,
            "fill": fill,
            "gathers": self.shape == "gathers",
        }


def dtype_name(dtype: str, layout: str) -> str:
    return f"{dtype}.block" if layout == "block" else dtype


def reductions() -> tuple[str, ...]:
    """The ways of split-K that Config knows; none before it has any."""
    return tuple(getattr(configs, "REDUCTIONS", ()))


def variants(backend: str) -> list[Variant]:
    """Every order x dtype x shape; split-K in each way x dtype, orders in turn."""
    plain = [
        Variant(backend, shape, dtype, layout, order)
        for shape, (dtype, layout), order in itertools.product(SHAPES, DTYPES, ORDERS)
        if _concerns(backend, shape, order)
    ]
    split = [
        Variant(backend, "ragged", dtype, layout, ORDERS[(i + j) % len(ORDERS)], reduction)
        for i, reduction in enumerate(reductions())
        for j, (dtype, layout) in enumerate(DTYPES)
    ]
    return plain + split


def _concerns(backend: str, shape: str, order: str) -> bool:
    """Tall tiles are another kernel in each backend, whatever the order: two orders of them, and of what pallas-mosaic
    alone has."""
    if shape not in ("tall", "turns", "gathers", "clusters"):
        return True
    return order in ("row", "popular") and (shape == "tall" or backend == "pallas-mosaic")


def covering(backend: str) -> list[Variant]:
    """The subset that the slower tools take."""
    everything = variants(backend)
    kinds = list(dict.fromkeys((v.shape, v.reduction) for v in everything))
    found = []
    for i, (dtype, layout) in enumerate(DTYPES):
        for turn in range(2):
            kind = kinds[(i + turn * (len(kinds) // 2)) % len(kinds)]
            mine = [v for v in everything if (v.dtype, v.scale_layout) == (dtype, layout)]
            mine = [v for v in mine if (v.shape, v.reduction) == kind]
            found.append(mine[(i + turn) % len(mine)])
    return found


def selected(
    tools: Iterable[str], backends: Sequence[str], keyword: str, *, full: bool = False
) -> dict[str, list[Variant]]:
    """{tool: what it runs}. Raises ArgumentError where -k, over "tool/id", selects nothing for any of them."""
    every = [
        (tool, v)
        for tool in dict.fromkeys(tools)
        for backend in backends
        for v in (variants if full or tool == "memcheck" else covering)(backend)
    ]
    found: dict[str, list[Variant]] = {tool: [] for tool, _ in every}
    for tool, v in selection.select(every, keyword, lambda one: f"{one[0]}/{one[1].id}"):
        found[tool].append(v)
    return found


@functools.lru_cache(maxsize=4)
def _data(problem: Problem, ids: bytes) -> tuple[tuple[np.ndarray | None, ...], np.ndarray]:
    topk_ids = np.frombuffer(ids, np.int32).reshape(problem.tokens, problem.top_k).copy()
    rng = np.random.default_rng(zlib.crc32(repr(problem).encode()))
    x = rng.standard_normal((problem.tokens, problem.k), np.float32)
    w = rng.standard_normal((problem.experts, problem.n, problem.k), np.float32)
    activation = _float_dtype(problem.activation)
    x, w_scale = x.astype(activation), None
    if problem.is_fp8:
        w, w_scale = (fp8.quantise_channel if problem.scale_layout == "channel" else fp8.quantise_block)(w)
    else:
        w = w.astype(activation)
    weight = rng.uniform(0.1, 2, topk_ids.shape).astype(np.float32)
    y = reference.moe_gemm_reference(x, w, topk_ids, problem=problem, w_scale=w_scale, topk_weight=weight)
    return (x, w, topk_ids, w_scale, weight), y


def data_of(problem: Problem, ids: np.ndarray) -> tuple[tuple[np.ndarray | None, ...], np.ndarray]:
    """(x, w, topk_ids, w_scale, topk_weight) as NumPy arrays, seeded by the problem, and the float64 reference.

    Host arrays: copying them to the GPU is a write that initcheck sees, whatever kernels it watches.
    """
    return _data(problem, ids.tobytes())


def _float_dtype(name: str) -> np.dtype:

    return np.dtype(np.float16 if name == "float16" else getattr(ml_dtypes, name))
