"""Truncated importance weights."""

from __future__ import annotations

import math

import pytest
import torch

from flowrl.flow.importance import TruncatedImportance


def test_the_ratio_is_truncated_from_above_only() -> None:
    behaviour = torch.tensor([0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    proximal = torch.tensor([0.0, math.log(1.5), math.log(9.0), math.log(0.1)], dtype=torch.float64)
    weights = TruncatedImportance(cap=2.0).weights(proximal, behaviour)
    assert weights.tolist() == pytest.approx([1.0, 1.5, 2.0, 0.1])


def test_rejected_rows_count_nothing() -> None:
    behaviour = torch.zeros(3, dtype=torch.float64)
    proximal = torch.tensor([math.log(0.1), 0.0, math.log(9.0)], dtype=torch.float64)
    correction = TruncatedImportance(cap=20.0, reject_below=0.5, reject_above=2.0)
    assert correction.weights(proximal, behaviour).tolist() == [0.0, 1.0, 0.0]


def test_weighting_makes_the_expectation_right() -> None:
    """E_behaviour[w f] = E_proximal[f] for Gaussians, as long as nothing is truncated."""
    x = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = TruncatedImportance(cap=1e9).weights(-0.5 * (x - 0.5).square(), -0.5 * x.square())
    assert float((weights * x).mean()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("settings", [{"cap": 0.0}, {"reject_below": -1.0}, {"reject_below": 2.0, "reject_above": 1.0}])
def test_impossible_bounds_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        TruncatedImportance(**settings)
