"""What is measured, by name: cases (`mixtral-8x7b/gate-up/tp2/tokens-8`) and rows (a case by one contender).

Decode comes first: small batches are what the project is about. The default set takes a few minutes on one GPU; the
full set is every model, GEMM, dtype and order; the targets set is what the speed targets are about (bench/targets.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shared import routing
from shared.checks import ArgumentError
from shared.models import Model, model, models
from shared.orders import ORDERS
from shared.problem import DTYPES, Problem, ScaleLayout

TOKENS_FULL = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEFAULT_DTYPES = ("fp16", "fp8-w8a16", "fp8-w8a8")
DEFAULT_ORDERS = ("column", "row")
"""Orders of the default set: a backend is shown by the faster one, so that none is held to an order that costs it."""
PAIRED = ("torch-triton", "pallas-mosaic")
"""Backends whose orders the default set compares by pairs: one gathers rows of x in the kernel, the other mostly sorts
them before it."""
CAPTURED_TOKENS = (8,)
"""Batches that the default set also measures captured (CUDA graph, outer jax.jit), as each costs a compilation."""
_DEFAULT = (
    ("mixtral-8x7b", "gate-up", (1, 8, 64, 512)),
    ("qwen3-30b-a3b", "gate-up", (1, 8, 64, 512)),
    ("deepseek-v3", "gate-up", (8, 64)),
    ("gpt-oss-120b", "gate-up", (8, 64)),
    ("mixtral-8x7b", "down", (8,)),
)
SETS = ("default", "full", "targets")
TARGET_DTYPES = ("fp16", "bf16", "fp8-w8a16", "fp8-w8a8")
TARGET_BF16_TOKENS = (1, 8, 64, 512)
"""Batches that the targets set measures in bf16: it moves fp16's bytes through the same instructions at fp16's rate."""
TARGET_GPU = "NVIDIA H200"
"""The GPU that the targets are about; the backends run in the order that a call without options takes there."""
TARGET_ORDER = "row"
"""That order in nearly all cases of the set, in which tiles are tuned and disassembled. Few tile rows share weights
there, and in row order a program need not know how many there are before it asks for its own."""
_TARGETS = (
    ("mixtral-8x7b", "gate-up"),
    ("mixtral-8x7b", "down"),
    ("qwen3-30b-a3b", "down"),
    ("qwen3-30b-a3b", "gate-up"),
    ("deepseek-v3", "gate-up"),
    ("deepseek-v3", "down"),
    ("gpt-oss-120b", "down"),
    ("gpt-oss-120b", "gate-up"),
)
"""Layers of the targets set, in an order that gives each of two or four shards large and small ones."""
PARAMETERS = ("model_name", "gemm", "tokens", "dtype", "order", "contender")
"""A row as plain values, one pytest parameter each: pytest-benchmark groups by any of them (param:dtype)."""
_TINY = Model(name="tiny", hidden=64, intermediate=64, experts=4, top_k=2, tp=1, source="made up for rehearsals")


@dataclasses.dataclass(frozen=True)
class Case:
    """One GEMM of one model on one tensor-parallel rank, for a number of tokens."""

    model: Model
    gemm: str
    tokens: int

    @property
    def name(self) -> str:
        return self.model.case(self.gemm, self.tokens)

    def problem(self, dtype: str, scale_layout: ScaleLayout = "channel") -> Problem:
        return self.model.problem(self.gemm, self.tokens, dtype, scale_layout=scale_layout)


@dataclasses.dataclass(frozen=True)
class Row:
    """One case by one contender (a backend or a peer). Peers have no tile order to choose: theirs is "own"."""

    case: Case
    dtype: str
    order: str
    contender: str
    scale_layout: ScaleLayout = "channel"

    @property
    def id(self) -> str:
        """Such as mixtral-8x7b/gate-up/tp2/tokens-8/fp16/column/pallas-mosaic."""
        return "/".join((self.case.name, *self.parameters[3:]))

    @property
    def parameters(self) -> tuple[str, str, int, str, str, str]:
        """The values of PARAMETERS; FP8 weights scaled per block are named like fp8-w8a8.block."""
        dtype = self.dtype if self.scale_layout == "channel" else f"{self.dtype}.{self.scale_layout}"
        return self.case.model.name, self.case.gemm, self.case.tokens, dtype, self.order, self.contender

    @classmethod
    def of(cls, model_name: str, gemm: str, tokens: int, dtype: str, order: str, contender: str) -> Row:
        """The row of these parameters."""
        layer = _TINY if model_name == _TINY.name else model(model_name)
        dtype, _, layout = dtype.partition(".")
        return cls(Case(layer, gemm, tokens), dtype, order, contender, "block" if layout == "block" else "channel")

    @property
    def problem(self) -> Problem:
        return self.case.problem(self.dtype, self.scale_layout)

    @property
    def captured_by_default(self) -> bool:
        return self.case.tokens in CAPTURED_TOKENS or self.case.model is _TINY


def cases(which: str, shard: tuple[int, int] = (1, 1)) -> list[Case]:
    """The cases of a set: one of SETS, or "rehearsal".

    shard: (i, n), the i-th of n parts, counted from 1; a layer (model and GEMM) is in one of them.
    """
    found = _cases(which)
    layers = list(dict.fromkeys((case.model, case.gemm) for case in found))
    mine = set(layers[shard[0] - 1 :: shard[1]])
    return [case for case in found if (case.model, case.gemm) in mine]


def _cases(which: str) -> list[Case]:
    if which == "rehearsal":
        return [Case(_TINY, "gate-up", 4)]
    if which == "default":
        return [Case(model(name), gemm, tokens) for name, gemm, batches in _DEFAULT for tokens in batches]
    if which == "targets":
        return [Case(model(name), gemm, tokens) for name, gemm in _TARGETS for tokens in TOKENS_FULL]
    return [Case(m, gemm, t) for m in models().values() for gemm in ("gate-up", "down") for t in TOKENS_FULL]


def rows(which: str, shard: tuple[int, int] = (1, 1)) -> list[Row]:
    """The rows of a set, those of one case and dtype together, as they share their data.

    In the targets set, those of one layer and dtype together: all batches share the weights. shard: as in `cases`.
    """
    chosen = cases(which, shard)
    layers = list(dict.fromkeys((case.model, case.gemm) for case in chosen))
    if which != "targets":
        return [row for case in chosen for row in _rows_of(case, which)]
    found = [row for case in chosen for row in _target_rows(case)]
    return sorted(found, key=lambda row: (layers.index((row.case.model, row.case.gemm)), _dtype_place(row)))


def _dtype_place(row: Row) -> int:
    return TARGET_DTYPES.index(row.dtype)


def _target_rows(case: Case) -> Iterator[Row]:
    """Every backend and dtype; each peer in each FP8 mode, and once with 2-byte weights: in fp16 where it has that."""
    from backends import tuning
    from backends.registry import BACKENDS
    from bench.peers import PEERS

    for dtype in TARGET_DTYPES:
        if dtype != "bf16" or case.tokens in TARGET_BF16_TOKENS:
            for backend in BACKENDS:
                order = tuning.choose(case.problem(dtype), backend, TARGET_GPU).order
                yield Row(case, dtype, order, backend)
        for name, peer in PEERS.items():
            if dtype in peer.dtypes and not (dtype == "bf16" and "fp16" in peer.dtypes):
                yield Row(case, dtype, "own", name)


def check_shard(text: str, which: str) -> tuple[int, int]:
    """(i, n) of "i/n"; ArgumentError where the set has no such part."""
    parts = text.split("/")
    layers = len({(case.model, case.gemm) for case in cases(which)})
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ArgumentError(f"--shard: got {text!r}; allowed: I/N, such as 1/2")
    i, n = int(parts[0]), int(parts[1])
    if not 1 <= i <= n <= layers:
        raise ArgumentError(
            f"--shard: got {text!r}; allowed: I/N with 1 <= I <= N <= {layers}, as the {which} set has {layers} layers"
        )
    return i, n


def _rows_of(case: Case, which: str) -> Iterator[Row]:
    from backends.registry import BACKENDS
    from bench.peers import PEERS

    for dtype in DTYPES if which == "full" else DEFAULT_DTYPES:
        layouts: tuple[ScaleLayout, ...] = ("channel", "block")
        for layout in layouts if which == "full" and dtype.startswith("fp8") else layouts[:1]:
            for order in ORDERS:
                for backend in BACKENDS:
                    if which == "full" or order in DEFAULT_ORDERS:
                        yield Row(case, dtype, order, backend, layout)
            for name, peer in PEERS.items():
                if dtype in peer.dtypes and layout == "channel":
                    yield Row(case, dtype, "own", name, layout)
    if which != "full":  # bf16-only peers move the same bytes as fp16, and stand beside it
        for name, peer in PEERS.items():
            if "bf16" in peer.dtypes and "fp16" not in peer.dtypes:
                yield Row(case, "bf16", "own", name)


def order_pairs(which: str, shard: tuple[int, int] = (1, 1)) -> list[tuple[Row, str]]:
    """(row in column order, the order to compare it with): what `pairs` measures interleaved, at one config."""
    if which == "targets":
        return []
    found = []
    for row in rows(which, shard):
        if row.order != "column" or (which != "full" and row.contender not in PAIRED):
            continue
        others = {"default": ("row",), "rehearsal": ("row", "popular")}.get(which, ORDERS)
        found += [(row, other) for other in others if other != "column"]
    return found


def check_routing(spec: str) -> tuple[int, int] | None:
    """(T, top_k) of a recorded routing, None for one that is drawn; ArgumentError where there is none of that name."""
    if not spec.endswith(".npy"):
        routing.make(spec, 2, 8, 2, seed=0)
        return None
    try:
        return routing.recorded(spec, experts=2**31 - 1).shape
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"routing: got {spec!r}, which cannot be read: {error}") from error
