"""`python -m bench sanitize`: the matrix, how findings are put down to variants, and that a blind check fails."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import mosaic_config
from backends.registry import BACKENDS
from bench import gathering
from bench.sanitize import child, matrix, output, report, run, sanitizer
from shared.checks import ArgumentError
from shared.orders import ORDERS

HELP = "--error-exitcode arg\n--print-limit arg\n--padding arg\n--destroy-on-device-error arg\n"
FINDINGS = {
    "memcheck": """\
========= Invalid __global__ write of size 4 bytes
=========     at {kernel}+0x70 in triton_kernel.py:120
=========     by thread (99,0,0) in block (0,0,0)
=========     Access to 0x7f5c4fa00190 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f5c4fa00000 of size 400 bytes
=========
""",
    "racecheck": """\
========= Error: Race reported between Write access at {kernel}+0xb0
=========     and Read access at {kernel}+0xe0 [100 hazards]
=========
""",
    "initcheck": """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at {kernel}+0x60
=========     by thread (31,0,0) in block (0,0,0)
=========     Access to 0x7f5c4fa0007c
=========
""",
    "synccheck": """\
========= Barrier error detected. Divergent thread(s) in block.
=========     at {kernel}+0x50
=========     by thread (64,0,0) in block (0,0,0)
=========
""",
}


def summary(tool: str, count: int) -> str:
    if tool == "racecheck":
        return (
            f"========= RACECHECK SUMMARY: {count} hazard{'s' * (count != 1)} displayed ({count} errors, 0 warnings)\n"
        )
    return f"========= ERROR SUMMARY: {count} error{'s' * (count != 1)}\n"


class Fake:
    """Stands in for compute-sanitizer over a child. ends(id): the child's word on a variant, or None: it dies there.

    finds(id): kernel in which the tool finds something, or None. late: findings come after everything else.
    """

    def __init__(
        self,
        ends: Callable[[str], dict[str, Any] | None] = lambda name: {"status": "right"},
        finds: Callable[[str], str | None] = lambda name: "moe_gemm_kernel" if "planted" in name else None,
        late: bool = False,
    ) -> None:
        self.ends, self.finds, self.late = ends, finds, late
        self.launched: list[list[str]] = []

    def stop(self) -> None:
        pass

    def __call__(self, tool: str, jobs: list[tuple[str, Any]], seconds: float) -> tuple[str, int | None]:
        self.launched.append([name for name, _ in jobs])
        text, afterwards, found, code = "========= COMPUTE-SANITIZER\n", "", 0, 0
        for name, _ in jobs:
            text += f"@@begin {name}\n"
            if (kernel := self.finds(name)) is not None:
                finding = FINDINGS[tool].format(kernel=kernel)
                found, code = found + 1, sanitizer.FOUND_EXIT
                text, afterwards = (text, afterwards + finding) if self.late else (text + finding, afterwards)
            if (word := self.ends(name)) is None:
                text, code = text + "Segmentation fault\n========= Error: process didn't terminate successfully\n", 139
                break
            text += f"@@end {name} {json.dumps(word)}\n"
        return text + afterwards + summary(tool, found), code


def go(fake: Fake, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    selection: dict[str, Any] = {
        "tools": ["memcheck", "racecheck"], "backends": ["torch-triton"],
        "keyword": "ragged and fp16 and not popular", "full": False,
    }  # fmt: skip
    found = run.run(fake, **selection | changes, jobs=1, seconds=9, say=said.append, keep=lambda _: None)
    return found, said


def statuses(found: dict[str, Any]) -> dict[str, str]:
    return {f"{r['tool']}/{r['variant']}": r["status"] for r in found["results"]}


def test_memcheck_runs_everything_and_the_others_a_covering_subset() -> None:
    for backend in BACKENDS:
        everything = matrix.selected(["memcheck"], [backend], "")["memcheck"]
        assert len({v.id for v in everything}) == len(everything)
        # pallas-mosaic alone has warp-groups that take turns, a copy of x that it does without, and clusters
        tall = 2 * (4 if backend == "pallas-mosaic" else 1)
        assert len(everything) == (3 * len(ORDERS) + tall + len(matrix.reductions())) * 6
        some = matrix.selected(["racecheck"], [backend], "")["racecheck"]
        assert set(some) < set(everything)
        assert len(some) <= 12
        for name in ("shape", "order", "dtype", "scale_layout", "reduction"):
            assert {getattr(v, name) for v in some} == {getattr(v, name) for v in everything}, name
        assert matrix.selected(["racecheck"], [backend], "", full=True)["racecheck"] == everything
    with gathering.forced():
        gathers = [v for v in matrix.variants("pallas-mosaic") if v.shape == "gathers"]
        assert all(mosaic_config.gathers(v.problem, v.config) for v in gathers)
    clusters = [v for v in matrix.variants("pallas-mosaic") if v.shape == "clusters"]
    assert all(mosaic_config.adds_in_cluster(v.problem, v.config) for v in clusters)
    split = next(v for v in matrix.variants(BACKENDS[0]) if v.reduction is not None)
    assert 1 < split.config.parts(split.problem.k) < 5, "K is split, and unevenly: five steps over three parts"
    ids = np.array(matrix.SHAPES["empty"].ids)
    assert set(ids.ravel()) == {-1, 0, 1, 3}, "expert 2 is empty"
    assert (ids == 1).sum() > 2 * matrix.CONFIG.block_m, "three tile rows of one expert"


def test_keyword() -> None:
    chosen = matrix.selected(["memcheck"], BACKENDS, "(ragged or empty) and not bf16 and mosaic and row")["memcheck"]
    assert chosen
    for v in chosen:
        assert (v.shape in ("ragged", "empty"), v.dtype != "bf16", v.backend, v.order) == (
            True,
            True,
            "pallas-mosaic",
            "row",
        )
    with pytest.raises(ArgumentError, match="-k: got 'ragged and'"):
        go(Fake(), keyword="ragged and")
    with pytest.raises(ArgumentError, match="-k: got 'raged', which selects none of"):
        go(Fake(), keyword="raged")


def test_a_childs_word_is_held_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = matrix.Variant("torch-triton", "ragged", "fp16", "channel", "column")
    assert child.run(variant.to_json("memcheck"), interpret=True)["status"] == "right"
    host, expected = matrix.data_of(variant.problem, np.array(matrix.SHAPES["ragged"].ids, np.int32))
    monkeypatch.setattr(matrix, "data_of", lambda *_: (host, expected + 0.1))
    assert child.run(variant.to_json("memcheck"), interpret=True)["reason"].startswith("error ")


def test_what_a_backend_refuses_is_no_fault() -> None:
    variant = matrix.Variant("pallas-mosaic", "ragged", "fp16", "channel", "column")
    asked = variant.to_json("memcheck")
    asked["config"]["swap_ab"] = False
    assert child.run(asked, interpret=True)["status"] == "refused"
    assert math.isnan(asked["fill"])


def test_what_initcheck_is_given() -> None:
    """NaN would pass for written; TMA's stores, which initcheck does not see, would not."""
    mosaic, triton = (
        matrix.Variant(backend, "ragged", "fp16", "channel", "column") for backend in ("pallas-mosaic", "torch-triton")
    )
    assert mosaic.to_json("initcheck")["fill"] == 0
    assert triton.to_json("initcheck")["fill"] is None


