"""The tuner: what it leaves out without timing, what it times how often, and what it exports."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")

from backends import mosaic_config, registry, tuning
from bench import candidates, contenders, data, export_vllm, machine, measure, prune, results, tune
from bench import turns as turns_module
from bench.cases import TOKENS_FULL, Row
from bench.turns import Turns
from shared.checks import ArgumentError
from shared.config import MOST_STAGES, Config
from shared.models import model

CEILINGS = {"read_bytes_per_s": 4.6e12, "bf16_flops": 8e14, "fp8_flops": 1.5e15}
MIXTRAL = model("mixtral-8x7b")


def test_lower_bound_of_tiles() -> None:
    """By hand: DRAM bytes once, tiles' bytes at twice the rate, padded products at 1.25 times theirs."""
    problem = MIXTRAL.problem("gate-up", 512, "fp16")
    counts = [128] * 8
    expert = problem.n * problem.k * 2

    def bound(**tile: int) -> float:
        return prune.lower_bound_seconds(problem, counts, Config(num_stages=2, **tile), CEILINGS)

    x_once = 1024 * problem.k * 2
    in_16_rows = (64 * expert + problem.n // 128 * x_once) / 9.2e12
    assert bound(block_m=16, block_n=128, block_k=64) == pytest.approx(in_16_rows)
    one_row_each = 2 * 1024 * problem.n * problem.k / 1e15
    in_dram = problem.read_bytes(counts) / 4.6e12
    assert bound(block_m=128, block_n=128, block_k=64) == pytest.approx(max(in_dram, one_row_each))
    padded = 2 * 8 * 1024 * problem.n * problem.k / 1e15
    assert bound(block_m=1024, block_n=128, block_k=64) == pytest.approx(padded)
    config = Config(block_m=1024, block_n=128, block_k=64, num_stages=2)
    alone = prune.lower_bound_seconds(problem, counts, config, CEILINGS, pads=False)
    assert alone == pytest.approx(max(in_dram, one_row_each)), "pallas-mosaic multiplies the rows that hold slots"


@pytest.mark.parametrize(
    ("count", "block_m", "rows"),
    [
        (0, 160, 0),
        (128, 160, 128),
        (129, 160, 144),
        (144, 160, 144),
        (145, 160, 160),
        (300, 160, 304),
        (7, 64, 64),
        (40, 48, 48),
    ],
)
def test_a_tall_tile_multiplies_its_tail_where_that_has_slots(count: int, block_m: int, rows: int) -> None:
    assert prune._rows_of_tiles(count, block_m) == rows


def test_what_cannot_win_is_said_with_both_times() -> None:
    problem = MIXTRAL.problem("gate-up", 512, "fp16")
    bound = prune.lower_bound_seconds(problem, [128] * 8, Config(), CEILINGS)
    assert prune.cannot_win(problem, [128] * 8, Config(), CEILINGS, bound * 1.001) is None
    reason = prune.cannot_win(problem, [128] * 8, Config(), CEILINGS, bound * 0.999)
    assert reason is not None
    assert f"{bound * 1e6:.1f} us or more" in reason


def test_spilled_registers_are_read_off_the_compiler() -> None:
    """A 128x256 accumulator needs 256 registers of each thread of four warps; 16x64 needs 8. What fails is unknown."""
    problem = MIXTRAL.problem("gate-up", 8, "fp16")
    small = Config(block_m=16, block_n=64, block_k=64, num_stages=2)
    assert prune.spilled_bytes("torch-triton", problem, "column", small) == 0
    large = Config(block_m=128, block_n=256, block_k=64, num_stages=2)
    assert (prune.spilled_bytes("torch-triton", problem, "column", large) or 0) > 0
    assert prune.spilled_bytes("torch-triton", problem, "nowhere", small) is None


class Known:
    """Stands for `prune.Spills`: configs of 5 stages spill."""

    def ask(self, *_: object) -> None: ...

    def reason(self, backend: str, problem: Any, order: str, config: Config) -> str | None:
        return "spills 8 bytes of registers" if config.num_stages == 5 else None


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], list[Config]]]:
    """tune_case with scripted times: (its entry, the config of every sample in turn)."""

    def run(us: Callable[[Config], float], configs: list[Config], wrong: Config | None = None) -> Any:
        sampled: list[Config] = []

        def prepare(row: Row, data: Any, device: Any, *, config: Config) -> Any:
            return types.SimpleNamespace(config=config, framework="torch", eager=lambda: None)

        def sample(contender: Any, device: Any) -> float:
            sampled.append(contender.config)
            return us(contender.config) * 1e-6

        def check(contender: Any, *_: object) -> dict[str, float]:
            if contender.config == wrong:
                raise AssertionError("wrong")
            return {"error": 1e-4}

        monkeypatch.setattr(contenders, "prepare", prepare)
        monkeypatch.setattr(contenders, "wait", lambda *_: None)
        monkeypatch.setattr(measure, "check", check)
        monkeypatch.setattr(measure, "gpu_sample", sample)
        clock = types.SimpleNamespace(pause=lambda: None, reset=lambda: None)
        device = types.SimpleNamespace(clock=clock, gpu="Some GPU", ceilings=lambda: CEILINGS)
        row = Row.of("mixtral-8x7b", "gate-up", 512, "fp16", "column", "torch-triton")
        data = types.SimpleNamespace(problem=row.problem, counts=np.full(8, 128))
        return tune.tune_case(row, device, configs, data, Known()), sampled  # type: ignore[arg-type]

    return run


