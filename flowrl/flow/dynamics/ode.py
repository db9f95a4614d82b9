"""The deterministic Euler step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.flow.dynamics.base import Dynamics, Transition, affine, step_sigmas


@dataclass(frozen=True)
class ODE(Dynamics):
    """x' = x + v dt, std 0: what diffusers' FlowMatchEulerDiscreteScheduler does. It has no log-probability."""

    @property
    def stochastic(self) -> bool:
        """Never."""
        return False

    def transition(self, sample: Tensor, velocity: Tensor, sigmas: Tensor, step_index: int | Tensor) -> Transition:
        """See `Dynamics.transition`."""
        sigma, next_sigma = step_sigmas(sigmas, step_index, sample)
        dt = next_sigma - sigma
        return Transition(mean=affine(sample, torch.ones_like(dt), velocity, dt), std=torch.zeros_like(dt), dt=dt)
