"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO with a ratio of mean 1 and of the step's scale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrl.algorithms.base import Transitions, freeze_transitions
from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.config import Config, Problem
from flowrl.flow.dynamics.base import Transition, mean_square
from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.flow.noise import Noise
from flowrl.types import Samples, Velocities


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
        return freeze_transitions(samples, velocities, self.old_log_prob, keep_mean=True, correction=self.correction)

    def log_ratio(self, micro: Transitions, transition: Transition, change: Tensor) -> tuple[Tensor, Tensor | float]:
        """The regulated ratio, and 1 / h."""
        assert micro.old_mean is not None
        regulated = regulated_log_ratio(change, transition.mean, micro.old_mean, transition.std, self.bias)
        return regulated, -1 / transition.dt


def regulated_log_ratio(change: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor, bias: str) -> Tensor:
    """(change + b) c, float64 [T]: `change` = log p - log p_old [T], b = |mu - mu_old|^2 / (2 c^2), c = `std` [T].

    E[change] under the old policy is -b: adding it makes the ratio's mean 1; the factor c makes steps comparable.
    """
    b = mean_square(mean, old_mean) / (2 * std.square())
    if bias == "batch":
        b = b.mean().expand_as(b)
    return (change + b) * std
