"""`python -m bench launch`: rehearsed on the CPU, gone on with, and its gaps and tables on made-up records."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from bench import evidence, launch_cost, launch_host, launch_step, launch_tables
from bench.__main__ import app
from bench.clock import KernelRecord
from bench.machine import Rehearsal

NOTE = Path(__file__).parents[2] / "notes" / "launch-cost.md"


def test_rehearsal_measures_everything_and_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, told = tmp_path / "launch.jsonl", []
    options: dict[str, Any] = {"seconds": 60, "say": told.append, "keyword": "fp16/pallas-triton", "rehearse": True}
    assert launch_cost.run(out, Rehearsal(), **options)
    (row,) = launch_cost.read(out)
    assert row["id"] == "tiny/gate-up/tp1/tokens-4/fp16/pallas-triton"
    assert set(row["us"]) == set(launch_tables.COLUMNS)
    assert all(row["us"][name] > 0 for name in ("kernel", "latency", "issued", "steady", "captured", "layer"))
    assert row["us"]["gaps"] is None, "the host's clock knows no gaps"
    assert row["us"]["layer_overhead"] == pytest.approx(row["us"]["layer"] - row["us"]["layer_kernel"], abs=0.02)
    assert (row["layers"], row["copies"]) == (2, 2)
    assert set(row["host_us"]) == {"door", "choice", "backend"}
    assert row["gpu"]
    assert row["sources"]
    monkeypatch.setattr(launch_cost, "measure", lambda cell, data, device: {"us": {"kernel": 2.0}})
    assert launch_cost.run(out, Rehearsal(), **options)
    assert len(out.read_text().splitlines()) == 1, "measured again"
    out.write_text(json.dumps(dict(row, sources="of other code", us={"kernel": 1.0})) + '\n{"id": "cut o')
    assert launch_cost.run(out, Rehearsal(), **options)
    (again,) = launch_cost.read(out)
    assert (again["sources"], again["us"]) == (row["sources"], {"kernel": 2.0})
    assert not launch_cost.run(tmp_path / "none.jsonl", Rehearsal(), **dict(options, seconds=-1))
    assert "goes on" in told[-1]


def test_a_cell_that_fails_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cell: Any, data: Any, device: Any) -> dict[str, Any]:
        if cell.dtype == "fp16":
            raise RuntimeError("out of luck\nand more")
        return {"us": {"kernel": 1.0}}

    monkeypatch.setattr(launch_cost, "measure", fail)
    out = tmp_path / "launch.jsonl"
    launch_cost.run(out, Rehearsal(), seconds=60, say=lambda line: None, keyword="torch-triton", rehearse=True)
    bad, good = launch_cost.read(out)
    assert bad["failed"] == "RuntimeError: out of luck"
    assert good["us"] == {"kernel": 1.0}
    assert "RuntimeError: out of luck" in launch_tables.tables([bad, good])


def test_gaps_and_names_come_from_the_records() -> None:
    records = [
        KernelRecord("prepare_kernel", 2e-6, 1.0),
        KernelRecord("moe_gemm_kernel", 40e-6, 1.0 + 3e-6),
        KernelRecord("moe_gemm_kernel_reduce", 1e-6, 1.0 + 44.5e-6),
    ]
    clock = SimpleNamespace(name="made up", reset=lambda: None, records=lambda: records.copy())
    device: Any = SimpleNamespace(clock=clock, interpret=True, synchronize=lambda: None, flush=lambda: None)
    contender: Any = SimpleNamespace(framework="torch")
    calls: list[int] = []

    def settled(clock: Any) -> list[KernelRecord]:
        return clock.records()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.clock.settle", settled)
        kernels, gaps = launch_cost._recorded(contender, device, lambda: calls.append(1), flush=True)
    assert kernels == {"prepare_kernel": 2.0, "moe_gemm_kernel": 40.0, "moe_gemm_kernel_reduce": 1.0}
    assert gaps == pytest.approx(2.5, abs=0.01)
    assert launch_cost._of_name(kernels, "moe_gemm_kernel") == 41.0


def test_every_layer_of_a_step_has_its_own_inputs() -> None:
    from bench import data as bench_data
    from bench.cases import _TINY as TINY
    from bench.cases import Case

    data = bench_data.build(Case(TINY, "gate-up", 4), "fp8-w8a8", "channel", device="cpu")
    layers, copies = launch_step.layers(SimpleNamespace(framework="torch"), data, Rehearsal(), 3)
    assert copies == 2
    assert [layer.arguments[1].data_ptr() for layer in layers][::2] == [layers[0].arguments[1].data_ptr()] * 2
    pointers = [[array.data_ptr() for array in layer.arguments] for layer in layers]
    assert not set(pointers[0]) & set(pointers[1])
    for one, other in zip(layers[0].arguments, layers[1].arguments, strict=True):
        assert (one.float() == other.float()).all()


def test_a_step_has_as_many_layers_as_the_model() -> None:
    of = {cell.case.model.name: cell.case.model for cell in launch_cost.cells()}
    told = {name: launch_step.layers_of_a_step(model, "torch") for name, model in of.items()}
    assert told == {"qwen3-30b-a3b": 48, "mixtral-8x7b": 32, "deepseek-v3": 58}
    assert {launch_step.layers_of_a_step(model, "jax") for model in of.values()} == {launch_step.JAX_LAYERS}
    assert f"or of {launch_step.JAX_LAYERS} inside one `jax.jit`" in NOTE.read_text()


def test_a_step_is_recorded_and_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time less the record before it: a GPU that slows down between two rounds would else show as overhead, or
    as a gain. Here overheads are 30, 42, 20, 38, 34, 26, 36 us of two layers, while kernels take 180 to 280."""
    from bench import contenders, measure
    from bench.cases import _TINY as TINY
    from bench.cases import Case

    turns: list[str] = []
    clock = SimpleNamespace(pause=lambda: turns.append("timed"), reset=lambda: turns.append("recorded"))
    device: Any = SimpleNamespace(clock=clock, interpret=False)
    config = SimpleNamespace()
    contender: Any = SimpleNamespace(framework="torch", kernel_name="gemm", config=config, eager=lambda: None)
    problem = SimpleNamespace(read_bytes=lambda counts: 1)
    data: Any = SimpleNamespace(problem=problem, counts=SimpleNamespace(tolist=list))
    of_kernels = [200.0, 260.0, 220.0, 280.0, 180.0, 240.0, 210.0]
    overheads = [30.0, 42.0, 20.0, 38.0, 34.0, 26.0, 36.0]
    step_kernels = iter(of_kernels)
    step_times = iter([kernels + overhead for kernels, overhead in zip(of_kernels, overheads, strict=True)])

    def recorded(contender: Any, device: Any, call: Any, *, flush: bool) -> tuple[dict[str, float], float]:
        return {"gemm": 100.0 if flush else next(step_kernels), "prepare": 2.0}, 0.5

    def latency(contender: Any, device: Any, call: Any, *, flush: bool = True) -> float:
        return 110.0 if flush else next(step_times)

    monkeypatch.setattr(launch_cost, "_recorded", recorded)
    monkeypatch.setattr(launch_host, "latency", latency)
    monkeypatch.setattr(launch_host, "in_a_row", lambda *_: (1.0, 2.0))
    monkeypatch.setattr(launch_host, "parts", lambda *_: {})
    monkeypatch.setattr(launch_step, "layers", lambda *_: ([object()] * 2, 2))
    monkeypatch.setattr(launch_step, "in_cuda_graph", lambda *_: lambda: None)
    monkeypatch.setattr(launch_cost.dataclasses, "asdict", lambda config: {})
    monkeypatch.setattr(contenders, "prepare", lambda *_: contender)
    monkeypatch.setattr(contenders, "capture", lambda *_: None)
    monkeypatch.setattr(contenders, "wait", lambda *_: None)
    monkeypatch.setattr(measure, "check", lambda *_: None)
    us = launch_cost.measure(launch_cost.Cell(Case(TINY, "gate-up", 4), "fp16", "torch-triton"), data, device)["us"]
    assert (us["layer_kernel"], us["layer"], us["layer_overhead"]) == (110.0, 123.0, 17.0)
    assert turns[-15:-1] == ["recorded", "timed"] * launch_cost.STEP_ROUNDS


