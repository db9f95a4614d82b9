"""Sampled and scored groups and components for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flowrl.flow.dynamics.ode import ODE
from flowrl.flow.solvers import Euler
from flowrl.prompts import Prompt
from flowrl.rewards.combine import Component
from flowrl.types import Conditions, Drawn, Group, SampledGroup, ScoredGroup, Trajectory

SOON = 20.0  # seconds, for what should take none: the machine may be busy


def one(scorer: Any, **options: Any) -> dict[str, Component]:
    """This scorer as the only component."""
    return {"style": Component(scorer=scorer, **options)}


def sampled_group(ordinal: int = 0, num_samples: int = 2, *, size: int = 8, **orders: Any) -> SampledGroup:
    """A group of grey pictures; the pictures of different groups and slots differ in brightness.

    `orders` are the prompt's metadata, for `scorers.Obeys`.
    """
    prompt = Prompt(f"p{ordinal}", 'a sign that says "FLOW"', target="FLOW", metadata=orders)
    group = Group(ordinal, prompt, occurrence=0, num_samples=num_samples)
    shade = np.arange(num_samples, dtype=np.uint8) + 10 * ordinal
    images = np.broadcast_to(shade[:, None, None, None], (num_samples, size, size, 3))
    latents = torch.zeros(num_samples, 0, 1)
    trajectory = Trajectory(
        latents=latents,
        next_latents=latents,
        step_index=torch.zeros(num_samples, 0, dtype=torch.int64),
        log_probs=torch.zeros(num_samples, 0, dtype=torch.float64),
        final_latents=torch.zeros(num_samples, 1),
        sample_ids=tuple(group.sample_id(slot) for slot in range(num_samples)),
        group_ids=torch.full((num_samples,), ordinal),
        slots=torch.arange(num_samples),
        policy_version=torch.zeros(num_samples, dtype=torch.int64),
        sigmas=torch.tensor([1.0, 0.0]),
        dynamics=ODE(),
        solver=Euler(),
    )
    return SampledGroup.of(group, images, Drawn(trajectory, Conditions()))


def scored_group(ordinal: int, rewards: Mapping[str, list[float]]) -> ScoredGroup:
    """A group with these rewards by component."""
    sizes = {len(values) for values in rewards.values()}
    return ScoredGroup(
        sampled_group(ordinal, sizes.pop()), {name: np.array(values) for name, values in rewards.items()}
    )
