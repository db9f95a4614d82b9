"""DiffusionNFT (arXiv 2509.16117): a contrastive flow-matching loss on clean samples; no transition, no likelihood."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.base import AlgorithmBase
from flowrl.flow.decay import Decay, LinearRamp
from flowrl.flow.dynamics.base import mean_square
from flowrl.flow.noise import Noise
from flowrl.flow.path import interpolate, predicted_x_0
from flowrl.types import Loss, Needs, Samples, TrainBatch, Velocities, Velocity

ADV_MODES = ("all", "positive_only", "negative_only", "one_only", "binary")


@dataclass(frozen=True)
class NoisedSamples(TrainBatch):
    """x_t = (1 - t) x_0 + t eps of every (sample, time) pair, and the frozen policies' velocities there."""

    clean: Tensor  # [T, ...] x_0
    noised: Tensor  # [T, ...] x_t
    time: Tensor  # [T] t in (0, 1]
    old_velocity: Tensor  # [T, ...]
    reference_velocity: Tensor | None  # [T, ...]


@dataclass(frozen=True, kw_only=True)
class DiffusionNFT(AlgorithmBase):
    """Pulls the velocity towards good samples and away from bad ones, relative to an old policy.

    Args:
        beta: how far the implicit positive and negative policies stand from the old one.
        adv_mode: "all", "positive_only", "negative_only", "one_only" or "binary".
        timestep_fraction: share of the sampling schedule's steps whose times are trained, the noisiest first.
        num_train_times: times drawn per sample and cycle, without replacement; null = all of them.
        kl_coef: weight lambda of mean (v - v_ref)^2.
        decay: theta_old <- d theta_old + (1 - d) theta, d by optimiser update (`flow.decay`).
    """

    beta: float = 1.0
    adv_mode: str = "all"
    timestep_fraction: float = 0.99
    num_train_times: int | None = None
    kl_coef: float = 1e-4
    decay: Any = field(default_factory=lambda: LinearRamp(flat=0, rate=1e-3, cap=0.5))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adv_mode not in ADV_MODES:
            raise ValueError(f"adv_mode must be one of {', '.join(ADV_MODES)}, got {self.adv_mode!r}.")
        if self.beta <= 0:
            raise ValueError(f"beta must be positive, got {self.beta}.")
        if self.num_train_times is not None and self.num_train_times < 1:
            raise ValueError(f"num_train_times must be at least 1 or null, got {self.num_train_times}.")
        if not isinstance(self.decay, Decay):
            raise ValueError(f"decay must be a schedule of flow.decay, got {self.decay!r}.")
        if not 0 < self.timestep_fraction <= 1:
            raise ValueError(f"timestep_fraction must be in (0, 1], got {self.timestep_fraction}.")

    @property
    def needs(self) -> Needs:
        """Deterministic rollouts by the old policy, of which only x_0 is used."""
        reference: dict[str, Decay | None] = {"reference": None} if self.kl_coef else {}
        return Needs(rollout="ode", behaviour="old", snapshots={"old": self.decay} | reference)

    def freeze(self, samples: Samples, velocities: Velocities, noise: Noise) -> NoisedSamples:
        """Fresh eps and shuffled times for every sample, and the frozen policies' velocities at x_t."""
        time = self._times(samples, noise)
        num_times = time.shape[1]
        per_row = torch.arange(len(samples), device=samples.advantages.device).repeat_interleave(num_times)
        clean, t = samples.trajectory.final_latents[per_row], time.flatten()
        keys = [(*key, i) for key in sample_keys(samples) for i in range(num_times)]
        eps = noise.child("epsilon").normal(tuple(clean.shape[1:]), keys).to(clean.device)
        noised = interpolate(clean, eps, t)
        rows = samples.condition_rows[per_row]
        frozen = {name: velocity(noised, t, rows) for name, velocity in velocities.snapshots.items()}
        return NoisedSamples(
            condition_rows=rows,
            group_ids=samples.trajectory.group_ids[per_row],
            advantages=samples.advantages[per_row],
            clean=clean,
            noised=noised,
            time=t,
            old_velocity=frozen["old"],
            reference_velocity=frozen.get("reference"),
        )

    def _times(self, samples: Samples, noise: Noise) -> Tensor:
        """Times [B, n]: the schedule's noisiest steps in an order of each sample's own."""
        sigmas = samples.trajectory.sigmas
        candidates = sigmas[: max(1, int((len(sigmas) - 1) * self.timestep_fraction))]
        count = len(candidates) if self.num_train_times is None else min(self.num_train_times, len(candidates))
        orders = [noise.permutation(len(candidates), "time", *key)[:count] for key in sample_keys(samples)]
        return candidates[torch.stack(orders).to(candidates.device)].to(samples.advantages.device)

    def optimality(self, advantages: Tensor) -> Tensor:
        """r in [0, 1]: how likely a sample is a good one."""
        a = self.clip_advantages(advantages)
        if self.adv_mode == "positive_only":
            a = a.clamp(min=0)
        elif self.adv_mode == "negative_only":
            a = a.clamp(max=0)
        elif self.adv_mode == "one_only":
            a = (a > 0).to(a.dtype)
        elif self.adv_mode == "binary":
            a = a.sign()
        return (a / (2 * self.adv_clip_max) + 0.5).clamp(0, 1)

    def loss(self, micro: TrainBatch, velocity: Velocity) -> Loss:
        """A_max [r l+ + (1 - r) l-] / beta + lambda |v - v_ref|^2 per row."""
        assert isinstance(micro, NoisedSamples)
        v = velocity(micro.noised, micro.time, micro.condition_rows)
        old, r = micro.old_velocity, self.optimality(micro.advantages)
        positive = denoising_error(micro, self.beta * v + (1 - self.beta) * old)
        negative = denoising_error(micro, (1 + self.beta) * old - self.beta * v)
        policy = self.adv_clip_max * (r * positive + (1 - r) * negative) / self.beta
        means = {"policy_loss": policy.detach(), "old_deviation": mean_square(v.detach(), old)}
        if micro.reference_velocity is None:
            return Loss(terms=policy, means=means)
        penalty = mean_square(v, micro.reference_velocity)
        return Loss(terms=policy + self.kl_coef * penalty, means=means | {"kl": penalty.detach()})


def denoising_error(micro: NoisedSamples, velocity: Tensor) -> Tensor:
    """Squared error of x_0 [T] float64, divided by its own detached mean absolute error (floor 1e-5)."""
    error = (predicted_x_0(micro.noised, velocity, micro.time) - micro.clean).flatten(1).double()
    weight = error.detach().abs().mean(1).clamp(min=1e-5)
    return error.square().mean(1) / weight


def sample_keys(samples: Samples) -> list[tuple[int, int]]:
    """(group ordinal, slot) of every sample: what its training noise is keyed by, whatever rank it is on."""
    return list(zip(samples.trajectory.group_ids.tolist(), samples.trajectory.slots.tolist(), strict=True))
