"""Triton's interpreter in a process that also compiles: exact arithmetic while it runs, nothing left behind."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from backends import torch_triton, triton_interpreter, triton_launch
from backends.arrays import numpy_to_torch, torch_to_numpy
from shared import fp8
from shared.config import Config
from shared.problem import Problem

pytestmark = pytest.mark.interpret


def interpret(x: np.ndarray, w: np.ndarray, w_scale: np.ndarray | None = None, dtype: str = "bf16") -> np.ndarray:
    """y (T, N) of one expert."""
    problem = Problem.of(dtype, tokens=x.shape[0], experts=1, n=w.shape[1], k=w.shape[2], top_k=1)
    ids = torch.zeros(x.shape[0], 1, dtype=torch.int32)
    scale = None if w_scale is None else numpy_to_torch(w_scale)
    config = Config(block_m=16, block_n=16, block_k=32)
    y = torch_triton.moe_gemm(
        numpy_to_torch(x), numpy_to_torch(w), ids, scale, None,
        problem=problem, order="row", config=config, interpret=True,
    )  # fmt: skip
    return torch_to_numpy(y)[:, 0].astype(np.float64)


def replaced(language: list[Any], before: list[dict[str, Any]]) -> list[str]:
    """Names in Triton's language that no longer stand for what they stood for."""
    return [
        f"{owner.__name__}.{name}"
        for owner, members in zip(language, before, strict=True)
        for name, member in members.items()
        if vars(owner).get(name) is not member
    ]


def test_bfloat16_products_are_of_values_not_of_bit_patterns() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.integers(-2, 3, (16, 32)), rng.integers(-2, 3, (1, 16, 32))
    y = interpret(x.astype(ml_dtypes.bfloat16), w.astype(ml_dtypes.bfloat16))
    assert (y == x @ w[0].T).all()


def test_conversions_round_to_nearest_even() -> None:
    """1 + 2**-8 lies between bfloat16's 1 and 1 + 2**-7: even is 1. 1 + 3 * 2**-8 goes up; truncation would not."""
    x = np.zeros((2, 32), ml_dtypes.bfloat16)
    x[:, 0], x[0, 1], x[1, 1] = 1, 2.0**-8, 3 * 2.0**-8
    y = interpret(x, np.ones((1, 16, 32), ml_dtypes.bfloat16))
    assert (y[0] == 1).all()
    assert (y[1] == 1 + 2.0**-6).all()


def test_fp8_products_are_exact() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-2, 3, (4, 32)).astype(ml_dtypes.bfloat16)
    w = fp8.to_fp8(rng.choice([448.0, -0.5, 2.0**-9, 1.0], (1, 16, 32)))
    y = interpret(x, w, np.ones((1, 16), np.float32), "fp8-w8a16")
    expected = (x.astype(np.float64) @ w[0].astype(np.float64).T).astype(ml_dtypes.bfloat16)
    assert (y == expected.astype(np.float64)).all()


def test_leaves_the_language_as_it_was() -> None:
    """Left patched, Triton could not compile anything afterwards in the same process."""
    language = triton_interpreter._language()
    before = [dict(vars(owner)) for owner in language]
    test_bfloat16_products_are_of_values_not_of_bit_patterns()
    assert replaced(language, before) == []


def test_compiles_after_it_interpreted(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))  # nothing compiled earlier is found there
    test_bfloat16_products_are_of_values_not_of_bit_patterns()
    problem = Problem.of("fp16", tokens=4, experts=2, n=64, k=64, top_k=1)
    compiled = triton_launch.compile_only(problem, "row", Config(block_n=64, block_k=64, num_stages=2))
    assert "wgmma" in compiled.ptx


def test_a_failing_kernel_leaves_the_language_as_it_was() -> None:
    language = triton_interpreter._language()
    before = [dict(vars(owner)) for owner in language]
    with pytest.raises(Exception, match=r"missing|argument"):
        triton_interpreter.launch("prepare_kernel", 1)
    assert replaced(language, before) == []
