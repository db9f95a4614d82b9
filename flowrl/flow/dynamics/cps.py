"""CPS, coefficients-preserving sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from flowrl.flow.checks import require, require_one_of
from flowrl.flow.dynamics.base import Dynamics, Transition, mean_square, path_preserving, step_sigmas


@dataclass(frozen=True)
class CPS(Dynamics):
    """x' = (1 - sigma') x_0 + sigma' (cos(theta) eps + sin(theta) z), theta = pi / 2 * noise_level (arXiv 2509.05952).

    x_0 and eps are the velocity's two ends of the path, z is fresh noise: the sample has just the signal and the noise
    that the schedule says. noise_level is in [0, 1]; 0 is the Euler step; 0.8 is published.

    `log_prob` names one of two forms:

    * "published" (default): -mean (x' - mean)^2, without the variance, as flow_grpo, verl-omni, UniRL, Flow-Factory
      and MixGRPO have it. Clip ranges are tuned to it. Its log-ratio is 2 std^2 times the Gaussian one.
    * "gaussian": the log-density, as for every other dynamics and as the SGLang engine reports it.

    The last step (sigma' = 0) adds no noise, so it must not be trained; "gaussian" raises there.
    """

    noise_level: float = 0.8
    log_prob_form: str = "published"

    def __post_init__(self) -> None:
        require(0 <= self.noise_level <= 1, self, "noise_level", "a number between 0 and 1")
        require_one_of(self, "log_prob_form", ("published", "gaussian"))

    @property
    def stochastic(self) -> bool:
        """Does a step add noise? Not with noise_level 0."""
        return self.noise_level > 0

    def transition(self, sample: Tensor, velocity: Tensor, sigmas: Tensor, step_index: int | Tensor) -> Transition:
        """See `Dynamics.transition`."""
        sigma, next_sigma = step_sigmas(sigmas, step_index, sample)
        theta = math.pi / 2 * self.noise_level
        noise_kept, std = next_sigma * math.cos(theta), next_sigma * math.sin(theta)
        return path_preserving(sample, velocity, sigma, next_sigma, noise_kept, std)

    def log_prob(self, next_sample: Tensor, transition: Transition) -> Tensor:
        """The form that `log_prob_form` names, averaged over the non-batch dimensions: float64 [B]."""
        if self.log_prob_form == "published":
            return -mean_square(next_sample, transition.mean)
        return super().log_prob(next_sample, transition)
