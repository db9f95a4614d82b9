"""Dance-SDE, the stochastic sampler of DanceGRPO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.flow.checks import require_at_least
from flowrl.flow.dynamics.base import Dynamics, Transition, reverse_sde, step_sigmas


@dataclass(frozen=True)
class DanceSDE(Dynamics):
    """s = eta, the same at every sigma (DanceGRPO, arXiv 2505.07818): 0.3 for images, 0.25 for HunyuanVideo.

    eta = 0 is the Euler step, without log-probabilities.
    """

    eta: float = 0.3

    def __post_init__(self) -> None:
        require_at_least(self, "eta", 0)

    @property
    def stochastic(self) -> bool:
        """Does a step add noise? Not with eta 0."""
        return self.eta > 0

    def transition(self, sample: Tensor, velocity: Tensor, sigmas: Tensor, step_index: int | Tensor) -> Transition:
        """See `Dynamics.transition`."""
        sigma, next_sigma = step_sigmas(sigmas, step_index, sample)
        return reverse_sde(sample, velocity, sigma, next_sigma, torch.full_like(sigma, self.eta))
