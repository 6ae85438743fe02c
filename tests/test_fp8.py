"""FP8 quantisation: what it does at its edges, and the same bytes from every implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from backends import arrays
from shared import fp8
from shared.problem import Problem
from tests.cases import float_dtype
from tests.where import HAS_GPU, NUMERICS

# NumPy says so when it computes with the infinities and NaN that some tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

Quantise = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def test_saturates() -> None:
    """448, 464, 465 and 1000: ml_dtypes makes 448, 448, NaN, NaN of them, hardware 448 of all. So clamp first."""
    values = np.array([448, 464, 465, 1000, np.inf, -448, -465, -np.inf], np.float32)
    assert np.isnan(values.astype(fp8.FP8).astype(np.float32)[2])  # why clamping is needed
    expected = [448] * 5 + [-448] * 3
    assert fp8.to_fp8(values).astype(np.float32).tolist() == expected
    assert np.isnan(fp8.to_fp8(np.array([np.nan])).astype(np.float32)).all()


@pytest.mark.parametrize("quantise", [fp8.quantise_channel, fp8.quantise_block])
def test_all_zero_weights_get_scale_one(quantise: Quantise) -> None:
    w = np.zeros((2, 130, 129), np.float32)
    w[1, 0, 0] = 3.5
    q, scale = quantise(w)
    assert np.isfinite(scale).all()
    assert scale[0].min() == scale[0].max() == 1
    assert np.count_nonzero(q.astype(np.float32)) == 1
    assert float(q[1, 0, 0]) * scale[1].ravel()[0] == pytest.approx(3.5)


def test_channel_scales_are_per_output_channel() -> None:
    w = np.ones((1, 3, 5), np.float32) * np.array([1.0, 100.0, 1e-30], np.float32)[None, :, None]
    q, scale = fp8.quantise_channel(w)
    assert scale.shape == (1, 3)
    assert np.all(q.astype(np.float32) == 448)
    np.testing.assert_allclose(q.astype(np.float64) * scale[:, :, None], w, rtol=1e-6)


def test_block_scales_of_edge_blocks() -> None:
    """N = 130, K = 257: blocks of 2 rows and of 1 column at the edges, each scaled by its own maximum."""
    w = np.ones((1, 130, 257), np.float32)
    w[:, 128:, :] *= 2
    w[:, :, 256:] *= 8
    q, scale = fp8.quantise_block(w)
    assert scale.shape == (1, 2, 3)
    np.testing.assert_allclose(scale[0], np.array([[1, 1, 8], [2, 2, 16]]) / 448, rtol=1e-6)
    assert np.all(q.astype(np.float32) == 448)
    np.testing.assert_allclose(q.astype(np.float32) * fp8.expand_block_scale(scale, 130, 257), w, rtol=1e-6)


WEIGHTS = hnp.arrays(
    np.float32, (2, 3, 130), elements=st.floats(-(2.0**100), 2.0**100, width=32), fill=st.just(0.0)
)  # fmt: skip


@given(w=WEIGHTS)
@example(w=np.full((2, 3, 130), 2.0**-149, np.float32))
@example(w=np.full((2, 3, 130), 2.0**-126, np.float32))
def test_weights_come_back_within_half_a_step(w: np.ndarray) -> None:
    """e4m3 has 3 fraction bits: an error of 2**-4 of the value, or half of its least step where it is subnormal."""
    for quantise in (fp8.quantise_channel, fp8.quantise_block):
        q, scale = quantise(w)
        assert np.isfinite(scale).all()
        assert (scale > 0).all()
        assert np.isfinite(q.astype(np.float32)).all()
        each = scale[:, :, None] if quantise is fp8.quantise_channel else fp8.expand_block_scale(scale, *w.shape[1:])
        error = np.abs(q.astype(np.float64) * each - w)
        allowed = np.maximum(np.abs(w.astype(np.float64)) * 2.0**-4, each.astype(np.float64) * 2.0**-10)
        assert np.all(error <= allowed * (1 + 1e-6))


# Activations, per token


def triton_scale(x: np.ndarray, target: str, halves_of: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`prepare_kernel`, x into arrays that hold other bytes beforehand. halves_of: as `prepare_constants` has it."""
    import torch

    from backends import torch_triton, triton_launch

    launch = torch_triton._launch if HAS_GPU else torch_triton._launch_interpreted
    tensor = arrays.numpy_to_torch(x.copy())
    tensor = tensor.cuda() if HAS_GPU else tensor
    scaled = torch.full(x.shape, 9.0, device=tensor.device).to(getattr(torch, target))
    scale = torch.full((x.shape[0],), 7.0, device=tensor.device)
    problem = Problem.of("fp8-w8a8", tokens=x.shape[0], experts=1, n=1, k=x.shape[1], top_k=1)
    constants = triton_launch.prepare_constants(problem, 16, x_stride=x.shape[1], halves_of=halves_of)
    ids = torch.zeros((x.shape[0], 1), dtype=torch.int32, device=tensor.device)
    plan = torch.empty((3, 16 * problem.max_tile_rows(16)), dtype=torch.int32, device=tensor.device)
    arguments = (ids, ids, tensor, *plan, plan[0], scaled, scale, problem.slots)
    launch("prepare_kernel", triton_launch.prepare_grid(problem), arguments, constants)
    return arrays.to_host(scaled), arrays.to_host(scale)


