"""Which config a call without one gets: always one that its backend can honour, and never one measured far away."""

from __future__ import annotations

import json

import pytest

import backends
from backends import tuning
from shared.config import Config
from shared.models import model, models
from shared.problem import Problem
from tests.cases import VARIANTS

H200 = "NVIDIA H200"


@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_model_gets_a_config_that_the_backend_honours(backend: str, variant: str) -> None:
    dtype, layout = VARIANTS[variant]
    module = backends.load(backend)
    for name in models():
        for gemm in ("gate-up", "down"):
            for tokens in (0, 1, 2, 8, 64, 200, 512, 4096, 100_000):
                problem = model(name).problem(gemm, tokens, dtype, scale_layout=layout or "channel")
                for gpu in ("", H200):
                    choice = backends.choose_config(problem, backend=backend, gpu=gpu)
                    assert module.unsupported(problem, choice.config) is None, (problem, choice)


@pytest.mark.parametrize(
    ("tokens", "block_m", "order"),
    [(1, 16, "row"), (64, 16, "row"), (65, 16, "column"), (512, 160, "row"), (0, 16, "row")],
)
def test_the_order_goes_by_whether_a_tile_holds_an_experts_slots(tokens: int, block_m: int, order: str) -> None:
    """mixtral-8x7b: 8 experts, top 2."""
    problem = model("mixtral-8x7b").problem("gate-up", tokens, "fp16")
    assert tuning.order_for(problem, Config(block_m=block_m)) == order


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Problem:
    """A GPU with entries of torch-triton at 1, 2, 4 and 8 tokens, whose configs say so by group_m; its problem."""
    problem = model("mixtral-8x7b").problem("gate-up", 1, "fp16")
    shape = {name: getattr(problem, name) for name in ("dtype", "scale_layout", "experts", "n", "k", "top_k")}
    entries = [
        {"backend": "torch-triton", "tokens": tokens, "config": json.loads(Config(group_m=tokens).to_json()), **shape}
        for tokens in (1, 2, 4, 8)
    ]
    monkeypatch.setattr(tuning, "_entries", lambda slug: entries if slug == "some-gpu" else [])
    return problem


@pytest.mark.parametrize(
    ("tokens", "found"), [(1, 1), (3, 4), (6, 8), (8, 8), (16, 8), (17, None), (2048, None), (0, None)]
)
def test_nearest_measured_tokens_at_most_a_factor_of_two_away(
    measured: Problem, tokens: int, found: int | None
) -> None:
    problem = model("mixtral-8x7b").problem("gate-up", tokens, "fp16")
    choice = backends.choose_config(problem, backend="torch-triton", gpu="Some GPU")
    if found is None:
        assert choice.source.startswith("rule of thumb")
        assert choice.config == tuning.rule_of_thumb(problem, "torch-triton")
    else:
        assert choice.config.group_m == found
        assert f"at {found} tokens" in choice.source


