"""Rewards for tests of whole runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.prompts import Prompt


@dataclass(frozen=True)
class FailsOnMilk:
    """1 for every picture, and an error for one of the words."""

    def load(self) -> None:
        """Nothing."""

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B]."""
        if any("MILK" in prompt.text for prompt in prompts):
            raise OSError("no milk today")
        return np.ones(len(images))


@dataclass(frozen=True)
class Indifferent:
    """0 for every picture."""

    def load(self) -> None:
        """Nothing."""

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B]."""
        return np.zeros(len(images))
