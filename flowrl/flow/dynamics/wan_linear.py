"""The stochastic sampler that flow_grpo uses for Wan, whose coefficient is linear in sigma."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrl.flow.dynamics.base import Dynamics, Transition, reverse_sde, step_sigmas


@dataclass(frozen=True)
class WanLinear(Dynamics):
    """s = sigmas[N] + (sigmas[1] - sigmas[N]) * sigma: the schedule decides, there is no noise level."""

    def transition(self, sample: Tensor, velocity: Tensor, sigmas: Tensor, step_index: int | Tensor) -> Transition:
        """See `Dynamics.transition`."""
        sigma, next_sigma = step_sigmas(sigmas, step_index, sample)
        last, second = sigmas[-1].to(sigma), sigmas[1].to(sigma)
        return reverse_sde(sample, velocity, sigma, next_sigma, last + (second - last) * sigma)
