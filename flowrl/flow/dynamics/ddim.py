"""DDIM with noise, as DiffusionNFT generalises it to flows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrl.flow.checks import require
from flowrl.flow.dynamics.base import Dynamics, Transition, path_preserving, step_sigmas


@dataclass(frozen=True)
class DDIM(Dynamics):
    """x' = (1 - sigma') x_0 + sqrt(sigma'^2 - rho^2) eps + rho z, rho = eta times the noise of the exact posterior.

    rho^2 = eta^2 sigma'^2 (1 - (sigma' (1 - sigma))^2 / (sigma (1 - sigma'))^2) (DDIM, arXiv 2010.02502, eq. 16, with
    alpha = 1 - sigma). eta is in [0, 1]: 0 is the Euler step, 1 ancestral sampling. The last step adds no noise.
    """

    eta: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.eta <= 1, self, "eta", "a number between 0 and 1")

    @property
    def stochastic(self) -> bool:
        """Does a step add noise? Not with eta 0."""
        return self.eta > 0

    def transition(self, sample: Tensor, velocity: Tensor, sigmas: Tensor, step_index: int | Tensor) -> Transition:
        """See `Dynamics.transition`."""
        sigma, next_sigma = step_sigmas(sigmas, step_index, sample)
        posterior = 1 - (next_sigma * (1 - sigma) / (sigma * (1 - next_sigma))).square()
        rho = next_sigma * self.eta * posterior.sqrt()
        noise_kept = next_sigma * (1 - self.eta**2 * posterior).sqrt()
        return path_preserving(sample, velocity, sigma, next_sigma, noise_kept, rho)
