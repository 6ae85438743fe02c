"""The speed targets: each is met by a made-up run that meets it, and missed by name where that run is broken."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import backends
from backends.registry import BACKENDS
from bench import cases, performance, report, results, tables, targets
from bench.__main__ import app
from tests import made_up
from tests.made_up import RUN, Found, Launched, missed, of, shards, slow, write


@pytest.fixture
def found() -> Found:
    return made_up.found()


@pytest.fixture
def launched() -> Launched:
    return made_up.launched()


def also_in_column_order(found: Found, case: str) -> dict[str, Any]:
    """A second row of pallas-mosaic, in fp16."""
    (row,) = of(found, case, "fp16", "pallas-mosaic")
    found["rows"].append({**row, "id": row["id"].replace("/row/", "/column/"), "order": "column"})
    return found["rows"][-1]


def test_a_run_that_meets_all_targets_passes(found: Found, launched: Launched) -> None:
    lines = targets.judge(found, launched)
    assert missed(found, launched) == set()
    assert targets.met(lines)
    told = {line.target for line in lines if line.status == "told" and not line.is_bound}
    assert told == {"floor / time, decode, less than 15 MB", "call - kernel, inside jax.jit"}
    sizes = [line for line in lines if line.target.startswith("floor") and line.backend == BACKENDS[0]]
    assert sum(line.of for line in sizes) == 80 + 32 + 80, "each case in one line per dtype group"


MIXTRAL, QWEN = "mixtral-8x7b/gate-up/tp2/tokens-{}", "qwen3-30b-a3b/down/tp1/tokens-{}"
Break = Callable[[Found, Launched], None]


def floor(case: str, dtypes: tuple[str, ...], factor: float) -> Break:
    def broken(found: Found, launched: Launched) -> None:
        for dtype in dtypes:
            slow(found, case, dtype, factor)

    return broken


def peers(factor: float, dtypes: tuple[str, ...], case: str | None = None) -> Break:
    def broken(found: Found, launched: Launched) -> None:
        for row in found["rows"]:
            if row["contender"] not in BACKENDS and row["dtype"] in dtypes and case in (None, row["case"]):
                row["kernel_us"] *= factor

    return broken


def call(field: str, value: Any, backend: str = "torch-triton") -> Break:
    def broken(found: Found, launched: Launched) -> None:
        next(line for line in launched if line["backend"] == backend)[field] = value

    return broken


def one_backend(dtype: str) -> Break:
    return lambda found, launched: slow(found, MIXTRAL.format(256), dtype, 1 / 1.06, "jax-triton")


def without(name: str) -> Break:
    def broken(found: Found, launched: Launched) -> None:
        found["rows"] = [row for row in found["rows"] if row["contender"] != name]

    return broken


@pytest.mark.parametrize(
    ("break_it", "target", "dtype"),
    [
        (floor(MIXTRAL.format(8), ("fp16",), 1.03), "floor / time, decode, 200 MB and more", "fp16"),
        (floor(MIXTRAL.format(64), ("bf16",), 1.03), "floor / time, decode, 200 MB and more", "bf16"),
        (floor(MIXTRAL.format(8), targets.FP8, 1.03), "floor / time, decode, 200 MB and more", "FP8"),
        (floor(QWEN.format(4), ("fp16",), 1.08), "floor / time, decode, 50 to 200 MB", "fp16"),
        (floor("deepseek-v3/down/tp8/tokens-1", ("fp16",), 1.22), "floor / time, decode, 15 to 50 MB", "fp16"),
        (floor(QWEN.format(4), targets.FP8, 1.22), "floor / time, decode, 15 to 50 MB", "FP8"),
        (floor(MIXTRAL.format(256), ("fp16",), 1.15), "floor / time, 128 to 512 tokens", "fp16"),
        (floor(MIXTRAL.format(512), targets.FP8, 1.15), "floor / time, 128 to 512 tokens", "FP8"),
        (floor(MIXTRAL.format(8), ("fp16",), 0.94), "fp16 time / FP8 time, decode, 200 MB and more", "FP8"),
        (peers(0.8, ("fp8-w8a8",), MIXTRAL.format(8)), "best peer's time / time, each case", "fp8-w8a8"),
        (peers(0.89, ("fp8-w8a8",)), "best peer's time / time, geometric mean", "fp8-w8a8"),
        (peers(0.89, ("fp8-w8a16",)), "best peer's time / time, geometric mean", "fp8-w8a16"),
        (without("vllm-fused-moe"), "peers that were measured", ""),
        (without("jax-ragged-dot"), "peers that were measured", ""),
        (one_backend("fp16"), "slowest backend / fastest", "fp16"),
        (one_backend("fp8-w8a16"), "slowest backend / fastest", "fp8-w8a16"),
        (call("graph_layer_us", 104.5), "call - kernel, CUDA graph", ""),
        (call("eager_steady_us", 120.5), "call - kernel, torch eager", ""),
        (call("eager_steady_us", None), "call - kernel, torch eager", ""),
        (call("jit_layer_us", None, "jax-triton"), "call - kernel, inside jax.jit", ""),
    ],
)
def test_each_broken_target_is_named_alone(
    found: Found, launched: Launched, break_it: Break, target: str, dtype: str
) -> None:
    break_it(found, launched)
    assert missed(found, launched) == {(target, dtype)}


def test_a_missing_row_is_missed_as_not_measured(found: Found, launched: Launched) -> None:
    case = MIXTRAL.format(8)
    found["rows"] = [row for row in found["rows"] if (row["case"], row["contender"]) != (case, "jax-triton")]
    found["skipped"][f"{case}/bf16/row/jax-triton"] = "jax is not installed"
    lines = [line for line in targets.judge(found, launched) if line.status == "missed"]
    assert all(line.reason.startswith(f"not measured: {case}") for line in lines)
    floors = {(line.dtype, line.backend) for line in lines if line.target.startswith("floor")}
    assert floors == {(dtype, "jax-triton") for dtype in ("fp16", "bf16", "FP8")}
    assert any("jax is not installed" in line.reason for line in lines if line.dtype == "bf16")
    assert {line.target for line in lines} >= {"slowest backend / fastest", "best peer's time / time, each case"}


def test_a_case_that_every_peer_refuses_is_compared_with_none(found: Found, launched: Launched) -> None:
    case = MIXTRAL.format(8)
    found["rows"] = [
        row for row in found["rows"]
        if (row["case"], row["dtype"]) != (case, "fp8-w8a16") or row["contender"] in BACKENDS
    ]  # fmt: skip

    def lines() -> list[targets.Line]:
        judged = targets.judge(found, launched)
        ours = [line for line in judged if line.dtype == "fp8-w8a16" and not line.is_bound]
        return [line for line in ours if line.target.startswith("best peer")]

    assert all(line.reason and line.of == 80 for line in lines()), "nobody said that they refuse"
    for peer in ("vllm-fused-moe", "triton-kernels-matmul", "tokamax-ragged-dot"):
        found["skipped"][f"{case}/fp8-w8a16/own/{peer}"] = f"{peer} has no such kernel"
    assert all(
        line.of == 79 and not line.reason and f"1 more cases, such as {case}" in line.left_out for line in lines()
    )
    assert missed(found, launched) == set()
    found["rows"] = [row for row in found["rows"] if row["contender"] != "vllm-fused-moe"]
    assert all(line.reason and line.of == 80 for line in lines()), "a peer that is not there refuses nothing"


def test_a_wrong_result_in_one_order_is_not_hidden_by_another(found: Found, launched: Launched) -> None:
    case = MIXTRAL.format(128)
    column = also_in_column_order(found, case)
    del column["kernel_us"]
    column["failures"] = {"kernel": "wrong: error 1.0e-01 > 4.2e-04"}
    (line,) = [
        line
        for line in targets.judge(found, launched)
        if line.status == "missed" and line.target.startswith("floor") and line.dtype == "fp16"
    ]
    assert "column order: wrong: error 1.0e-01" in line.reason


def test_the_fastest_order_and_the_faster_fp8_mode_count(found: Found, launched: Launched) -> None:
    case = MIXTRAL.format(64)
    also_in_column_order(found, case)["kernel_us"] *= 1.5
    assert missed(found, launched) == set()
    floor(case, ("fp8-w8a16",), 1.03)(found, launched)
    assert missed(found, launched) == set()


def test_without_any_result_every_target_is_missed() -> None:
    lines = targets.judge(None)
    assert {line.status for line in lines if line.needed != "–" and not line.is_bound} == {"missed"}
    assert all(line.reason.startswith("not measured") for line in lines)


# Files and the command


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["targets", *map(str, arguments)])


def test_two_shards_and_the_launch_file_pass_together(found: Found, launched: Launched, tmp_path: Path) -> None:
    ceilings = {"read_bytes_per_s": 4.6e12}
    first, second = shards(found, tmp_path, date="2026-01-02T03:04:06Z", ceilings=ceilings)
    (tmp_path / "launch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in launched))
    passed = command("--from", first, "--from", second)
    assert passed.exit_code == 0, passed.output
    assert passed.output.strip().endswith("met")

    alone = command("--from", first, "--json")
    content = json.loads(alone.output)
    assert (alone.exit_code, content["met"]) == (1, False)
    assert all("not measured" in line["reason"] for line in content["lines"] if line["status"] == "missed")

    (tmp_path / "launch.jsonl").unlink()
    without_launch = command("--from", first, "--from", second)
    assert without_launch.exit_code == 1
    assert "no launch.jsonl" in without_launch.output
    assert without_launch.output.strip().endswith("missed")


def test_call_costs_are_read_from_either_form_of_line(launched: Launched, tmp_path: Path) -> None:
    """Kernel time in a graph's layer is that layer's own; of a cell measured twice, the last line counts."""
    us = {"kernel": 100.0, "layer_kernel": 90.0, "layer": 93.0, "steady": 119.0}
    lines = [
        {"backend": "torch-triton", "case": "a", "dtype": "fp16", "us": us | {"layer": 200.0}},
        {"backend": "torch-triton", "case": "a", "dtype": "fp16", "us": us},
        {"backend": "jax-triton", "case": "a", "dtype": "fp16", "failed": "RuntimeError: out of memory"},
    ]
    path = tmp_path / "launch-cost.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert targets.launch_file(tmp_path) == path
    calls = [line for line in targets.judge(None, targets.launches(path, None)) if line.target.startswith("call")]
    found = {(line.target.split(", ")[1], line.backend): line for line in calls}
    assert found["CUDA graph", "torch-triton"].worst == pytest.approx(3.0)
    assert found["torch eager", "torch-triton"].worst == pytest.approx(19.0)
    assert "out of memory" in found["inside jax.jit", "jax-triton"].reason
    path.write_text(json.dumps(lines[1] | {"gpu": "NVIDIA H100"}) + "\n")
    with pytest.raises(results.UnusableFile, match="of NVIDIA H100; the kernel times are of NVIDIA H200"):
        targets.launches(path, {"run": RUN})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gpu": "NVIDIA H100"}, "gpu: NVIDIA H200 and NVIDIA H100"),
        ({"versions": {"torch": "1", "triton": "3"}}, "triton: 2 and 3"),
        ({"sources": "def"}, "sources: abc and def"),
        ({"cache": "warm"}, "cache is 'warm'"),
        ({"routing": "zipf-1.2"}, "routing is 'zipf-1.2'"),
        ({"clock": "rehearsal"}, "a rehearsal"),
    ],
)
def test_parts_of_other_runs_are_refused(found: Found, tmp_path: Path, change: dict[str, Any], told: str) -> None:
    found["rows"] = found["rows"][:2]
    first, second = shards(found, tmp_path, **change)
    refused = command("--from", first, "--from", second)
    assert refused.exit_code == 2
    assert told in refused.output


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for option in ("--from", "--launch"):
        refused = command(option, tmp_path / "none.jsonl")
        assert refused.exit_code == 2
        assert "none.jsonl" in refused.output


# The note


def test_each_peer_stands_beside_the_fastest_backend_and_torch_triton(found: Found) -> None:
    """A peer that is the slower by a half in one case and missing in another; torch-triton is the slower in a third."""
    first, second, third = (MIXTRAL.format(tokens) for tokens in (1, 8, 64))
    _, before = performance.each_peer(found)
    slow(found, first, "fp8-w8a8", 1.5, "vllm-fused-moe")
    slow(found, second, "fp8-w8a8", 1.25, "torch-triton")
    missing = (third, "fp8-w8a8", "vllm-fused-moe")
    found["rows"] = [row for row in found["rows"] if (row["case"], row["dtype"], row["contender"]) != missing]
    _, after = performance.each_peer(found)
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new and old[0] == "vllm-fused-moe"]
    ((old, new),) = changed
    assert (new[:2], int(new[2])) == (["vllm-fused-moe", "fp8-w8a8"], int(old[2]) - 1)
    least, _, most = (float(part) for part in new[3].split(", "))
    assert most == pytest.approx(1.5 * least, rel=0.01)
    least, _, most = (float(part) for part in new[4].split(", "))
    assert most == pytest.approx(1.5 * 1.25 * least, rel=0.01)


def test_whole_calls_stand_beside_their_kernels_and_torch_triton(found: Found) -> None:
    """Layers of one backend and batch take 3 us beside their kernel, one of them 50, and no more than that changes."""
    for row in found["rows"]:
        row["gpu_total_us"] = row["kernel_us"] + 1
    _, before = performance.whole_calls(found)
    mine = [row for row in found["rows"] if (row["contender"], row["dtype"]) == ("pallas-mosaic", "fp16")]
    for row in mine:
        if row["case"].endswith("tokens-8"):
            row["gpu_total_us"] = row["kernel_us"] + 3
    first = next(row for row in mine if row["case"] == MIXTRAL.format(8))
    first["gpu_total_us"] = first["kernel_us"] + 50
    headings, after = performance.whole_calls(found)
    ((old, new),) = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert new[:2] == ["pallas-mosaic", "fp16"]
    assert (new[headings.index("8 tokens")], headings[2]) == ("3.0", "1 token")
    assert [old[i] for i in range(2, 12) if i != 5] == [new[i] for i in range(2, 12) if i != 5]
    torchs = next(
        r for r in found["rows"] if (r["case"], r["dtype"], r["contender"]) == (first["case"], "fp16", "torch-triton")
    )
    assert new[-1].endswith(f", {first['gpu_total_us'] / torchs['gpu_total_us']:.2f}")


def test_a_layer_of_a_step_costs_what_its_rounds_say(found: Found, launched: Launched) -> None:
    """The median of the rounds' differences, which is not the difference of the medians; the worst one is named."""
    for line in launched:
        line |= {"layer_kernel_us": 100.0, "layer_overhead_us": 3.5}
    launched += [line | {"case": "b", "layer_overhead_us": 60.0} for line in launched if line["backend"] == BACKENDS[1]]
    lines = {(line.target, line.backend): line for line in targets.judge(found, launched)}
    assert lines["call - kernel, CUDA graph", "torch-triton"].worst == 3.5
    assert lines["call - kernel, torch eager", "torch-triton"].worst == pytest.approx(19.0)
    _, table = performance.targets_table(list(lines.values()))
    (told,) = [line for line in table if line[0] == "call - kernel, inside jax.jit"]
    assert told[-1] == "b fp16"


