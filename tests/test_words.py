"""e4m3 weights read as 32-bit words (fp8-w8a16 in torch-triton and jax-triton) or in pairs (pallas-triton): order of x,
results, machine code."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

import backends
from backends import arrays, triton_launch
from shared import fp8
from shared.config import Config
from shared.problem import Problem
from tests import cases
from tests.execute import check, run
from tests.test_fp8 import pallas_scale, triton_scale
from tests.where import HAS_GPU, NUMERICS

SMALL = Config(block_m=16, block_n=64, block_k=64, num_stages=2)
CASE = dataclasses.replace(
    cases.TALL, k=192, config=SMALL, ids=np.repeat(np.array([0, 2, -1], np.int32), (35, 9, 2))[:, None]
)
"""Of 48 rows one tile is tall, and one is not."""


def reads_words(problem: Problem, config: Config, *, w_stride_e: int = 0, w_stride_n: int = 0) -> bool:
    return triton_launch.reads_words(
        problem, config, w_stride_e=w_stride_e or problem.n * problem.k, w_stride_n=w_stride_n or problem.k
    )


EVERY_KIND_OF_TILE = pytest.mark.parametrize(
    "changes",
    [{}, {"block_m": 48}, pytest.param({"block_m": 96}, marks=pytest.mark.slow), {"split_k": 2}],
    ids=["one-block", "two-blocks", "half-tail", "split"],
)


@pytest.mark.parametrize("halves_of", [32, 64, 256])
@pytest.mark.parametrize("together", [4, 2])
def test_a_half_has_its_share_of_each_word_or_pair(together: int, halves_of: int) -> None:
    """Of so many weights read as one, the first product has the lower half."""
    k = np.arange(4 * halves_of)
    place = fp8.place_of(k, halves_of, together)
    assert sorted(place) == k.tolist()
    assert (place // halves_of == k // halves_of).all(), "a value stays in its step of K"
    second = place % halves_of >= halves_of // 2
    assert (second == (k % together >= together // 2)).all()
    for half in (k[~second], k[second]):
        assert (np.diff(place[half]) > 0).all(), "in their order"


@NUMERICS
@pytest.mark.parametrize(
    ("scale", "together", "k", "halves_of"),
    [
        (triton_scale, 4, 256, 256),
        (triton_scale, 4, 768, 64),
        (pallas_scale, 2, 256, 256),
        (pallas_scale, 2, 768, 64),
        (pallas_scale, 2, 16384 + 64, 64),  # read in two chunks
    ],
)
def test_prepare_brings_x_to_that_order(scale: Any, together: int, k: int, halves_of: int) -> None:
    x = np.random.default_rng(0).normal(size=(3, k)).astype(cases.float_dtype("bfloat16"))
    scaled, x_scale = scale(x, "float16", halves_of)
    expected, expected_scale = fp8.scale_token(x)
    assert (scaled[:, fp8.place_of(np.arange(k), halves_of, together)] == expected).all()
    assert (x_scale == expected_scale).all()


@NUMERICS
@pytest.mark.parametrize("backend", ["torch-triton", pytest.param("jax-triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", ["fp8-w8a16-channel", "fp8-w8a16-block"])
@EVERY_KIND_OF_TILE
def test_results(changes: dict[str, int], variant: str, backend: str) -> None:
    config = SMALL.replace(**changes)
    data = cases.data_of(dataclasses.replace(CASE, config=config), variant)
    assert reads_words(data.problem, config)
    check(run(backend, data, "row", config), data, config.rounded_parts(192))


@NUMERICS
@EVERY_KIND_OF_TILE
def test_results_of_pairs(changes: dict[str, int]) -> None:
    from backends import pallas_triton

    config = SMALL.replace(**changes)
    data = cases.data_of(dataclasses.replace(CASE, config=config), "fp8-w8a16-channel")
    assert pallas_triton._reads_pairs(data.problem, config)
    check(run("pallas-triton", data, "row", config), data, config.rounded_parts(192))


@NUMERICS
@pytest.mark.parametrize(("order", "slots"), [("row", 80), ("popular", 20)])
def test_results_of_pairs_behind_every_plan(order: str, slots: int) -> None:
    """x is scaled beside one planning program for few slots, beside several for many and in order "popular"."""
    case = dataclasses.replace(CASE, ids=np.repeat(np.array([0, 2], np.int32), slots // 2)[:, None])
    data = cases.data_of(case, "fp8-w8a16-channel")
    check(run("pallas-triton", data, order, SMALL), data)


@NUMERICS
@pytest.mark.parametrize(
    "backend", ["torch-triton", pytest.param("jax-triton", marks=pytest.mark.slow), "pallas-triton"]
)
def test_every_weight_is_widened_exactly(backend: str) -> None:
    """All finite values of e4m3, each in each of a word's four bytes, by tokens that pick one of K each."""
    problem = Problem.of("fp8-w8a16", tokens=64, experts=1, n=256, k=64, top_k=1)
    assert reads_words(problem, SMALL)
    codes = np.arange(256, dtype=np.uint8)
    finite = codes[codes & 0x7F != 0x7F].view(cases.float_dtype("float8_e4m3fn"))
    n, k = np.indices((256, 64))
    w = finite[(n + k) % finite.size][None]
    reference = np.swapaxes(w.astype(np.float64), 1, 2).reshape(64, 1, 256)
    data = cases.Data(
        problem=problem, x=np.eye(64).astype(cases.float_dtype("bfloat16")), w=w, ids=np.zeros((64, 1), np.int32),
        w_scale=np.ones((1, 256), np.float32), topk_weight=None, reference=reference,
    )  # fmt: skip
    y = run(backend, data, "row", SMALL)
    assert (y.astype(np.float64) == reference).all()


