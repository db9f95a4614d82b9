"""Advantages: how much better a sample is than the others of its group (of the same prompt).

Everything is float64: rewards are few, and repositories differ in the last digits only because of float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.flow.checks import require, require_at_least, require_choice, require_one_of


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    std: str = "group",
    eps: float = 1e-4,
    unbiased: bool = False,
    floor: float = 0.0,
) -> Tensor:
    """(reward - group mean) / (max(std, floor) + eps), float64 [B].

    A singleton group, and a group whose rewards are all equal, get exactly 0. Statistics are those of the tensors
    given: pass the whole train batch, not one rank's part. To normalise without groups, give all samples the same id.

    The default is flow_grpo's: additive 1e-4 and the population standard deviation. By repository:

    ============== ====================== ========= ===== =====
    repository     std                    unbiased  eps   floor
    ============== ====================== ========= ===== =====
    flow_grpo, NFT "group" or "batch"     False     1e-4  0
    verl-omni      "group", "batch",      True      1e-4  0
                   "none" (Dr. GRPO)
    UniRL          "group" or "batch"     True      1e-8  0
    DanceGRPO      "group"                True      1e-8  0
    Relax          any                    True      1e-6  0
    Flow-Factory   "batch" or "group"     False     0     1e-6
    ============== ====================== ========= ===== =====

    Args:
        rewards: [B], finite.
        group_ids: int64 [B].
        std: divide by the standard deviation of the sample's "group", of the whole "batch", or not at all ("none").
        eps: added to the standard deviation.
        unbiased: divide squared deviations by n - 1 (torch's default) instead of n (numpy's).
        floor: the smallest standard deviation to divide by.

    Raises:
        ValueError: for a reward that is not finite, shapes that differ, an unknown `std`, or eps and floor both 0.
    """
    require_choice("std", std, ("group", "batch", "none"))
    rewards = _checked(rewards, group_ids)
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    deviation = _deviation(rewards, group, size)
    if std == "none":
        return deviation
    if not eps + floor > 0:
        raise ValueError("eps and floor must not both be 0: a group of equal rewards would divide 0 by 0")
    if std == "group":
        correction = size / (size - 1).clamp(min=1) if unbiased else 1.0
        spread = (_group_mean(deviation.square(), group, size) * correction).sqrt()[group]
    else:
        spread = _batch_std(rewards, unbiased)
    return deviation / (spread.clamp(min=floor) + eps)


@dataclass(frozen=True)
class Advantages:
    """Rewards of several components to one advantage per sample, with `group_advantages`' options.

    `combine` names how components with weights w_k come together:

    * "weighted_sum" (default): sum of w_k * advantages of component k. Each component counts by its weight, whatever
      its scale.
    * "raw": the advantages of the sum of w_k * rewards of component k, as flow_grpo and Flow-Factory's "sum" do. A
      component with large rewards outweighs the others.
    * "gdpo": the weighted sum, which is centred already, divided by its batch standard deviation, as Flow-Factory's
      GDPO does (with floor 1e-6 and eps 0 there). It divides each component per group first: `std` must be "group".
    """

    combine: str = "weighted_sum"
    std: str = "group"
    eps: float = 1e-4
    unbiased: bool = False
    floor: float = 0.0

    def __post_init__(self) -> None:
        require_one_of(self, "combine", ("weighted_sum", "raw", "gdpo"))
        require_one_of(self, "std", ("group", "batch", "none"))
        require_at_least(self, "eps", 0)
        require_at_least(self, "floor", 0)
        require(self.combine != "gdpo" or self.std == "group", self, "std", "'group' with combine=gdpo")
        require(self.std == "none" or self.eps + self.floor > 0, self, "eps", "> 0 unless floor is")

    def __call__(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float], group_ids: Tensor) -> Tensor:
        """float64 [B] from rewards [B] by component, a weight for each of them, and group_ids int64 [B].

        Raises ValueError for components and weights that do not have the same names, and as `group_advantages` does.
        """
        if not rewards or rewards.keys() != weights.keys():
            raise ValueError(f"rewards and weights must name the same components: {sorted(rewards)}, {sorted(weights)}")
        if self.combine == "raw":
            return self._normalised(_weighted_sum(rewards, weights), group_ids)
        total = _weighted_sum({name: self._normalised(r, group_ids) for name, r in rewards.items()}, weights)
        if self.combine == "weighted_sum":
            return total
        return total / (_batch_std(total, self.unbiased).clamp(min=self.floor) + self.eps)

    def _normalised(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_advantages(rewards, group_ids, self.std, self.eps, self.unbiased, self.floor)


def best_and_worst(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """+1 for the first best sample of each group, -1 for the first worst, else 0: float64 [B] (flow_grpo's "dpo").

    When all rewards of a group are equal its second sample counts as the best and its first as the worst. A singleton
    gets 0.
    """
    rewards = _checked(rewards, group_ids)
    out = torch.zeros_like(rewards)
    for group in torch.unique(group_ids):
        members = (group_ids == group).nonzero().squeeze(1)
        if len(members) == 1:
            continue
        best, worst = int(rewards[members].argmax()), int(rewards[members].argmin())
        if best == worst:
            best, worst = 1, 0
        out[members[best]], out[members[worst]] = 1.0, -1.0
    return out


def best_of_group(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """1 for every sample that has its group's highest reward, else 0: float64 [B] (flow_grpo's "sft")."""
    rewards = _checked(rewards, group_ids)
    _, group = torch.unique(group_ids, return_inverse=True)
    highest = rewards.new_full((int(group.max()) + 1,), -torch.inf).scatter_reduce(0, group, rewards, "amax")
    return (rewards == highest[group]).double()


def _checked(rewards: Tensor, group_ids: Tensor) -> Tensor:
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards and group_ids must both be [B], got {list(rewards.shape)}, {list(group_ids.shape)}")
    if not bool(rewards.isfinite().all()):
        raise ValueError(f"every reward must be finite, got {rewards.tolist()}")
    return rewards.double()


def _weighted_sum(values: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    return torch.stack([weights[name] * value.double() for name, value in values.items()]).sum(0)


def _group_mean(values: Tensor, group: Tensor, size: Tensor) -> Tensor:
    return values.new_zeros(len(size)).index_add(0, group, values) / size


def _deviation(rewards: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """From the group's mean; rounding would leave 1e-16 of it where all rewards are equal, which is not nothing."""
    empty = rewards.new_empty(len(size))
    lowest = empty.scatter_reduce(0, group, rewards, "amin", include_self=False)
    highest = empty.scatter_reduce(0, group, rewards, "amax", include_self=False)
    deviation = rewards - _group_mean(rewards, group, size)[group]
    return torch.where((lowest == highest)[group], 0.0, deviation)


def _batch_std(values: Tensor, unbiased: bool) -> Tensor:
    return values.std(correction=1 if unbiased and len(values) > 1 else 0)
