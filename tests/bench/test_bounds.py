"""Bounds beside the speed targets: each verdict appears where a plain read denies the target, and only there."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from backends.registry import BACKENDS
from bench import bounds, performance, results, target_lines, targets
from bench.reads import SIZES, PlainReads
from bench.target_lines import FLOOR, PLAIN
from tests import made_up
from tests.made_up import READ, Found

MIXTRAL, QWEN = "mixtral-8x7b/gate-up/tp2/tokens-{}", "qwen3-30b-a3b/down/tp1/tokens-{}"
FEW_BYTES = "floor / time, decode, 15 to 50 MB"
GAIN = "fp16 time / FP8 time, decode, 200 MB and more"
MEAN = "best peer's time / time, geometric mean"


def plain_reads(start_us: float, share: float = 1.0) -> list[dict[str, Any]]:
    """A start, then bytes at that share of the read ceiling."""
    return [{"bytes": size, "us": start_us + 1e6 * size / READ / share, "design": "once"} for size in SIZES]


@pytest.fixture
def found() -> Found:
    return made_up.found()


def lines(found: Found, start_us: float | None = None, share: float = 1.0) -> dict[tuple[str, str, str], Any]:
    """{(target, dtype, backend): line}; start_us None: without plain reads."""
    if start_us is not None:
        found["run"]["reads"] = plain_reads(start_us, share)
    return {(line.target, line.dtype, line.backend): line for line in targets.judge(found)}


def test_the_plain_read_has_its_own_floor_over_time(found: Found) -> None:
    line = lines(found, 3.0)["floor / time, decode, less than 15 MB", "FP8", PLAIN]
    (layer,) = (one for one in targets.layers() if one.name == QWEN.format(1))
    seconds = {dtype: layer.read_bytes[dtype] / READ for dtype in targets.FP8}
    expected = max(us / (3e-6 + us) for us in seconds.values())
    assert line.worst == pytest.approx(expected, rel=1e-6)
    assert (line.worst_case, line.of) == (layer.name, 2)
    assert line.worst < line.mean < 1
    assert line.status == "told"
    assert target_lines.verdict(line) == "a bound"


def test_plain_read_over_time_stands_beside_each_floor(found: Found) -> None:
    """Backends take the floor / 0.97; a plain read at 0.98 of the ceiling takes the floor / 0.98."""
    line = lines(found, 0.0, 0.98)["floor / time, decode, 200 MB and more", "fp16", "jax-triton"]
    assert (line.read_worst, line.read_mean) == pytest.approx((0.97 / 0.98, 0.97 / 0.98))
    assert target_lines.read_over_time(line) == "0.990, mean 0.990"


def test_where_operations_bound_it_a_plain_read_is_no_faster_than_the_floor(found: Found) -> None:
    line = lines(found, 0.0)["floor / time, 128 to 512 tokens", "FP8", PLAIN]
    assert (line.worst, line.mean) == pytest.approx((1, 1))
    assert line.worst <= 1


def test_a_floor_that_a_plain_read_misses_is_denied(found: Found) -> None:
    case = QWEN.format(4)
    made_up.slow(found, case, "fp8-w8a16", 1.3)
    made_up.slow(found, case, "fp8-w8a8", 1.3)
    missed = lines(found, 6.0)
    reached = missed[FEW_BYTES, "FP8", PLAIN]
    for backend in BACKENDS:
        line = missed[FEW_BYTES, "FP8", backend]
        assert line.status == "missed", "a target that is denied is missed all the same"
        assert line.denied.startswith("denied: a plain read of these bytes reaches 0.602, ")
        assert line.denied.endswith(f"less than 0.8 in 1 of {reached.of} cases; all others are met")
        assert target_lines.verdict(line) == f"missed; {line.denied}"
    assert not targets.met(list(missed.values()))
    assert "4 of" in targets.told(list(missed.values()))
    assert "4 of them denied by a bound" in targets.told(list(missed.values()))


def test_a_floor_is_not_denied_where_a_plain_read_reaches_it_or_it_is_met(found: Found) -> None:
    assert not any(line.denied for line in lines(found, 6.0).values() if line.status == "met")
    for dtype in targets.FP8:
        made_up.slow(found, QWEN.format(4), dtype, 1.3)
    line = lines(found, 0.5)[FEW_BYTES, "FP8", "jax-triton"]
    assert (line.status, line.denied) == ("missed", "")


def test_what_is_missed_without_being_denied_is_told_beside_it(found: Found) -> None:
    """25 MB are denied, 43 MB are missed though a plain read reaches the target there."""
    for tokens in (2, 4):
        for dtype in targets.FP8:
            made_up.slow(found, QWEN.format(tokens), dtype, 1.3)
    found["run"]["reads"] = [
        one | {"us": 1e6 * one["bytes"] / READ / (0.7 if one["bytes"] < 30e6 else 0.95)} for one in plain_reads(0.0)
    ]
    line = lines(found)[FEW_BYTES, "FP8", "torch-triton"]
    assert line.denied.endswith("less than 0.8 in 1 of 6 cases; 1 of the others is missed")


@pytest.mark.parametrize(
    ("factor", "start_us", "share", "denied"),
    [
        (0.86, 0.0, 1.0, "denied: at the floor it would be 1.075"),
        (0.9, 2.0, 0.95, "denied: as fast as a plain read it would be "),
        (0.9, 0.0, 1.0, ""),
        (1.0, 2.0, 0.95, ""),
    ],
)
@pytest.mark.parametrize("dtype", ["fp16", "fp8-w8a8"])
def test_a_lead_over_peers_that_the_floor_denies(
    found: Found, factor: float, start_us: float, share: float, denied: str, dtype: str
) -> None:
    """Peers take 1.25 times the floor and this factor, backends the floor / 0.97."""
    for row in found["rows"]:
        if row["contender"] not in BACKENDS:
            row["kernel_us"] *= factor
        else:
            row["kernel_us"] *= 1.03
    told = lines(found, start_us, share)
    assert told[MEAN, dtype, FLOOR].mean == pytest.approx(1.25 * factor)
    assert told[MEAN, dtype, PLAIN].mean <= told[MEAN, dtype, FLOOR].mean
    for backend in BACKENDS:
        line = told[MEAN, dtype, backend]
        assert line.denied.startswith(denied)
        assert bool(line.denied) == bool(denied)
        assert line.status == ("met" if factor == 1 else "missed")


def test_a_gain_of_fp8_is_told_beside_that_of_plain_reads_and_not_denied(found: Found) -> None:
    """A slower fp16 kernel gains more than the bytes do: the ratio of plain reads is no bound."""
    layer = next(one for one in targets.layers() if one.name == MIXTRAL.format(8))
    made_up.slow(found, layer.name, "fp16", 0.9)
    fewer = min(layer.read_bytes[dtype] for dtype in targets.FP8)
    expected = (20e-6 + layer.read_bytes["fp16"] / READ) / (20e-6 + fewer / READ)
    told = lines(found, 20.0)
    assert told[GAIN, "FP8", "pallas-mosaic"].denied == ""
    worst = told[GAIN, "FP8", PLAIN].worst
    assert worst == pytest.approx(expected) or worst < expected


def test_what_has_no_time_is_not_denied() -> None:
    """A kernel that was wrong in the one case whose bytes are too few: nothing excuses it."""
    name = QWEN.format(2)
    line = target_lines.line_of("t", "fp16", "b", [target_lines.Value(name, None, "wrong")], ">=", 0.8)
    most = [target_lines.Value(name, 0.6)]
    assert target_lines.deny(line, [target_lines.Value(name, None, "wrong")], most, 0.8, "{:.3f}").denied == ""
    values = [target_lines.Value(name, None, "wrong"), target_lines.Value("other", 0.5)]
    line = target_lines.line_of("t", "fp16", "b", values, ">=", 0.8)
    told = target_lines.deny(line, values, [*most, target_lines.Value("other", 0.7)], 0.8, "at most {:.3f}").denied
    assert told == "denied: at most 0.700, less than 0.8 in 1 of 2 cases; 1 of the others is missed"


def test_a_mean_over_a_part_of_the_cases_denies_nothing() -> None:
    line = target_lines.Line("t", "fp16", PLAIN, ">= 1.1", 1.0, "c", 1.02, 0, 2, "told", reason="not measured: d")
    full = target_lines.Line("t", "fp16", FLOOR, ">= 1.1", 1.0, "c", 1.2, 1, 2, "told")
    assert bounds.denied_mean({PLAIN: line, FLOOR: full}, 1.1) == ""
    line = dataclasses.replace(line, reason="")
    assert bounds.denied_mean({PLAIN: line, FLOOR: full}, 1.1).startswith("denied: as fast as a plain read")


def test_results_without_plain_reads_say_so(found: Found) -> None:
    told = list(lines(found).values())
    headings, cells = target_lines.table(told)
    column, verdict = headings.index("plain read / time"), headings.index("verdict")
    for line, row in zip(told, cells, strict=True):
        about = line.target.startswith("floor") and not line.is_bound
        assert row[column] == ("not measured" if about else "")
        if line.backend == PLAIN:
            assert row[verdict].startswith("not measured"), row
        assert not line.denied
    assert {line.mean is None for line in told if line.backend == PLAIN} == {True}
    assert {line.mean is None for line in told if line.backend == FLOOR} == {False}, "a floor needs no plain reads"


def test_a_kernel_faster_than_the_plain_read_is_told(found: Found) -> None:
    found["run"]["reads"] = plain_reads(0.0, 0.96)
    assert targets.doubts(found) == [], "0.97 of the floor is within 2 % of 0.96"
    found["run"]["reads"] = plain_reads(0.0, 0.9)
    (told,) = targets.doubts(found)
    assert told.startswith("doubtful bound: ")
    assert "the farthest at 0.928 of it" in told


def test_between_sizes_a_start_and_a_rate_and_nothing_outside(found: Found) -> None:
    found["run"]["reads"] = plain_reads(3.0)
    reads = PlainReads(found)
    for size in (SIZES[0], 5e6, 123456789, 4.2e9, SIZES[-1]):
        assert reads.us(size) == pytest.approx(3 + 1e6 * size / READ)
    assert reads.us(SIZES[0] - 1) is None
    assert reads.us(SIZES[-1] + 1) is None
    smallest = min(size for layer in targets.layers() for size in layer.read_bytes.values())
    largest = max(size for layer in targets.layers() for size in layer.read_bytes.values())
    assert SIZES[0] <= smallest <= largest <= SIZES[-1], "every case lies between measured sizes"


def journal(path: Path, found: Found, sizes: list[dict[str, Any]] | None, **changes: Any) -> None:
    """A run appended to a file, as the suite writes it."""
    lines = [{"kind": "run", **found["run"], **changes}]
    lines += [] if sizes is None else [{"kind": "reads", "sizes": sizes}]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*lines, *({"kind": "time", **r} for r in found["rows"])])


def test_of_shards_and_resumed_parts_the_fastest_plain_read_counts(found: Found, tmp_path: Path) -> None:
    first, second = tmp_path / "targets-1of2.jsonl", tmp_path / "targets-2of2.jsonl"
    found["rows"] = found["rows"][:1]
    journal(first, found, plain_reads(5.0))
    journal(first, found, None, date="2026-01-02T03:04:06Z")  # gone on with
    assert PlainReads(results.load(first)).us(1e8) == pytest.approx(5 + 1e14 / READ)
    journal(first, found, plain_reads(4.0), date="2026-01-02T03:04:07Z")
    assert PlainReads(results.load(first)).us(1e8) == pytest.approx(4 + 1e14 / READ)
    journal(second, found, plain_reads(3.0), date="2026-01-02T03:04:08Z")
    both = targets.load([first, second])
    assert PlainReads(both).us(1e8) == pytest.approx(3 + 1e14 / READ)
    kept = json.loads(results.dump(both))  # type: ignore[arg-type]
    assert PlainReads(kept).us(1e8) == pytest.approx(3 + 1e14 / READ)
    assert "reads" not in both["skipped"]  # type: ignore[index]


def test_the_note_shows_the_plain_reads(found: Found, tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    for dtype in targets.FP8:
        made_up.slow(found, QWEN.format(4), dtype, 1.3)
    path = folder / "targets.jsonl"
    journal(path, found, None)
    before, _ = performance.pictures(folder)[performance.PICTURE]
    blocks = {name: performance.BLOCKS[name](folder, {}) for name in ("targets", "targets-plain-read", "plain-reads")}
    assert "| not measured; at the floor 1.250 |" in blocks["targets"]
    assert blocks["targets-plain-read"].count("| not measured | – | – |") == len(
        [line for line in targets.judge(found) if line.target.startswith("floor") and line.backend == PLAIN]
    )
    assert blocks["plain-reads"] == "Not measured yet."

    path.unlink()
    journal(path, found, plain_reads(6.0))
    blocks = {name: block(folder, {}) for name, block in performance.BLOCKS.items()}
    assert blocks["plain-reads"].count("\n") == len(SIZES) + 1
    share = SIZES[0] / READ * 1e6 / (6 + SIZES[0] / READ * 1e6)
    assert f"| {share:.3f} | once |" in blocks["plain-reads"]
    row = next(line for line in blocks["targets-plain-read"].splitlines() if "15 to 50 MB | FP8" in line)
    cells = row.split(" | ")
    assert float(cells[3]) < float(cells[4]) < 0.8
    assert cells[5] == "6 of 6"
    assert len(cells) == 6 + len(BACKENDS)
    assert "4 of the missed are denied by a bound" in blocks["targets-summary"]
    drawn, draw = performance.pictures(folder)[performance.PICTURE]
    curve = [point for point in drawn if point[0] == PLAIN]
    assert len(curve) == len(SIZES)
    assert drawn[: len(before)] == before
    assert math.isclose(curve[0][3], share, abs_tol=1e-3)
    assert ">a plain read<" in draw()
