"""Hypothesis strategies: programs that a backend accepts, and draws of data."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

import backends
from bench.fuzz import values
from bench.fuzz.example import Draw, Program
from shared.checks import ArgumentError
from shared.config import Config
from shared.orders import ORDERS
from shared.problem import Problem, ScaleLayout

KINDS: tuple[tuple[str, str, ScaleLayout | None], ...] = (
    ("fp16", "float16", None),
    ("bf16", "bfloat16", None),
    *(
        (dtype, activation, layout)
        for dtype in ("fp8-w8a16", "fp8-w8a8")
        for activation in ("float16", "bfloat16")
        for layout in ("channel", "block")
    ),  # type: ignore[misc]
)
"""(dtype, activation, scale layout)"""

CONFIG_FIELDS: dict[str, tuple[Any, ...]] = {
    "block_m": (16, 32, 64, 128, 48, 160),
    "block_n": (64, 16, 32, 128, 256),
    "block_k": (32, 16, 64, 128, 256),
    "num_warps": (4, 8, 2, 1),
    "num_stages": (2, 1, 3, 4, 5),
    "group_m": (2, 1, 3, 8),
    "swap_ab": (True, False),
    "split_k": (1, 2, 3, 4, 8),
    "reduction": ("two-pass", "atomic", "atomic-fp32"),
    "ping_pong": (False, True),
}
"""Values drawn for each field of Config, the simplest first; one line a field. A test holds it to Config's fields."""


def base() -> Config:
    """The smallest config that every backend takes, from which drawn ones are built."""
    return Config(block_m=16, block_n=64, block_k=32, num_stages=2, group_m=2)


@dataclasses.dataclass(frozen=True)
class Limits:
    """How large problems get. products: T * top_k * N * K; weights: E * N * K."""

    tokens: int
    experts: int
    top_k: int
    n: tuple[int, ...]
    k: tuple[int, ...]
    weights: int
    products: int


INTERPRETED = Limits(
    tokens=12, experts=5, top_k=3, weights=150_000, products=400_000,
    n=(64, 1, 8, 17, 65, 72, 96, 128, 130, 160), k=(32, 1, 8, 17, 31, 33, 64, 72, 96, 128, 129, 160, 200),
)  # fmt: skip
COMPILED = Limits(
    tokens=150, experts=64, top_k=8, weights=6_000_000, products=60_000_000,
    n=(64, 1, 2, 8, 15, 16, 17, 63, 65, 72, 96, 128, 129, 160, 256, 360, 512, 720, 1000, 2880),
    k=(32, 1, 2, 8, 15, 16, 17, 31, 33, 63, 64, 65, 72, 96, 127, 128, 129, 160, 200, 256, 352, 512, 1000, 2048, 2880),
)  # fmt: skip


def config_fields() -> list[str]:
    return [field.name for field in dataclasses.fields(Config)]


@st.composite
def problems(draw: st.DrawFn, limits: Limits) -> Problem:
    dtype, activation, scale_layout = draw(st.sampled_from(KINDS[:2]) | st.sampled_from(KINDS))
    k = draw(st.sampled_from(limits.k) | st.integers(1, limits.k[-1]))
    n = draw(st.sampled_from([n for n in limits.n if n * k <= limits.weights]) | st.integers(1, 200))
    n = min(n, max(1, limits.weights // k))
    experts = draw(st.integers(1, max(1, min(8, limits.weights // (n * k)))) | st.just(limits.experts))
    experts = min(experts, max(1, limits.weights // (n * k)))
    top_k = draw(st.integers(1, limits.top_k))
    most = max(1, min(limits.tokens, limits.products // (n * k * top_k)))
    tokens = draw(st.integers(1, min(9, most)) | st.integers(0, min(12, most)) | st.integers(0, most))
    return Problem(
        tokens=tokens,
        experts=experts,
        n=n,
        k=k,
        top_k=top_k,
        dtype=dtype,
        activation=activation,
        scale_layout=scale_layout,
        routing_weight=draw(st.booleans()),
    )


@st.composite
def configs(draw: st.DrawFn, backend: str, problem: Problem) -> Config:
    """A config that the backend accepts: drawn values are put in one by one, in any order, where they are accepted."""
    config = base()
    module = backends.load(backend)
    for name in draw(st.permutations(config_fields())):
        value = draw(st.sampled_from(CONFIG_FIELDS[name]))
        try:
            changed = config.replace(**{name: value})
        except ArgumentError:  # not allowed beside the others
            continue
        if module.unsupported(problem, changed) is None:
            config = changed
    return config


@st.composite
def programs(draw: st.DrawFn, backend: str, limits: Limits) -> Program:
    problem = draw(problems(limits))
    config = draw(configs(backend, problem))
    # The door refuses nothing here that the backend accepts; no tokens are its business alone.
    door = problem.tokens == 0 or draw(st.integers(0, 4)) == 4
    strided = backends.load(backend).FRAMEWORK == "torch"
    gaps = st.sampled_from((0, 0, 0, 1, 8)) if strided else st.just(0)
    order = draw(st.sampled_from(ORDERS))
    return Program(
        backend=backend, problem=problem, order=order, config=config, x_gap=draw(gaps), w_gap=draw(gaps),
        popular=order == "popular" and draw(st.booleans()), door=door,
        gathers=backend == "pallas-mosaic" and draw(st.booleans()),
    )  # fmt: skip


def draws() -> st.SearchStrategy[Draw]:
    """Half of what makes data special is left out of a draw, so that faults of ordinary data show too."""

    def mostly(choices: tuple[Any, ...]) -> st.SearchStrategy[Any]:
        return st.just(choices[0]) | st.sampled_from(choices)

    return st.builds(
        Draw,
        seed=st.integers(0, 2**16 - 1),
        routing=st.sampled_from(values.ROUTINGS),
        x=mostly(values.VALUES),
        w=mostly(values.VALUES),
        x_spread=mostly(values.SPREADS),
        w_spread=mostly(values.SPREADS),
        zeros=mostly(values.ZEROS),
        x_special=mostly(values.SPECIALS),
        w_special=st.just("none") | mostly(values.SPECIALS[:2]),
        weight=mostly(values.WEIGHTS),
    )


def batches(backend: str, limits: Limits, count: int) -> st.SearchStrategy[tuple[Program, list[Draw]]]:
    """A program and `count` draws for it."""
    return st.tuples(programs(backend, limits), st.lists(draws(), min_size=count, max_size=count))
