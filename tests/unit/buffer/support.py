"""Groups that have been drawn and scored, small and recognisable."""

from __future__ import annotations

import numpy as np
import torch

from flowrl.prompts import Prompt
from flowrl.types import Group, InMemory, SampledGroup, Sampling, ScoredGroup

SOON = 20.0  # seconds, for what should take none: the machine may be busy
NUM_SAMPLES = 2


def group(ordinal: int) -> Group:
    """With everything that a prompt can have."""
    prompt = Prompt(f"p{ordinal}", "a sign", target="sign", negative="blur", metadata={"tags": ["a", {"b": 1}]})
    return Group(ordinal, prompt, occurrence=1, num_samples=NUM_SAMPLES)


def scored(ordinal: int, version: int = 0, reward: float = 0.0) -> ScoredGroup:
    """Its heavy part says whose it is."""
    sampling = Sampling(version, (0, 1), (1.0, 0.5, 0.0), "FlowSDE()", 1.0, (4, 2, 2))
    images = np.full((NUM_SAMPLES, 3, 5, 3), ordinal, np.uint8)
    heavy = {"latents": torch.full((NUM_SAMPLES, 3), float(ordinal)), "ordinal": ordinal, "empty": torch.zeros(0)}
    sampled = SampledGroup(group(ordinal), images, sampling, InMemory(heavy))
    return ScoredGroup(sampled, {"ocr": np.full(NUM_SAMPLES, reward)})


def ordinals(groups: list[ScoredGroup]) -> list[int]:
    """In their order."""
    return [each.sampled.group.ordinal for each in groups]
