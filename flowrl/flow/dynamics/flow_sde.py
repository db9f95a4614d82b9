"""Flow-SDE, the stochastic sampler of Flow-GRPO."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.flow.checks import require, require_at_least
from flowrl.flow.dynamics.base import Dynamics, Transition, reverse_sde, step_sigmas

PURE_NOISE = 1 - 1e-5  # from here on sigma counts as 1; Wan's schedule starts at 0.999999


@dataclass(frozen=True)
class FlowSDE(Dynamics):
    """s = noise_level * sqrt(sigma / (1 - sigma)) (Flow-GRPO, arXiv 2505.05470).

    At sigma = 1 that is infinite, and repositories replace the sigma inside (1 - sigma) by a `sigma_max`:

    * "next" (default): sigmas[1], as flow_grpo, verl-omni, Flow-Factory and the SGLang engine do. The step's variance
      is then exactly noise_level^2.
    * a number below 1: UniRL and Relax use 0.99, which makes s = 10 * noise_level whatever the schedule.

    Published noise levels: 0.7 (SD3), 0.9 (FLUX), 1.2 (Qwen-Image). 0 is the Euler step, without log-probabilities.
    """

    noise_level: float = 0.7
    sigma_max: float | str = "next"

    def __post_init__(self) -> None:
        require_at_least(self, "noise_level", 0)
        number = isinstance(self.sigma_max, float | int) and math.isfinite(self.sigma_max) and 0 < self.sigma_max < 1
        require(number or self.sigma_max == "next", self, "sigma_max", '"next" or a number between 0 and 1')

    @property
    def stochastic(self) -> bool:
        """Does a step add noise? Not with noise_level 0."""
        return self.noise_level > 0

    def transition(self, sample: Tensor, velocity: Tensor, sigmas: Tensor, step_index: int | Tensor) -> Transition:
        """See `Dynamics.transition`."""
        sigma, next_sigma = step_sigmas(sigmas, step_index, sample)
        sigma_max = sigmas[1].to(sigma) if isinstance(self.sigma_max, str) else sigma.new_tensor(self.sigma_max)
        finite_sigma = torch.where(sigma >= PURE_NOISE, sigma_max, sigma)
        diffusion = self.noise_level * (sigma / (1 - finite_sigma)).sqrt()
        return reverse_sde(sample, velocity, sigma, next_sigma, diffusion)
