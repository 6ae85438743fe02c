"""Simpler examples than one that fails, by one change each: the caller tries them and says which still fail.

Hypothesis's own shrinker would compile hundreds of kernels, in the process that a faulty one may have broken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from typing import Any

import backends
from bench.fuzz.example import Draw, Example
from bench.fuzz.programs import CONFIG_FIELDS, base, config_fields
from shared.checks import ArgumentError
from shared.orders import ORDERS
from shared.problem import Problem

MOST_TRIES = 80


def shrink(example: Example) -> Generator[Example, bool, Example]:
    """Yields candidates, is sent whether each fails too, and returns the simplest that does; MOST_TRIES at most."""
    tries, again = 0, True
    tried = {example}
    while again:
        again = False
        for candidate in simpler(example):
            if candidate in tried or not _accepted(candidate):
                continue
            tried.add(candidate)
            tries += 1
            if (yield candidate):
                example, again = candidate, True
                break
            if tries == MOST_TRIES:
                return example
    return example


def simpler(example: Example) -> Iterator[Example]:
    """The large steps first."""
    program, draw, problem = example.program, example.draw, example.program.problem
    yield dataclasses.replace(example, draw=Draw(seed=draw.seed))
    yield _with(example, config=base())
    for name in ("tokens", "experts", "n", "k", "top_k"):
        size = getattr(problem, name)
        for smaller in dict.fromkeys((1, size // 2, size - 1)):
            if 1 <= smaller < size:
                yield from _problem(example, **{name: smaller})
    if program.door and problem.tokens:
        yield _with(example, door=False)
    yield _with(example, popular=False)
    yield _with(example, popular=False, order=ORDERS[0])
    yield _with(example, gathers=False)
    yield _with(example, x_gap=0, w_gap=0)
    yield _with(example, x_gap=0)
    yield _with(example, w_gap=0)
    yield from _problem(example, routing_weight=False)
    yield from _problem(example, dtype="fp16", activation="float16", scale_layout=None)
    if problem.is_fp8:
        yield from _problem(example, scale_layout="channel")
        yield from _problem(example, activation="float16")
    for field in dataclasses.fields(Draw):
        if field.name != "seed":
            plain: dict[str, Any] = {field.name: field.default}
            yield dataclasses.replace(example, draw=dataclasses.replace(draw, **plain))
    for name in config_fields():
        try:
            yield _with(example, config=program.config.replace(**{name: CONFIG_FIELDS[name][0]}))
        except ArgumentError:
            continue


def _with(example: Example, **changes: Any) -> Example:
    return dataclasses.replace(example, program=dataclasses.replace(example.program, **changes))


def _problem(example: Example, **changes: Any) -> Iterator[Example]:
    problem: Problem = dataclasses.replace(example.program.problem, **changes)
    yield _with(example, problem=problem)


def _accepted(example: Example) -> bool:
    module = backends.load(example.program.backend)
    return module.unsupported(example.program.problem, example.program.config) is None
