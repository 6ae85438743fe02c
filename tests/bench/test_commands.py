"""`python -m bench`: order, doctor, report, and what compare does without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import doctor, picture, report, results, tables, walk
from bench.published import counted_coverage
from shared import orders
from shared.checks import ArgumentError

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("order", orders.ORDERS)
def test_order_prints_the_specification_as_json(order: str) -> None:
    size = ["--tile-rows", "5", "--tile-cols", "7", "--group-m", "2"]
    if order == "popular":
        size += ["--expert-rows", "3,2"]
    found = json.loads(bench("order", *size, "--order", order, "--json").stdout)
    assert found == [list(tile) for tile in orders.walk(order, 5, 7, 2, [3, 2] if order == "popular" else None)]


def test_order_pictures() -> None:
    assert walk.picture(walk.walk("column", 2, 3, 8), 2, 3).splitlines() == [
        "       0  1  2   (tile column)",
        "row 0  0  2  4",
        "row 1  1  3  5",
    ]
    skipping = walk.picture(walk.walk("published-2024", 2, 4, 8), 2, 4)
    assert "4 of 8 tiles are never visited (dots); 4 programs land outside of the grid" in skipping


def test_order_refuses_what_it_does_not_know() -> None:
    found = bench("order", "--tile-rows", "2", "--tile-cols", "2", "--order", "colum")
    assert found.returncode == 2
    assert "did you mean 'column'?" in found.stderr
    assert "Traceback" not in found.stderr
    with pytest.raises(ArgumentError, match="tile-rows: got 0"):
        walk.walk("row", 0, 2, 1)
    with pytest.raises(ArgumentError, match="expert-rows: got None with order popular; allowed: numbers that add up"):
        walk.walk("popular", 2, 2, 1)
    with pytest.raises(ArgumentError, match=r"expert-rows: got \[2\] with order row; allowed: none"):
        walk.walk("row", 2, 2, 1, [2])
    with pytest.raises(ArgumentError, match="expert-rows: got 'a'"):
        walk.numbers("expert-rows", "a")


def test_order_is_instant() -> None:
    code = "import sys, bench.__main__, bench.walk; print([m for m in ('torch', 'jax', 'triton') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "[]"


def test_doctor_answers_for_every_backend() -> None:
    found = json.loads(bench("doctor", "--json").stdout)
    assert set(found["backends"]) == {"torch-triton", "jax-triton", "pallas-triton", "pallas-mosaic"}
    for ways in found["backends"].values():
        assert set(ways) == {"gpu", "interpreter", "compile-only"}
        assert ways["interpreter"] is None
    assert found["versions"]["numpy"]
    if found["gpu"]["name"] is None:
        assert all(ways["gpu"] for ways in found["backends"].values())
        assert "timings need one" in doctor.text(found)


def test_counters_that_only_root_may_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parameters = tmp_path / "params"
    parameters.write_text("RmProfilingAdminOnly: 1\n")
    monkeypatch.setattr(doctor, "DRIVER_PARAMETERS", parameters)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    assert doctor.counters()["permitted"] is False
    assert "NVreg_RestrictProfilingToAdminUsers=0" in doctor.counters()["reason"]
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    assert doctor.counters() == {"permitted": True, "reason": None}


def test_published_coverage_by_counting() -> None:
    assert counted_coverage(2)["coverage"] == pytest.approx(0.0179, abs=5e-5)


RUN = {
    "kind": "run",
    "gpu": "NVIDIA H200",
    "clock": "cupti",
    "cache": "cold",
    "rounds": 30,
    "date": "2026-01-02T03:04:05Z",
    "versions": {"torch": "1", "triton": "2", "jax": "3", "jax-triton": "4"},
    "ceilings": {"read_bytes_per_s": 4.5e12, "bf16_flops": 7.9e14},
}


def time_line(contender: str, kernel_us: float, dtype: str = "fp16", order: str = "column") -> dict[str, object]:
    case = "mixtral-8x7b/gate-up/tp2/tokens-8"
    return {
        "kind": "time", "id": f"{case}/{dtype}/{order}/{contender}", "case": case, "dtype": dtype, "order": order,
        "scale_layout": None, "contender": contender, "kernel_us": kernel_us, "floor_us": 150.0, "read_bytes": 7e8,
        "share_of_read_ceiling": 150 / kernel_us, "times_floor": kernel_us / 150,
    }  # fmt: skip


def pair_line(verdict: str = "no difference") -> dict[str, object]:
    return {
        "kind": "pair", "id": "p", "case": "mixtral-8x7b/gate-up/tp2/tokens-8", "dtype": "fp16", "scale_layout": None,
        "contender": "torch-triton", "a": "column", "b": "row", "ratio": 1.2, "low": 1.1, "high": 1.3,
        "verdict": verdict,
    }  # fmt: skip


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    lines = [
        RUN, time_line("torch-triton", 160.0), time_line("pallas-mosaic", 155.0),
        time_line("torch-grouped-mm", 300.0, dtype="bf16", order="own"), pair_line(),
    ]  # fmt: skip
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_table_holds_best_peer_and_order_effect(run_file: Path) -> None:
    headings, lines = tables.kernel_times(results.compact(results.read(run_file)))
    assert dict(zip(headings, lines[0], strict=True)) == {
        "case": "mixtral-8x7b/gate-up/tp2/tokens-8",
        "dtype": "fp16",
        "floor µs": "150.0",
        "torch-triton": "160.0",
        "jax-triton": "–",
        "pallas-triton": "–",
        "pallas-mosaic": "**155.0**",
        "best peer": "300.0 (torch-grouped-mm)",
        "floor ÷ best": "97%",
        "row ÷ column, torch-triton": "no difference",
    }
    assert len(lines) == 1


def test_an_order_effect_of_another_tile_is_not_shown(run_file: Path) -> None:
    found = results.compact(results.read(run_file))
    row = next(row for row in found["rows"] if row["contender"] == "torch-triton")
    (pair,) = found["pairs"]
    row["config"], pair["config"] = ({"block_m": rows} for rows in (16, 16))
    headings, lines = tables.kernel_times(found)
    assert lines[0][headings.index("row ÷ column, torch-triton")] == "no difference"
    row["sources"] = "abc"
    headings, lines = tables.kernel_times(found)
    assert lines[0][headings.index("row ÷ column, torch-triton")] == "no difference ‡"
    row["config"] = {"block_m": 32}
    headings, lines = tables.kernel_times(found)
    assert lines[0][headings.index("row ÷ column, torch-triton")] == "–"


def test_findings_are_computed_from_the_results(run_file: Path) -> None:
    found = results.compact(results.read(run_file))
    text = tables.findings(found)
    assert "Order, torch-triton" in text
    assert "1.20 to 1.20 of column order's time up to 64 tokens (1 cases)" in text
    assert "row order is faster in 0, column order in 0, no difference in 1" in text
    assert "Framework" not in text, "a case without all backends says nothing about frameworks"
    assert "1.94 to 1.94 times" in text, "300 us of the peer over 155 us of the best backend"
    found["pairs"][0]["ratio"] = 1.31
    assert "1.31 to 1.31" in tables.findings(found)


def test_report_writes_and_checks(run_file: Path, tmp_path: Path) -> None:
    folder, readme = tmp_path / "results", tmp_path / "README.md"
    kept = results.add(run_file, results=folder, name="first").path
    assert kept == folder / "h200" / "first.json"
    readme.write_text("# A\n<!-- generated: kernel-times -->\nold\n<!-- end generated -->\ntail\n")

    def rewrite(*, check: bool) -> list[str]:
        return report.rewrite(check=check, documents=[readme], folder=folder)

    assert len(rewrite(check=True)) == 2
    assert "old" in readme.read_text()
    assert len(rewrite(check=False)) == 2
    assert "**155.0**" in readme.read_text()
    assert readme.read_text().endswith("<!-- end generated -->\ntail\n")
    assert rewrite(check=True) == []

    content = json.loads(kept.read_text())
    content["rows"][0]["kernel_us"], content["rows"][0]["times_floor"] = 140.0, 140 / 150
    kept.write_text(results.dump(content))
    assert len(rewrite(check=True)) == 2


def test_pictures_are_the_same_each_time(run_file: Path) -> None:
    drawn = picture.points(results.compact(results.read(run_file)))
    assert [point[2] for point in drawn] == ["torch-triton", "pallas-mosaic", "torch-grouped-mm"]
    assert picture.draw(drawn, "title") == picture.draw(drawn, "title")


def test_report_refuses_an_unknown_block(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- generated: kernel-tims -->\n<!-- end generated -->\n")
    with pytest.raises(ValueError, match="known: kernel-times"):
        report.rewrite(check=True, documents=[readme], folder=tmp_path)


def test_readme_agrees_with_the_committed_results() -> None:
    assert report.rewrite(check=True) == [], "run `make report`"
