"""The fuzzer: a short run of every backend, what it has found before, and the fuzzer itself."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import backends
from backends import mosaic_config, mosaic_rows
from bench.fuzz import campaign, execute, judge, programs, values
from bench.fuzz.example import Draw, Example, Program, load
from bench.fuzz.shrink import shrink
from shared.config import Config
from shared.orders import ORDERS
from shared.problem import Problem
from tests.fuzz_worker import DIES, ERRS, HANGS, REFUSED, TOO_LARGE, WRONG, faulty
from tests.mutants import copy_tree
from tests.where import INTERPRET, NUMERICS

quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's word on infinities and NaN
EXAMPLES = {"torch-triton": 16, "jax-triton": 8, "pallas-triton": 4, "pallas-mosaic": 4}
"""Of the short run; the long one is `python -m bench fuzz`. Pallas's interpreters take about a second an example."""


def options(backend: str, **changes: object) -> campaign.Options:
    given: dict[str, object] = {
        "backends": (backend,), "examples": EXAMPLES[backend], "seed": 0, "jobs": 2, "interpret": INTERPRET, "draws": 2,
        **changes,
    }  # fmt: skip
    return campaign.Options(**given)  # type: ignore[arg-type]


@NUMERICS
@quiet
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_short_run(backend: str) -> None:
    """The first examples of seed 0, in this process."""
    if (reason := backends.load(backend).unavailable(interpret=INTERPRET)) is not None:
        pytest.skip(reason)
    ran = 0
    for program, draws in campaign.tasks(backend, options(backend)):
        runner = execute.Runner(program, interpret=INTERPRET)
        for draw in draws:
            example = Example(program=program, draw=draw)
            try:
                runner.check(draw)
            except judge.Wrong as fault:
                pytest.fail(f"{example}\n{fault}\n{json.dumps(example.to_mapping())}")
            ran += 1
    assert ran == EXAMPLES[backend]


def regressions() -> list[Path]:
    return sorted(campaign.REGRESSIONS.glob("*.json"))


def test_there_are_regressions() -> None:
    assert regressions()


@NUMERICS
@quiet
@pytest.mark.parametrize("path", regressions(), ids=lambda path: path.stem)
def test_regression(path: Path) -> None:
    """Examples that failed once, of a kernel or of one with a planted fault (`found` says which)."""
    example = load(path)
    if (reason := backends.load(example.program.backend).unavailable(interpret=INTERPRET)) is not None:
        pytest.skip(reason)
    if INTERPRET and example.program.problem.operations([example.program.problem.slots]) > 1e7:
        pytest.skip("too large for the interpreters")
    execute.check(example, interpret=INTERPRET)


# What is drawn


@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_drawn_programs_cover_the_spec(backend: str) -> None:
    """Whatever the backend accepts of it; and all that is drawn is accepted."""
    module = backends.load(backend)
    asked = options(backend, examples=200, draws=1, interpret=False)
    drawn = [program for program, _ in campaign.tasks(backend, asked)]
    assert len(set(drawn)) == 200
    assert all(module.unsupported(p.problem, p.config) is None for p in drawn)
    problems = [p.problem for p in drawn]
    assert len({(p.dtype, p.activation, p.scale_layout) for p in problems} & set(programs.KINDS)) == 10
    assert {p.order for p in drawn} == set(ORDERS)
    assert {p.popular for p in drawn if p.order == "popular"} == {True, False}
    assert {0, 1} < {p.tokens for p in problems}
    assert {1, 64} < {p.n for p in problems}
    assert {1, 32} < {p.k for p in problems}
    assert max(p.k for p in problems) > 1000
    assert any(p.top_k > p.experts for p in problems)
    assert {p.routing_weight for p in problems} == {True, False}
    assert {p.door for p in drawn} == {True, False}
    for name, choices in programs.CONFIG_FIELDS.items():
        others = [programs.base().replace(**{name: choice}) for choice in choices[1:]]
        refused = all(module.unsupported(HALF, config) is not None for config in others)
        assert len({getattr(p.config, name) for p in drawn}) > 1 or refused, name
    if module.FRAMEWORK == "torch":
        assert any(p.x_gap for p in drawn)
        assert any(p.w_gap for p in drawn)


def test_every_field_of_config_is_drawn() -> None:
    assert set(programs.CONFIG_FIELDS) == set(programs.config_fields())
    for name, choices in programs.CONFIG_FIELDS.items():
        for choice in choices:
            Config(**{name: choice})


def test_drawn_data_covers_the_spec() -> None:
    drawn = [
        d for _, draws in campaign.tasks("torch-triton", options("torch-triton", examples=200, draws=20)) for d in draws
    ]
    assert len({d.seed for d in drawn}) == len(drawn)
    for name, choices in (
        ("routing", values.ROUTINGS), ("x", values.VALUES), ("w", values.VALUES), ("x_spread", values.SPREADS),
        ("zeros", values.ZEROS), ("x_special", values.SPECIALS), ("weight", values.WEIGHTS),
    ):  # fmt: skip
        assert {getattr(d, name) for d in drawn} == set(choices)
        assert getattr(Draw(), name) == choices[0]


