"""What algorithms share: settings, and the replay of stored transitions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.config import Config, Problem
from flowrl.flow.advantage import Advantages
from flowrl.flow.dynamics.base import Dynamics, Transition
from flowrl.flow.importance import TruncatedImportance
from flowrl.types import SHARED, Samples, TrainBatch, Velocities, Velocity

ROWS_AT_A_TIME = 64


@dataclass(frozen=True, kw_only=True)
class AlgorithmBase:
    """Settings of every algorithm, and the parts of the protocol that most of them leave alone.

    Args:
        num_updates_per_batch: disjoint, equal optimiser updates that one batch is split into.
        adv_clip_max: advantages are clipped to +- this.
        advantages: how rewards become advantages (`flow.advantage`); by default centred per prompt, divided by the
            standard deviation of the whole batch, as Flow-GRPO's recipes do.
        drop_zero_advantage: leave out samples whose advantage is exactly 0 (groups without variance).
    """

    num_updates_per_batch: int = 1
    adv_clip_max: float = 5.0
    advantages: Any = field(default_factory=lambda: Advantages(std="batch"))
    drop_zero_advantage: bool = False

    def __post_init__(self) -> None:
        if self.num_updates_per_batch < 1:
            raise ValueError(f"num_updates_per_batch must be at least 1, got {self.num_updates_per_batch}.")
        if self.adv_clip_max <= 0:
            raise ValueError(f"adv_clip_max must be positive, got {self.adv_clip_max}.")
        if not isinstance(self.advantages, Advantages):
            raise ValueError(f"advantages must be flow.advantage.Advantages, got {self.advantages!r}.")

    def select(self, advantages: Tensor, group_ids: Tensor) -> Tensor:
        """All samples, or those with a non-zero advantage."""
        return advantages.nonzero().squeeze(1) if self.drop_zero_advantage else torch.arange(len(advantages))

    @property
    def target_kl(self) -> float | None:
        """Cycles are never cut short."""
        return None

    def couple(self, update: TrainBatch, velocities: Velocities) -> TrainBatch:
        """Nothing ties samples together."""
        return update

    def problems(self, run: Config) -> list[Problem]:
        """What the run asks of this algorithm and it cannot do."""
        return []

    def clip_advantages(self, advantages: Tensor) -> Tensor:
        """Advantages within +- adv_clip_max."""
        return advantages.clamp(-self.adv_clip_max, self.adv_clip_max)


@dataclass(frozen=True)
class Transitions(TrainBatch):
    """Stored transitions as training rows, sample-major: a sample's S steps stand together."""

    sample: Tensor  # [T, ...] float32
    next_sample: Tensor  # [T, ...] float32
    step_index: Tensor  # [T] int64
    old_log_prob: Tensor  # [T] float64
    old_mean: Tensor | None = None  # [T, ...] mean of the old policy's transition
    reference_velocity: Tensor | None = None  # [T, ...]
    importance: Tensor | None = None  # [T] float64, of samples that an older policy drew
    sigmas: Tensor = field(kw_only=True, metadata=SHARED)
    dynamics: Dynamics = field(kw_only=True, metadata=SHARED)


def replay(batch: Transitions, velocity: Velocity) -> tuple[Tensor, Transition, Tensor]:
    """Velocity [T, ...], transition and log-probability float64 [T] of the stored steps under `velocity`."""
    sigma = batch.sigmas[batch.step_index]
    v = velocity(batch.sample, sigma, batch.condition_rows)
    transition = batch.dynamics.transition(batch.sample, v, batch.sigmas, batch.step_index)
    return v, transition, batch.dynamics.log_prob(batch.next_sample, transition)


def freeze_transitions(
    samples: Samples,
    velocities: Velocities,
    old_log_prob: str,
    *,
    keep_mean: bool,
    correction: TruncatedImportance | None = None,
) -> Transitions:
    """The rows of a policy-gradient cycle, with pi_old and the reference evaluated once on the weights before it.

    `old_log_prob="replay"` recomputes pi_old with the trainer's own forward, `"rollout"` trusts the recorded one. With
    a `correction`, rows are weighted by replayed over recorded: proximal over behaviour policy.
    """
    trajectory = samples.trajectory
    num_steps = trajectory.step_index.shape[1]
    per_row = torch.arange(len(samples), device=samples.advantages.device).repeat_interleave(num_steps)
    batch = Transitions(
        condition_rows=samples.condition_rows[per_row],
        group_ids=trajectory.group_ids[per_row],
        advantages=samples.advantages[per_row],
        sample=trajectory.latents.flatten(0, 1),
        next_sample=trajectory.next_latents.flatten(0, 1),
        step_index=trajectory.step_index.flatten(),
        old_log_prob=trajectory.log_probs.flatten(),
        sigmas=trajectory.sigmas,
        dynamics=trajectory.dynamics,
    )
    if old_log_prob == "replay" or keep_mean:
        means, log_probs = _replayed(batch, velocities.policy)
        batch = dataclasses.replace(
            batch,
            old_log_prob=log_probs if old_log_prob == "replay" else batch.old_log_prob,
            old_mean=means if keep_mean else None,
            importance=None if correction is None else correction.weights(log_probs, batch.old_log_prob),
        )
    if "reference" in velocities.snapshots:
        sigma = batch.sigmas[batch.step_index]
        reference = velocities.snapshots["reference"](batch.sample, sigma, batch.condition_rows)
        batch = dataclasses.replace(batch, reference_velocity=reference)
    return batch


def _replayed(batch: Transitions, velocity: Velocity) -> tuple[Tensor, Tensor]:
    """Means [T, ...] and log-probabilities [T] of all rows; the float64 arithmetic goes a few rows at a time."""
    v = velocity(batch.sample, batch.sigmas[batch.step_index], batch.condition_rows)
    means, log_probs = [], []
    for rows in torch.arange(len(batch), device=v.device).split(ROWS_AT_A_TIME):
        part = batch.rows(rows)
        transition = part.dynamics.transition(part.sample, v[rows], part.sigmas, part.step_index)
        means.append(transition.mean)
        log_probs.append(part.dynamics.log_prob(part.next_sample, transition))
    return torch.cat(means), torch.cat(log_probs)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) [T] (PPO, arXiv 1707.06347, eq. 7, as a loss)."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