@pytest.mark.parametrize("seen", [False, True])
def test_the_report_says_whether_initcheck_sees_bulk_stores(seen: bool) -> None:
    blind = Fake(finds=lambda name: name.split("/")[1] if "planted" in name or (seen and "control" in name) else None)
    found, _ = go(blind, tools=["initcheck"], backends=["pallas-mosaic"], keyword="ragged and fp16 and row")
    assert bool(found["controls"][0]["reported"]) == seen
    assert ("memory that TMA wrote, read: reported though nothing is wrong" in report.text(found)) == seen
    assert report.passed(found)
    assert "controls" not in go(Fake(), tools=["memcheck"])[0]


def test_all_clean() -> None:
    found, _ = go(Fake())
    assert set(statuses(found).values()) == {"clean"}
    assert report.passed(found)
    assert [p["in_place"] for p in found["plants"]] == [True] * 3
    assert "3 clean" in report.text(found)


@pytest.mark.parametrize("late", [False, True])
def test_a_finding_is_put_down_to_its_variant(late: bool) -> None:
    bad = "torch-triton/ragged/fp16/row"
    fake = Fake(finds=lambda name: "moe_gemm_kernel" if "planted" in name or name == bad else None, late=late)
    found, said = go(fake, tools=["memcheck"])
    assert statuses(found) == {
        "memcheck/torch-triton/ragged/fp16/row": "errors",
        "memcheck/torch-triton/ragged/fp16/column": "clean",
        "memcheck/torch-triton/ragged/fp16/grouped": "clean",
    }
    assert not report.passed(found)
    assert "Invalid __global__ write of size 4 bytes; at moe_gemm_kernel+0x70" in report.text(found)
    assert any("errors: Invalid" in line for line in said)
    alone = [names for names in fake.launched if names == [bad]]
    assert len(alone) == late, "findings that come late are put down by running each variant alone"


