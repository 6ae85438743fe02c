"""The benchmark's data, quantisers and reference agree with the spec in `shared`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from backends.arrays import torch_to_numpy  # noqa: E402
from bench import data, libraries, peers  # noqa: E402
from bench.cases import Case, Row, cases, check_shard, order_pairs, rows  # noqa: E402
from shared import fp8, reference  # noqa: E402
from shared.checks import ArgumentError  # noqa: E402
from shared.models import Model  # noqa: E402
from shared.problem import ScaleLayout  # noqa: E402

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


@pytest.mark.parametrize("dtype", ["fp16", "fp8-w8a8"])
def test_batches_share_weights_and_are_the_same_whichever_are_beside_them(dtype: str) -> None:
    several, one = [Case(RAGGED, "gate-up", tokens) for tokens in (3, 1, 7)], Case(RAGGED, "gate-up", 7)
    found = data.build_batches(several, dtype, "channel", device="cpu", seed=1)
    alone = data.build_batches([one], dtype, "channel", device="cpu", seed=1)[one]
    assert len({batch.w.data_ptr() for batch in found.values()}) == 1
    assert not torch.equal(found[several[0]].x, found[one].x[:3])
    for name in ("x", "w", "topk_ids", "reference"):
        assert torch.equal(getattr(found[one], name).float(), getattr(alone, name).float()), name
    for case, batch in found.items():
        assert (batch.problem.tokens, batch.counts.sum()) == (case.tokens, case.tokens * RAGGED.top_k)
        again = data.reference(batch.x, batch.w, batch.w_scale, batch.topk_ids, batch.problem)
        assert data.relative_error(again, batch.reference) < 1e-14
        cost = batch.quantisation_error(batch.reference)
        assert cost is None if dtype == "fp16" else cost is not None and 0.01 < cost < 0.1
    assert np.array_equal(found[one].topk_ids, data.build(one, dtype, "channel", device="cpu", seed=1).topk_ids)


def test_the_cache_of_batches_makes_one_layer_at_a_time_and_only_what_is_measured() -> None:
    made: list[tuple[list[int], str]] = []

    def make(batches: list[Case], dtype: str, layout: ScaleLayout) -> dict[Case, data.Data]:
        made.append(([case.tokens for case in batches], dtype))
        return data.build_batches(batches, dtype, layout, device="cpu")

    measured = [(tokens, dtype) for dtype in ("fp16", "bf16") for tokens in (1, 4) if (tokens, dtype) != (4, "bf16")]
    chosen = [Row(Case(RAGGED, "down", tokens), dtype, "column", "torch-triton") for tokens, dtype in measured]
    cache = data.BatchCache(make, chosen)
    for row in chosen:
        assert cache.get(row.case, row.dtype, row.scale_layout).problem.tokens == row.case.tokens
    assert made == [([1, 4], "fp16"), ([1], "bf16")]
    cache.free()
    assert cache.key is None


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
    ready = peer.prepare(found, "gate-up")
    assert found.error(ready.to_y(found, ready.call(*ready.arguments))) <= reference.error_bound(found.problem)


@pytest.mark.parametrize("name", ["vllm-fused-moe", "triton-kernels-matmul", "tokamax-ragged-dot"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8-w8a16", "fp8-w8a8"])
def test_a_library_that_is_not_there_or_has_no_such_kernel_says_so(name: str, dtype: str) -> None:
    peer = peers.PEERS[name]
    assert dtype in peer.dtypes, "a row for every dtype, so that none is missing without a word"
    none_there = {"vllm-fused-moe": "fp8-w8a16", "triton-kernels-matmul": "fp8-w8a16", "tokamax-ragged-dot": "fp8-w8a8"}
    found = data.build(Case(RAGGED, "gate-up", 3), dtype, "channel", device="cpu")
    if none_there[name] != dtype:
        reason = peer.missing()
        if reason is None:
            pytest.skip("it is installed: bench measures it on a GPU")
        assert "pip install" in reason
    with pytest.raises(NotImplementedError, match=r"cannot be imported|FP8|fp8"):
        peer.prepare(found, "gate-up")


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block_m"), [(9, 2, 4, 4), (70, 4, 8, 16), (3, 2, 5, 16)])
def test_slots_are_laid_out_as_vllm_reads_them(tokens: int, top_k: int, experts: int, block_m: int) -> None:
    """Each tile row holds slots of its expert alone, every slot with an expert is there once, padding is S."""
    ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    sorted_ids, expert_ids, padded = libraries.vllm_assignment(ids, block_m, experts)
    flat, slots = ids.reshape(-1), ids.numel()
    assert int(padded) % block_m == 0
    assert sorted_ids.numel() <= slots + experts * (block_m - 1)
    rows = sorted_ids[: int(padded)].view(-1, block_m)
    for row, expert in zip(rows, expert_ids.tolist(), strict=False):
        assert {int(flat[slot]) for slot in row if slot < slots} == {expert}
    used = sorted_ids[sorted_ids < slots]
    assert sorted(used.tolist()) == torch.nonzero(flat >= 0).flatten().tolist()
    assert (sorted_ids[int(padded) :] == slots).all()


def test_few_slots_get_a_tile_row_each_in_vllm() -> None:
    ids = torch.tensor([[3, 15]], dtype=torch.int32)
    sorted_ids, expert_ids, padded = libraries.vllm_assignment(ids, 16, 16)
    assert sorted_ids is None
    assert (expert_ids.tolist(), int(padded)) == ([3, 15], 32)


def test_jax_shares_memory() -> None:
    pytest.importorskip("jax")
    tensor = torch.arange(6, dtype=torch.float32)  # aligned to 64 bytes, which JAX wants on the CPU
    assert data.to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def test_ids_are_readable_unique_and_round_trip() -> None:
    for which in ("default", "full", "targets", "rehearsal"):
        found = rows(which)
        assert len({row.id for row in found}) == len(found)
        assert all(Row.of(*row.parameters) == row for row in found)
    assert "mixtral-8x7b/gate-up/tp2/tokens-8/fp16/column/pallas-mosaic" in {row.id for row in rows("default")}
    assert "deepseek-v3/down/tp8/tokens-1/fp8-w8a8.block/grouped/jax-triton" in {row.id for row in rows("full")}


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_shards_are_the_whole_set_and_share_no_layer(parts: int) -> None:
    shards = [rows("targets", (i, parts)) for i in range(1, parts + 1)]
    assert sorted(row.id for shard in shards for row in shard) == sorted(row.id for row in rows("targets"))
    layers = [{(row.case.model, row.case.gemm) for row in shard} for shard in shards]
    assert sum(map(len, layers)) == len(set.union(*layers)) == 8
    if parts != 3:
        assert len({len(shard) for shard in shards}) == 1


def test_rows_of_one_draw_of_weights_stand_together_in_the_targets_set() -> None:
    keys = [(row.case.model, row.case.gemm, row.dtype) for row in rows("targets")]
    assert len([1 for a, b in itertools.pairwise(keys) if a != b]) == len(set(keys)) - 1


@pytest.mark.parametrize("given", ["0/2", "3/2", "1/9", "1", "a/b", "1/2/3", "-1/2"])
def test_a_shard_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ArgumentError, match=f"--shard: got '{given}'"):
        check_shard(given, "targets")
    assert check_shard("2/8", "targets") == (2, 8)


def test_decode_comes_first_and_orders_are_compared() -> None:
    assert cases("default")[0].tokens == 1
    assert {other for _, other in order_pairs("full")} == {"row", "grouped", "popular"}
    assert all(row.order == "column" for row, _ in order_pairs("default"))
