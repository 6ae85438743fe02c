"""The suite tests itself: two faults it must catch, and every mutant still applicable. All: python -m tests.mutants."""

from __future__ import annotations

import subprocess
import sys

import pytest
from _pytest.mark.expression import Expression

from tests import mutants
from tests.where import NUMERICS


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_applies(mutant: mutants.Mutant) -> None:
    """The source line that a mutant changes is still there, once."""
    assert (mutants.ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old


def test_every_mutant_has_tests_in_the_default_run() -> None:
    """Else it has no verdict: a test that it names was left to the slow run."""
    command = [sys.executable, "-m", "pytest", "tests", "--collect-only", "-q"]
    shown = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True, check=True).stdout
    ids = [line.lower() for line in shown.splitlines() if "::" in line]

    def selects(path: str, *options: str) -> bool:
        keyword = Expression.compile(dict(zip(options[::2], options[1::2], strict=True)).get("-k", ""))
        mine = (test for test in ids if test.startswith(path.lower()))
        return any(keyword.evaluate(lambda word, test=test: word.lower() in test) for test in mine)

    assert [mutant.name for mutant in mutants.MUTANTS if not selects(*mutant.tests)] == []


@NUMERICS
@pytest.mark.parametrize("name", ["skipped tile", pytest.param("dropped channel scale", marks=pytest.mark.slow)])
def test_caught(name: str) -> None:
    (mutant,) = (mutant for mutant in mutants.MUTANTS if mutant.name == name)
    assert mutants.green_without_fault([mutant.tests]) == []
    verdict = mutants.judge(mutant)
    assert verdict.caught, verdict.by


def test_a_harmless_change_is_not_called_caught() -> None:
    mutant = mutants.Mutant(
        "harmless", mutants.TRITON, "# Scale\n", "# Scaling\n", ("tests/test_planning.py", "-k", "four_tokens")
    )
    verdict = mutants.judge(mutant)
    assert not verdict.caught
    assert verdict.by == "all green"


def test_no_test_selected_is_no_verdict() -> None:
    mutant = mutants.Mutant(
        "nothing runs",
        mutants.TRITON,
        "# Scale\n",
        "# Scaling\n",
        ("tests/test_planning.py", "-k", "nothing_of_the_kind"),
    )
    verdict = mutants.judge(mutant)
    assert not verdict.caught
    assert "no verdict, status 5" in verdict.by
