"""What every dynamics shares: a Gaussian transition, its log-probability, and the reverse SDE of a flow."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.flow.path import as_computed, per_sample


@dataclass(frozen=True)
class Transition:
    """The distribution of the next sample: N(mean, std^2), one std per sample.

    `mean` is float32 (float64 for float64 samples); `std` and `dt` are always float64, being a few numbers that
    log-probabilities are sensitive to.
    """

    mean: Tensor  # [B, ...]
    std: Tensor  # [B] float64, total standard deviation of the step: sqrt(-dt) included
    dt: Tensor  # [B] float64, sigmas[i + 1] - sigmas[i] < 0

    @property
    def diffusion(self) -> Tensor:
        """The SDE's coefficient s = std / sqrt(-dt), float64 [B]: what flow_grpo calls std_dev_t for its flow-SDE."""
        return self.std / (-self.dt).sqrt()

    def sample(self, noise: Tensor) -> Tensor:
        """The next sample mean + std * noise, for standard normal noise [B, ...], in the dtype of `mean`."""
        return self.mean + per_sample(self.std, self.mean) * noise.to(self.mean)


@dataclass(frozen=True)
class Dynamics(ABC):
    """How one denoising step x_i -> x_{i+1} is drawn. Rollout and replay read one and the same object."""

    @property
    def stochastic(self) -> bool:
        """Does a step add noise? Only then are there log-probabilities to train on."""
        return True

    @abstractmethod
    def transition(self, sample: Tensor, velocity: Tensor, sigmas: Tensor, step_index: int | Tensor) -> Transition:
        """The distribution of the next sample.

        Args:
            sample: x at sigmas[step_index], [B, ...] in any floating dtype; computed in float32 unless float64.
            velocity: the guided model output there, [B, ...].
            sigmas: the whole schedule, decreasing to 0, [N + 1].
            step_index: one step for all samples, or int64 [B], one each; in 0..N-1.
        """

    def log_prob(self, next_sample: Tensor, transition: Transition) -> Tensor:
        """log N(next_sample; mean, std^2) with its constants, averaged over the non-batch dimensions: float64 [B].

        The average (Flow-GRPO, arXiv 2505.05470) is the log-density divided by the number of dimensions: ratios of it
        are roots of likelihood ratios, which is why clip ranges are 1e-6 to 1e-3. Everything is upcast before
        differences are taken, since float32 errors reach a third of the smallest clip range.

        Raises:
            ValueError: a step without noise has no density.
        """
        std = transition.std
        if bool((std <= 0).any()):
            raise ValueError(
                f"{self} has no log-probability at a step without noise (std 0): leave that step out of "
                "the trained steps, or choose a dynamics that adds noise there"
            )
        variance = std.square()
        return -mean_square(next_sample, transition.mean) / (2 * variance) - std.log() - 0.5 * math.log(2 * math.pi)

    def untrainable(self, steps: Sequence[int], num_steps: int) -> list[str]:
        """What keeps `steps` of a schedule of `num_steps` from being trained: that no noise is added there."""
        steps = [step for step in steps if 0 <= step < num_steps]
        point = torch.zeros(len(steps), 1)
        index = torch.tensor(steps, dtype=torch.int64)
        std = self.transition(point, point, torch.linspace(1, 0, num_steps + 1), index).std
        silent = [step for step, is_silent in zip(steps, (std <= 0).tolist(), strict=True) if is_silent]
        return [f"{self} adds no noise at steps {silent} of {num_steps}, so they cannot be trained"] if silent else []


def mean_square(a: Tensor, b: Tensor) -> Tensor:
    """mean (a - b)^2 over the non-batch dimensions, in float64 from the first difference on: [B]."""
    return (a.double() - b.double()).square().flatten(1).mean(1)


def step_sigmas(sigmas: Tensor, step_index: int | Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
    """sigmas[i] and sigmas[i + 1] of each sample, float64 [B], on the sample's device.

    Raises IndexError for a step outside 0..N-1 (on CUDA, a tensor of steps fails with a device-side assertion).
    """
    num_steps = len(sigmas) - 1
    if not isinstance(step_index, Tensor):
        if not 0 <= step_index < num_steps:
            raise IndexError(f"step_index must be in 0..{num_steps - 1}, got {step_index}")
        step_index = torch.full((len(sample),), step_index, device=sample.device)
    index = step_index.to(sample.device)
    schedule = sigmas.to(sample.device, torch.float64)
    # index_select refuses the negative indices that plain indexing would wrap around
    return schedule.index_select(0, index), schedule.index_select(0, index + 1)


def affine(sample: Tensor, a: Tensor, velocity: Tensor, b: Tensor) -> Tensor:
    """a x + b v with a, b [B], in the dtype that flowrl computes in."""
    sample, velocity = as_computed(sample), as_computed(velocity)
    return per_sample(a, sample) * sample + per_sample(b, sample) * velocity


def path_preserving(
    sample: Tensor, velocity: Tensor, sigma: Tensor, next_sigma: Tensor, noise_kept: Tensor, std: Tensor
) -> Transition:
    """A step to (1 - sigma') x_0 + noise_kept eps + std z, x_0 and eps being the velocity's two ends of the path.

    With noise_kept^2 + std^2 = sigma'^2 the sample has just the signal and the noise that the schedule says. All [B].
    """
    signal = 1 - next_sigma
    # signal (x - sigma v) + noise_kept (x + (1 - sigma) v)
    mean = affine(sample, signal + noise_kept, velocity, noise_kept * (1 - sigma) - signal * sigma)
    return Transition(mean=mean, std=std, dt=next_sigma - sigma)


def reverse_sde(sample: Tensor, velocity: Tensor, sigma: Tensor, next_sigma: Tensor, diffusion: Tensor) -> Transition:
    """One Euler-Maruyama step of the reverse SDE that keeps the flow's marginals, for any coefficient s = `diffusion`.

    dx = [v + s^2 / (2 sigma) (x + (1 - sigma) v)] dt + s dW (Flow-GRPO, arXiv 2505.05470, eq. 8-9). All [B] float64.
    """
    dt = next_sigma - sigma
    drift = diffusion.square() / (2 * sigma) * dt
    mean = affine(sample, 1 + drift, velocity, dt + drift * (1 - sigma))
    return Transition(mean=mean, std=diffusion * (-dt).sqrt(), dt=dt)