def test_between_two_as_near_the_one_at_more_tokens_is_taken_in_any_order_of_the_file(
    measured: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [entry for entry in tuning._entries("some-gpu") if entry["tokens"] in (1, 4)]
    for found in (entries, entries[::-1]):
        monkeypatch.setattr(tuning, "_entries", lambda slug, found=found: found)
        assert backends.choose_config(measured_at(2), backend="torch-triton", gpu="Some GPU").config.group_m == 4


def test_every_measured_config_is_one_that_backends_still_honour() -> None:
    """At its own number of tokens, in every backend and dtype that takes it."""
    layers = set()
    for entry in tuning._entries("nvidia-h200"):
        shape = {name: entry[name] for name in ("experts", "n", "k", "top_k", "tokens")}
        problem = Problem.of(entry["dtype"], scale_layout=entry["scale_layout"] or "channel", **shape)
        layers.add(problem)
        refusal = backends.load(entry["backend"]).unsupported(problem, Config.from_mapping(entry["config"]))
        assert refusal is None, entry
    for problem in layers:
        for dtype in ("fp16", "bf16") if problem.dtype == "fp16" else (problem.dtype,):
            shape = {name: getattr(problem, name) for name in ("experts", "n", "k", "top_k", "tokens")}
            same = Problem.of(dtype, scale_layout=problem.scale_layout or "channel", **shape)
            for backend in backends.BACKENDS:
                choice = backends.choose_config(same, backend=backend, gpu=H200)
                assert backends.load(backend).unsupported(same, choice.config) is None, (backend, same, choice)


def test_whose_measurement_serves_whom(measured: Problem) -> None:
    def source(backend: str, dtype: str = "fp16", gpu: str = "Some GPU") -> str:
        problem = model("mixtral-8x7b").problem("gate-up", 1, dtype)
        return backends.choose_config(problem, backend=backend, gpu=gpu).source

    assert "torch-triton" in source("jax-triton"), "it launches the same kernel"
    assert "torch-triton" in source("pallas-triton"), "a port of the same kernel, without an entry of its own"
    assert "torch-triton" in source("torch-triton", "bf16"), "the same bytes at the same rate"
    assert source("pallas-mosaic").startswith("rule of thumb"), "another kernel"
    assert source("torch-triton", "fp8-w8a8").startswith("rule of thumb"), "other bytes"
    assert source("torch-triton", gpu="Other GPU").startswith("rule of thumb, no measured entry for Other GPU")


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (1, "torch-triton at 1"),  # an exact entry of the other's beats an own one at 2
        (2, "pallas-triton at 2"),  # both have one
        (3, "torch-triton at 4"),
        (12, "torch-triton at 8"),
        (16, "pallas-triton at 32"),  # twice as many as one, half as many as the other
        (64, "pallas-triton at 32"),
    ],
)
def test_a_port_takes_the_nearest_entry_of_either_its_own_where_both_are_as_near(
    measured: Problem, monkeypatch: pytest.MonkeyPatch, tokens: int, found: str
) -> None:
    """The other's entries are at 1, 2, 4 and 8 tokens, its own at 2 and 32 and come last."""
    theirs = tuning._entries("some-gpu")
    own = [
        {**theirs[0], "backend": "pallas-triton", "tokens": t, "config": {**theirs[0]["config"], "group_m": 100 + t}}
        for t in (2, 32)
    ]
    monkeypatch.setattr(tuning, "_entries", lambda slug: [*theirs, *own])
    choice = backends.choose_config(measured_at(tokens), backend="pallas-triton", gpu="Some GPU")
    assert choice.source.endswith(f"in {found} tokens")
    assert choice.config.group_m == int(found.split()[-1]) + (100 if found.startswith("pallas") else 0)
    for backend in ("torch-triton", "jax-triton"):
        choice = backends.choose_config(measured_at(2), backend=backend, gpu="Some GPU")
        assert "torch-triton at 2" in choice.source, "a port's entries are its own"


def measured_at(tokens: int) -> Problem:
    return model("mixtral-8x7b").problem("gate-up", tokens, "fp16")


