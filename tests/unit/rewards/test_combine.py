"""Components, and advantages of batches in which some are missing."""

from __future__ import annotations

import pytest
import torch

from flowrl.config import Reward
from flowrl.flow.advantage import Advantages
from flowrl.rewards.combine import Component, batch_advantages
from flowrl.rewards.frames import EveryKth
from flowrl.types import ScoredGroup
from tests.unit.rewards.scorers import Brightness, Energy
from tests.unit.rewards.support import scored_group

WEIGHTS = {"ocr": 1.0, "style": 0.5}
COMBINERS = [
    Advantages(combine="gdpo", std="group"),
    *(Advantages(combine=combine, std=std) for combine in ("weighted_sum", "raw") for std in ("group", "batch")),
]


def full(ordinal: int) -> ScoredGroup:
    return scored_group(ordinal, {"ocr": [0.1 * ordinal, 0.5, 1.0], "style": [3.0, 1.0, 2.0 + ordinal]})


def lacking(ordinal: int) -> ScoredGroup:
    return scored_group(ordinal, {"ocr": [0.2, 0.9 - 0.1 * ordinal, 0.4]})


@pytest.mark.parametrize("combiner", COMBINERS, ids=str)
def test_a_complete_batch_is_combined_as_a_whole(combiner: Advantages) -> None:
    groups = [full(3), full(1), full(2)]
    rewards = {name: torch.cat([torch.from_numpy(group.rewards[name]) for group in groups]) for name in WEIGHTS}
    expected = combiner(rewards, WEIGHTS, torch.tensor([3, 3, 3, 1, 1, 1, 2, 2, 2]))
    assert torch.equal(batch_advantages(groups, WEIGHTS, combiner), expected)


@pytest.mark.parametrize("combiner", COMBINERS, ids=str)
def test_groups_that_lack_a_component_are_combined_among_themselves(combiner: Advantages) -> None:
    mixed = batch_advantages([full(1), lacking(2), full(3), lacking(4)], WEIGHTS, combiner)
    complete = batch_advantages([full(1), full(3)], WEIGHTS, combiner)
    short = batch_advantages([lacking(2), lacking(4)], {"ocr": 1.0}, combiner)
    assert torch.equal(mixed, torch.cat([complete[:3], short[:3], complete[3:], short[3:]]))


def test_groups_keep_their_own_sizes() -> None:
    groups = [scored_group(1, {"ocr": [0.0, 1.0]}), scored_group(2, {"ocr": [0.5, 0.5, 0.5]})]
    advantages = batch_advantages(groups, {"ocr": 1.0}, Advantages(std="none"))
    assert advantages.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_are_finite(weight: float) -> None:
    with pytest.raises(ValueError, match="weight must be a finite number"):
        Component(scorer=Brightness(), weight=weight)


def test_a_component_that_is_alone_needs_no_weight() -> None:
    assert Reward({"ocr": Component(scorer=Brightness())}).weights == {"ocr": 1.0}
    assert Reward({"ocr": Component(scorer=Brightness(), weight=-0.5)}).weights == {"ocr": -0.5}


def test_frames_are_of_pictures() -> None:
    with pytest.raises(ValueError, match="frames must be null: Energy scores latents"):
        Component(scorer=Energy(), frames=EveryKth(2))


def test_a_scorer_must_score() -> None:
    with pytest.raises(ValueError, match=r"scorer must have load\(\) and score"):
        Component(scorer="ocr")
