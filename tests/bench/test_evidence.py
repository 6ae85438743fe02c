"""Counters, the locality verdict and the article: what is read, how it is judged, and that it can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backends.registry import BACKENDS
from bench import article, counters, locality, results, verdict
from bench.cache_points import article_points, groups, other_points
from bench.cases import _TINY, Case
from bench.points import Point
from shared.checks import ArgumentError
from shared.config import Config

SAVED = Path(__file__).parent / "data" / "ncu-2025.3-raw.csv"
"""Three launches of ncu 2025.3 (--csv --page raw --print-units base) on one NVIDIA H200: the article's example."""


def saved() -> str:
    return SAVED.read_text(encoding="utf-8")


# Counters


def test_real_output_of_ncu_is_read() -> None:
    row, column, published = counters.parse(saved())
    assert row["kernel"] == "moe_gemm_kernel"
    assert (row["dram_read_bytes"], row["l2_hit_percent"], row["grid"]) == (469795072.0, 2.53, 1792.0)
    assert row["duration_us"] == pytest.approx(146.88)
    assert column["dram_read_bytes"] == 469810176.0
    assert published["dram_read_bytes"] < 0.02 * row["dram_read_bytes"]
    assert all(launch[name] is not None for launch in (row, column, published) for name in counters.METRICS)


def test_counters_stand_beside_the_bytes_that_had_to_be_read() -> None:
    points = article_points()[:3]
    facts = [{"launches": 1, "tile_rows": 4}] * 3
    rows = counters.join(points, facts, counters.parse(saved()), "all")
    assert [row["id"] for row in rows] == [point.id for point in points]
    # Four active experts of 14336 x 4096 float16, two rows of x, four routed slots.
    assert {row["needed_bytes"] for row in rows} == {4 * 14336 * 4096 * 2 + 2 * 4096 * 2 + 4 * 4}
    assert [row["dram_read_over_needed"] for row in rows] == [1.0, 1.0001, 0.0179]
    assert {row["cache_control"] for row in rows} == {"all"}
    assert (rows[0]["blocks_per_sm"], rows[0]["occupancy_limiter"]) == (12, "registers")


def test_a_launch_that_was_not_counted_fails_its_own_point_alone() -> None:
    points = [*other_points()[-1:], *article_points()[:3]]  # the first is pallas-mosaic's
    rows = counters.join(points, [{"launches": 1}] * 4, counters.parse(saved()), "all")
    assert "moe_gemm_mosaic" in rows[0]["failed"]
    assert [row["launches"] for row in rows] == [0, 1, 1, 1]
    with pytest.raises(ValueError, match="belong to no point"):
        counters.join(points[1:2], [{"launches": 1}], counters.parse(saved()), "all")


def test_points_after_the_childs_end_are_told() -> None:
    rows = counters.join(article_points()[:3], [{"launches": 1}], counters.parse(saved())[:1], "all")
    assert [row.get("failed") for row in rows] == [None, *["the child ended before it"] * 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== nothing was profiled", "no table"),
        (saved().replace('"ns"', '"usecond"'), "gpu__time_duration.sum: got unit 'usecond'"),
        (saved().replace('"byte"', '"Mbyte"'), "dram__bytes_read.sum: got unit 'Mbyte'"),
    ],
)
def test_output_in_other_units_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        counters.parse(text)


def test_no_ncu_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(counters.CountersUnavailable, match="Nsight Compute"):
        counters.measure(article_points()[:1])


def fake_ncu(folder: Path, body: str) -> None:
    (folder / "ncu").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "ncu").chmod(0o755)