def test_the_note_tells_by_how_much_the_host_changed() -> None:
    rows = [
        {"backend": backend, "host_us": {"choice": us} if us else {}}
        for backend, us in (("torch-triton", 400.4), ("torch-triton", 990.0), ("jax-triton", 500.0), ("jax-triton", 0))
    ]
    assert launch_tables.host_speed(rows).endswith("torch-triton 400 to 990, jax-triton 500 to 500.")
    assert launch_tables.host_speed([{"backend": "torch-triton"}]) == ""


def test_cells_are_what_the_note_says_and_accepted() -> None:
    import backends

    cells = list(launch_cost.cells())
    assert len({cell.id for cell in cells}) == len(cells) == 5 * 2 * 4
    assert {cell.backend for cell in cells[:10]} == {"torch-triton"}
    for cell in cells:
        problem = cell.case.problem(cell.dtype)
        config = backends.config_for(problem, backend=cell.backend, gpu="NVIDIA H200")
        assert backends.load(cell.backend).unsupported(problem, config) is None, cell.id


def test_the_command_refuses_clearly_and_prints_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.machine.smi", lambda fields: {})
    runner = CliRunner()
    refused = runner.invoke(app, ["launch"])
    assert refused.exit_code == 2
    assert "no NVIDIA GPU here" in refused.stderr
    missing = runner.invoke(app, ["launch", "--from", str(tmp_path / "none.jsonl")])
    assert missing.exit_code == 2
    assert "does not exist" in missing.stderr
    row = {
        "id": "a", "case": "c", "dtype": "fp16", "backend": "torch-triton",
        "us": {"kernel": 40.25, "layer_overhead": 3.5}, "kernels": {"prepare_kernel": 1.5, "moe_gemm_kernel": 40.25},
        "host_us": {"door": 9.0}, "gpu": "NVIDIA H200",
        "date": "2026-01-02", "versions": dict.fromkeys(("torch", "triton", "jax", "jax-triton"), "1"),
    }  # fmt: skip
    (tmp_path / launch_cost.FILE).write_text(json.dumps(row) + "\n")
    printed = runner.invoke(app, ["launch", "--from", str(tmp_path / launch_cost.FILE)])
    assert "moe_gemm_kernel 40.2, prepare_kernel 1.5" in printed.stdout
    block = evidence.BLOCKS["launch-cost"](tmp_path, {})
    assert "| c | fp16 | torch-triton | 40.2 |" in block
    assert "| 3.5 |" in block
    assert evidence.BLOCKS["launch-cost"](tmp_path / "none", {}) == evidence.NOT_MEASURED
