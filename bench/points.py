"""One launch of one kernel, exactly: what counters are read for and what the cache model predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.cases import Case, Row
from shared import planning, routing
from shared.checks import check_fields
from shared.config import Config
from shared.models import model
from shared.problem import Problem, ScaleLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A model's GEMM for some tokens, routed in a named way, by one backend in one order with one config.

    tp None: the tensor-parallel degree that the model is commonly served with. routing, seed: as `shared.routing.make`.
    """

    model: str
    gemm: str = "gate-up"
    tp: int | None = None
    tokens: int
    dtype: str = "fp16"
    scale_layout: ScaleLayout = "channel"
    routing: str = "uniform"
    seed: int = 0
    backend: str = "torch-triton"
    order: str = "column"
    config: Config

    @property
    def case(self) -> Case:
        layer = model(self.model)
        return Case(layer if self.tp is None else dataclasses.replace(layer, tp=self.tp), self.gemm, self.tokens)

    @property
    def row(self) -> Row:
        return Row(self.case, self.dtype, self.order, self.backend, self.scale_layout)

    @property
    def problem(self) -> Problem:
        return self.case.problem(self.dtype, self.scale_layout)

    @property
    def id(self) -> str:
        """Such as mixtral-8x7b/gate-up/tp2/tokens-8/fp16/column/torch-triton/uniform/16x128x128 w4 s4 g8 swap."""
        return f"{self.row.id}/{self.routing}/{self.config}"

    def topk_ids(self) -> np.ndarray:
        problem = self.problem
        return routing.make(self.routing, problem.tokens, problem.experts, problem.top_k, seed=self.seed)

    def expert_counts(self) -> np.ndarray:
        """Slots per expert, (E,)."""
        return planning.expert_counts(self.topk_ids(), self.problem.experts)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_mapping` gives an equal Point back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Point:
        check_fields("point", values, cls)
        return cls(**{**values, "config": Config.from_mapping(values["config"])})
