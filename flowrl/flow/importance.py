"""Weights for samples of another policy than the one that is improved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TruncatedImportance:
    """w = min(pi_proximal / pi_behaviour, cap), and 0 where the ratio leaves [reject_below, reject_above].

    Rollouts of older weights were sampled by a *behaviour* policy; updates are clipped around the *proximal* one, the
    weights at the cycle's start. Their ratio makes the expectation right, truncating it bounds the variance (IMPALA,
    arXiv 1802.01561; decoupled PPO, arXiv 2110.00641, eq. 4).

    Args:
        cap: the largest weight.
        reject_below: rows with a smaller ratio count nothing; null = never.
        reject_above: rows with a larger ratio count nothing; null = never.
    """

    cap: float = 2.0
    reject_below: float | None = None
    reject_above: float | None = None

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ValueError(f"cap must be positive, got {self.cap}.")
        low, high = self.reject_below or 0.0, self.reject_above
        if low < 0 or (high is not None and high <= low):
            raise ValueError(f"reject_below and reject_above must be 0 <= below < above, got {low} and {high}.")

    def weights(self, proximal: Tensor, behaviour: Tensor) -> Tensor:
        """[T] from log-probabilities float64 [T] of both policies."""
        ratio = torch.exp(proximal - behaviour)
        weights = ratio.clamp(max=self.cap)
        if self.reject_below is not None:
            weights = weights.masked_fill(ratio < self.reject_below, 0.0)
        if self.reject_above is not None:
            weights = weights.masked_fill(ratio > self.reject_above, 0.0)
        return weights
