"""Result files: what may be merged and what may not, and what a file that cannot be used says."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import results, tables
from shared.config import Config

CASE = "mixtral-8x7b/gate-up/tp2/tokens-8"
RUN: dict[str, Any] = {
    "kind": "run", "gpu": "NVIDIA H200", "clock": "cupti", "cache": "cold", "routing": "uniform", "seed": 0,
    "rounds": 30, "date": "2026-01-02T03:04:05Z",
    "versions": {"torch": "1", "triton": "2", "jax": "3", "jax-triton": "4"},
    "ceilings": {"read_bytes_per_s": 4.5e12, "bf16_flops": 7.9e14},
}  # fmt: skip
LATER = RUN | {"date": "2026-01-03T00:00:00Z", "rounds": 15}
CONFIG = {"block_m": 16, "block_n": 64, "block_k": 64}


def row(contender: str, **times: Any) -> dict[str, Any]:
    return {
        "kind": "time", "id": f"{CASE}/fp16/column/{contender}", "case": CASE, "dtype": "fp16", "order": "column",
        "scale_layout": None, "contender": contender, "config": CONFIG, "floor_us": 150.0, **times,
    }  # fmt: skip


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder of committed results, with one file: h200/first.json."""
    run = write(
        tmp_path / "a.jsonl",
        RUN,
        row("torch-triton", kernel_us=160.0, call_us=200.0),
        row("jax-triton", kernel_us=170.0),
    )
    results.add(run, results=tmp_path / "kept", name="first")
    return tmp_path / "kept"


def test_a_further_run_updates_its_rows_and_leaves_the_others(kept: Path, tmp_path: Path) -> None:
    run = write(
        tmp_path / "b.jsonl", LATER, row("torch-triton", kernel_us=150.0), row("pallas-triton", kernel_us=155.0)
    )
    added = results.add(run, results=kept, into="first")
    found = {r["contender"]: r for r in results.load(added.path)["rows"]}
    assert found["torch-triton"]["kernel_us"] == 150.0
    assert found["torch-triton"]["call_us"] == 200.0, "same config: what was not measured again stays"
    assert found["jax-triton"]["kernel_us"] == 170.0
    assert found["pallas-triton"]["kernel_us"] == 155.0
    assert (len(added.new), len(added.updated), added.replaced) == (1, 1, [])
    environment = tables.environment(results.load(added.path)["run"])
    assert "2026-01-02 and 2026-01-03" in environment
    assert "median of 30 and 15" in environment

    once = added.path.read_text()
    results.add(run, results=kept, into="first.json")
    assert added.path.read_text() == once, "the same run twice changes nothing"


@pytest.mark.parametrize("change", [{"config": CONFIG | {"block_n": 128}}, {"sources": "b"}])
def test_times_of_another_kernel_do_not_stay_in_its_row(kept: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    first = write(tmp_path / "a.jsonl", LATER, row("torch-triton", kernel_us=160.0, call_us=200.0, sources="a"))
    results.add(first, results=kept, into="first")
    added = results.add(
        write(tmp_path / "b.jsonl", LATER, row("torch-triton", kernel_us=1.0) | change), results=kept, into="first"
    )
    found = {r["contender"]: r for r in results.load(added.path)["rows"]}
    assert "call_us" not in found["torch-triton"]
    assert len(added.replaced) == 1
    assert "their earlier times are left out" in str(added)


def test_a_changed_kernel_and_a_changed_harness_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two digests, so that a harness that changed does not make times look like another kernel's."""
    for folder in ("backends", "shared", "bench"):
        shutil.copytree(
            results.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "results")
        )
    monkeypatch.setattr(results, "ROOT", tmp_path)
    digests = results.sources.__wrapped__, results.harness.__wrapped__

    def changed(name: str) -> list[bool]:
        before = [digest() for digest in digests]
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        return [digest() != old for digest, old in zip(digests, before, strict=True)]

    assert changed("backends/triton_kernel.py") == [True, False]
    assert changed("shared/config.py") == [True, False]
    for name in ("reads", "read_kernel", "measure", "cold", "clock", "pairs"):
        assert changed(f"bench/{name}.py") == [False, True], name
    assert changed("bench/tables.py") == [False, False]


