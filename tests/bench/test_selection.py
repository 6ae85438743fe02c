"""-k means the same in every verb of `python -m bench`, and a selection of nothing is an error before a run begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression
from typer.testing import CliRunner

from bench import launch_cost, locality, machine, selection, tile_reads, tune, variants
from bench.__main__ import app
from bench.cases import SETS, cases, rows
from bench.sanitize import matrix, sanitizer
from shared.checks import ArgumentError

IDS = ("mixtral/fp16/torch-triton", "mixtral/fp8-w8a8/jax-triton", "qwen3/fp16/pallas-mosaic", "qwen3/bf16/jax-triton")
EXPRESSIONS = (
    "fp16", "FP16", "jax-triton or pallas", "mixtral and not fp16", "not (mixtral or bf16)", "not not qwen3/fp16/",
    "fp16 or mixtral and jax", "nothing or qwen3", "nothing", "word0 or word1", "True", "None or bf16", "not\tfp16",
)  # fmt: skip
MEASURING = ("launch", "tile-reads", "variants", "locality", "compare", "sanitize")


@pytest.mark.parametrize("keyword", EXPRESSIONS)
def test_an_expression_selects_what_it_selects_in_pytest(keyword: str) -> None:
    in_pytest = Expression.compile(keyword)

    def selects(name: str) -> bool:
        return in_pytest.evaluate(lambda word, /, **_: word.lower() in name.lower())

    assert [*map(selection.matcher(keyword), IDS)] == [*map(selects, IDS)]


def test_no_keyword_selects_everything() -> None:
    assert selection.select(IDS, " ", str) == list(IDS)


@pytest.mark.parametrize("keyword", ["fp16 jax", "and", "fp16 and", "(fp16", "fp16)", "()", "fp16 (jax)", "a,b", "a=1"])
def test_what_is_no_expression_is_refused_as_in_pytest(keyword: str) -> None:
    with pytest.raises(ArgumentError, match=r"^-k: got .*; allowed: words with and, or, not and parentheses$"):
        selection.matcher(keyword)
    with pytest.raises(Exception):  # noqa: B017, PT011 - its class differs between pytest's versions
        Expression.compile(keyword)


def test_the_refusal_shows_ids_from_all_over() -> None:
    many = [f"id-{i}" for i in range(90)]
    with pytest.raises(ArgumentError) as refused:
        selection.select(many, "fp16x", str)
    assert str(refused.value) == "-k: got 'fp16x', which selects none of 90; ids are such as id-0, id-30, id-60"
    for few in (1, 2, 4):
        assert 1 <= str(selection.nothing("-k", "x", many[:few])).count("id-") <= selection.SHOWN
    assert str(selection.nothing("-k", "x", [])) == "-k: got 'x', but there is nothing"


def test_every_id_can_be_given_to_k() -> None:
    found = [cell.id for cell in (*launch_cost.cells(), *locality.cells())]
    found += [tile_reads._id(row) for row in tile_reads.cells()]
    found += map(variants._id, variants._each("column", tuple(variants.VARIANTS), rehearse=False))
    found += [v.id for v in matrix.selected(["memcheck"], ["torch-triton"], "")["memcheck"]]
    found += [row.id for which in SETS for row in rows(which, (1, 1))]
    assert [name for name in found if not selection._WORD.fullmatch(name)] == []


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU seems to be there, and whoever turns to it fails."""

    def touched(*_: Any, **__: Any) -> Any:
        raise AssertionError("a run was begun")

    monkeypatch.setattr(machine, "smi", lambda fields: {"name": "NVIDIA H200"})
    monkeypatch.setattr(machine, "Machine", touched)
    monkeypatch.setattr(tune, "has_gpu", lambda: True)
    monkeypatch.setattr(sanitizer, "executable", touched)
    monkeypatch.setattr("bench.__main__._run", touched)


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize("verb", [verb for verb in MEASURING if verb != "compare"])
def test_what_selects_nothing_is_refused_before_a_run(verb: str) -> None:
    refused = CliRunner().invoke(app, [verb, "-k", "jax-tritn or palas"])
    assert refused.exit_code == 2, refused.exception
    assert "-k: got 'jax-tritn or palas', which selects none of " in refused.stderr
    shown = refused.stderr.split("ids are such as ")[1].split(", ")
    assert 1 < len(shown) <= selection.SHOWN
    assert all("/fp" in name or "/bf16" in name for name in shown)
    assert refused.stdout == ""


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize("verb", MEASURING)
def test_what_is_no_expression_is_refused_before_a_run(verb: str) -> None:
    refused = CliRunner().invoke(app, [verb, "-k", "fp16 and"])
    assert refused.exit_code == 2, refused.exception
    assert "-k: got 'fp16 and'; allowed: words with" in refused.stderr


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize("verb", [verb for verb in MEASURING if verb != "compare"])
def test_what_selects_something_goes_on_to_the_run(verb: str) -> None:
    """The fixture catches it there: what the tests above refuse is refused for its selection alone."""
    begun = CliRunner().invoke(app, [verb, "-k", "torch-triton and fp16 or column and fp16 or tokens-8/fp16 or tma"])
    assert str(begun.exception) == "a run was begun"