@NUMERICS
@pytest.mark.parametrize("offset", [1, 4], ids=["odd", "of-words"])
def test_weights_that_start_anywhere_torch_triton(offset: int) -> None:
    """Words at other addresses than multiples of 16 bytes would fault, or be copied byte by byte."""
    import torch

    from backends import torch_triton

    data = cases.data_of(CASE, "fp8-w8a16-channel")
    place = "cuda" if HAS_GPU else "cpu"
    given = (data.x, data.w, data.w_scale, data.topk_weight)
    x, w, w_scale, topk_weight = (None if a is None else arrays.numpy_to_torch(a).to(place) for a in given)
    room = torch.empty(w.numel() + 16, dtype=torch.uint8, device=place)
    moved = room[offset : offset + w.numel()].view(w.dtype).view(w.shape)
    moved.view(torch.uint8).copy_(w.view(torch.uint8))
    ids = torch.from_numpy(data.ids).to(place)
    y = torch_triton.moe_gemm(
        x, moved, ids, w_scale, topk_weight, problem=data.problem, order="row", config=SMALL, interpret=not HAS_GPU
    )
    check(arrays.to_host(y), data)


def test_words_need_whole_steps_scaled_x_and_rows_of_16_bytes() -> None:
    problem = Problem.of("fp8-w8a16", tokens=4, experts=2, n=64, k=192, top_k=1)
    assert reads_words(problem, SMALL)
    assert not reads_words(dataclasses.replace(problem, k=168), SMALL)
    assert not reads_words(dataclasses.replace(problem, activation="float16"), SMALL)
    assert not reads_words(problem, SMALL.replace(swap_ab=False))
    assert not reads_words(problem, SMALL.replace(num_warps=2))
    assert not reads_words(problem, SMALL.replace(block_n=32))
    assert not reads_words(problem, SMALL, w_stride_n=200)
    assert not reads_words(problem, SMALL, w_stride_e=64 * 192 + 8)
    assert not reads_words(Problem.of("fp8-w8a8", tokens=4, experts=2, n=64, k=192, top_k=1), SMALL)


@pytest.mark.compile_only
@pytest.mark.parametrize("backend", ["torch-triton", "pallas-triton"])
def test_a_thread_gets_its_operand_by_ldmatrix(backend: str) -> None:
    """Read value by value it took a 16-bit load for every two weights, and copies of 8 bytes."""
    problem = Problem.of("fp8-w8a16", tokens=128, experts=8, n=4096, k=7168, top_k=2)
    config = Config(block_m=48, block_n=128, block_k=128, num_stages=4)
    code = backends.load(backend).compile_only(problem, "row", config)
    assert code.sass is not None
    assert "LDSM" in code.sass
    assert not re.search(r"\bLDS\.U16", code.sass)
    assert not re.search(r"\bLDGSTS\.E(?!\.BYPASS\.128)", code.sass)
    assert code.spills == 0
    # Rows of 128 bytes, not swizzled, lie in the same banks: the lanes' addresses would differ by a constant alone.
    addresses = set(re.findall(r"\bLDSM\S* R\d+, \[(R\d+)", code.sass))
    assert len(addresses) >= 4, "ldmatrix of swizzled rows"