def test_a_missed_plant_fails_and_nothing_else_runs() -> None:
    fake = Fake(finds=lambda name: "moe_gemm_kernel" if name == "memcheck/planted_overrun" else None)
    found, said = go(fake)
    assert found["results"] == []
    assert not report.passed(found)
    assert len(report.missed(found)) == 2
    assert sum("MISSED" in line for line in said) == 2
    assert "A planted fault was missed" in report.text(found)


def test_a_finding_of_another_kind_does_not_count_as_the_plant() -> None:
    class Other(Fake):
        def __call__(self, tool: str, jobs: list[tuple[str, Any]], seconds: float) -> tuple[str, int | None]:
            text, code = super().__call__(tool, jobs, seconds)
            return text.replace("Invalid __global__ write", "Invalid __local__ read"), code

    assert report.missed(go(Other(), tools=["memcheck"])[0])


def test_a_frameworks_kernel_counts_for_memcheck_alone() -> None:
    def finds(name: str) -> str | None:
        return "planted_race" if "planted" in name else "void cub::RadixSort(int*)"

    found, _ = go(Fake(finds=finds), keyword="torch-triton and fp16")
    by_tool = {tool: {r["status"] for r in found["results"] if r["tool"] == tool} for tool in ("memcheck", "racecheck")}
    assert by_tool == {"memcheck": {"errors"}, "racecheck": {"clean"}}
    assert "in a kernel of the framework, not counted" in report.text(found)


def test_a_child_that_dies_takes_no_other_variant_with_it() -> None:
    bad = "torch-triton/ragged/fp16/column"
    found, _ = go(Fake(ends=lambda name: None if name == bad else {"status": "right"}), tools=["memcheck"])
    assert sorted(statuses(found).values()) == ["clean", "clean", "failed"]
    failed = next(r for r in found["results"] if r["status"] == "failed")
    assert failed["variant"] == bad
    assert "the process ended with status 139" in failed["reason"]
    assert not report.passed(found)


def test_a_child_that_leaves_the_rest_to_another_blames_none_of_them() -> None:
    class Leaves(Fake):
        def __call__(self, tool: str, jobs: list[tuple[str, Any]], seconds: float) -> tuple[str, int | None]:
            return super().__call__(tool, jobs[:1] if "ragged" in jobs[0][0] else jobs, seconds)

    found, _ = go(
        Leaves(ends=lambda name: {"status": "failed", "reason": "a"} if "row" in name else {"status": "right"})
    )
    assert sorted(statuses(found).values()).count("failed") == sum("row" in name for name in statuses(found))


def test_a_wrong_result_is_not_clean() -> None:
    word = {"status": "wrong", "reason": "error 3.0e-02 > 4.2e-04"}
    found, _ = go(Fake(ends=lambda name: word if name.endswith("grouped") else {"status": "right"}))
    assert "wrong (0): error 3.0e-02 > 4.2e-04" in report.text(found)
    assert not report.passed(found)