@pytest.mark.usefixtures("no_run")
def test_tune_refuses_texts_that_no_row_contains(tmp_path: Path) -> None:
    command = ["tune", "--out", str(tmp_path / "tune.jsonl")]
    refused = CliRunner().invoke(app, [*command, "--only", "mixtral and fp16", "--only", "gate_up"])
    assert refused.exit_code == 2, refused.exception
    assert "--only: got ['mixtral and fp16', 'gate_up'], which selects none of " in refused.stderr
    assert "/row/torch-triton" in refused.stderr
    begun = CliRunner().invoke(app, [*command, "--only", "nothing", "--only", "gate-up"])
    assert str(begun.exception) == "a run was begun"


def test_a_shard_without_the_models_is_refused() -> None:
    shards = [(i, 4) for i in range(1, 5)]
    without = next(s for s in shards if all(case.model.name != "mixtral-8x7b" for case in cases("targets", s)))
    with pytest.raises(ArgumentError, match=r"--model: got \['mixtral-8x7b'\], which selects none of"):
        tune.jobs(["torch-triton"], ["fp16"], [""], models=["mixtral-8x7b"], shard=without)


def test_compare_refuses_what_selects_nothing(tmp_path: Path) -> None:
    """By the suite's own pytest, which knows the names of its tests."""
    from tests.bench.test_commands import bench

    path = tmp_path / "run.jsonl"
    refused = bench("compare", "--rehearse", "-k", "fp16 and palas", "--results", str(path))
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "-k: got 'fp16 and palas', which selects none of" in refused.stderr
    assert "ids are such as tiny/gate-up/tp1/tokens-4/" in refused.stderr
    assert not path.exists()


def test_k_selects_among_the_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / launch_cost.FILE
    versions = dict.fromkeys(("torch", "triton", "jax", "jax-triton"), "1")
    facts = {"case": "c", "dtype": "fp16", "gpu": "g", "date": "2026-01-02", "versions": versions, "us": {}}
    lines = [json.dumps(facts | {"id": f"c/fp16/{name}", "backend": name}) for name in ("torch-triton", "jax-triton")]
    path.write_text("\n".join(lines) + "\n")
    printed = CliRunner().invoke(app, ["launch", "--from", str(path), "--json", "-k", "not torch"])
    assert [row["backend"] for row in json.loads(printed.stdout)] == ["jax-triton"]
    refused = CliRunner().invoke(app, ["launch", "--from", str(path), "-k", "pallas"])
    assert refused.exit_code == 2
    assert "-k: got 'pallas', which selects none of 2; ids are such as c/fp16/torch-triton" in refused.stderr


def test_compare_refuses_a_selection_of_nothing_without_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the correctness matrix begins, which takes minutes and would hide the typo."""
    monkeypatch.setattr("bench.__main__.has_gpu", lambda: False)
    monkeypatch.setattr("bench.__main__._compare_without_gpu", lambda *_: pytest.fail("the matrix began"))
    refused = CliRunner().invoke(app, ["compare", "-k", "mixtrl"])
    assert refused.exit_code == 2
    assert "-k: got 'mixtrl', which selects none of" in refused.output