@functools.cache
def _pallas_prepare(problem: Problem, halves_of: int = 0) -> Any:
    import jax

    from backends import pallas_triton_prepare

    options = {"popularity": None, "problem": problem, "block_m": 16, "popular": False, "interpret": not HAS_GPU}
    return jax.jit(functools.partial(pallas_triton_prepare.prepare, halves_of=halves_of, **options))


def pallas_scale(x: np.ndarray, target: str, halves_of: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """pallas-triton's `prepare`, beside a plan by one program and by more. halves_of: as it has it."""
    import jax

    mode = "fp8-w8a8" if target == "float8_e4m3fn" else "fp8-w8a16"
    tokens, k = x.shape
    problem = Problem.of(mode, tokens=tokens, experts=1, n=1, k=k, top_k=1, activation=x.dtype.name)
    made = _pallas_prepare(problem, halves_of)(jax.numpy.asarray(x), jax.numpy.zeros((tokens, 1), "int32"))
    return np.asarray(made["x"]), np.asarray(made["x_scale"])


IMPLEMENTATIONS = {"triton": triton_scale, "pallas": pallas_scale}
EVERY_IMPLEMENTATION = pytest.mark.parametrize("scale_tokens", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
TARGETS = [("float16", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn"), ("bfloat16", "float16")]
"""(dtype of x, what the kernel reads): fp8-w8a8 quantises, fp8-w8a16 scales bfloat16 into float16's range."""
EVERY_TARGET = pytest.mark.parametrize(("dtype", "target"), TARGETS)

ScaleTokens = Callable[[np.ndarray, str], tuple[np.ndarray, np.ndarray]]


def assert_same_bytes(scale_tokens: ScaleTokens, x: np.ndarray, target: str) -> None:
    scaled, scale = scale_tokens(x, target)
    with np.errstate(invalid="ignore"):
        specified = fp8.quantise_token(x) if target == "float8_e4m3fn" else fp8.scale_token(x)
    np.testing.assert_array_equal(scale, specified[1])  # NaN where NaN
    # The sign of a zero is part of the bytes; which of the many NaN codes a NaN has is not.
    integer = np.uint8 if target == "float8_e4m3fn" else np.uint16
    both_nan = np.isnan(scaled.astype(np.float32)) & np.isnan(specified[0].astype(np.float32))
    bytes_, expected = scaled.view(integer), specified[0].view(integer)
    np.testing.assert_array_equal(np.where(both_nan, 0, bytes_), np.where(both_nan, 0, expected))


@given(x=hnp.arrays(np.float32, (2, 9), elements=st.floats(-60000, 60000, width=16)))
def test_token_scale_is_the_least_power_of_two(x: np.ndarray) -> None:
    x = x.astype(np.float16)
    q, scale = fp8.quantise_token(x)
    amax = np.abs(x.astype(np.float64)).max(axis=1)
    for largest, s in zip(amax, scale.astype(np.float64), strict=True):
        assert np.log2(s) == np.round(np.log2(s))
        if largest == 0:
            assert s == 1
        else:
            assert largest / s <= 448
            assert largest / (s / 2) > 448
    error = np.abs(q.astype(np.float64) * scale[:, None] - x.astype(np.float64))
    assert np.all(error <= np.maximum(np.abs(x.astype(np.float64)) * 2.0**-4, scale[:, None] * 2.0**-10))


def test_token_edges() -> None:
    big = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    tiny = 2.0**-133  # the least bfloat16
    x = np.array(
        [[0, 0, 0], [448, -448, 1], [449, 0, 0], [big, -big, 1], [tiny, 0, 0], [np.nan, 1, 2], [1, np.inf, 2]],
        np.float32,
    ).astype(ml_dtypes.bfloat16)
    q, scale = fp8.quantise_token(x)
    assert scale[:2].tolist() == [1, 1]
    assert q[1].astype(np.float32).tolist() == [448, -448, 1]
    assert scale[2] == 2 or float(x[2, 0]) == 448  # bfloat16 rounds 449 to 448
    assert scale[3] == 2.0**120
    assert q[3].astype(np.float32).tolist() == [256, -256, 0]
    assert scale[4] == 2.0**-100, "scales stay normal numbers, so that 2**-scale does too"
    assert np.isnan(scale[5:]).all()
    assert q[5].astype(np.float32).tolist()[0] == 0
    assert np.isfinite(q.astype(np.float32)).all()


@given(x=hnp.arrays(np.float32, (2, 9), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_scaling_into_float16_loses_nothing_that_counts(x: np.ndarray) -> None:
    x = x.astype(ml_dtypes.bfloat16)
    scaled, scale = fp8.scale_token(x)
    amax = np.abs(x.astype(np.float64)).max(axis=1)
    top = np.abs(scaled.astype(np.float64)).max(axis=1)
    normal = amax > 2.0**-86  # below, the scale is held at 2**-100
    assert np.all(top[normal] >= 2.0**14)
    assert np.all(top < 2.0**15)
    error = np.abs(scaled.astype(np.float64) * scale[:, None] - x.astype(np.float64))
    assert np.all(error <= 2.0**-39 * np.maximum(amax, 2.0**-86)[:, None])


SPECIAL = [
    0.0, -0.0, 1.0, 448.0, 464.0, 465.0, 479.0, 480.0, 65504.0, 2.0**-24, 2.0**-14, 1.0625, 1.1875,
    np.inf, -np.inf, np.nan,
]  # fmt: skip


@NUMERICS
@EVERY_IMPLEMENTATION
@EVERY_TARGET
def test_same_bytes_for_special_values(scale_tokens: ScaleTokens, dtype: str, target: str) -> None:
    values = np.array(SPECIAL, np.float32)
    pairs = np.stack(np.meshgrid(values, values), axis=-1).reshape(-1, 2)
    with np.errstate(over="ignore"):
        x = np.concatenate([pairs, pairs[:, :1] * 0.37], axis=1).astype(float_dtype(dtype))
    assert_same_bytes(scale_tokens, x, target)


@NUMERICS
@EVERY_IMPLEMENTATION
@EVERY_TARGET
def test_same_bytes_for_every_value(scale_tokens: ScaleTokens, dtype: str, target: str) -> None:
    """All 65536 bit patterns: in rows of equal size, and in rows from the least to the largest and beyond."""
    bits = np.arange(2**16, dtype=np.uint16).reshape(-1, 1024)
    assert_same_bytes(scale_tokens, bits.view(float_dtype(dtype)), target)
    # Patterns 1024 apart; the last 24 rows end in infinities and NaN, so they are cut to what is finite.
    mixed = np.ascontiguousarray(bits.T[::16])
    assert_same_bytes(scale_tokens, mixed.view(float_dtype(dtype)), target)
    halves = np.ascontiguousarray(mixed[:, :30])
    assert np.isfinite(halves.view(float_dtype(dtype)).astype(np.float32)).all()
    assert_same_bytes(scale_tokens, halves.view(float_dtype(dtype)), target)


@NUMERICS
@EVERY_IMPLEMENTATION
@given(bits=hnp.arrays(np.uint16, (3, 7), elements=st.integers(0, 2**16 - 1)), which=st.sampled_from(TARGETS))
@settings(max_examples=90)
def test_same_bytes_for_any_bits(scale_tokens: ScaleTokens, bits: np.ndarray, which: tuple[str, str]) -> None:
    assert_same_bytes(scale_tokens, bits.view(float_dtype(which[0])), which[1])


@NUMERICS
@EVERY_IMPLEMENTATION
@EVERY_TARGET
@pytest.mark.parametrize("k", [1, 33, 256, 257, 2880, 16384, 16385])
def test_same_bytes_at_row_lengths(scale_tokens: ScaleTokens, dtype: str, target: str, k: int) -> None:
    """Row lengths around the kernel's least chunk of 256 and its largest of 16384; the largest value last."""
    x = np.random.default_rng(k).standard_normal((3, k)).astype(float_dtype(dtype))
    x[:, -1] = 300
    assert_same_bytes(scale_tokens, x, target)
