"""Bootstrap intervals against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.cli import statistics
from flowrl.cli.statistics import Comparison, Interval, compare


def width(interval: Interval) -> float:
    return interval.high - interval.low


def test_many_prompts_give_the_normal_interval() -> None:
    """mean +- 1.96 s / sqrt(P), and for the difference with s of the differences."""
    rng = np.random.default_rng(1)
    base = rng.normal(0.4, 0.2, 400)
    trained = base + rng.normal(0.1, 0.05, 400)
    found = compare(base, trained)
    for interval, values in ((found.base, base), (found.trained, trained), (found.difference, trained - base)):
        half = 1.96 * values.std() / np.sqrt(len(values))
        assert interval.mean == pytest.approx(values.mean(), abs=1e-12)
        assert interval.low == pytest.approx(values.mean() - half, abs=0.1 * half)
        assert interval.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert width(found.difference) < 0.4 * width(found.base)  # which is what pairing is for


def test_half_the_prompts_solved_gives_the_binomial_interval() -> None:
    """100 tosses of a fair coin: 2.5 % and 97.5 % lie at 40 and 60."""
    found = compare(np.repeat([0.0, 1.0], 50), np.ones(100))
    assert (found.base.low, found.base.high) == (0.4, 0.6)
    assert found.trained == Interval(1.0, 1.0, 1.0)


def test_the_interval_holds_what_it_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many experiments about 95 % of the intervals hold the true difference."""
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 1000)
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        base = rng.uniform(size=40)
        found = compare(base, base + rng.normal(0.1, 0.2, 40)).difference
        hits += found.low <= 0.1 <= found.high
    assert 0.90 <= hits / 200 <= 0.985


def test_it_is_reproducible_and_antisymmetric() -> None:
    rng = np.random.default_rng(3)
    base, trained = rng.uniform(size=(2, 30))
    found, reverse = compare(base, trained), compare(trained, base)
    assert found == compare(base, trained) != compare(base, trained, seed=1)
    assert isinstance(found, Comparison) and found.num_prompts == 30
    assert reverse.difference.low == pytest.approx(-found.difference.high, abs=1e-12)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2)])
def test_what_cannot_be_compared(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="two equally long vectors of at least 2 prompts"):
        compare(np.zeros(sizes[0]), np.zeros(sizes[1]))
