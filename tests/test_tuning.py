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


def test_default_configs_give_the_same_bits_in_every_run() -> None:
    entries = tuning._entries("nvidia-h200")
    assert entries
    assert all(Config.from_mapping(entry["config"]).deterministic for entry in entries)