def test_rows_of_other_tiles_than_calls_take_are_counted(found: Found) -> None:
    case = MIXTRAL.format(8)
    rows = [*of(found, case, "fp8-w8a8"), *of(found, case, "fp16", "pallas-mosaic")]
    by_id = {row.id: row for row in cases.rows("targets")}
    for row in rows:
        problem = by_id[row["id"]].problem
        config = backends.config_for(problem, backend=row["contender"], gpu="NVIDIA H200")
        row |= {"gpu": "NVIDIA H200", "config": dataclasses.asdict(config)}
    assert tables.other_tiles(found) == []
    for row in rows[-2:]:  # the last backend's, in both dtypes
        row["config"] |= {"num_stages": row["config"]["num_stages"] + 1}
    (told,) = tables.other_tiles(found)
    assert told.endswith(": 2 of pallas-mosaic")
    assert told in performance.environment(found)
    for unknown in ("llama-99/down/tp2/tokens-8", "mixtral-8x7b/down/tp4/tokens-8", "mixtral-8x7b/router/tp2/tokens-8"):
        for row in rows:
            row |= {"id": row["id"].replace(row["case"], unknown), "case": unknown}
        assert tables.other_tiles(found) == [], "nothing is known of such a layer"


def test_the_note_shows_results_and_says_where_there_are_none(found: Found, launched: Launched, tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    for name, block in performance.BLOCKS.items():
        assert "ot measured" in block(folder, {}), name
    assert performance.pictures(folder) == {}

    slow(found, MIXTRAL.format(8), "fp16", 1.03, "jax-triton")
    shards(found, folder)
    blocks = {name: block(folder, {}) for name, block in performance.BLOCKS.items()}
    line = next(line for line in blocks["targets"].splitlines() if "200 MB and more | fp16 | >= 0.95" in line)
    assert line.startswith(
        "| floor / time, decode, 200 MB and more | fp16 | >= 0.95 | **0.970** (40 of 40) | 0.942 (39 of"
    )
    assert line.endswith(f"{MIXTRAL.format(8)} |")
    assert blocks["targets-cases"].count("\n") == 81
    assert "97%" in blocks["targets-cases"]
    assert "1.21" in blocks["targets-peers"]
    assert "read ceiling 4.70 TB/s" in blocks["targets-environment"]
    drawn, draw = performance.pictures(folder)[performance.PICTURE]
    assert len(drawn) == 80 + 32 + 80
    path = folder / performance.PICTURE
    path.write_text(draw())
    assert path.read_text().count(">0.97<") == len(drawn)
    slow(found, MIXTRAL.format(8), "fp16", 1.5)
    shards(found, folder, date="2026-01-02T03:04:06Z")
    changed, _ = performance.pictures(folder)[performance.PICTURE]
    assert report.picture.shows(path, drawn)
    assert not report.picture.shows(path, changed)


def test_a_step_is_told_from_the_files_that_it_names(found: Found, tmp_path: Path) -> None:
    case = MIXTRAL.format(8)
    write(tmp_path / "before.jsonl", found)
    slow(found, case, "fp16", 0.5)
    write(tmp_path / "after.jsonl", found)
    name = f"{case}/fp16/row/torch-triton"
    measured = {"id": name, "field": "kernel_us", "before": "before.jsonl", "after": "after.jsonl"}
    step = {
        "step": "a",
        "predicted": "0.5 times",
        "measured": measured,
        "source file": "after.jsonl",
        "verdict": "held",
    }
    path = tmp_path / performance.STEPS
    path.write_text(json.dumps({"steps": [step, step | {"measured": "nothing"}]}))
    told = tables.markdown(performance.steps_table(path))
    assert f"(0.500 times), kernel_us of {name}" in told
    assert "| nothing | `after.jsonl` | held |" in told
    for wrong, message in (
        ({"source file": "gone.jsonl"}, "gone.jsonl is not beside it"),
        ({"unknown": 1}, "allowed: step, predicted"),
        ({"measured": measured | {"id": "x"}}, "has no kernel_us of x"),
        ({"measured": 3}, "not of the form"),
    ):
        path.write_text(json.dumps({"steps": [step | wrong]}))
        with pytest.raises(results.UnusableFile, match=message):
            performance.steps_table(path)


def test_what_is_read_off_compiled_kernels() -> None:
    from backends.compiled import Compiled
    from bench import disassembly

    ptx = """
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1}, %rd1, %rd2;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f2};
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1, {%r5,%r5}], [%r1];
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r5,%r5}], [%r1];
    cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
    cvt.rn.f16x2.e4m3x2 %r1, %rs1;
    bar.sync 0;
    bar.sync 1, 128;
    bar.warp.sync -1;
    """
    read = disassembly.read(Compiled(ptx=ptx, sass=None, registers=40, spills=0, shared_bytes=2048))
    assert list(read["instructions"].values()) == [2, 1, 1, 1, 1]
    assert read["shapes"] == {"m16n8k16": 1, "m64n8k16": 1}
    row = {"case": "c", "dtype": "fp16", "backend": "b", "config": "16x64x64", **read}
    headings, (line,) = disassembly.table([row])
    assert len(headings) == len(line)
    assert line[4:7] == ["40", "0", "2"]
