"""The cache model: its limits, its committed parameters and errors, and `python -m bench predict`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import cache_fit, cache_gpus, cache_judge, cache_tables
from bench.__main__ import app
from bench.points import Point
from shared import cache_launch, cache_model, planning, routing
from shared.cache_launch import DTYPES, FP4, ORDERS, Chip, Launch
from shared.checks import ArgumentError
from shared.config import Config
from shared.gpus import gpu

ROOT = Path(__file__).parents[2]
CONFIG = Config(block_m=16, block_n=128, block_k=64, num_stages=3)
ONE_BLOCK = 3 * 64 * 144 * 2 + 1024
"""Shared memory of one block of CONFIG, bytes."""
IN_STEP = cache_model.fitted().replace(sm_spread=0.0, older_first=0.0)
CHIP = Chip(sms=16, l2_bytes=1e6, dram_bytes_per_s=1e12, flops=1e14)


def a_launch(*, order: str = "row", dtype: str = "fp16", tokens: int = 96, n: int = 1000, **changes: Any) -> Launch:
    """4 experts with several tile rows each; N is no multiple of block_n."""
    ids = routing.zipf(tokens, 4, 2, exponent=0.5, seed=1)
    values: dict[str, Any] = {"n": n, "k": 512, "experts": 4, "topk_ids": ids, "dtype": dtype, "order": order}
    return Launch(**values | {"config": CONFIG} | changes)


def with_l2(l2_bytes: float, **changes: Any) -> Chip:
    return dataclasses.replace(CHIP, l2_bytes=l2_bytes, **changes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_an_infinite_l2_reads_what_is_needed(order: str, dtype: str) -> None:
    launch = a_launch(order=order, dtype=dtype)
    found = cache_model.predict(launch, with_l2(math.inf))
    assert found.dram_bytes == pytest.approx(launch.needed_bytes, rel=1e-9)
    assert found.other_bytes >= 0


@pytest.mark.parametrize("order", ORDERS)
def test_without_l2_one_block_at_a_time_reads_everything_again(order: str) -> None:
    launch = a_launch(order=order, tokens=48)
    alone = with_l2(1e-3, sms=1, shared_memory=ONE_BLOCK)
    found = cache_model.predict(launch, alone)
    assert found.blocks_per_sm == 1
    rows = planning.tile_rows_in_use(launch.expert_counts, 16)
    assert found.weight_bytes == pytest.approx(rows * launch.n * launch.k * 2, rel=1e-9)
    tile_cols = 8
    # A token with both its slots in one tile row does not occur: its experts differ.
    assert found.x_bytes == pytest.approx(launch.topk_ids.size * launch.k * 2 * tile_cols, rel=0.2)  # sampled rows


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["fp16", "fp8-w8a8"])
def test_more_l2_never_reads_more_and_nothing_reads_less_than_needed(order: str, dtype: str) -> None:
    launch = a_launch(order=order, dtype=dtype, n=500)
    sizes = (1e-3, 3e5, 1e6, 3e6, 1e8)
    chips = [with_l2(size, sms=5, shared_memory=ONE_BLOCK) for size in sizes]
    read = [cache_model.predict(launch, chip).dram_bytes for chip in chips]
    assert min(read) >= launch.needed_bytes * (1 - 1e-9)
    for smaller, larger in itertools.pairwise(read):
        assert larger <= smaller * 1.02  # schedules differ a little
    assert read[0] > 1.1 * read[-1]


def test_one_tile_row_per_expert_leaves_nothing_to_order() -> None:
    ids = np.arange(8, dtype=np.int32).reshape(4, 2)
    launches = [a_launch(order=order, topk_ids=ids, experts=8) for order in ORDERS]
    found = [cache_model.predict(launch, CHIP) for launch in launches]
    assert {one.tile_rows for one in found} == {8}
    for one in found:
        assert one.weight_bytes == pytest.approx(8 * 1000 * 512 * 2, rel=1e-9)
        assert one.dram_bytes == pytest.approx(found[0].dram_bytes, rel=0.01)


def test_tile_rows_in_flight_together_share_one_stream() -> None:
    """Without L2, row order reads weights again for each tile row that is alone, and half as often where two are."""
    ids = routing.one_expert(8, 4, 16)  # 128 slots: 8 tile rows of one expert
    launch = a_launch(topk_ids=ids, n=2048)
    parameters = IN_STEP
    once = 2048 * 512 * 2
    for sms, reads in ((16, 8), (32, 4), (64, 2)):
        chip = with_l2(1e-3, sms=sms, shared_memory=ONE_BLOCK)
        assert cache_model.predict(launch, chip, parameters).weight_bytes == pytest.approx(reads * once, rel=1e-6)


def test_what_both_halves_of_l2_read_takes_more_of_it() -> None:
    """In row order a column's weights take 1.5 times their size where always one multiprocessor reads them; where two
    do, those that are at different halves make it twice, and they are half of all."""
    launch = a_launch(topk_ids=routing.one_expert(8, 4, 16), n=2048)  # 8 tile rows of 16 columns
    weights = 2048 * 512 * 2
    parameters = IN_STEP.replace(l2_share=1.0, l2_sharpness=400.0)
    read = {}
    for sms, share in itertools.product((16, 32), (1.3, 1.55, 2.1)):
        chip = with_l2(share * weights, sms=sms, shared_memory=ONE_BLOCK)
        read[sms, share] = cache_model.predict(launch, chip, parameters).weight_bytes / weights
    assert read[16, 1.3] == pytest.approx(8, rel=0.01)  # every tile row anew
    assert read[16, 1.55] == pytest.approx(1, rel=0.01)
    assert read[32, 1.55] == pytest.approx(4, rel=0.01)  # every two tile rows, which share a stream
    assert read[32, 2.1] == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("dram_bytes_per_s", [1e12, 1e11])
def test_unequal_shares_of_a_multiprocessor_end_lockstep_where_it_is_waited_for(dram_bytes_per_s: float) -> None:
    launch = a_launch(topk_ids=routing.one_expert(8, 4, 64), n=2048, k=1024)  # 32 tile rows of 16 columns
    chip = with_l2(1e-3, sms=32, shared_memory=2 * ONE_BLOCK, dram_bytes_per_s=dram_bytes_per_s)
    read = [cache_model.predict(launch, chip, IN_STEP.replace(older_first=share)) for share in (0.0, 0.3)]
    assert read[0].blocks_per_sm == 2
    assert read[0].weight_bytes == pytest.approx(8 * 2048 * 1024 * 2)  # four tile rows share a stream
    if dram_bytes_per_s == 1e12:
        assert read[1].weight_bytes > 1.5 * read[0].weight_bytes
    else:
        assert read[1].weight_bytes == pytest.approx(read[0].weight_bytes)


def test_shares_of_a_multiprocessor() -> None:
    # Places 0 to 6 on three multiprocessors: tiles 9, 4 and 7 on the first, 5 and 6 on the second, 8 on the third.
    share = cache_model._shares_of_sm(np.array([9, 5, 8, 4, 6, -1, 7]), 3, 0.3)
    assert share[[0, 1, 2, 3, 4, 6]] == pytest.approx([0.7 / 3, 1.3 / 2, 1, 1.3 / 3, 0.7 / 2, 1 / 3])


def test_time_is_bounded_by_each_part() -> None:
    launch = a_launch(n=4096)
    p = cache_model.fitted()
    slow_dram = dataclasses.replace(CHIP, dram_bytes_per_s=1e9)
    found = cache_model.predict(launch, slow_dram)
    assert found.time_us * 1e-6 >= (found.weight_bytes + found.x_bytes) / (1e9 * p.dram_share)
    few_flops = dataclasses.replace(CHIP, flops=1e10)
    padded = 2 * launch.tiles * 16 * 128 * launch.k
    assert cache_model.predict(launch, few_flops).time_us * 1e-6 >= padded / (1e10 * p.flops_share)
    assert cache_model.predict(launch, slow_dram) == found


def test_dealt_expert_counts() -> None:
    counts = [61, 70, 3, 0, 9, 1]
    ids = cache_launch.deal(counts, 2, seed=0)
    assert ids.shape == (72, 2)
    assert planning.expert_counts(ids, 6).tolist() == counts
    assert (ids[:, 0] != ids[:, 1]).all()
    assert planning.expert_counts(cache_launch.deal([8, 0], 2, seed=0), 2).tolist() == [8, 0]
    with pytest.raises(ArgumentError, match="multiple of top_k = 2"):
        cache_launch.deal([1, 2], 2, seed=0)


def test_four_bit_weights_are_a_quarter_and_their_scales() -> None:
    fp16, fp4 = (a_launch(dtype=dtype) for dtype in ("fp16", FP4))
    weights = 4 * 1000 * 512
    assert fp16.needed_bytes - fp4.needed_bytes == pytest.approx(weights * (2 - 0.5 - 1 / 32))


def test_no_framework_is_imported() -> None:
    code = "import sys, shared.cache_model, bench.predict; print({'torch', 'jax', 'triton'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "set()"


# What is committed


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    return cache_judge.read(cache_judge.JUDGED)


def points_by_id() -> dict[str, Point]:
    from bench.cache_points import groups

    return {point.id: point for group in groups() for point in group.points}


def test_committed_errors_follow_from_the_committed_points(judged: dict[str, Any]) -> None:
    assert judged["errors"] == cache_judge.errors(judged["points"])
    assert judged["orders"] == cache_judge.orders(judged["points"])
    assert judged["parameters"] == dataclasses.asdict(cache_model.fitted())
    number = sum(not point["fits"] for point in judged["points"])
    assert number >= 30
    assert judged["errors"][0]["median"] <= cache_judge.MEDIAN_TARGET
    assert cache_judge.missed(judged) == []


def test_committed_predictions_are_what_the_model_says(judged: dict[str, Any]) -> None:
    points = points_by_id()
    quick = [one for one in judged["points"] if points[one["id"]].config.block_m >= 64][::5]
    assert len(quick) >= 8
    for one in quick:
        found = cache_fit.predict(points[one["id"]])
        assert found.dram_bytes == pytest.approx(one["predicted_bytes"], rel=1e-6), one["id"]
        assert found.time_us == pytest.approx(one["predicted_us"], rel=1e-4), one["id"]


def test_blocks_per_multiprocessor_as_counted(judged: dict[str, Any]) -> None:
    points = points_by_id()
    for one in judged["points"]:
        point = points[one["id"]]
        config, dtype = point.config, point.dtype
        launch = a_launch(dtype=dtype, config=config, k=point.problem.k)
        assert cache_launch.blocks_per_sm(launch, Chip.of(gpu("h200"), dtype)) == one["measured_blocks_per_sm"], point


def test_committed_counters_are_those_judged(judged: dict[str, Any]) -> None:
    if not cache_fit.COUNTERS.exists():
        pytest.skip("no counters are committed")
    assert cache_fit.digest(cache_fit.measured()) == judged["data"]


def counters_file(judged: dict[str, Any], path: Path, ids: list[str]) -> Path:
    """Counters of some judged points, as `python -m bench counters` writes them."""
    points = points_by_id()
    with path.open("w") as file:
        for one in judged["points"]:
            if one["id"] in ids:
                row = {"id": one["id"], "point": points[one["id"]].to_mapping(), "launches": 1, "cache_control": "all"}
                row |= {"dram_read_bytes": one["measured_bytes"], "duration_us": one["measured_us"]}
                row |= {"needed_bytes": one["needed_bytes"], "blocks_per_sm": one["measured_blocks_per_sm"]}
                file.write(json.dumps(row) + "\n")
    return path


def test_parameters_were_fitted_on_the_judged_files_fit_points(judged: dict[str, Any]) -> None:
    points = points_by_id()
    fitted = [
        cache_fit.Measured(
            group=one["group"],
            fits=True,
            point=points[one["id"]],
            dram_bytes=one["measured_bytes"],
            time_us=one["measured_us"],
            needed_bytes=one["needed_bytes"],
            blocks_per_sm=None,
        )
        for one in judged["points"]
        if one["fits"]
    ]
    committed = cache_judge.read(cache_fit.PARAMETERS)
    assert committed["data"] == cache_fit.digest(fitted)
    assert committed["points"] == len(fitted)
    for name, (least, most) in committed["fits_about_as_well"].items():
        assert least <= committed["values"][name] <= most
        assert committed["values"][name] in committed["grid"][name]


def test_fit_finds_the_committed_capacity(
    judged: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole fit takes minutes: here one parameter, on the points where it shows most, from a wrong start."""
    sensitive = [
        one["id"]
        for one in judged["points"]
        if one["fits"] and "/16x" in one["id"] and "down" in one["id"] and "tokens-512" in one["id"]
    ]
    path = counters_file(judged, tmp_path / "counters.jsonl", sensitive)
    share = cache_model.fitted().l2_share
    monkeypatch.setattr(cache_fit, "START", cache_model.fitted().replace(l2_share=0.2))
    monkeypatch.setattr(cache_fit, "GRID", {"l2_share": (0.2, share, 1.0)})
    monkeypatch.setattr(cache_fit, "PARAMETERS", tmp_path / "fitted.json")
    said = CliRunner().invoke(app, ["predict", "--fit", "--counters", str(path), "--json"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["values"]["l2_share"] == share
    assert found["points"] == len(sensitive) == 4
    with pytest.raises(ArgumentError, match="none of the model's points"):
        cache_fit.measured(counters_file(judged, tmp_path / "none.jsonl", []))


def test_judge_says_what_misses(judged: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [one["id"] for one in judged["points"] if not one["fits"] and "/64x128" in one["id"]][:2]
    for module, name in ((cache_judge, "JUDGED"), (cache_tables, "JUDGED"), (cache_tables, "PICTURE")):
        monkeypatch.setattr(module, name, tmp_path / name)
    command = ["predict", "--judge", "--counters", str(counters_file(judged, tmp_path / "counters.jsonl", ids))]
    right = CliRunner().invoke(app, command)
    assert right.exit_code == 0, right.output
    assert "Both targets are met" in right.stdout
    wrong = {**judged, "points": [dict(one) for one in judged["points"]]}
    for one in wrong["points"]:
        one["measured_bytes"] *= 1.4 if one["id"] == ids[0] else 1
    counters_file(wrong, tmp_path / "counters.jsonl", ids)
    missing = CliRunner().invoke(app, [*command, "--json"])
    assert missing.exit_code == 1
    assert any(ids[0] in line for line in json.loads(missing.stdout)["missed"])


def test_the_picture_shows_the_committed_judgement(
    judged: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not cache_tables.picture_differs()
    changed = {**judged, "points": [dict(judged["points"][0], predicted_bytes=1), *judged["points"][1:]]}
    cache_judge.write(tmp_path / "judged.json", changed)
    monkeypatch.setattr(cache_tables, "JUDGED", tmp_path / "judged.json")
    assert cache_tables.picture_differs()


def test_other_gpus_rows_are_what_the_model_says() -> None:
    found = cache_judge.read(cache_gpus.OTHER_GPUS)
    assert found["parameters"] == dataclasses.asdict(cache_model.fitted())
    rows = found["rows"]
    assert len(rows) == 4 * 3 * len(cache_gpus.MODELS) * len(cache_gpus.TOKENS) * len(cache_gpus.TILES)
    some = [row for row in rows if row["tile"] == "sensible" and row["tokens"] in (64, 512)][::17]
    assert {row["gpu"] for row in some} == {"a100", "h100", "h200", "b200"}
    for row in some:
        again = cache_gpus.predicted_row(row["gpu"], row["weights"], row["model"], row["tokens"], row["tile"])
        assert _same(again, row)


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        a[key] == pytest.approx(b[key], rel=1e-3) if isinstance(b[key], float) else a[key] == b[key] for key in b
    )


# The command

MIXTRAL = ["--model", "mixtral-8x7b", "--tokens", "8"]


def predict(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["predict", *arguments])


def test_json_of_one_order_and_of_all() -> None:
    one = json.loads(predict(*MIXTRAL, "--order", "row", "--json").stdout)
    for key in ("dram_bytes", "time_us", "needed_bytes", "weight_bytes", "x_bytes", "dram_us", "blocks_per_sm"):
        assert one[key] >= 0
    assert one["kind"] == "prediction"
    assert one["notes"] == []
    every = json.loads(predict(*MIXTRAL, "--json").stdout)
    assert list(every["orders"]) == list(ORDERS)
    assert every["orders"]["row"]["dram_bytes"] == one["dram_bytes"]


def test_shape_and_counts_instead_of_a_model() -> None:
    counts = ["--n", "1024", "--k", "512", "--expert-counts", "40,0,24", "--top-k", "2"]
    found = json.loads(predict(*counts, "--order", "column", "--json").stdout)
    assert found["expert_counts"] == [40, 0, 24]
    assert found["tile_rows"] == 5
    assert found["dram_bytes"] >= 2 * 1024 * 512 * 2


def test_what_nothing_backs_is_noted() -> None:
    for options, note in ((["--gpu", "b200"], "fitted on an H200"), (["--dtype", FP4], "no kernel here has 4-bit")):
        assert note in predict(*MIXTRAL, *options, "--order", "row").stdout
    assert "fitted on an H200" in predict(*MIXTRAL, "--l2-bytes", "1e6", "--order", "row").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "model: got none; allowed: --model NAME, or both --n and --k"),
        (["--model", "mixtral", "--tokens", "8"], "did you mean 'mixtral-8x7b'?"),
        (["--model", "mixtral-8x7b"], "expert-counts, tokens: got neither"),
        ([*MIXTRAL, "--expert-counts", "1,1,1,1,1,1,1,1"], "expert-counts, tokens: got both"),
        ([*MIXTRAL, "--n", "4"], "n: got 4 with model mixtral-8x7b"),
        (["--model", "mixtral-8x7b", "--tokens", "0"], "tokens: got 0"),
        (["--model", "mixtral-8x7b", "--expert-counts", "4,4"], "expert-counts: got 2 numbers; allowed: 8"),
        (["--n", "64", "--k", "64", "--expert-counts", "3,x"], "expert-counts: got '3,x'"),
        (["--n", "64", "--k", "64", "--expert-counts", "3,-1"], "expert-counts: got [3, -1]"),
        (["--n", "64", "--k", "64", "--expert-counts", "0,0"], "together 0"),
        (["--n", "64", "--k", "0", "--expert-counts", "3"], "k: got 0"),
        (["--n", "64", "--k", "64", "--tokens", "4", "--tp", "2"], "tp: got 2 without a model"),
        ([*MIXTRAL, "--dtype", "fp8"], "dtype: got 'fp8'"),
        ([*MIXTRAL, "--order", "colum"], "did you mean 'column'?"),
        ([*MIXTRAL, "--block-m", "17"], "config.block_m: got 17"),
        ([*MIXTRAL, "--num-stages", "12"], "bytes of shared memory; allowed: 233472"),
        ([*MIXTRAL, "--gpu", "h300"], "gpu: got 'h300'"),
        ([*MIXTRAL, "--gpu", "a100", "--dtype", "fp8-w8a8"], "which has no FP8 unit"),
        ([*MIXTRAL, "--l2-bytes", "nan"], "l2_bytes: got nan"),
        ([*MIXTRAL, "--sms", "0"], "sms: got 0"),
        ([*MIXTRAL, "--seed", "-1"], "seed: got -1"),
        ([*MIXTRAL, "--routing", "missing.npy"], "cannot be read"),
        (["--n", "1048576", "--k", "64", "--tokens", "65536"], "tiles: got"),
        (["--fit", "--judge"], "got more than one of"),
        ([*MIXTRAL, "--counters", "x.jsonl"], "got a file without --fit or --judge"),
        (["--judge", "--counters", "missing.jsonl"], "missing.jsonl, which is not there"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    found = predict(*arguments)
    assert found.exit_code == 2
    assert message in found.stderr
    assert len(found.stderr.splitlines()) == 1
