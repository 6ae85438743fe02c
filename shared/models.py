"""Real MoE layers by name: `data/models.json`, from each model's published configuration."""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

from shared.checks import ArgumentError, check_name
from shared.problem import Problem

GEMMS = ("gate-up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """One model's MoE layer. tp is the tensor-parallel degree that it is commonly served with, and the default.

    layers: how many MoE layers the model has (num_hidden_layers, less the dense ones); two of a made-up one.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tp: int
    layers: int = 2
    source: str

    def shape(self, gemm: str, tp: int | None = None) -> tuple[int, int]:
        """(N, K) of one GEMM on one of `tp` ranks.

        gate-up is column-parallel: the gate and up projections stacked, N = 2 * intermediate / tp, K = hidden.
        down is row-parallel: N = hidden, K = intermediate / tp.
        """
        check_name("gemm", gemm, GEMMS)
        tp = self.tp if tp is None else tp
        if tp < 1 or self.intermediate % tp:
            raise ArgumentError(f"tp: got {tp}; allowed: a divisor of {self.intermediate} ({self.name}'s intermediate)")
        part = self.intermediate // tp
        return (2 * part, self.hidden) if gemm == "gate-up" else (self.hidden, part)

    def problem(self, gemm: str, tokens: int, dtype: str, *, tp: int | None = None, **options: Any) -> Problem:
        n, k = self.shape(gemm, tp)
        return Problem.of(dtype, tokens=tokens, experts=self.experts, n=n, k=k, top_k=self.top_k, **options)

    def case(self, gemm: str, tokens: int, tp: int | None = None) -> str:
        """The name of a case in tests and benchmarks, such as mixtral-8x7b/gate-up/tp2/tokens-8."""
        return f"{self.name}/{gemm}/tp{self.tp if tp is None else tp}/tokens-{tokens}"


@functools.cache
def models() -> dict[str, Model]:
    """All known models by name."""
    table = json.loads(resources.files("shared").joinpath("data/models.json").read_text())
    return {name: Model(name=name, **values) for name, values in table.items()}


def model(name: str) -> Model:
    """The model of that name; an unknown name is an ArgumentError that lists the known ones."""
    check_name("model", name, models())
    return models()[name]