def test_what_the_tuner_times_and_what_it_leaves_out(tuned: Any) -> None:
    good = [Config(block_m=128, block_n=128, block_k=64, num_stages=2, group_m=g) for g in range(1, 10)]
    rereads = Config(block_m=16, block_n=128, block_k=64, num_stages=3)
    spills = Config(block_m=128, block_n=64, block_k=64, num_stages=5)
    too_large = Config(block_m=128, block_n=256, block_k=256, num_stages=8, num_warps=8)
    wrong = Config(block_m=128, block_n=64, block_k=64, num_stages=3)
    entry, sampled = tuned(lambda config: 400.0 + config.group_m, [*good, rereads, spills, too_large, wrong], wrong)
    best = [Config.from_mapping(time["config"]) for time in entry["times"]]
    assert best[0] == good[0]
    assert Config.from_mapping(entry["before"]) in best, "the config that calls take today is timed too"
    counts = {config: sampled.count(config) for config in best}
    finalists = -(-len(best) // 3)
    assert [counts[config] for config in best] == [7] * finalists + [2] * (len(best) - finalists)
    assert [time["samples"] for time in entry["times"]] == [counts[config] for config in best]
    assert "cannot win" in entry["pruned"][str(rereads)]
    assert "spills" in entry["pruned"][str(spills)]
    assert "shared memory" in entry["pruned"][str(too_large)]
    assert set(entry["failed"]) == {str(wrong)}
    assert not {rereads, spills, too_large, wrong} & set(sampled)


def test_a_slower_best_time_leaves_fewer_out(tuned: Any) -> None:
    rereads = Config(block_m=16, block_n=128, block_k=64, num_stages=3)
    entry, sampled = tuned(lambda config: 2000.0, [rereads])
    assert not entry["pruned"]
    assert rereads in sampled


def test_progress_tells_what_is_left() -> None:
    row = Row.of("mixtral-8x7b", "gate-up", 512, "fp16", "column", "torch-triton")
    entry = {"times": [{"us": 12.5, "config": dataclasses.asdict(Config())}], "pruned": {"a": "b"}, "failed": {}}
    line = tune.progress(row, entry, 2, 6, 30.0, 90.0)
    assert line.startswith("[2/6] mixtral")
    assert "1 timed, 1 left out, 0 failed" in line
    assert "about 3 min left" in line


def test_models_are_chosen() -> None:
    chosen = list(tune.jobs(["torch-triton"], ["fp16"], [""], models=["qwen3-30b-a3b"]))
    assert {row.case.model.name for row in chosen} == {"qwen3-30b-a3b"}
    assert len(list(tune.jobs(["torch-triton"], ["fp16"], [""]))) > len(chosen)


def test_every_layer_is_tuned_at_every_batch_and_shards_share_them_out() -> None:
    rows = tune.jobs(["torch-triton", "pallas-mosaic"], ["fp16", "fp8-w8a8"], [""])
    of_layer: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        of_layer.setdefault((row.case.model.name, row.case.gemm), set()).add(row.case.tokens)
    assert len(of_layer) == 8
    assert all(batches == set(TOKENS_FULL) for batches in of_layer.values())
    assert len(rows) == len(set(rows)) == 8 * 10 * 2 * 2
    kept_together = [(row.case.model.name, row.case.gemm, row.dtype) for row in rows]
    changes = sum(a != b for a, b in itertools.pairwise(kept_together))
    assert changes == 8 * 2 - 1, "weights are made once a layer and dtype"
    shards = [tune.jobs(["torch-triton"], ["fp16"], [""], shard=(i, 2)) for i in (1, 2)]
    assert len(shards[0]) == len(shards[1])
    assert sorted(row.id for shard in shards for row in shard) == sorted(
        row.id for row in rows if (row.contender, row.dtype) == ("torch-triton", "fp16")
    )


# What is known of other batches


def entry(tokens: int, backend: str = "torch-triton", **config: Any) -> dict[str, Any]:
    """An entry of backends/tuned/ for Mixtral's gate-up projection in fp16."""
    problem = MIXTRAL.problem("gate-up", tokens, "fp16")
    shape = {name: getattr(problem, name) for name in ("dtype", "scale_layout", "experts", "n", "k", "top_k", "tokens")}
    return {"backend": backend, **shape, "config": dataclasses.asdict(Config(**config))}


SMALL = Config(block_m=16, block_n=64, block_k=128, num_stages=4)
TALL = Config(block_m=64, block_n=128, block_k=64, num_stages=3)


def changed(found: list[Config], config: Config) -> set[str]:
    """How those of `found` that are one parameter away from `config` differ from it."""
    before = dataclasses.asdict(config)
    steps = [
        [f"{name}={value}" for name, value in dataclasses.asdict(other).items() if value != before[name]]
        for other in found
    ]
    return {step[0] for step in steps if len(step) == 1}


def near(tokens: int, known: list[dict[str, Any]], backend: str = "torch-triton") -> list[Config]:
    return candidates.near(MIXTRAL.problem("gate-up", tokens, "fp16"), backend, known)


def test_near_candidates_are_the_next_batches_configs_and_one_step_from_them() -> None:
    known = [
        entry(1, block_m=16, block_n=256),
        entry(64, **dataclasses.asdict(SMALL)),
        entry(256, **dataclasses.asdict(TALL)),
        entry(512, block_m=160, block_n=128, block_k=64, num_stages=2, num_warps=8),
    ]
    found = near(128, known)
    assert {SMALL, TALL} <= set(found)
    steps = {"num_stages=3", "num_stages=5", "block_n=32", "block_n=128"}
    assert changed(found, SMALL) == steps | {"block_m=32"}, "no shorter tile for more tokens; w8 has no work"
    steps = {"num_stages=2", "num_stages=4", "block_n=64", "block_n=256", "num_warps=8"}
    assert changed(found, TALL) == steps | {"block_m=48"}, "no taller tile for fewer tokens"
    assert len(found) == len(set(found))
    assert Config.from_mapping(known[0]["config"]) not in found, "64 tokens are nearer than one"
    assert Config.from_mapping(known[3]["config"]) not in found, "256 tokens are nearer than 512"


def test_taller_tiles_are_tried_only_where_slots_would_fill_them() -> None:
    known = [entry(1, **dataclasses.asdict(SMALL))]
    assert "block_m=32" not in changed(near(4, known), SMALL)
    assert "block_m=32" in changed(near(64, known), SMALL)


@pytest.mark.parametrize("backend", ["torch-triton", "pallas-mosaic"])
def test_the_deepest_pipeline_has_no_deeper_neighbour(backend: str) -> None:
    deepest = Config(block_m=16, block_n=64, block_k=64, num_stages=MOST_STAGES)
    found = near(64, [entry(64, backend, **dataclasses.asdict(deepest))], backend)
    assert deepest in found
    assert max(config.num_stages for config in found) == MOST_STAGES


def test_pallas_mosaic_is_tried_with_the_deepest_pipelines_of_one_to_four_thread_blocks() -> None:
    tile = Config(block_m=16, block_n=64, block_k=128, num_stages=3)
    problem = MIXTRAL.problem("gate-up", 64, "fp16")
    found = candidates.near(problem, "pallas-mosaic", [entry(64, "pallas-mosaic", **dataclasses.asdict(tile))])
    depths = {config.num_stages for config in found if config.replace(num_stages=3) == tile}
    blocks = [mosaic_config.blocks_per_sm(problem, tile.replace(num_stages=depth)) for depth in depths]
    assert set(blocks) == {1, 2, 3, 4}


def test_nothing_known_leaves_all_candidates() -> None:
    assert near(8, []) == []
    row = Row.of("mixtral-8x7b", "gate-up", 8, "fp16", "column", "torch-triton")
    every = candidates.candidates(row.problem, "torch-triton")
    assert tune.configs_for(row, "Other GPU", near_only=True) == every
    assert tune.configs_for(row, "NVIDIA H200", near_only=False) == every
    few = tune.configs_for(row, "NVIDIA H200", near_only=True)
    assert 0 < len(few) < len(every)


def test_a_port_starts_from_its_own_entries_and_looks_at_its_originals() -> None:
    own, theirs = entry(64, "pallas-triton", **dataclasses.asdict(SMALL)), entry(128, **dataclasses.asdict(TALL))
    found = near(128, [own, theirs], "pallas-triton")
    assert changed(found, SMALL)
    assert TALL in found
    assert not changed([config for config in found if config.block_k == TALL.block_k], TALL), "as it is alone"
    assert changed(near(128, [theirs], "pallas-triton"), TALL), "it has none itself"


def test_parts_of_k_are_halved_for_more_tokens_and_doubled_for_fewer() -> None:
    split = SMALL.replace(split_k=4)
    found = changed(near(2, [entry(1, **dataclasses.asdict(split))]), split)
    assert {"split_k=2", "split_k=1"} <= found
    problem = model("deepseek-v3").problem("gate-up", 1, "fp16")
    known = [entry(2, **dataclasses.asdict(split))]
    assert "split_k=8" in changed(candidates.near(problem, "torch-triton", known), split), "it has few tiles"


@pytest.mark.parametrize("backend", ["torch-triton", "pallas-triton", "pallas-mosaic"])
def test_near_candidates_run_and_are_few(backend: str) -> None:
    """All cases without an entry together: each config can be honoured, and they are far fewer than all candidates."""
    few = every = 0
    for row in tune.jobs([backend], ["fp16", "fp8-w8a16", "fp8-w8a8"], [""], models=["mixtral-8x7b", "deepseek-v3"]):
        known = tuning.of_layer(row.problem, backend, "NVIDIA H200")
        known = [entry for entry in known if entry["tokens"] != row.case.tokens]
        found = candidates.near(row.problem, backend, known)
        reasons = [registry.load(backend).unsupported(row.problem, config) for config in found]
        assert found
        assert reasons == [None] * len(found)
        few += len(found)
        every += len(candidates.candidates(row.problem, backend))
    assert few < every / 2


def test_a_step_that_needs_more_shared_memory_has_fewer_stages() -> None:
    deep = Config(block_m=16, block_n=128, block_k=128, num_stages=6)
    found = near(8, [entry(4, **dataclasses.asdict(deep))])
    assert deep.replace(block_n=256, num_stages=3) in found
    assert not any(config.block_n == 256 and config.num_stages > 3 for config in found)


def test_cases_with_an_entry_of_their_own_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_entries", lambda slug: [entry(8)] if slug == "some-gpu" else [])

    def has(tokens: int = 8, dtype: str = "fp16", backend: str = "torch-triton", gpu: str = "Some GPU") -> bool:
        return tune.has_entry(Row.of("mixtral-8x7b", "gate-up", tokens, dtype, "column", backend), gpu)

    assert has()
    assert not has(tokens=16)
    assert not has(dtype="fp8-w8a8")
    assert not has(backend="pallas-triton"), "the original's entry is not its own"
    assert not has(gpu="Other GPU")
    assert not tune.has_entry(Row.of("mixtral-8x7b", "down", 8, "fp16", "column", "torch-triton"), "Some GPU")


def is_taken(lock: Path) -> bool:
    """Whether someone has the GPU for itself."""
    return lock.exists() and turns_module._is_held(lock)


@pytest.mark.parametrize("take_turns", [False, True])
def test_a_run_takes_missing_cases_near_known_ones_and_goes_on(
    take_turns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral's gate-up has an entry at 8 tokens, nothing else has one: the run is stopped, repeated, and complete."""
    monkeypatch.setattr(turns_module, "folder_of", lambda gpu: tmp_path / "turns")
    device = types.SimpleNamespace(gpu="Some GPU", torch_device="cpu", synchronize=lambda: None)
    monkeypatch.setattr(tuning, "_entries", lambda slug: [entry(8)])
    monkeypatch.setattr(machine, "Machine", lambda *_: device)
    monkeypatch.setattr(data, "build_batches", lambda cases, *_, **__: dict.fromkeys(cases))
    timed: dict[str, int] = {}

    def tune_case(
        row: Row, device: Any, configs: list[Config], data: Any, spills: Any, turns: Turns | None
    ) -> dict[str, Any]:
        assert (turns is not None) == is_taken(tmp_path / "turns" / "gpu") == take_turns, "alone, with all others away"
        if len(timed) == 3 and row.id not in timed:
            timed["stopped"] = 0
            raise KeyboardInterrupt
        assert row.id not in timed, "it is finished"
        timed[row.id] = len(configs)
        told = {"backend": row.contender, "case": row.case.name, "dtype": row.dtype, "order": row.order}
        return {**told, "times": [], "pruned": {}, "failed": {}}

    monkeypatch.setattr(tune, "tune_case", tune_case)
    given = types.SimpleNamespace(
        clock="cupti", out=tmp_path / "tune.jsonl", from_best=None, top=4, backend=["torch-triton"], dtype=["fp16"],
        only=["gate-up"], order="column", model=["mixtral-8x7b"], shard=(1, 1), missing=True, near=True, seconds=1e9,
        take_turns=take_turns,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        tune.run(given)  # type: ignore[arg-type]
    assert not is_taken(tmp_path / "turns" / "gpu")
    assert len(tune.read(given.out)) == 3
    tune.run(given)  # type: ignore[arg-type]
    batches = [tokens for tokens in TOKENS_FULL if tokens != 8]
    cases = [f"mixtral-8x7b/gate-up/tp{MIXTRAL.tp}/tokens-{tokens}" for tokens in batches]
    assert [entry["case"] for entry in tune.read(given.out)] == cases
    problem = MIXTRAL.problem("gate-up", 16, "fp16")
    assert timed[f"{cases[4]}/fp16/column/torch-triton"] < len(candidates.candidates(problem, "torch-triton"))


def told_of(order: str = "column", us: float = 2.0, **change: Any) -> dict[str, Any]:
    """A line of a tuning file; its config says the time, in microseconds, by group_m."""
    shape = {"dtype": "fp16", "scale_layout": None, "experts": 8, "n": 14336, "k": 4096, "top_k": 2, "tokens": 8}
    told = {"gpu": "Some GPU", "date": "2026-11-30", "versions": {"torch": "2", "triton": "3", "jax": "0"}}
    config = dataclasses.asdict(Config(group_m=int(us)))
    times = {"times": [{"us": us, "config": config}]}
    return {"backend": "torch-triton", "case": "a", "order": order, **shape, **told, **times, **change}


def written(path: Path, *lines: dict[str, Any], end: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return path


def test_the_collection_takes_whole_lines_and_of_a_case_twice_the_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed leaves half a line; two side by side leave a case twice."""
    monkeypatch.setattr(tune, "TUNED", tmp_path)
    half = json.dumps(told_of(tokens=16))[:99]
    target = tune.collect(written(tmp_path / "a.jsonl", told_of(us=3), told_of(us=2), told_of(us=4), end=half))
    (entry,) = json.loads(target.read_text())["entries"]
    assert (entry["us"], entry["config"]["group_m"]) == (2, 2)
    target = tune.collect(written(tmp_path / "b.jsonl", told_of(us=5)))
    (entry,) = json.loads(target.read_text())["entries"]
    assert entry["us"] == 5, "a later file counts, however slow: it is of the present kernels"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "some-gpu.json"]


@pytest.mark.parametrize(
    ("lines", "end", "says"),
    [
        ([told_of(), told_of("row")], "", "in the orders column and row"),
        ([told_of(), told_of(gpu="Other GPU")], "", "several GPUs"),
        ([{k: v for k, v in told_of().items() if k != "date"}], "", "line 1 has no date"),
        ([told_of(), {"times": 1}], "", "line 2 has no backend"),
        ([told_of(times=[{"us": 1, "config": {"block_q": 1}}])], "", "torch-triton at 8 tokens.*block_q"),
        ([], '{"backend": "tor', "no entries"),
        ([], "", "no entries"),
        ([], '{"backend": \n{"backend": ', "line 1 is not JSON"),
    ],
)
def test_what_cannot_be_collected_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]], end: str, says: str
) -> None:
    monkeypatch.setattr(tune, "TUNED", tmp_path)
    with pytest.raises(ArgumentError, match=says):
        tune.collect(written(tmp_path / "tune.jsonl", *lines, end=end))
    assert not (tmp_path / "some-gpu.json").exists()


@pytest.mark.parametrize("content", ["", '{"backend": "torch-tri', '{"ba'])
def test_a_run_goes_on_where_the_first_case_was_not_written_whole(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tune.jsonl"
    path.write_text(content)
    assert tune.finished(path, gpu="Some GPU", versions=told_of()["versions"]) == set()
    assert path.read_text() == ""


def test_a_case_that_lacks_nothing_but_its_lines_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    path.write_text(json.dumps(told_of()))
    assert len(tune.finished(path, gpu="Some GPU", versions=told_of()["versions"])) == 1
    assert path.read_text() == json.dumps(told_of()) + "\n"


@pytest.mark.parametrize("content", ["my notes", "my notes\nwithout an end", '{"gpu": "NVIDIA H200", "entries": []}'])
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(ArgumentError, match="not a tuning file"):
        tune.finished(path, gpu="Some GPU", versions={})
    assert path.read_text() == content


def test_a_file_is_one_runs_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tune.jsonl"
    with results.alone(path):
        with pytest.raises(ArgumentError, match="--out: another process is writing"), results.alone(path):
            pass
        results.append(path, {"times": []})
    with results.alone(path):
        assert path.read_text() == '{"times": []}\n'
    with pytest.raises(ArgumentError, match=r"--out: .* cannot be written"), results.alone(tmp_path):
        pass


def test_a_run_of_nothing_says_so(tmp_path: Path) -> None:
    given = types.SimpleNamespace(
        backend=["torch-triton"], dtype=["fp16"], only=["mixtrel"], order="column", model=None, shard=(2, 2),
        out=tmp_path / "tune.jsonl",
    )  # fmt: skip
    with pytest.raises(ArgumentError, match=r"--only: got \['mixtrel'\], which selects none of 40"):
        tune.run(given)  # type: ignore[arg-type]
    assert not given.out.exists()


def test_an_interrupted_run_does_not_compile_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def wait(value: int, *_: object) -> None:
        begun.append(value)
        if value == 0:
            raise KeyboardInterrupt
        time.sleep(0.05)

    monkeypatch.setattr(contenders, "wait", wait)
    monkeypatch.setattr(tune, "COMPILE_THREADS", 1)
    device: Any = types.SimpleNamespace(clock=types.SimpleNamespace(pause=lambda: None, reset=lambda: None))
    several = {i: types.SimpleNamespace(framework="torch", eager=lambda i=i: i) for i in range(50)}
    with pytest.raises(KeyboardInterrupt):
        tune._compile(several, device)
    assert len(begun) < 10


# Export


def test_the_export_is_what_vllm_reads(tmp_path: Path) -> None:
    tuned = tune.TUNED / "nvidia-h200.json"
    found = export_vllm.export(tuned, tmp_path)
    names = {path.name for path in found.paths}
    assert {
        "E=8,N=7168,device_name=NVIDIA_H200.json",
        "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8.json",
        "E=128,N=768,device_name=NVIDIA_H200.json",
        "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8.json",
    } <= names
    assert not any("w8a16" in name for name in names), "its Triton kernel has none"
    for path in found.paths:
        export_vllm.check(json.loads(path.read_text()), path.name)
    ours = next(
        entry
        for entry in json.loads(tuned.read_text())["entries"]
        if (entry["backend"], entry["dtype"], entry["n"], entry["tokens"]) == ("torch-triton", "fp8-w8a8", 14336, 8)
    )
    name = "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"
    theirs = json.loads((tmp_path / name).read_text())["8"]
    assert (theirs["BLOCK_SIZE_M"], theirs["BLOCK_SIZE_N"], theirs["num_stages"]) == (
        ours["config"]["block_m"], ours["config"]["block_n"], ours["config"]["num_stages"]
    )  # fmt: skip


def test_a_band_holds_every_tile_row() -> None:
    problem = MIXTRAL.problem("gate-up", 512, "fp16")
    group = export_vllm.tiles(Config(block_m=64), problem)["GROUP_SIZE_M"]
    assert group >= problem.max_tile_rows(64) > group / 2
    assert export_vllm.tiles(Config(), MIXTRAL.problem("gate-up", 1, "fp16"))["GROUP_SIZE_M"] == 2


def test_what_vllm_cannot_have_is_told(tmp_path: Path) -> None:
    shape = {"backend": "torch-triton", "dtype": "fp16", "scale_layout": None, "experts": 8, "k": 4096, "top_k": 2}
    entries = [
        {**shape, "n": 14336, "tokens": 1, "config": dataclasses.asdict(Config(split_k=4))},
        {**shape, "n": 14336, "tokens": 8, "config": dataclasses.asdict(Config(swap_ab=True))},
        {**shape, "n": 14300, "tokens": 8, "config": dataclasses.asdict(Config())},
    ]
    source = tmp_path / "some-gpu.json"
    source.write_text(json.dumps({"gpu": "NVIDIA H200 NVL", "entries": entries}))
    found = export_vllm.export(source, tmp_path / "out")
    assert [path.name for path in found.paths] == ["E=8,N=7168,device_name=NVIDIA_H200.json"]
    assert list(json.loads(found.paths[0].read_text())) == ["8"]
    assert any("1 tokens: left out, as they split K" in note for note in found.notes)
    assert any("8 tokens: timed with operands in the other order" in note for note in found.notes)
    source.write_text(json.dumps({"gpu": "NVIDIA H200", "entries": [entries[1], entries[1]]}))
    with pytest.raises(ArgumentError, match="two entries"):
        export_vllm.export(source, tmp_path / "out")


def test_of_a_tile_of_two_blocks_the_best_of_one_is_exported(tmp_path: Path) -> None:
    shape = {"backend": "torch-triton", "dtype": "fp16", "scale_layout": None, "experts": 8, "k": 4096, "top_k": 2}
    tall, one = (dataclasses.asdict(Config(block_m=m, block_n=128)) for m in (160, 64))
    versions = {"torch": "2", "triton": "3", "jax": "0"}
    told = {"gpu": "Some GPU", "versions": versions, "date": "2026-11-30", "n": 14336, "tokens": 512}
    run = {**shape, **told, "times": [{"us": 1.0, "config": tall}, {"us": 2.0, "config": one}]}
    lone = {**run, "tokens": 256, "times": [{"us": 1.0, "config": tall}]}
    (tmp_path / "tune.jsonl").write_text(json.dumps(run) + "\n" + json.dumps(lone) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "TUNED", tmp_path)
        target = tune.collect(tmp_path / "tune.jsonl")
    entries = {entry["tokens"]: entry for entry in json.loads(target.read_text())["entries"]}
    assert entries[512]["config"] == tall
    found = export_vllm.export(target, tmp_path / "out")
    exported = json.loads(found.paths[0].read_text())
    assert list(exported) == ["512"]
    assert exported["512"]["BLOCK_SIZE_M"] == 64
    assert any("512 tokens: the best tile of one block of rows" in note for note in found.notes)
    assert any("256 tokens: left out" in note and "two blocks of rows" in note for note in found.notes)


GOOD = dict(zip(export_vllm.FIELDS, (16, 64, 128, 1, 4, 3), strict=True))


@pytest.mark.parametrize(
    "content",
    [
        {"eight": GOOD},
        {"8": {key: value for key, value in GOOD.items() if key != "GROUP_SIZE_M"}},
        {"8": GOOD | {"SWAP_AB": 1}},
        {"8": GOOD | {"BLOCK_SIZE_K": 96}},
        {"8": GOOD | {"num_stages": True}},
        {"8": GOOD | {"num_warps": "4"}},
        {"8": GOOD | {"SPLIT_K": 2}},
        {"8": GOOD | {"BLOCK_SIZE_N": 8}},
    ],
)
def test_a_file_that_vllm_could_not_read_is_refused(content: dict[str, Any]) -> None:
    export_vllm.check({"8": GOOD, "16": GOOD | {"SPLIT_K": 1}}, "good.json")
    with pytest.raises(ArgumentError):
        export_vllm.check(content, "bad.json")
