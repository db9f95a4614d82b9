"""How sure a difference of means is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95
METHOD = f"percentile bootstrap over prompts, paired, {NUM_RESAMPLES} resamples"
CHUNK = 1_000  # resamples at a time: bounds the memory


@dataclass(frozen=True)
class Interval:
    """A mean, and where it lies with the confidence of `CONFIDENCE`."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """The same prompts before and after."""

    num_prompts: int
    base: Interval
    trained: Interval
    difference: Interval  # trained - base


def compare(base: np.ndarray, trained: np.ndarray, seed: int = 0) -> Comparison:
    """From one number per prompt [P], P >= 2: the mean of its samples.

    Prompts are drawn anew with replacement, and each with both of its numbers: what makes a prompt hard for both
    models cancels in the difference (Efron and Tibshirani, An Introduction to the Bootstrap, chapters 8 and 13).
    Samples of one prompt are not independent, so it is prompts that are drawn.
    """
    if base.shape != trained.shape or base.ndim != 1 or len(base) < 2:
        raise ValueError(f"needs two equally long vectors of at least 2 prompts, got {base.shape} and {trained.shape}")
    values = np.stack([base, trained, trained - base])  # [3, P]
    rng, size = np.random.default_rng(seed), len(base)
    draws = [
        values[:, rng.integers(size, size=(CHUNK, size))].mean(axis=-1) for _ in range(NUM_RESAMPLES // CHUNK)
    ]  # [3, CHUNK] each
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.concatenate(draws, axis=1), [tail, 100 - tail], axis=1)
    means = values.mean(axis=1)
    intervals = [Interval(float(m), float(lo), float(hi)) for m, lo, hi in zip(means, low, high, strict=True)]
    return Comparison(size, *intervals)
