"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO with a ratio of mean 1 and of the step's scale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrl.algorithms.base import Transitions, clipped_surrogate, freeze_transitions, replay
from flowrl.algorithms.flow_grpo import FlowGRPO, diagnostics
from flowrl.config import Config, Problem
from flowrl.flow.dynamics.base import mean_square
from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.flow.noise import Noise
from flowrl.types import Loss, Samples, TrainBatch, Velocities, Velocity


@dataclass(frozen=True, kw_only=True)
class GRPOGuard(FlowGRPO):
    """r = exp((log p - log p_old + b) c), b = |mu - mu_old|^2 / (2 c^2), c = the step's total std; loss / h, h = -dt.

    Args:
        bias: "sample" takes b per row (verl-omni); "batch" averages it over the micro-batch (flow_grpo).
    """

    clip_range: float = 2e-6
    bias: str = "sample"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias not in ("sample", "batch"):
            raise ValueError(f"bias must be sample or batch, got {self.bias!r}.")

    def problems(self, run: Config) -> list[Problem]:
        """The mean must be flow-SDE's."""
        if isinstance(run.sampler.dynamics, FlowSDE):
            return []
        got = type(run.sampler.dynamics).__name__
        return [
            Problem(
                "sampler.dynamics", f"grpo_guard is derived for FlowSDE, got {got}.", "Set sampler/dynamics=flow_sde."
            )
        ]

    def freeze(self, samples: Samples, velocities: Velocities, noise: Noise) -> Transitions:
        """Flow-GRPO's, and mu_old."""
        return freeze_transitions(samples, velocities, self.old_log_prob, keep_mean=True)

    def loss(self, micro: TrainBatch, velocity: Velocity) -> Loss:
        """The regulated ratio, clipped, divided by the step's h."""
        assert isinstance(micro, Transitions) and micro.old_mean is not None
        v, transition, log_prob = replay(micro, velocity)
        change = log_prob - micro.old_log_prob
        log_ratio = regulated_log_ratio(change, transition.mean, micro.old_mean, transition.std, self.bias)
        ratio = log_ratio.exp()
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        surrogate = clipped_surrogate(ratio, self.clip_advantages(micro.advantages), self.clip_range, high)
        terms = surrogate / -transition.dt
        penalty = self.penalty(micro, v, transition)
        return Loss(
            terms=terms if penalty is None else terms + self.kl_coef * penalty,
            means=diagnostics(log_ratio, self.clip_range, high) | ({} if penalty is None else {"kl": penalty.detach()}),
            spreads={"ratio": ratio.detach()},
        )


def regulated_log_ratio(change: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor, bias: str) -> Tensor:
    """(change + b) c, float64 [T]: `change` = log p - log p_old [T], b = |mu - mu_old|^2 / (2 c^2), c = `std` [T].

    E[change] under the old policy is -b: adding it makes the ratio's mean 1; the factor c makes steps comparable.
    """
    b = mean_square(mean, old_mean) / (2 * std.square())
    if bias == "batch":
        b = b.mean().expand_as(b)
    return (change + b) * std
