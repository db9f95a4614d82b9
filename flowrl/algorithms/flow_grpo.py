"""Flow-GRPO (arXiv 2505.05470): PPO's clipped surrogate over the stochastic denoising steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowrl.algorithms.base import AlgorithmBase, Transitions, clipped_surrogate, freeze_transitions, replay
from flowrl.flow.dynamics.base import Transition
from flowrl.flow.importance import TruncatedImportance
from flowrl.flow.kl import KL_FORMS, kl_divergence
from flowrl.flow.noise import Noise
from flowrl.types import Loss, Needs, Samples, TrainBatch, Velocities, Velocity


@dataclass(frozen=True, kw_only=True)
class FlowGRPO(AlgorithmBase):
    """Clip per (sample, step), never over the sum of steps.

    Args:
        clip_range: epsilon of the ratio; log-probabilities are means over dimensions, hence 1e-6 ... 1e-3.
        clip_range_high: upper epsilon when it differs from the lower.
        old_log_prob: "replay" (the trainer's forward before the first update) or "rollout" (as recorded).
        kl_coef: weight of the penalty to the reference policy; 0 does not evaluate the reference.
        kl: form of the penalty (`flow.kl`): "gaussian", "flow_grpo", "x" or "v".
        correction: weights for samples that an older policy drew (`flow.importance`), in asynchronous training; needs
            `old_log_prob="replay"`. null = none.
        target_kl: end a cycle early once an update's mean `approx_kl` exceeds this; null = never.
    """

    clip_range: float = 1e-4
    clip_range_high: float | None = None
    old_log_prob: str = "replay"
    kl_coef: float = 0.0
    kl: str = "gaussian"
    target_kl: float | None = None
    correction: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_range", "clip_range_high"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {value}.")
        if self.old_log_prob not in ("replay", "rollout"):
            raise ValueError(f"old_log_prob must be replay or rollout, got {self.old_log_prob!r}.")
        if self.kl not in KL_FORMS:
            raise ValueError(f"kl must be one of {', '.join(KL_FORMS)}, got {self.kl!r}.")
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef must not be negative, got {self.kl_coef}.")
        if self.correction is not None and not isinstance(self.correction, TruncatedImportance):
            raise ValueError(
                f"correction must be flow.importance.TruncatedImportance or null, got {self.correction!r}."
            )
        if self.correction is not None and self.old_log_prob != "replay":
            raise ValueError("correction compares the replayed policy with the recorded one: set old_log_prob=replay.")
        if self.target_kl is not None and self.target_kl <= 0:
            raise ValueError(f"target_kl must be positive or null, got {self.target_kl}.")

    @property
    def needs(self) -> Needs:
        """Stochastic transitions; the reference only if it is penalised."""
        return Needs(
            rollout="sde",
            snapshots={"reference": None} if self.kl_coef else {},
            on_policy=self.old_log_prob == "replay" and self.correction is None,
        )

    def freeze(self, samples: Samples, velocities: Velocities, noise: Noise) -> Transitions:
        """pi_old and the reference velocity of every row."""
        return freeze_transitions(samples, velocities, self.old_log_prob, keep_mean=False, correction=self.correction)

    def loss(self, micro: TrainBatch, velocity: Velocity) -> Loss:
        """Clipped surrogate plus `kl_coef` times the penalty."""
        assert isinstance(micro, Transitions)
        v, transition, log_prob = replay(micro, velocity)
        change = log_prob - micro.old_log_prob
        log_ratio, scale = self.log_ratio(micro, transition, change)
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        ratio, advantages = log_ratio.exp(), self.clip_advantages(micro.advantages)
        terms = scale * clipped_surrogate(ratio, advantages, self.clip_range, high)
        means = {
            "clip_fraction": ((ratio > 1 + high) | (ratio < 1 - self.clip_range)).double(),
            "approx_kl": 0.5 * change.detach().square(),
            "log_prob_abs_diff": change.detach().abs(),
        }
        if micro.importance is not None:
            terms = terms * micro.importance
            means["importance"] = micro.importance
            means["importance_rejected"] = (micro.importance == 0).double()
        if micro.reference_velocity is not None:
            anchor = micro.dynamics.transition(micro.sample, micro.reference_velocity, micro.sigmas, micro.step_index)
            penalty = kl_divergence(self.kl, transition, anchor, v, micro.reference_velocity)
            terms = terms + self.kl_coef * penalty
            means["kl"] = penalty.detach()
        return Loss(terms, means, spreads={"ratio": ratio.detach()})

    def log_ratio(self, micro: Transitions, transition: Transition, change: Tensor) -> tuple[Tensor, Tensor | float]:
        """What is clipped, and the factor of its surrogate, from `change` = log p - log p_old, all [T]."""
        return change, 1.0