def test_no_permission_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_ncu(tmp_path, "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(counters.CountersUnavailable, match="NVreg_RestrictProfilingToAdminUsers=0"):
        counters.measure(article_points()[:1])


def test_points_that_were_counted_are_not_counted_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def measure(points: Any, **_: Any) -> list[dict[str, Any]]:
        asked.append(len(points))
        return [{"id": point.id, "launches": 1, "cache_control": "all"} for point in points]

    monkeypatch.setattr(counters, "measure", measure)
    out = tmp_path / "counters.jsonl"
    points = article_points()
    assert counters.collect(points[:5], out, say=print) == 5
    assert counters.collect(points, out, say=print) == len(points) - 5
    assert counters.collect(points, out, say=print) == 0
    assert asked == [5, len(points) - 5]
    assert [row["id"] for row in counters.read(out)] == [point.id for point in points]


def test_every_committed_point_is_accepted_by_its_backend() -> None:
    import backends

    points = [*article_points(), *(p for group in groups() for p in group.points), *other_points()]
    assert len({point.id for point in points}) == len(points)
    for point in points:
        assert backends.load(point.backend).unsupported(point.problem, point.config) is None, point.id
        assert Point.from_mapping(json.loads(json.dumps(point.to_mapping()))) == point
    judged = [p for group in groups() if not group.fits for p in group.points]
    assert len(judged) >= 30
    assert {point.dtype for point in judged} == {"fp16", "fp8-w8a16", "fp8-w8a8"}
    assert {"uniform", "zipf-1.2", "one-expert"} <= {point.routing for point in judged}


def test_a_point_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(ArgumentError, match="tokenz"):
        Point.from_mapping({"model": "mixtral-8x7b", "tokenz": 1, "config": {}})


def test_saved_output_is_shown_by_the_command() -> None:
    from bench.__main__ import app

    shown = CliRunner().invoke(app, ["counters", "--from", str(SAVED), "--json"])
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)[0]["dram_read_bytes"] == 469795072.0


# The verdict


def cell(samples: dict[tuple[int, str], float], *, noise: float = 0.001, **facts: Any) -> dict[str, Any]:
    """A cell whose (block_m, order) combinations take so many µs, up to a noise that differs from round to round."""
    combos = [
        {
            "config": json.loads(Config(block_m=block_m).to_json()),
            "order": order,
            "tile_rows": facts.get("tile_rows", 8),
            "samples_us": [us * (1 + noise * ((7 * i + len(order)) % 5 - 2)) for i in range(12)],
        }
        for (block_m, order), us in samples.items()
    ]
    base = {
        "id": "x", "model": "mixtral-8x7b", "gemm": "gate-up", "tokens": 64, "dtype": "fp16", "backend": "torch-triton",
        "routing": "uniform", "question": "order", "active_experts": 8, "largest_expert": 20,
        "slots_per_active_expert": 16.0, "combos": combos,
    }  # fmt: skip
    return base | {key: value for key, value in facts.items() if key != "tile_rows"}


def test_the_same_tile_and_the_best_tiles_are_different_questions() -> None:
    found = cell({(16, "column"): 100, (16, "row"): 180, (64, "column"): 90, (64, "row"): 91})
    same = {win.config_better.block_m: round(win.ratio, 2) for win in locality.same_tile(found, "column", "row")}
    assert same == {16: 1.8, 64: 1.01}
    best = locality.best_tiles(found, "column", "row")
    assert best is not None
    assert best.ratio == pytest.approx(91 / 90, abs=0.005)
    assert verdict.matters(best) == 0  # below 2 %
    assert verdict.matters(locality.same_tile(found, "column", "row")[0]) == 1


def test_best_tiles_are_picked_and_compared_on_different_rounds() -> None:
    """A tile that was lucky on the even rounds is compared by its odd ones."""
    found = cell({(16, "column"): 100, (64, "column"): 100, (16, "row"): 100})
    lucky = found["combos"][1]["samples_us"]
    lucky[::2] = [50.0] * 6
    best = locality.best_tiles(found, "column", "row")
    assert best is not None
    assert best.config_better.block_m == 64
    assert best.ratio == pytest.approx(1.0, abs=0.01)


def test_no_difference_where_the_interval_holds_one() -> None:
    noisy = cell({(16, "column"): 100, (16, "row"): 103}, noise=0.05)
    win = locality.best_tiles(noisy, "column", "row")
    assert win is not None
    assert not win.seen
    assert verdict.matters(win) == 0


