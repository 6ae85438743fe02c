"""The benchmark suite from end to end, rehearsed on the CPU with the interpreters and a stand-in for the GPU clock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import results

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


def pytest_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "bench", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)


def test_rehearsal_fills_every_field(tmp_path: Path) -> None:
    run, report = tmp_path / "run.jsonl", tmp_path / "benchmark.json"
    select = "fp16 and (torch-triton or pallas-triton or cublas or ragged) or scaled or published"
    found = pytest_bench(
        "--rehearse", "--rounds=2", f"--results={run}", f"--benchmark-json={report}", "-k", select,
        "--benchmark-group-by=group,param:dtype",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "fp16/column/torch-triton kernel" in found.stdout  # progress

    compact = results.compact(results.read(run))
    row = next(row for row in compact["rows"] if row["id"] == "tiny/gate-up/tp1/tokens-4/fp16/column/torch-triton")
    for field in results.TIMES:
        assert row[field] > 0, field
    assert row["gpu_total_us"] >= row["kernel_us"]
    assert 0 < row["error"] <= row["error_bound"]
    assert len(row["samples_us"]) == 2
    assert compact["run"]["clock"] == "rehearsal"
    assert {pair["b"] for pair in compact["pairs"]} == {"row", "popular"}
    assert compact["published"][0]["written_by_row"] == 1
    assert 0 < compact["published"][0]["written"] < 1

    saved = json.loads(report.read_text())["benchmarks"]
    kernel = next(b for b in saved if b["name"].startswith("test_kernel_time[") and "/column/torch-triton" in b["name"])
    assert kernel["group"] == "tiny/gate-up/tp1/tokens-4 kernel time, eager (rehearsal clock)"
    assert kernel["options"]["timer"] == "gpu_kernel_seconds"
    assert kernel["stats"]["median"] * 1e6 == pytest.approx(row["kernel_us"], abs=1e-3)
    expected = {
        "read_bytes", "tb_per_s", "share_of_read_ceiling", "floor_us", "error", "error_bound", "quantisation_error",
        "active_experts", "tile_rows", "config", "order", "dtype", "contender", "kernels", "gpu_total_us", "versions",
        "gpu", "state_before", "state_after", "cache", "clock", "samples",
    }  # fmt: skip
    assert expected <= set(kernel["extra_info"])
    with pytest.raises(ValueError, match="rehearsal"):
        results.add(run, results=tmp_path)


def test_wrong_result_has_no_time(tmp_path: Path) -> None:
    plugin = tmp_path / "wrong_plugin.py"
    plugin.write_text(
        "from backends import torch_triton\n"
        "right = torch_triton.moe_gemm\n"
        "def wrong(*arguments, **options):\n"
        "    y = right(*arguments, **options)\n"
        "    y[0, 0, 0] += 10\n"
        "    return y\n"
        "torch_triton.moe_gemm = wrong\n"
    )
    run, report = tmp_path / "run.jsonl", tmp_path / "benchmark.json"
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-p", "wrong_plugin", "--rehearse", "--rounds=1"]
    command += [f"--results={run}", f"--benchmark-json={report}", "-k", "fp16 and torch-triton and not pairs"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 1
    assert "is above its bound" in found.stdout
    lines = results.read(run)
    assert {line["kind"] for line in lines[1:]} == {"failed"}
    assert {line["test"] for line in lines[1:]} == {"kernel", "kernel captured", "call", "call captured"}
    assert {line["status"] for line in lines[1:]} == {"wrong"}
    assert not report.exists()


def test_run_cut_short_keeps_what_it_measured(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    command = [
        sys.executable,
        "-m",
        "bench",
        "compare",
        "--rehearse",
        "--rounds=2",
        "-k",
        "fp16 and not mosaic",
        f"--results={run}",
    ]
    child = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (run.exists() and run.read_text().count('"kind": "time"') >= 3):
        time.sleep(0.2)
    os.killpg(child.pid, signal.SIGINT)  # as Ctrl-C in a terminal: to the whole process group
    output, _ = child.communicate(timeout=120)
    assert len([line for line in results.read(run) if line["kind"] == "time"]) >= 3
    assert "Kernel time, µs" in output
    assert f"python -m bench compare --resume {run}" in output
    assert child.returncode != 0


def test_cut_off_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "run", "gpu": "a"}\n{"kind": "time", "id": "b", "kern')
    assert results.read(path) == [{"kind": "run", "gpu": "a"}]


def test_without_a_gpu_every_benchmark_is_skipped_with_a_reason() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = pytest_bench("-rs", "-k", "mixtral and tokens-8 and fp16")
    assert found.returncode == 0
    assert "no NVIDIA GPU" in found.stdout
    assert "pytest bench --rehearse" in found.stdout