@pytest.mark.parametrize(
    ("text", "code"),
    [("========= COMPUTE-SANITIZER\n", 1), ("", None), ("========= Error: No attachable process found\n", 1)],
)
def test_nothing_run_is_not_clean(text: str, code: int | None) -> None:
    class Silent(Fake):
        def __call__(self, tool: str, jobs: list[tuple[str, Any]], seconds: float) -> tuple[str, int | None]:
            return (text, code) if "ragged" in jobs[0][0] else super().__call__(tool, jobs, seconds)

    found, _ = go(Silent(), tools=["memcheck"])
    assert set(statuses(found).values()) <= {"failed", "not run"}
    assert not report.passed(found)


def test_the_sanitizers_own_failure_is_not_clean() -> None:
    class Broken(Fake):
        def __call__(self, tool: str, jobs: list[tuple[str, Any]], seconds: float) -> tuple[str, int | None]:
            text, code = super().__call__(tool, jobs, seconds)
            return text + "========= Internal Sanitizer Error: out of memory\n", code

    found, _ = go(Broken(), tools=["memcheck"])
    assert set(statuses(found).values()) == {"not run"}


def test_findings_that_are_not_printed_are_found_by_count() -> None:
    text = "@@begin a\n@@end a {}\n========= ERROR SUMMARY: 5 errors were not printed. Use --print-limit option\n"
    assert output.parse(text).summary is None
    assert output.parse(text + "========= ERROR SUMMARY: 7 errors\n").summary == 7
    races = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"
    assert output.parse(races).summary == 3


def test_options_follow_what_this_version_knows() -> None:
    assert sanitizer.options("synccheck", HELP) == [
        "--tool", "synccheck", "--error-exitcode", "86", "--print-limit", "1000", "--destroy-on-device-error", "kernel",
    ]  # fmt: skip
    assert "--padding" in sanitizer.options("memcheck", HELP)


def test_memory_is_not_pooled_under_a_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/a")
    found = sanitizer.environment()
    assert found["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert found["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"
    assert "JAX_PLATFORMS" not in found
    assert found["XLA_FLAGS"].startswith("--xla_dump_to=/tmp/a --xla_gpu")


def test_a_real_process_is_run_and_stopped_in_time(tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$1" in --version) echo 2025.3; exit;; --help) echo "--error-exitcode arg"; exit;; esac\n'
        'echo "$@"; [ "$2" = synccheck ] && exec sleep 60; exit 86\n'
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    launch = sanitizer.Sanitizer(str(tool))
    assert launch.version == "2025.3"
    text, code = launch("memcheck", [("a", "planted_race")], 30)
    assert code == 86
    assert re.match(r"--tool memcheck --error-exitcode 86 \S+ -m bench.sanitize.child \S+json$", text.strip())
    assert launch("synccheck", [], 0.2)[1] is None
    launch.stop()
    assert launch("memcheck", [], 30) == ("", None)


def test_plants_compile() -> None:
    """By PyTorch's NVRTC, for sm_90, with no device: the plants are there on the day that a GPU is."""
    utils = pytest.importorskip("torch.cuda._utils")
    from bench.sanitize import planted

    for plant in run.PLANTS:
        if plant.kernel != "planted_triton_overrun":
            utils._nvrtc_compile(planted.SOURCE, plant.kernel, "90")
    names = set(re.findall(r"void (planted_\w+)", planted.SOURCE))
    assert names == {p.kernel for p in run.PLANTS} - {"planted_triton_overrun"} | {"planted_nothing"}


def test_report_is_kept_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    keeper = report.Keeper(path, {"gpu": "NVIDIA H200"})
    run.run(
        Fake(), tools=["memcheck"], backends=["jax-triton"], keyword="", full=False, jobs=2, seconds=1,
        say=lambda line: len(json.loads(path.read_text())["results"]), keep=keeper,
    )  # fmt: skip
    found = json.loads(path.read_text())
    assert found["complete"] is True
    assert found["gpu"] == "NVIDIA H200"
    assert len(found["results"]) == len(matrix.variants("jax-triton"))


def test_without_the_tool_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from bench.__main__ import app

    monkeypatch.setattr(sanitizer, "executable", lambda: None)
    found = CliRunner().invoke(app, ["sanitize"])
    assert found.exit_code == 2
    assert "comes with the CUDA toolkit" in found.output
    found = CliRunner().invoke(app, ["sanitize", "--tool", "memchek"])
    assert found.exit_code == 2
    assert "did you mean 'memcheck'?" in found.output
