"""The one denoising loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from flowrl.flow.dynamics.base import Dynamics
from flowrl.flow.dynamics.ode import ODE


@dataclass(frozen=True)
class Denoised:
    """x_0 and the stored transitions of B samples (see `types.Trajectory` for the shapes)."""

    final_latents: Tensor
    latents: Tensor
    next_latents: Tensor
    step_index: Tensor
    log_probs: Tensor

    @classmethod
    def final_only(cls, final_latents: Tensor) -> Self:
        """No stored transition: S = 0."""
        batch, device = len(final_latents), final_latents.device
        empty = final_latents.new_empty(batch, 0, *final_latents.shape[1:])
        steps = torch.empty(batch, 0, dtype=torch.int64, device=device)
        return cls(final_latents, empty, empty, steps, torch.empty(batch, 0, dtype=torch.float64, device=device))


@torch.no_grad()
def denoise(
    velocity: Callable[[Tensor, Tensor], Tensor],
    sample: Tensor,
    sigmas: Tensor,
    dynamics: Dynamics,
    stochastic_steps: Sequence[int],
    noise: Callable[[int], Tensor],
) -> Denoised:
    """From x_T to x_0: `dynamics` with fresh noise at `stochastic_steps`, which are stored; Euler at all the others.

    Args:
        velocity: v(x [B, ...], sigma [B]), guidance included.
        sample: x_T [B, ...] float32.
        sigmas: [N + 1] float32, decreasing, last 0.
        dynamics: the stochastic transition.
        stochastic_steps: step indices in 0..N-1.
        noise: standard normal [B, ...] of a step.
    """
    batch, num_steps = len(sample), len(sigmas) - 1
    if not set(stochastic_steps) <= set(range(num_steps)):
        raise ValueError(f"stochastic steps {list(stochastic_steps)} must lie in 0..{num_steps - 1}")
    stored: list[tuple[Tensor, Tensor, Tensor]] = []
    for i in range(num_steps):
        v = velocity(sample, sigmas[i].expand(batch))
        if i in stochastic_steps:
            transition = dynamics.transition(sample, v, sigmas, i)
            next_sample = transition.sample(noise(i))
            stored.append((sample, next_sample, dynamics.log_prob(next_sample, transition)))
        else:
            next_sample = ODE().transition(sample, v, sigmas, i).mean
        sample = next_sample
    if not stored:
        return Denoised.final_only(sample)
    before, after, log_probs = (torch.stack(column, dim=1) for column in zip(*stored, strict=True))
    steps = torch.tensor(sorted(stochastic_steps), device=sample.device).expand(batch, -1)
    return Denoised(sample, before, after, steps, log_probs)