PROBLEM = Problem(
    tokens=8, experts=4, n=130, k=140, top_k=3, dtype="fp8-w8a16", activation="bfloat16", scale_layout="block",
    routing_weight=True,
)  # fmt: skip
PROGRAM = Program(backend="torch-triton", problem=PROBLEM, order="row", config=Config())


def data(problem: Problem = PROBLEM, **draw: object) -> values.Arrays:
    program = dataclasses.replace(PROGRAM, problem=problem)
    return values.arrays(Example(program=program, draw=Draw(seed=1, **draw)))  # type: ignore[arg-type]


def test_routings_are_what_they_are_called() -> None:
    def ids(name: str) -> np.ndarray:
        return data(routing=name).topk_ids

    assert (ids("all-minus-one") == -1).all()
    assert len(np.unique(ids("one-expert"))) == 1
    assert sorted(np.unique(ids("single"), return_counts=True)[1]) in ([1, 23], [24])
    assert (ids("repeated") == ids("repeated")[:, :1]).all()
    assert all(len(set(row)) == 3 for row in ids("distinct").tolist())
    assert 0 < (ids("some-minus-one") == -1).mean() < 1
    assert np.unique(ids("overfull"), return_counts=True)[1].max() > 12


def test_values_are_what_they_are_called() -> None:
    assert set(np.abs(data(w="saturated").w.astype(np.float32)).ravel()) == {448}
    assert np.abs(data(w="subnormal").w.astype(np.float32)).max() == 3 * 2.0**-9
    assert np.isnan(data(x_special="nan").x.astype(np.float32)).any()
    both = data(x_special="both-inf").x.astype(np.float32)
    assert np.isinf(both).any()
    assert not (np.isnan(both)).any()
    assert (data(zeros="token").x == 0).all(axis=1).any()
    assert (data(zeros="channel").w.astype(np.float32) == 0).all(axis=2).any()
    half = dataclasses.replace(PROBLEM, dtype="fp16", activation="float16", scale_layout=None)
    subnormal = np.abs(data(half, x="subnormal").x.astype(np.float64))
    assert subnormal.max() == 3 * 2.0**-24
    assert data(x_spread=40).w_scale is not None


# Gathering


