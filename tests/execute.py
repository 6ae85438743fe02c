"""Run one backend on NumPy data where the tests run, and judge the result."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import backends
from backends import arrays
from shared.config import Config
from shared.problem import Problem
from shared.reference import element_bound, error_bound, relative_error
from tests.cases import Data
from tests.where import HAS_GPU, INTERPRET


def run(
    backend: str, data: Data, order: str, config: Config, *, fill: float | None = float("nan"),
    popularity: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """y of a backend's own moe_gemm, whose output buffer held `fill` before; skips where the backend cannot."""
    module = backends.load(backend)
    if (reason := module.unavailable(interpret=INTERPRET)) is not None:
        pytest.skip(f"{backend}: {reason}")
    if (reason := module.unsupported(data.problem, config)) is not None:
        pytest.skip(f"{backend} refuses: {reason}")
    native = [
        None if array is None else arrays.to_framework(array, module.FRAMEWORK, on_gpu=HAS_GPU)
        for array in (*data.arguments, popularity)
    ]
    y = module.moe_gemm(
        *native[:-1], problem=data.problem, order=order, config=config, interpret=INTERPRET, fill=fill,
        popularity=native[-1],
    )  # fmt: skip
    return arrays.to_host(y)


def as_accumulated(problem: Problem) -> Problem:
    """The problem whose bounds hold: interpreters sum in float32 and may not lose what Hopper's FP8 unit does."""
    return dataclasses.replace(problem, dtype="fp8-w8a16") if INTERPRET and problem.quantises_x else problem


def check(y: np.ndarray, data: Data, rounded_parts: int = 1) -> None:
    """y is right: dtype and shape, every element written, -1 rows zeros, error within the bound overall and locally.

    rounded_parts: of K, as `Config.rounded_parts` tells.
    """
    problem, reference = data.problem, data.reference
    assert y.shape == (problem.tokens, problem.top_k, problem.n)
    assert y.dtype.name == problem.activation
    y = y.astype(np.float64)
    unwritten = np.isnan(y)
    assert not unwritten.any(), f"{unwritten.sum()} of {y.size} elements unwritten or NaN, first {where(unwritten)}"
    nonzero = (y != 0) & (data.ids < 0)[:, :, None]
    assert not nonzero.any(), f"rows of -1 slots must be zeros: {nonzero.sum()} are not, first {where(nonzero)}"
    rows = np.abs(reference).max(axis=2, keepdims=True)
    wrong = np.abs(y - reference) > element_bound(as_accumulated(problem), rounded_parts) * rows
    assert not wrong.any(), f"{wrong.sum()} of {y.size} elements wrong, first {where(wrong)}"
    error, limit = relative_error(y, reference), error_bound(as_accumulated(problem), rounded_parts)
    assert error <= limit, f"relative error {error:.2e} above {limit:.1e}"


def where(mask: np.ndarray) -> list[int]:
    """[token, j, channel] of the first element."""
    return [int(i) for i in np.argwhere(mask)[0]]


def run_programs_backwards(patch: pytest.MonkeyPatch) -> None:
    """Pallas's interpreter takes the programs of a launch before the GEMM from the last one to the first: nothing may
    hang on their order, which a GPU does not keep."""
    from jax.experimental import pallas as pl

    from backends import pallas_prepare

    patch.setattr(pallas_prepare, "program_of", lambda programs: programs - 1 - pl.program_id(0))
