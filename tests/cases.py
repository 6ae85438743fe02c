"""The correctness suite's cases by name: small problems, each with the reason why it is there.

A case is a shape, a routing and a config; a variant is a dtype with its scale layout. `build` draws the data of one
case in one variant, as NumPy arrays, from a seed that the names give.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable

import ml_dtypes
import numpy as np

from shared import fp8, routing
from shared.config import Config
from shared.problem import Problem
from shared.reference import moe_gemm_reference

SMALL = Config(block_m=16, block_n=64, block_k=32, num_stages=2, group_m=2)
"""The smallest tile that every backend takes, so that small problems have several tiles and K steps."""

VARIANTS: dict[str, tuple[str, str | None]] = {
    "fp16": ("fp16", None),
    "bf16": ("bf16", None),
    "fp8-w8a16-channel": ("fp8-w8a16", "channel"),
    "fp8-w8a16-block": ("fp8-w8a16", "block"),
    "fp8-w8a8-channel": ("fp8-w8a8", "channel"),
    "fp8-w8a8-block": ("fp8-w8a8", "block"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """ids: topk_ids (T, top_k); activation: of the FP8 variants; spread: each token's values times a random power
    of two from 2**-spread to 2**spread; integers: inputs are small integers and scales powers of two, so that the
    result is exact in every dtype."""

    name: str
    reason: str
    ids: np.ndarray
    experts: int
    n: int
    k: int
    config: Config = SMALL
    routing_weight: bool = True
    activation: str = "bfloat16"
    spread: int = 0
    integers: bool = False

    def problem(self, variant: str) -> Problem:
        dtype, layout = VARIANTS[variant]
        activation = {"fp16": "float16", "bf16": "bfloat16"}.get(dtype, self.activation)
        return Problem(
            tokens=self.ids.shape[0],
            experts=self.experts,
            n=self.n,
            k=self.k,
            top_k=self.ids.shape[1],
            dtype=dtype,
            activation=activation,
            scale_layout=layout,  # type: ignore[arg-type]
            routing_weight=self.routing_weight,
        )


@dataclasses.dataclass(frozen=True)
class Data:
    """Arguments of moe_gemm as NumPy arrays, and the float64 reference."""

    problem: Problem
    x: np.ndarray
    w: np.ndarray
    ids: np.ndarray
    w_scale: np.ndarray | None
    topk_weight: np.ndarray | None
    reference: np.ndarray

    @property
    def arguments(self) -> tuple[np.ndarray | None, ...]:
        return self.x, self.w, self.ids, self.w_scale, self.topk_weight


def float_dtype(name: str) -> np.dtype:
    return np.dtype(np.float16 if name == "float16" else getattr(ml_dtypes, name))


@functools.lru_cache(maxsize=8)
def build(name: str, variant: str) -> Data:
    return data_of(CASES[name], variant)


def data_of(case: Case, variant: str) -> Data:
    """As `build`, for a case that need not be in the table."""
    problem = case.problem(variant)
    rng = np.random.default_rng(zlib.crc32(f"{case.name}/{variant}".encode()))
    draw: Callable[[tuple[int, ...]], np.ndarray]
    if case.integers:
        # bfloat16 has integers up to 256, float16 up to 2048: |sum| <= K, or with scales of 1/2 to 2 in steps of 1/2.
        def draw(shape: tuple[int, ...]) -> np.ndarray:
            return rng.integers(-1, 2, shape).astype(np.float32)
    else:

        def draw(shape: tuple[int, ...]) -> np.ndarray:
            return rng.standard_normal(shape, np.float32)

    x = draw((problem.tokens, problem.k))
    if case.spread:
        x *= 2.0 ** rng.integers(-case.spread, case.spread + 1, (problem.tokens, 1))
    x = x.astype(float_dtype(problem.activation))
    w = draw((problem.experts, problem.n, problem.k))
    w_scale = None
    if not problem.is_fp8:
        w = w.astype(float_dtype(problem.activation))
    elif case.integers:
        assert problem.w_scale_shape is not None
        w, w_scale = w.astype(fp8.FP8), (2.0 ** rng.integers(-1, 2, problem.w_scale_shape)).astype(np.float32)
    else:
        # Channels of very different size, so that a scale taken from another channel or block shows.
        w *= 2.0 ** rng.integers(-3, 4, (problem.experts, problem.n, 1))
        w, w_scale = (fp8.quantise_channel if problem.scale_layout == "channel" else fp8.quantise_block)(w)
    topk_weight = None
    if problem.routing_weight:
        weights = 2.0 ** rng.integers(-1, 2, case.ids.shape) if case.integers else rng.uniform(0.1, 2, case.ids.shape)
        topk_weight = weights.astype(np.float32)
    reference = moe_gemm_reference(x, w, case.ids, problem=problem, w_scale=w_scale, topk_weight=topk_weight)
    return Data(problem, x, w, case.ids, w_scale, topk_weight, reference)


def _ids(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, np.int32)


def _many_rows() -> np.ndarray:
    """34 slots on expert 1 (three tile rows of 16), 3 each on experts 0 and 2: five tile rows, of which 2 a band."""
    return _ids(*[(1, 1)] * 17, *[(0, 2)] * 3)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="ragged",
            reason="neither N = 96 nor K = 72 is a multiple of a tile; five experts, an odd number",
            ids=_ids((0, 3), (4, 1), (3, 0), (2, 3), (1, 4)), experts=5, n=96, k=72,
        ),
        Case(
            name="many-rows",
            reason="one expert has three tile rows, so that tile orders differ; the last band of group_m is not full",
            ids=_many_rows(), experts=3, n=160, k=48,
        ),
        Case(
            name="scale-blocks",
            reason="N and K pass 128: two by two scale blocks, the outer ones not full",
            ids=_ids((1,), (0,), (1,), (1,)), experts=2, n=144, k=160,
        ),
        Case(
            name="k-tail",
            reason="K = 352 leaves 96 of a K step of 128, as K = 2880 does of 128 and 256",
            ids=_ids((0, 1), (1, 0), (0, 1)), experts=2, n=64, k=352, config=SMALL.replace(block_k=128),
        ),
        Case(
            name="k-odd",
            reason="K = 33 and N = 65: rows of w are not even aligned to two elements, one column is in a tile alone",
            ids=_ids((0, 1), (1, 2)), experts=3, n=65, k=33,
        ),
        Case(
            name="below-one-tile",
            reason="N = 17 and K = 17 are smaller than any tile",
            ids=_ids((0, 1), (1, 1)), experts=2, n=17, k=17, routing_weight=False,
        ),
        Case(
            name="one-token",
            reason="decode at its smallest; N and K exactly tiles",
            ids=_ids((6, 2)), experts=8, n=128, k=64, routing_weight=False,
        ),
        Case(
            name="one-slot",
            reason="T = top_k = E = 1: every index array has its least length",
            ids=_ids((0,)), experts=1, n=64, k=32,
        ),
        Case(
            name="empty-experts",
            reason="64 experts of which six have a token: more programs of the plan than slots",
            ids=_ids((0, 63), (17, 5), (63, 40)), experts=64, n=64, k=48,
        ),
        Case(
            name="some-minus-one",
            reason="slots of other ranks first, in the middle and for a whole token; their rows of y are zeros",
            ids=_ids((-1, 2), (0, -1), (-1, -1), (2, 0), (1, -1)), experts=3, n=96, k=40,
        ),
        Case(
            name="all-minus-one",
            reason="no slot has an expert here: y is zeros, and written",
            ids=np.full((9, 2), -1, np.int32), experts=2, n=80, k=32,
        ),
        Case(
            name="many-minus-one",
            reason="20 slots of other ranks fill more than one tile row of zeros",
            ids=_ids(*[(-1, -1)] * 10, (1, 0)), experts=2, n=72, k=32, routing_weight=False,
        ),
        Case(
            name="repeated-expert",
            reason="a token names one expert twice: both slots are computed, each with its own routing weight",
            ids=_ids((1, 1, 0), (0, 0, 0)), experts=2, n=64, k=64,
        ),
        Case(
            name="exact-tiles",
            reason="16 slots fill a tile row exactly: no padding, and no tile row too many",
            ids=_ids(*[(0, 1)] * 16), experts=2, n=64, k=64, routing_weight=False,
        ),
        Case(
            name="one-over",
            reason="17 slots: the second tile row holds one",
            ids=_ids(*[(1,)] * 17), experts=2, n=64, k=40,
        ),
        Case(
            name="fifteen",
            reason="15 slots, top_k = 1: one short of a tile row (small operands were refused on device elsewhere)",
            ids=np.zeros((15, 1), np.int32), experts=1, n=64, k=64,
        ),
        Case(
            name="spread",
            reason="tokens from 2**-6 to 2**6 in size: a scale or weight of another token would show",
            ids=_ids(*[(0, 1), (1, 2)] * 5), experts=3, n=64, k=72, spread=6,
        ),
        Case(
            name="half-activations",
            reason="FP8 weights with float16 activations",
            ids=_ids((0, 1), (1, 2), (2, 0)), experts=3, n=96, k=160, activation="float16",
        ),
        Case(
            name="tokens-left",
            reason="tokens as the matrix instruction's left operand",
            ids=_many_rows(), experts=3, n=96, k=72, config=SMALL.replace(swap_ab=False),
        ),
        Case(
            name="wide-tile",
            reason="N = 160 in one tile of 256, which was wrong elsewhere; more than one row of scale blocks in a tile",
            ids=_ids(*[(0,), (1,)] * 9), experts=2, n=160, k=64, config=SMALL.replace(block_n=256, block_k=64),
        ),
        Case(
            name="tall-tile",
            reason="block_m = 64 with few slots: mostly padding",
            ids=_ids((0, 1), (1, 0), (1, 1)), experts=2, n=64, k=48, config=SMALL.replace(block_m=64),
        ),
        Case(
            name="integers",
            reason="small integers and powers of two: exact to the bit in every dtype; dead columns would show",
            ids=_ids(*[(0, 1), (2, -1), (1, 0)] * 2), experts=3, n=96, k=72, activation="float16", integers=True,
        ),
        Case(
            name="integers-wide-k",
            reason="exact over several scale blocks along K, and over a K tail",
            ids=_ids((0, 1), (1, 1)), experts=2, n=144, k=200, activation="float16", integers=True,
            routing_weight=False,
        ),
        Case(
            name="integers-tokens-left",
            reason="exact with the other operand order (a transposed FP8 operand was miscompiled elsewhere)",
            ids=_ids((0, 1), (1, 1)), experts=2, n=96, k=72, activation="float16", integers=True,
            config=SMALL.replace(swap_ab=False),
        ),
    )
}  # fmt: skip

SPLIT = Case(
    name="split-k",
    reason="seven K steps in parts of two: the fourth part has one, with a K tail, the fifth none; two tile rows of an "
    "expert, N = 72, slots without an expert alone in a token and beside others",
    ids=_ids(*[(1, 1)] * 9, (0, -1), (-1, -1), (2, 0)), experts=3, n=72, k=200, config=SMALL.replace(split_k=5),
)  # fmt: skip

TALL = Case(
    name="tall-tiles",
    reason="tiles of 48 rows (32 and 16): 32 slots, which leave the tail empty, 33, which begin it, 97 in three tiles, "
    "the last with one slot, 40 without an expert; N and K no multiple of a tile",
    ids=np.random.default_rng(1).permutation(np.repeat([0, 1, 2, -1], (32, 33, 97, 40))).astype(np.int32)[:, None],
    experts=3, n=72, k=40, config=SMALL.replace(block_m=48),
)  # fmt: skip

HALVED = Case(
    name="half-tails",
    reason="tiles of 96 rows (64 and 32): 65 slots, which begin the tail's first half, 80, which fill it, 81, which "
    "begin its second, 96, a full tile, and 20 without an expert",
    ids=np.random.default_rng(2).permutation(np.repeat(np.int32([0, 1, 2, 3, -1]), (65, 80, 81, 96, 20)))[:, None],
    experts=4, n=72, k=40, config=SMALL.replace(block_m=96),
)  # fmt: skip

FULL = ("ragged", "many-rows")
"""Cases that run in every order x variant. The others take turns, so that each runs in a 16-bit and an FP8 variant and
all orders and variants are met; what is left of the product is marked slow."""


def quick(name: str) -> set[tuple[str, str]]:
    """(variant, order) pairs of a case that are part of the default run."""
    from shared.orders import GRID_ORDERS, ORDERS

    if name == "ragged":  # has one tile row an expert, where popular is row
        return {(variant, order) for variant in VARIANTS for order in GRID_ORDERS}
    if name in FULL:
        return {(variant, order) for variant in MANY_ROWS_VARIANTS for order in ORDERS}
    count = len(ORDERS)
    if name.startswith("integers") or name == "scale-blocks":
        shift = list(CASES).index(name)
        return {(variant, ORDERS[(shift + i) % count]) for i, variant in enumerate(VARIANTS)}
    turn = list(CASES).index(name)
    narrow = list(VARIANTS)[2:]
    return {
        (("fp16", "bf16")[turn % 2], ORDERS[turn % count]),
        (narrow[turn % 4], ORDERS[(turn // 4 + 1) % count]),
    }


MANY_ROWS_VARIANTS = ("fp16", "fp8-w8a8-block")


def uniform(tokens: int, experts: int, top_k: int) -> np.ndarray:
    return routing.uniform(tokens, experts, top_k, seed=tokens)
