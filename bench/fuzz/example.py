"""One example of the fuzzer: a program, and the draw of data that it is given. Plain data, held by JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.config import Config
from shared.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What is compiled.

    x_gap, w_gap: elements between the rows of x and of w beyond K, all NaN (torch backends alone have strides)
    popular:      popularity of the experts is given (order "popular" alone); else it is this routing's slot counts
    gathers:      pallas-mosaic gathers rows of x where its tiles allow it, as if L2 kept no sorted copy of them
    door:         called through `backends.moe_gemm` with NumPy arrays, else through the backend's own moe_gemm with an
                  output buffer that holds NaN beforehand
    """

    backend: str
    problem: Problem
    order: str
    config: Config
    x_gap: int = 0
    w_gap: int = 0
    popular: bool = False
    gathers: bool = False
    door: bool = False

    def __str__(self) -> str:
        p = self.problem
        kind = p.dtype + (f"/{p.scale_layout}/{p.activation}" if p.is_fp8 else "")
        weighted = " weighted" if p.routing_weight else ""
        order = f"{self.order} given" if self.popular else self.order
        how = "".join(f" {name}" for name in ("gathers", "door") if getattr(self, name))
        gaps = f" gaps {self.x_gap},{self.w_gap}" if self.x_gap or self.w_gap else ""
        return (
            f"{self.backend} {kind} T={p.tokens} E={p.experts} N={p.n} K={p.k} top_k={p.top_k}"
            f"{weighted} {order} [{self.config}]{gaps}{how}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """The data of one call, by the names that `values` knows; the first choice of each is the simplest.

    x_spread, w_spread: a token's (channel's) values are multiplied by 2**e, e between -spread and spread
    zeros:              what is all zero: none, token, channel, block (of 128x128), expert
    x_special, w_special: values that are not finite, and how many rows have one
    """

    seed: int = 0
    routing: str = "uniform"
    x: str = "normal"
    w: str = "normal"
    x_spread: int = 0
    w_spread: int = 0
    zeros: str = "none"
    x_special: str = "none"
    w_special: str = "none"
    weight: str = "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    program: Program
    draw: Draw

    def __str__(self) -> str:
        simple = Draw()
        changed = [
            f"{field.name}={getattr(self.draw, field.name)}"
            for field in dataclasses.fields(Draw)
            if getattr(self.draw, field.name) != getattr(simple, field.name)
        ]
        return " ".join([str(self.program), *changed])

    def to_mapping(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Example:
        program = dict(values["program"])
        program |= {"problem": Problem(**program["problem"]), "config": Config.from_mapping(program["config"])}
        return cls(program=Program(**program), draw=Draw(**values["draw"]))

    def key(self) -> str:
        """Short name by content."""
        text = json.dumps(self.to_mapping(), sort_keys=True)
        return f"{self.program.backend}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def save(example: Example, folder: Path, **found: Any) -> Path:
    """Write a regression; found: how it was found, for the reader."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{example.key()}.json"
    path.write_text(json.dumps({"found": found, **example.to_mapping()}, indent=1) + "\n", encoding="utf-8")
    return path


def load(path: Path) -> Example:
    content = json.loads(path.read_text(encoding="utf-8"))
    content.pop("found", None)
    return Example.from_mapping(content)
