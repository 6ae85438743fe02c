"""What the bounds are made of: rounding, and what Hopper's FP8 unit cuts off while it accumulates."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import backends
from bench import matrix_unit, results
from shared import fp8
from shared.problem import Problem
from shared.reference import accumulate_fp8, accumulate_fp16, accumulation_error, relative_error, rounding_error


def operands(k: int, tokens: int = 4, channels: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 values as float64: x (tokens, k) and w (channels, k), quantised as the spec does."""
    rng = np.random.default_rng(k)
    x, _ = fp8.quantise_token(rng.standard_normal((tokens, k)).astype(ml_dtypes.bfloat16))
    w, _ = fp8.quantise_channel(rng.standard_normal((1, channels, k)))
    return x.astype(np.float64), w[0].astype(np.float64)


def w8a8(k: int, layout: str = "channel") -> Problem:
    return Problem.of("fp8-w8a8", tokens=4, experts=1, n=256, k=k, top_k=1, scale_layout=layout)


@pytest.mark.parametrize("k", [2048, 4096, 7168])
def test_accumulation_error_is_what_the_model_of_the_unit_loses(k: int) -> None:
    x, w = operands(k)
    assert relative_error(accumulate_fp8(x, w), x @ w.T) == pytest.approx(accumulation_error(w8a8(k)), rel=0.1)


def test_block_scales_keep_partial_sums_short() -> None:
    x, w = operands(128)
    problem = w8a8(7168, "block")
    assert accumulation_error(problem) == accumulation_error(w8a8(128))
    assert relative_error(accumulate_fp8(x, w), x @ w.T) < 2 * accumulation_error(problem)


def test_small_integers_are_exact() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.integers(-2, 3, (3, 100)).astype(float), rng.integers(-2, 3, (5, 100)).astype(float)
    assert (accumulate_fp8(x, w) == x @ w.T).all()


def test_one_large_product_hides_small_ones() -> None:
    """448 * 448 + 127 ones: the ones lie below the 13 bits that are kept beside 2**17."""
    x = np.ones((1, 128))
    x[0, 0] = 448
    assert accumulate_fp8(x, x)[0, 0] == 448 * 448


def committed() -> list[tuple[str, dict[str, object]]]:
    rows = [row for found in results.committed().values() for run in found for row in run["rows"]]
    return [
        (str(row["id"]), row)
        for row in rows
        if row["dtype"] == "fp8-w8a8" and row["contender"] in backends.BACKENDS and row["scale_layout"] == "channel"
    ]


def test_measured_errors_are_the_predicted_ones() -> None:
    """On the GPU, every backend's fp8-w8a8 error is rounding plus what the model of its FP8 unit loses, within 5 %: in
    each part of K, where that is split, as parts are added in float32."""
    measured = committed()
    assert len(measured) >= 40
    assert any(row["config"]["split_k"] > 1 for _, row in measured)
    for name, row in measured:
        model, gemm = str(row["case"]).split("/")[:2]
        from shared.models import model as model_of

        k = model_of(model).shape(gemm)[1]
        config = results.config_of(row)
        assert config is not None
        k = min(k, config.k_steps_per_split(k) * config.block_k)
        predicted = float(np.hypot(rounding_error(w8a8(k)), accumulation_error(w8a8(k))))
        assert row["error"] == pytest.approx(predicted, rel=0.05), f"{name}: {json.dumps(row['error'])}"


MATRIX_UNIT = json.loads((results.RESULTS / "h200" / "matrix-unit.json").read_text())
"""What was read off the matrix unit of one NVIDIA H200, beside which the models of it are held."""


@pytest.mark.parametrize("k", matrix_unit.DEPTHS)
def test_sums_of_one_sign_lose_what_the_model_says(k: int) -> None:
    """Where all products have one sign, nothing averages out: the FP8 unit loses 1 % at K = 1024 and 11 % at 7168."""
    data = matrix_unit.one_sign(k)
    a, b = data["q"].astype(np.float64), data["w"][0, : matrix_unit.TOKENS].astype(np.float64)
    exact, model = (a * b).sum(axis=1), np.diag(accumulate_fp8(a, b))
    predicted = float((model / exact - 1).mean())
    measured = {row["backend"]: row["measured"] for row in MATRIX_UNIT["one_sign"]["rows"] if row["k"] == k}
    assert set(measured) == set(backends.BACKENDS)
    for backend, loss in measured.items():
        assert loss == pytest.approx(predicted, rel=0.02), backend


@pytest.mark.parametrize("row", MATRIX_UNIT["subnormal"]["rows"], ids=lambda row: row["regression"])
def test_float16_subnormals_are_not_normalised(row: dict[str, object]) -> None:
    """Rounded to float16, the model gives what the GPU gave, and the exact sum does not."""
    from bench.fuzz import example, values

    found = example.load(Path(__file__).parent / "regressions" / f"{row['regression']}.json")
    given = values.arrays(found)
    token, j, n = row["index"]  # type: ignore[misc]
    x, w = (a.astype(np.float64)[None] for a in (given.x[token], given.w[given.topk_ids[token, j], n]))
    weight = 1.0 if given.topk_weight is None else float(given.topk_weight[token, j])
    y = np.float16(row["y"])  # type: ignore[arg-type]
    assert np.float16(accumulate_fp16(x, w)[0, 0] * weight) == y
    assert np.float16((x @ w.T)[0, 0] * weight) != y


@pytest.mark.parametrize("row", MATRIX_UNIT["subnormal_fp8"]["rows"], ids=lambda row: row["regression"])
def test_fp8_subnormals_are_not_normalised(row: dict[str, object]) -> None:
    """The same of the FP8 unit, whose least normal number is 2**-6."""
    from bench.fuzz import example, judge, values

    found = example.load(Path(__file__).parent / "regressions" / f"{row['regression']}.json")
    given = values.arrays(found)
    assert given.topk_weight is not None
    assert given.w_scale is not None
    token, j, n = row["index"]  # type: ignore[misc]
    expert = given.topk_ids[token, j]
    codes, x_scale = judge._as_read(given.x[token : token + 1], found.program.problem)
    w = given.w[expert, n].astype(np.float64)[None]
    factor = float(x_scale[0]) * float(given.topk_weight[token, j]) * float(given.w_scale[expert, n])
    y = np.float16(row["y"])  # type: ignore[arg-type]
    assert np.float16(accumulate_fp8(codes, w)[0, 0] * factor) == y
    assert np.float16((codes @ w.T)[0, 0] * factor) != y
