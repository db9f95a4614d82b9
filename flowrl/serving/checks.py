"""Scores that are fit to be sent."""

from __future__ import annotations

import numpy as np


def checked_scores(scores: object, num: int) -> np.ndarray:
    """`scores`, if they are float64 [num] and finite. Raises ValueError."""
    if not isinstance(scores, np.ndarray) or scores.dtype != np.float64 or scores.shape != (num,):
        got = f"{scores.dtype} {list(scores.shape)}" if isinstance(scores, np.ndarray) else type(scores).__name__
        raise ValueError(f"the scorer must return float64 [{num}], got {got}")
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        raise ValueError(f"the score of sample {bad[0]} is {scores[bad[0]]}")
    return scores