@pytest.mark.interpret
@pytest.mark.parametrize("gathers", [False, True])
def test_what_a_program_says_of_gathering_reaches_the_kernel(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only it: what L2 keeps is as before when a call is done."""
    problem = dataclasses.replace(PROBLEM, tokens=12, n=64, k=64, dtype="fp16", activation="float16", scale_layout=None)
    config = Config(block_n=64, block_k=32, num_stages=3)
    program = Program(backend="pallas-mosaic", problem=problem, order="row", config=config, gathers=gathers)
    assert str(program).endswith(" gathers") == gathers
    seen, kept, original = [], mosaic_config.KEPT_IN_L2, mosaic_rows.gathers
    monkeypatch.setattr(mosaic_rows, "gathers", lambda *given: seen.append(original(*given)) or seen[-1])
    execute.Runner(program, interpret=True).check(Draw())
    assert set(seen) == {gathers}
    assert kept == mosaic_config.KEPT_IN_L2


# The judge


def judged(y: np.ndarray, example: Example) -> str:
    """ "right", or what is wrong."""
    try:
        judge.check(y, example, values.arrays(example), interpret=True)
    except judge.Wrong as fault:
        return str(fault)
    return "right"


def rounded(example: Example) -> np.ndarray:
    """The reference in the output dtype."""
    hoped = judge.expected(example, values.arrays(example), interpret=True)
    with np.errstate(over="ignore"):
        return hoped.reference.astype(values.arrays(example).x.dtype)


HALF = Problem(tokens=4, experts=2, n=70, k=96, top_k=2, routing_weight=True)


def example(problem: Problem = HALF, **draw: object) -> Example:
    program = dataclasses.replace(PROGRAM, problem=problem)
    return Example(program=program, draw=Draw(**draw))  # type: ignore[arg-type]


@quiet
def test_judge_takes_the_rounded_reference_and_nothing_two_steps_away() -> None:
    given = example()
    y = rounded(given)
    assert judged(y, given) == "right"
    for at in ((0, 0, 0), (3, 1, 69)):
        off = y.copy()
        off.view(np.uint16)[at] += 2
        assert judged(off, given).startswith(f"wrong: 1 of 560 elements, first {list(at)}")
        off[at] = np.nan
        assert judged(off, given).startswith("unwritten, or NaN out of nothing: 1 of")


@quiet
@pytest.mark.parametrize("special", ["nan", "inf", "both-inf"])
def test_judge_places_what_is_not_finite(special: str) -> None:
    given = example(x_special=special)
    y = rounded(given)
    assert not np.isfinite(y).all()
    assert judged(y, given) == "right"
    bad = tuple(np.argwhere(~np.isfinite(y))[0])
    good = tuple(np.argwhere(np.isfinite(y))[0])
    for at, value in ((bad, 1.0), (good, np.nan), (good, np.inf), (bad, -y[bad] if np.isinf(y[bad]) else np.inf)):
        off = y.copy()
        off[at] = value
        assert judged(off, given) != "right", (at, value)


@quiet
def test_judge_wants_infinity_where_the_output_overflows() -> None:
    given = example(dataclasses.replace(HALF, routing_weight=False), x="saturated", w="saturated")
    y = rounded(given)
    assert np.isinf(y).any()
    assert judged(y, given) == "right"
    assert judged(np.clip(y, -65504, 65504), given) != "right"


@quiet
def test_judge_lets_parts_overflow_that_only_rounding_makes_large() -> None:
    """Parts that cancel exactly, of which rounding leaves more than float16 holds: infinities of both signs, so NaN.

    two-pass adds in float32, where they fit.
    """
    found = load(campaign.REGRESSIONS / "jax-triton-2fa035e5.json")
    given, place = values.arrays(found), (41, 0, 35)
    hoped = judge.expected(found, given, interpret=False)
    assert hoped.reference[place] == 0
    assert hoped.wild[place]
    summed = dataclasses.replace(found.program, config=found.program.config.replace(reduction="two-pass"))
    two_pass = dataclasses.replace(found, program=summed)
    assert not judge.expected(two_pass, given, interpret=False).wild[place]


def test_judge_wants_zeros_where_no_expert_is() -> None:
    given = example(routing="some-minus-one")
    y = rounded(given)
    nowhere = values.arrays(given).topk_ids < 0
    assert nowhere.any()
    y[nowhere] = 1e-7
    assert "rows of -1 slots must be zeros" in judged(y, given)


@quiet
def test_judge_holds_subnormal_results_to_a_step() -> None:
    """x and w of a few subnormal steps: y is at most a few of float16's least steps, and one step more is wrong."""
    problem = Problem(tokens=1, experts=1, n=8, k=8, top_k=1)
    given = example(problem, x="subnormal", w="integers")
    y = rounded(given)
    assert 0 < np.abs(y).max() < 2.0**-18
    assert judged(y, given) == "right"
    y.view(np.uint16)[0, 0, 0] += 1
    assert judged(y, given) != "right"


# Faults that are planted


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("old", "new", "dtypes"),
    [
        ("k_valid = k < K\n", "k_valid = k < K - 1\n", {"fp16"}),
        pytest.param(
            "scale = tl.load(x_scale_ptr + token, mask=row_valid, other=0.0)",
            "scale *= 1.0",
            {"fp8-w8a8", "fp8-w8a16"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["K mask off by one", "dropped x scale"],
)
def test_a_planted_fault_is_found_shrunk_and_saved(old: str, new: str, dtypes: set[str], tmp_path: Path) -> None:
    """`python -m bench fuzz` over a copy of the tree with one fault in the Triton kernel."""
    copy_tree(tmp_path)
    kernel = tmp_path / "backends" / "triton_kernel.py"
    source = kernel.read_text()
    assert source.count(old) == 1
    kernel.write_text(source.replace(old, new))
    command = [
        sys.executable, "-m", "bench", "fuzz", "--interpret", "--backend", "torch-triton", "--examples", "24", "--jobs",
        "1", "--regressions", "saved", "--out", "result.json",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    first, *_ = json.loads((tmp_path / "result.json").read_text())["failures"]
    assert first["kind"] == "wrong"
    assert first["shrunk"]
    assert f"shrunk to: {first['example']}" in ran.stdout
    simplest = load(tmp_path / "saved" / first["saved"])
    problem = simplest.program.problem
    assert (problem.tokens, problem.experts, problem.n, problem.k, problem.top_k) == (1, 1, 1, 1, 1)
    assert problem.dtype in dtypes
    assert simplest.draw == Draw(seed=simplest.draw.seed)
    # the same example is right in the kernel without the fault
    execute.check(simplest, interpret=True)


def test_shrinking_takes_away_all_that_does_not_matter() -> None:
    """A fault that needs N > 64 and bfloat16 output: what is left has just that."""
    start = Example(
        program=dataclasses.replace(PROGRAM, x_gap=8, door=True, order="grouped", config=Config(block_m=64)),
        draw=Draw(seed=3, x="heavy", zeros="token", x_special="nan", weight="zero"),
    )

    def fails(candidate: Example) -> bool:
        return candidate.program.problem.n > 64 and candidate.program.problem.activation == "bfloat16"

    steps = shrink(start)
    found = next(steps)
    tries = 0
    try:
        while True:
            found = steps.send(fails(found))
            tries += 1
    except StopIteration as end:
        simplest: Example = end.value
    assert tries < 80
    problem = simplest.program.problem
    assert (problem.tokens, problem.experts, problem.n, problem.k, problem.top_k) == (1, 1, 65, 1, 1)
    assert simplest.program.config == programs.base()
    assert simplest.draw == Draw(seed=3)
    assert not simplest.program.door


# Worker processes


def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: tuple[int, ...], **changes: object) -> campaign.Result:
    def tasks(backend: str, _: campaign.Options) -> list[campaign.Task]:
        return [
            (dataclasses.replace(PROGRAM, problem=dataclasses.replace(HALF, n=n)), [Draw(seed=i) for i in range(3)])
            for n in sizes
        ]

    monkeypatch.setattr(campaign, "tasks", tasks)
    chosen = options("torch-triton", examples=3 * len(sizes), draws=3, regressions=tmp_path / "saved", **changes)
    return campaign.run(chosen, tmp_path / "journals", lambda line: print(line), faulty)


def test_a_process_that_dies_is_reported_shrunk_and_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.fuzz.shrink.MOST_TRIES", 4)
    result = pool(monkeypatch, tmp_path, (DIES, 64, 65), jobs=1)
    (failure,) = result.failures
    assert failure.kind == "died"
    assert failure.text == "the process was killed by SIGSEGV"
    assert failure.shrunk
    assert failure.path is not None
    saved = load(failure.path)
    assert saved.program.problem.n == DIES
    assert saved.program.problem.tokens == 1, "shrunk in processes of their own, of which each dies"
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [failure.path.name]
    assert result.examples["torch-triton"] == 1 + 3 + 3, "the other programs ran"
    assert not (tmp_path / "journals").exists()


def test_errors_hangs_and_refusals_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = pool(monkeypatch, tmp_path, (64, HANGS, ERRS, WRONG, REFUSED, TOO_LARGE), shrink=False, patience=5.0)
    assert sorted((f.kind, f.example.program.problem.n) for f in result.failures) == [
        ("error", ERRS), ("hangs", HANGS), *[("wrong", WRONG)] * 3,
    ]  # fmt: skip
    assert all(f.path is not None and load(f.path) == f.example for f in result.failures)
    assert len({f.path for f in result.failures}) == 5
    assert result.refused["torch-triton"] == {
        "# bytes of shared memory": 1,
        "compiler: RuntimeError: Requested shared memory size # exceeds the limit": 1,
    }
    assert result.examples["torch-triton"] == 3 + 1 + 1 + 3
    assert result.to_mapping()["programs"] == {"torch-triton": 4}


def test_many_failures_end_a_backends_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = pool(monkeypatch, tmp_path, (WRONG,) * 30, shrink=False, jobs=1)
    assert len(result.failures) == campaign.MOST_FAILURES
    assert result.examples["torch-triton"] < 20


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_late_runs_keep_what_they_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: signal.Signals
) -> None:
    def interrupted(line: str) -> None:
        if "FAILED" in line:
            os.kill(os.getpid(), ending)

    def ended(pool: campaign._Pool) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # a second one, as impatient schedulers send
        end(pool)

    end = campaign._Pool.end
    late = pool(monkeypatch, tmp_path, (64, 65), seconds=0.0)
    assert late.stopped == "time limit"
    chosen = options("torch-triton", examples=9, draws=3, regressions=tmp_path / "saved")
    monkeypatch.setattr(
        campaign,
        "tasks",
        lambda *_: [(dataclasses.replace(PROGRAM, problem=dataclasses.replace(HALF, n=WRONG)), [Draw()] * 9)],
    )
    monkeypatch.setattr(campaign._Pool, "end", ended)
    before = [signal.getsignal(one) for one in campaign.ENDINGS]
    with campaign.ended_in_order():
        cut = campaign.run(chosen, tmp_path / "journals", interrupted, faulty)
    assert cut.stopped == "interrupted"
    assert [signal.getsignal(one) for one in campaign.ENDINGS] == before
    assert len(list((tmp_path / "saved").iterdir())) == 1


def test_command_refuses(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from bench.__main__ import app

    def told(*arguments: str) -> str:
        found = CliRunner().invoke(app, ["fuzz", *arguments])
        assert found.exit_code == 2
        return found.output

    assert "backend: got 'triton'; known: torch-triton" in told("--interpret", "--backend", "triton")
    assert "examples: got 0; allowed: 1 or more" in told("--interpret", "--examples", "0")
    if INTERPRET:
        assert "PyTorch sees no GPU" in told("--examples", "1")