def test_a_file_from_before_the_harness_had_a_digest_differs_in_nothing() -> None:
    old, new = {"sources": "a"}, {"sources": "a", "harness": "b"}
    assert results.differences(old, new, results.RESUMED) == []
    assert results.differences(new | {"harness": "c"}, new, results.RESUMED) == ["harness: c and b"]


def test_a_kernel_time_keeps_the_harness_of_its_own_run(kept: Path, tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", LATER, row("torch-triton", kernel_us=160.0, harness="a"))
    results.add(first, results=kept, into="first")
    second = write(tmp_path / "b.jsonl", LATER, row("torch-triton", call_us=200.0, harness="b"))
    found = {r["contender"]: r for r in results.load(results.add(second, results=kept, into="first").path)["rows"]}
    assert found["torch-triton"]["harness"] == "a"
    assert (found["torch-triton"]["kernel_us"], found["torch-triton"]["call_us"]) == (160.0, 200.0)


def test_a_field_that_came_later_is_not_another_config() -> None:
    old, new = row("torch-triton"), row("torch-triton") | {"config": CONFIG | {"num_warps": 4}}
    assert not results.of_another_kernel(old, new)
    with pytest.raises(results.UnusableFile, match="split_z"):
        results.config_of(row("torch-triton") | {"config": {"split_z": 2}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gpu": "NVIDIA H100"}, "kept: none"),
        ({"clock": "jax-cupti"}, "clock: cupti and jax-cupti"),
        ({"cache": "warm"}, "cache: cold and warm"),
        ({"routing": "zipf-1.2"}, "routing: uniform and zipf-1.2"),
        ({"seed": 1}, "seed: 0 and 1"),
        ({"versions": {**RUN["versions"], "torch": "9"}}, "torch: 1 and 9"),
        ({"versions": {**RUN["versions"], "numpy": "9"}}, "numpy: None and 9"),
    ],
)
def test_runs_that_differ_are_not_merged(kept: Path, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    run = write(tmp_path / "b.jsonl", LATER | change, row("torch-triton", kernel_us=150.0))
    before = (kept / "h200" / "first.json").read_text()
    with pytest.raises(results.UnusableFile, match=named):
        results.add(run, results=kept, into="first")
    assert (kept / "h200" / "first.json").read_text() == before
    if "gpu" not in change:
        with pytest.raises(ValueError, match=named):
            tables.merged([results.load(run), results.load(kept / "h200" / "first.json")])


def test_an_unknown_file_to_merge_into(kept: Path, tmp_path: Path) -> None:
    run = write(tmp_path / "b.jsonl", LATER, row("torch-triton", kernel_us=150.0))
    with pytest.raises(results.UnusableFile, match=r"into: got 'frist'.*kept: first"):
        results.add(run, results=kept, into="frist")


def test_merging_keeps_what_was_not_measured_until_it_is() -> None:
    skip = {"kind": "skipped", "id": row("jax-triton")["id"], "reason": "not installed"}
    old = results.compact([RUN, row("torch-triton", kernel_us=1.0), skip])
    untouched = copy.deepcopy(old)
    assert results.combined(old, results.compact([LATER, row("torch-triton", kernel_us=2.0)]))["skipped"]
    assert not results.combined(old, results.compact([LATER, row("jax-triton", kernel_us=2.0)]))["skipped"]
    assert old == untouched


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none.jsonl", None, "No such file"),
        ("a.jsonl", '{"kind": "run"\n{"kind": "time"}\n', "line 1 is not JSON"),
        ("a.jsonl", '{"gpu": "x"}\n', "no 'kind'"),
        ("a.jsonl", "[1, 2]\n", "no 'kind'"),
        ("a.jsonl", "", "does not say where its run was made"),
        ("a.json", "{", "not JSON"),
        ("a.json", '{"benchmarks": []}', "does not say where its run was made"),
        ("a.json", "[]", "does not say where its run was made"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(results.UnusableFile, match=says) as error:
        results.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("status", "left"), [("wrong", {}), ("failed", {"call_us": 200.0})], ids=["wrong", "failed"])
def test_a_failure_in_a_later_run_takes_the_earlier_time(status: str, left: dict[str, float]) -> None:
    failure = row("torch-triton") | {"kind": "failed", "test": "kernel", "status": status, "reason": "so"}
    (found,) = results.compact([RUN, row("torch-triton", kernel_us=1.0, call_us=200.0), LATER, failure])["rows"]
    assert {key: found[key] for key in results.TIMES if key in found} == left
    assert found["failures"] == {"kernel": f"{status}: so"}
    (found,) = results.compact([RUN, failure, LATER, row("torch-triton", kernel_us=2.0)])["rows"]
    assert found["kernel_us"] == 2.0
    assert "failures" not in found


def test_a_kernel_time_keeps_the_floor_of_its_own_run(kept: Path, tmp_path: Path) -> None:
    """A later run that measured calls alone had another read ceiling, and so another floor."""
    first = write(tmp_path / "a.jsonl", LATER, row("torch-triton", kernel_us=160.0, floor_us=100.0))
    results.add(first, results=kept, into="first")
    second = write(tmp_path / "b.jsonl", LATER, row("torch-triton", call_us=300.0, floor_us=110.0))
    added = results.add(second, results=kept, into="first")
    found = {r["contender"]: r for r in results.load(added.path)["rows"]}["torch-triton"]
    assert (found["kernel_us"], found["call_us"], found["floor_us"]) == (160.0, 300.0, 100.0)
    third = write(tmp_path / "c.jsonl", LATER, row("torch-triton", kernel_us=170.0, floor_us=120.0))
    added = results.add(third, results=kept, into="first")
    found = {r["contender"]: r for r in results.load(added.path)["rows"]}["torch-triton"]
    assert (found["kernel_us"], found["floor_us"]) == (170.0, 120.0)


def test_a_reason_that_many_rows_share_is_told_once() -> None:
    found = {"skipped": {"a": "not installed", "b": "other", "c": "not installed"}}
    assert tables.skipped(found) == ["not measured: a and 1 more: not installed", "not measured: b: other"]


def test_configs_in_force_are_listed_with_where_they_come_from() -> None:
    ours = {
        "id": "x/torch-triton",
        "contender": "torch-triton",
        "config": dataclasses.asdict(Config()),
        "about": "nearest: y",
    }
    theirs = {"id": "x/vllm", "contender": "vllm-fused-moe", "config": None, "about": "its file z"}
    found = {"rows": [ours, theirs]}
    assert tables.configs(found)[1] == [["x/torch-triton", str(Config()), "nearest: y"]]
    assert tables.peers_told(found) == ["x/vllm: its file z"]


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b'{"a": 1}\n{"b": 2', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b": 2}', b'{"a": 1}\n{"b": 2}\n'),  # whole but for its end
        (b'{"a"', b""),
        (b'{"a": 1}\n', b'{"a": 1}\n'),
        (b"", b""),
    ],
)
def test_a_file_of_a_killed_run_ends_at_a_line(content: bytes, left: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    results.end_at_a_line(path)
    assert path.read_bytes() == left


@pytest.mark.parametrize("content", [b"notes", b"notes\nmore", b"[1, 2]\n[3", b'{"a": 1}\nnotes', b"# a\n{"])
def test_a_file_of_something_else_is_left_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(results.UnusableFile, match="left as it is"):
        results.end_at_a_line(path)
    with pytest.raises(results.UnusableFile, match="left as it is"):
        results.Journal(path)
    assert path.read_bytes() == content
