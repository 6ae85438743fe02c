"""The benchmark's data, quantisers and reference agree with the spec in `shared`."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from backends.arrays import torch_to_numpy  # noqa: E402
from bench import data, peers  # noqa: E402
from bench.cases import Case, Row, cases, order_pairs, rows  # noqa: E402
from shared import fp8, reference  # noqa: E402
from shared.models import Model  # noqa: E402

RAGGED = Model(name="ragged", hidden=200, intermediate=72, experts=5, top_k=2, tp=1, source="not multiples of 128")
DTYPES = [
    ("fp16", "channel"),
    ("bf16", "channel"),
    ("fp8-w8a16", "block"),
    ("fp8-w8a8", "channel"),
    ("fp8-w8a8", "block"),
]


@pytest.mark.parametrize("layout", ["channel", "block"])
def test_weights_are_quantised_as_the_spec_says(layout: str) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 200, 300)).astype(np.float32) * np.exp(rng.normal(size=(3, 200, 1)) * 4).astype(np.float32)
    w[1, 7] = 0
    w[2] = 0
    w[0, 3] *= 1e-38
    q, scale = data.quantise(torch.from_numpy(w), layout)  # type: ignore[arg-type]
    expected_q, expected_scale = {"channel": fp8.quantise_channel, "block": fp8.quantise_block}[layout](w)
    np.testing.assert_array_equal(scale.numpy(), expected_scale)
    np.testing.assert_array_equal(torch_to_numpy(q).view(np.uint8), expected_q.view(np.uint8))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activations_are_quantised_as_the_spec_says(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(64, 96)) * 10.0 ** rng.integers(-7, 4, (64, 1))).to(getattr(torch, dtype))
    x[5] = 0
    x[6, :] = 448
    x[7, 0], x[7, 1:] = 449, 1
    q, scale = data.quantise_token(x)
    expected_q, expected_scale = fp8.quantise_token(torch_to_numpy(x))
    np.testing.assert_array_equal(scale.numpy(), expected_scale)
    np.testing.assert_array_equal(torch_to_numpy(q).view(np.uint8), expected_q.view(np.uint8))


@pytest.mark.parametrize(("dtype", "layout"), DTYPES)
def test_reference_is_the_specs(dtype: str, layout: str) -> None:
    found = data.build(Case(RAGGED, "gate-up", 7), dtype, layout, device="cpu")  # type: ignore[arg-type]
    found.topk_ids[2, 1] = -1
    arrays = [None if a is None else torch_to_numpy(a) for a in (found.x, found.w, found.topk_ids, found.w_scale)]
    x, w, ids, w_scale = arrays
    assert x is not None
    assert w is not None
    assert ids is not None
    expected = reference.moe_gemm_reference(x, w, ids, problem=found.problem, w_scale=w_scale)
    again = data.reference(found.x, found.w, found.w_scale, found.topk_ids, found.problem)
    assert data.relative_error(again, torch.from_numpy(expected)) < 1e-14
    assert float(again[2, 1].abs().max()) == 0


def test_original_reference_shows_what_quantisation_costs() -> None:
    found = data.build(Case(RAGGED, "gate-up", 7), "fp8-w8a8", "channel", device="cpu")
    assert found.error(found.reference) == 0
    cost = found.quantisation_error(found.reference)
    assert cost is not None
    assert 0.01 < cost < 0.1


def test_data_is_random_seeded_and_never_zero() -> None:
    first, second = (data.build(Case(RAGGED, "down", 3), "fp16", "channel", device="cpu", seed=1) for _ in range(2))
    other = data.build(Case(RAGGED, "down", 3), "fp16", "channel", device="cpu", seed=2)
    assert torch.equal(first.w, second.w)
    assert not torch.equal(first.w, other.w)
    assert float((first.w == 0).float().mean()) < 0.01


def test_unwritten_element_is_an_error() -> None:
    found = data.build(Case(RAGGED, "down", 3), "fp16", "channel", device="cpu")
    y = found.reference.half()
    y[0, 0, 0] = float("nan")
    assert not found.error(y) <= 1


@pytest.mark.parametrize("name", ["torch-cublas-loop", "torch-grouped-mm", "jax-ragged-dot"])
def test_peers_compute_the_same_product(name: str) -> None:
    peer = peers.PEERS[name]
    model = Model(name="even", hidden=64, intermediate=32, experts=4, top_k=2, tp=1, source="multiples of 16")
    found = data.build(Case(model, "gate-up", 9), peer.dtypes[0], "channel", device="cpu")
    call, arguments = peer.prepare(found)
    assert found.error(peers.unsort(found, call(*arguments))) <= reference.error_bound(found.problem)


def test_jax_shares_memory() -> None:
    pytest.importorskip("jax")
    tensor = torch.arange(6, dtype=torch.float32)  # aligned to 64 bytes, which JAX wants on the CPU
    assert data.to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def test_ids_are_readable_unique_and_round_trip() -> None:
    for which in ("default", "full", "rehearsal"):
        found = rows(which)
        assert len({row.id for row in found}) == len(found)
        assert all(Row.of(*row.parameters) == row for row in found)
    assert "mixtral-8x7b/gate-up/tp2/tokens-8/fp16/column/pallas-mosaic" in {row.id for row in rows("default")}
    assert "deepseek-v3/down/tp8/tokens-1/fp8-w8a8.block/grouped/jax-triton" in {row.id for row in rows("full")}


def test_decode_comes_first_and_orders_are_compared() -> None:
    assert cases("default")[0].tokens == 1
    assert {other for _, other in order_pairs("full")} == {"row", "grouped", "popular"}
    assert all(row.order == "column" for row, _ in order_pairs("default"))