def test_sentences_follow_the_data() -> None:
    decode = cell({(16, "column"): 100, (16, "row"): 100.5}, largest_expert=2, tile_rows=8)
    batch = cell({(16, "column"): 100, (16, "row"): 150}, largest_expert=80, tile_rows=40, tokens=256)
    narrow = batch | {"dtype": "fp8-w8a8", "combos": cell({(16, "column"): 100, (16, "row"): 122.5})["combos"]}
    text = verdict.answer([decode, batch, narrow], [])
    assert "in 0, row order in 0, neither in 1" in text  # the decode cell
    assert "column order wins by more than 2 % in 2, row order in 0, neither in 1" in text.lower().replace(
        "column\n", ""
    )
    assert "of fp16's median 1.50x, fp8-w8a8 leaves 1.23x (it keeps 45% of the gain" in text
    turned = verdict.answer([batch | {"combos": cell({(16, "column"): 150, (16, "row"): 100})["combos"]}], [])
    assert "row order in 1" in turned
    assert "keeps" not in turned
    assert "at most" not in verdict.short_answer([decode, batch])
    assert "mixtral-8x7b gate-up 1.50x" in verdict.short_answer([decode, batch])


def test_split_k_is_judged_by_reduction() -> None:
    whole = Config(block_m=16)
    combos = [
        {"config": json.loads(config.to_json()), "order": "column", "tile_rows": 8, "samples_us": [us] * 12}
        for config, us in (
            (whole, 10.0),
            (whole.replace(split_k=2), 8.0),
            (whole.replace(split_k=4, reduction="atomic"), 12.0),
        )
    ]
    found = cell({}, question="split-k") | {"combos": combos}
    ratios = {name: locality.best_split(found, name) for name in ("two-pass", "atomic", "atomic-fp32")}
    assert ratios["atomic-fp32"] is None
    assert [round(ratios[name].ratio, 2) for name in ("two-pass", "atomic")] == [1.25, 0.83]  # type: ignore[union-attr]
    best = locality.best_split(found)
    assert best is not None
    assert best.config_better.split_k == 2


