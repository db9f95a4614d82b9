"""Deterministic solvers of dx = v dsigma, for evaluation and for algorithms that train on x_0 alone.

For flow matching several names are one method: DDIM and DPM-Solver++(1) give the Euler step. So there are three here:
first order (`Euler`), second order (`DPM2`), and second order with a corrector (`UniPC`). All call the velocity once a
step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from flowrl.flow.path import as_computed, predicted_x_0

VelocityOf = Callable[[Tensor, Tensor], Tensor]  # v(x [B, ...], sigma [B]) -> [B, ...]
OnStep = Callable[[int, Tensor], None]  # called with i and x at sigmas[i], after every step


@dataclass(frozen=True)
class Solver(ABC):
    """From x at sigmas[0] to x at sigmas[N], without noise."""

    @abstractmethod
    def solve(self, velocity: VelocityOf, sample: Tensor, sigmas: Tensor, on_step: OnStep | None = None) -> Tensor:
        """x at the last sigma, [B, ...].

        Args:
            velocity: v(x, sigma) for x [B, ...] and sigma [B], guidance included.
            sample: x at sigmas[0], [B, ...]; computed in float32 unless float64.
            sigmas: decreasing, [N + 1].
            on_step: told i and x at sigmas[i] for i = 1..N.
        """


@dataclass(frozen=True)
class Euler(Solver):
    """x' = x + (sigma' - sigma) v: diffusers' FlowMatchEulerDiscreteScheduler; DiffusionNFT's flow, ddim and dpm1."""

    def solve(self, velocity: VelocityOf, sample: Tensor, sigmas: Tensor, on_step: OnStep | None = None) -> Tensor:
        """See `Solver.solve`."""
        sample = as_computed(sample)
        for i in range(len(sigmas) - 1):
            v = as_computed(velocity(sample, sigmas[i].expand(len(sample))))
            sample = sample + (sigmas[i + 1] - sigmas[i]) * v
            if on_step:
                on_step(i + 1, sample)
        return sample


@dataclass(frozen=True)
class DPM2(Solver):
    """DPM-Solver++(2M) (arXiv 2211.01095): second order in x_0, first order at the first and the last step.

    DiffusionNFT's dpm2, with which it samples.
    """

    def solve(self, velocity: VelocityOf, sample: Tensor, sigmas: Tensor, on_step: OnStep | None = None) -> Tensor:
        """See `Solver.solve`."""
        return _multistep(velocity, sample, sigmas, on_step, corrector=False)


@dataclass(frozen=True)
class UniPC(Solver):
    """UniPC of order 2 with B(h) = e^h - 1 (arXiv 2302.04867): DPM2's steps, each corrected by the next velocity.

    Wan's sampler: diffusers' UniPCMultistepScheduler with its default settings and `use_flow_sigmas`.
    """

    def solve(self, velocity: VelocityOf, sample: Tensor, sigmas: Tensor, on_step: OnStep | None = None) -> Tensor:
        """See `Solver.solve`."""
        return _multistep(velocity, sample, sigmas, on_step, corrector=True)


def _multistep(
    velocity: VelocityOf, sample: Tensor, sigmas: Tensor, on_step: OnStep | None, *, corrector: bool
) -> Tensor:
    sample = as_computed(sample)
    grid = [float(sigma) for sigma in sigmas.double().cpu()]
    num_steps = len(grid) - 1
    step: _Step | None = None
    for i in range(num_steps):
        x_0 = predicted_x_0(sample, as_computed(velocity(sample, sigmas[i].expand(len(sample)))), grid[i])
        if corrector and step is not None:
            sample = step.corrected(x_0)
        step = _Step.after(step if i < num_steps - 1 else None, sample, x_0, grid[i], grid[i + 1])
        sample = step.predicted()
        if on_step:
            on_step(i + 1, sample)
    return sample


@dataclass(frozen=True)
class _Step:
    """A step from sigma to next_sigma; lambda = log((1 - sigma) / sigma) is its time, h its length in lambda."""

    sample: Tensor
    x_0: Tensor  # predicted at `sample`
    sigma: float
    next_sigma: float
    slope: Tensor | None = None  # h dx_0/dlambda by the x_0 before; None makes this step first order
    r: float = 0.0  # where the x_0 before lies: at lambda + r h

    @classmethod
    def after(cls, before: _Step | None, sample: Tensor, x_0: Tensor, sigma: float, next_sigma: float) -> _Step:
        """Second order after another step, else first order."""
        step = cls(sample, x_0, sigma, next_sigma)
        if before is None:
            return step
        r = -before.h / step.h
        return replace(step, slope=(before.x_0 - x_0) / r, r=r)

    @property
    def h(self) -> float:
        return _log_snr(self.next_sigma) - _log_snr(self.sigma)

    def predicted(self) -> Tensor:
        """The next sample, by what is known before it."""
        return self._moved(self.x_0 if self.slope is None else self.x_0 + 0.5 * self.slope)

    def corrected(self, next_x_0: Tensor) -> Tensor:
        """The next sample again, now that x_0 has been predicted there too."""
        change = next_x_0 - self.x_0
        if self.slope is None:
            return self._moved(self.x_0 + 0.5 * change)
        e = math.expm1(-self.h)
        phi_1 = -e / self.h - 1
        phi_2 = -phi_1 / self.h - 0.5
        # rho_1 + rho_2 = phi_1 / e and r rho_1 + rho_2 = 2 phi_2 / e (UniPC, with B(h) = e)
        rho_1 = (phi_1 - 2 * phi_2) / e / (1 - self.r)
        rho_2 = phi_1 / e - rho_1
        return self._moved(self.x_0 + rho_1 * self.slope + rho_2 * change)

    def _moved(self, x_0: Tensor) -> Tensor:
        kept = self.next_sigma / self.sigma
        return kept * self.sample + ((1 - self.next_sigma) - (1 - self.sigma) * kept) * x_0


def _log_snr(sigma: float) -> float:
    if sigma >= 1:
        return -math.inf
    return math.log((1 - sigma) / sigma) if sigma > 0 else math.inf
