"""Statistics of the interleaved comparison."""

from __future__ import annotations

import numpy as np
import pytest

from bench import pairs


def test_equal_times_are_no_difference() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(100e-6, 1e-6, (2, 40))
    found = pairs.judge(a, b)
    assert found.low <= 1 <= found.high
    assert found.verdict("column", "row") == "no difference"


@pytest.mark.parametrize(("factor", "winner"), [(1.2, "column is 1.2"), (1 / 1.2, "row is 1.2")])
def test_a_difference_is_named(factor: float, winner: str) -> None:
    rng = np.random.default_rng(2)
    a = rng.normal(100e-6, 1e-6, 40)
    found = pairs.judge(a, a * factor * rng.normal(1, 0.005, 40))
    assert found.ratio == pytest.approx(factor, rel=0.01)
    assert found.low < found.ratio < found.high
    assert found.verdict("column", "row").startswith(winner)


def test_drift_that_both_share_cancels() -> None:
    drift = np.linspace(1, 2, 50)
    found = pairs.judge(100e-6 * drift, 110e-6 * drift)
    assert (found.low, found.high) == pytest.approx((1.1, 1.1))


def test_compare_interleaves_in_random_order_and_is_seeded() -> None:
    def play() -> tuple[str, pairs.Comparison]:
        calls: list[str] = []

        def run(name: str, seconds: float) -> float:
            calls.append(name)
            return seconds

        found = pairs.compare(lambda: run("a", 1.0), lambda: run("b", 2.0), pairs=20, seed=3)
        return "".join(calls), found

    order, found = play()
    assert {order[i : i + 2] for i in range(0, 40, 2)} == {"ab", "ba"}
    assert found.ratio == 2
    assert (order, found) == play()


def test_unequal_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="two equal"):
        pairs.judge(np.ones(3), np.ones(4))