def test_a_run_goes_on_behind_its_finished_cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the interpreter, on a tiny layer: a journal cut off in the middle of a line keeps what is before it."""
    from bench.machine import Rehearsal

    asked = [locality.Cell(Case(_TINY, "gate-up", tokens), "fp16") for tokens in (1, 2)]
    monkeypatch.setattr(locality, "cells", lambda: iter(asked))
    tile = Config(block_n=32, block_k=64)
    monkeypatch.setattr(locality.Cell, "combos", lambda self, counts: [(tile, "row")])
    out = tmp_path / "locality.jsonl"
    device, said = Rehearsal(), []
    assert not locality.run(out, device, seconds=-1, say=said.append, rounds=2)
    assert "2 cells left" in said[0]
    assert locality.run(out, device, seconds=600, say=said.append, rounds=2)
    first, second = out.read_text().splitlines()
    out.write_text(f"{first}\n{second[: len(second) // 2]}")
    assert [found["id"] for found in locality.read(out)] == [asked[0].id]
    assert locality.run(out, device, seconds=600, say=said.append, rounds=2)
    found = locality.read(out)
    assert [entry["id"] for entry in found] == [one.id for one in asked]
    assert [(combo["order"], len(combo["samples_us"])) for combo in found[1]["combos"]] == [("row", 2)]
    assert not found[1]["failed"]
    assert locality.sources_told(found) == f"kernel sources: {results.sources()} (2 cells)"
    assert not any("are kept" in line for line in said)
    del found[0]["sources"]  # as files have it from before cells told their sources
    out.write_text("".join(json.dumps(cell) + "\n" for cell in found))
    told = f"kernel sources: {results.sources()} (1 cell), not recorded (1 cell)"
    assert locality.sources_told(locality.read(out)) == told
    assert locality.run(out, device, seconds=600, say=said.append, rounds=2)
    assert said[-1].endswith("unrecorded ones, are kept; kernel sources: not recorded (1 cell)")
    assert len(out.read_text().splitlines()) == 2, "nothing is measured again"


def test_cells_cover_what_the_verdict_promises() -> None:
    from shared.models import models

    every = list(locality.cells())
    assert len({one.id for one in every}) == len(every)
    even = [one for one in every if one.question == "order" and one.routing == "uniform"]
    for name in models():
        for dtype in verdict.DTYPES:
            mine = {
                c.case.tokens
                for c in even
                if c.case.model.name == name and c.dtype == dtype and c.case.gemm == "gate-up"
            }
            assert {1, 2048} <= mine
    assert {one.backend for one in even} == {"torch-triton", "jax-triton", "pallas-triton", "pallas-mosaic"}
    layers = [one.layer for one in every]
    assert len(set(layers)) == sum(a != b for a, b in zip([None, *layers], layers, strict=False))  # weights made once


# The article


def test_article_table_reads_counters() -> None:
    points = article_points()[:3]
    facts = [{"launches": 1, "tile_rows": 4}, {"launches": 1, "tile_rows": 4}, {"launches": 1, "written": 0.0179}]
    counted = counters.join(points, facts, counters.parse(saved()), "all")
    _, lines = article.table({"rows": []}, [], counted)
    first = next(line for line in lines if line[0].startswith("2.7x"))
    assert first[1] == "7.8x at 2 tokens, writing 1.79% of the output"
    assert first[2] == "1.00x"
    assert first[3].startswith("not confirmed")
    loads = next(line for line in lines if line[0].startswith("global loads"))
    assert loads[1:3] == ["-98%", "+0%"]


def test_what_sanitizers_and_fuzzing_found_is_told() -> None:
    from bench import checked

    found = [
        {"tool": "memcheck", "backend": "torch-triton", "status": "clean"},
        {"tool": "memcheck", "backend": "torch-triton", "status": "errors"},
        {"tool": "racecheck", "backend": "pallas-mosaic", "status": "clean"},
    ]
    report = {
        "compute_sanitizer": "Version 2025.3.1.0 (build 1)", "gpu": "NVIDIA H200", "date": "2026-11-29T00:00:00Z",
        "seconds": 12.4, "complete": False, "results": found,
        "plants": [
            {"tool": "memcheck", "what": "an overrun", "caught": "yes"},
            {"tool": "racecheck", "what": "a race", "caught": None},
        ],
    }  # fmt: skip
    text = checked.sanitizer_text(report)
    assert "3 launches in 12 s; the run was stopped before its end. It does not say of which sources" in text
    assert "before its end.\n" in checked.sanitizer_text(report | {"sources": results.sources()})
    assert "The kernels' sources, or their tiles, have changed since." in checked.sanitizer_text(
        report | {"sources": "0"}
    )
    assert "| memcheck | 1 clean, 1 errors | – | – | – | an overrun |" in text
    assert "| racecheck | – | – | – | 1 clean |  |" in text
    run = {
        "date": "20261129T214003", "seed": 3, "seconds": 172.4, "examples": dict.fromkeys(BACKENDS, 2000),
        "failures": [{"example": "pallas-mosaic fp16 T=1", "text": "wrong: 1 of 9"}],
    }  # fmt: skip
    text = checked.fuzz_text([run])
    row = "| 20261129 | 3 | 2000 (0 failed) | 2000 (0 failed) | 2000 (0 failed) | 2000 (1 failed) | 172 |"
    assert f"{row} not recorded |" in text
    assert f"{row} yes |" in checked.fuzz_text([run | {"sources": results.sources()}])
    assert f"{row} no |" in checked.fuzz_text([run | {"sources": "0"}])
    assert "- seed 3: pallas-mosaic fp16 T=1: wrong: 1 of 9" in text
    of_one = checked.fuzz_text([run | {"examples": {"pallas-mosaic": 1424}, "failures": []}])
    assert "| 20261129 | 3 | – | – | – | 1424 (0 failed) | 172 | not recorded |" in of_one
