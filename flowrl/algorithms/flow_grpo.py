"""Flow-GRPO (arXiv 2505.05470): PPO's clipped surrogate over the stochastic denoising steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrl.algorithms.base import AlgorithmBase, Transitions, clipped_surrogate, freeze_transitions, replay
from flowrl.flow.dynamics.base import Transition
from flowrl.flow.kl import kl_divergence
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
    """

    clip_range: float = 1e-4
    clip_range_high: float | None = None
    old_log_prob: str = "replay"
    kl_coef: float = 0.0
    kl: str = "gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.clip_range < 1:
            raise ValueError(f"clip_range must be between 0 and 1, got {self.clip_range}.")
        if self.old_log_prob not in ("replay", "rollout"):
            raise ValueError(f"old_log_prob must be replay or rollout, got {self.old_log_prob!r}.")
        if self.kl not in ("gaussian", "flow_grpo", "x", "v"):
            raise ValueError(f"kl must be gaussian, flow_grpo, x or v, got {self.kl!r}.")
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef must not be negative, got {self.kl_coef}.")

    @property
    def needs(self) -> Needs:
        """Stochastic transitions; the reference only if it is penalised."""
        return Needs(rollout="sde", snapshots=frozenset({"reference"}) if self.kl_coef else frozenset())

    def freeze(self, samples: Samples, velocities: Velocities, noise: Noise) -> Transitions:
        """pi_old and the reference velocity of every row."""
        return freeze_transitions(samples, velocities, self.old_log_prob, keep_mean=False)

    def loss(self, micro: TrainBatch, velocity: Velocity) -> Loss:
        """Clipped surrogate plus `kl_coef` times the penalty."""
        assert isinstance(micro, Transitions)
        v, transition, log_prob = replay(micro, velocity)
        log_ratio = log_prob - micro.old_log_prob
        ratio = log_ratio.exp()
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        terms = clipped_surrogate(ratio, self.clip_advantages(micro.advantages), self.clip_range, high)
        penalty = self.penalty(micro, v, transition)
        return Loss(
            terms=terms if penalty is None else terms + self.kl_coef * penalty,
            means=diagnostics(log_ratio, self.clip_range, high) | ({} if penalty is None else {"kl": penalty.detach()}),
            spreads={"ratio": ratio.detach()},
        )

    def penalty(self, micro: Transitions, v: Tensor, transition: Transition) -> Tensor | None:
        """KL [T] to the reference in the chosen form, or None without one."""
        reference = micro.reference_velocity
        if reference is None:
            return None
        anchor = micro.dynamics.transition(micro.sample, reference, micro.sigmas, micro.step_index)
        return kl_divergence(self.kl, transition, anchor, v, reference)


def diagnostics(log_ratio: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Per-row diagnostics of a ratio: what is clipped, and |delta log p| to be read beside the clip range."""
    log_ratio = log_ratio.detach()
    change = log_ratio.expm1()
    return {
        "clip_fraction": ((change > high) | (change < -low)).double(),
        "approx_kl": 0.5 * log_ratio.square(),
        "log_prob_abs_diff": log_ratio.abs(),
    }