def test_split_k_is_taken_only_at_the_tokens_it_was_measured_at(
    measured: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half as many tokens have half as many tiles, and twice as many may fill the GPU without splitting."""
    entries = [dict(entry) for entry in tuning._entries("some-gpu")]
    for entry in entries:
        entry["config"] = json.loads(Config(group_m=entry["tokens"], split_k=4).to_json())
    monkeypatch.setattr(tuning, "_entries", lambda slug: entries)
    problem = model("mixtral-8x7b").problem("gate-up", 8, "fp16")
    assert backends.choose_config(problem, backend="torch-triton", gpu="Some GPU").config.split_k == 4
    problem = model("mixtral-8x7b").problem("gate-up", 16, "fp16")
    assert backends.choose_config(problem, backend="torch-triton", gpu="Some GPU").config == Config(group_m=8)


def test_clusters_stay_where_the_batch_is_another(measured: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """pallas-mosaic's two parts of K pay with many tiles, too; not so parts that a second kernel adds up."""
    known = next(entry for entry in tuning._entries("some-gpu") if entry["tokens"] == 8)

    def parts_at(tokens: int, split_k: int) -> int:
        config = Config(block_m=16, block_n=64, block_k=128, num_stages=4, split_k=split_k)
        entry = {**known, "backend": "pallas-mosaic", "config": json.loads(config.to_json())}
        monkeypatch.setattr(tuning, "_entries", lambda slug: [entry])
        choice = backends.choose_config(measured_at(tokens), backend="pallas-mosaic", gpu="Some GPU")
        assert choice.source.startswith("measured")
        return choice.config.split_k

    assert [parts_at(tokens, 2) for tokens in (5, 8, 12)] == [2, 2, 2]
    assert [parts_at(tokens, 3) for tokens in (5, 8, 12)] == [1, 3, 1]


def test_default_configs_give_the_same_bits_in_every_run() -> None:
    entries = tuning._entries("nvidia-h200")
    assert entries
    assert all(Config.from_mapping(entry["config"]).deterministic for entry in entries)


def of_shape(tokens: int, n: int, k: int, experts: int = 8, top_k: int = 2, **options: str) -> Problem:
    options.setdefault("dtype", "fp16")
    return Problem.of(tokens=tokens, n=n, k=k, experts=experts, top_k=top_k, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n", "k", "experts", "tokens", "found"),
    [
        (14336, 4096, 8, 8, "measured"),
        (12288, 4096, 8, 8, "nearest"),
        (14336, 4096, 16, 16, "nearest"),  # two slots an expert, as at 8 tokens of 8 experts
        (14336, 4096 * 4, 8, 8, "nearest"),  # four times the bytes
        (14336, 4096 * 4 + 64, 8, 8, "rule"),
        (12288, 4096, 8, 16, "nearest"),  # twice the slots per expert
        (12288, 4096, 8, 17, "rule"),
        (12288, 4096, 8, 0, "rule"),
    ],
)
def test_a_shape_that_is_not_measured_takes_its_nearest_neighbour(
    measured: Problem, n: int, k: int, experts: int, tokens: int, found: str
) -> None:
    problem = of_shape(tokens, n, k, experts)
    choice = backends.choose_config(problem, backend="torch-triton", gpu="Some GPU")
    assert choice.source.startswith(found), choice.source
    if found == "nearest":
        assert choice.config.group_m == 8, "the entry with the slots per expert that are nearest"
        assert "N = 14336, K = 4096, 8 experts" in choice.source


def test_the_nearest_of_several_shapes(measured: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = next(entry for entry in tuning._entries("some-gpu") if entry["tokens"] == 8)
    far, near = ({**entry, "n": n, "config": {**entry["config"], "group_m": g}} for n, g in ((20000, 3), (13000, 5)))
    monkeypatch.setattr(tuning, "_entries", lambda slug: [far, near, {**near, "backend": "pallas-mosaic"}])
    choice = backends.choose_config(of_shape(8, 12288, 4096), backend="torch-triton", gpu="Some GPU")
    assert choice.config.group_m == 5


def test_a_neighbours_config_that_the_problem_cannot_have_is_passed_over(
    measured: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shapes of block scales: the nearer one's K step holds more than one scale block."""
    entry = next(entry for entry in tuning._entries("some-gpu") if entry["tokens"] == 8)
    entry = {**entry, "dtype": "fp8-w8a8", "scale_layout": "block"}
    nearer = {**entry, "n": 12300, "config": {**entry["config"], "block_k": 256}}
    problem = of_shape(8, 12288, 4096, dtype="fp8-w8a8", scale_layout="block")
    for entries, source in (([entry, nearer], "nearest"), ([nearer], "rule of thumb")):
        monkeypatch.setattr(tuning, "_entries", lambda slug, entries=entries: entries)
        choice = backends.choose_config(problem, backend="torch-triton", gpu="Some GPU")
        assert choice.source.startswith(source)
        assert choice.config.block_k == 128


def test_a_neighbour_does_not_split_k(measured: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{**e, "config": {**e["config"], "split_k": 4}} for e in tuning._entries("some-gpu")]
    monkeypatch.setattr(tuning, "_entries", lambda slug: entries)
    choice = backends.choose_config(of_shape(8, 12288, 4096), backend="torch-triton", gpu="Some GPU")
    assert choice.source.startswith("nearest")
    assert choice.config.split_k == 1
