"""Components of the reward, and the one advantage that they give together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.config import Config, Particular, Problem
from flowrl.rewards.frames import AllFrames, Frames, UniformFrames, VideoScorer, chosen
from flowrl.rewards.latents import LatentScorer
from flowrl.types import ScoredGroup, Scorer

Combiner = Callable[[Mapping[str, Tensor], Mapping[str, float], Tensor], Tensor]
"""Rewards [B] by component, weights, group ids int64 [B] -> advantages float64 [B], as `flow.advantage.Advantages`."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """One reward among others.

    Args:
        scorer: a `types.Scorer`; of videos, it may be a `rewards.frames.VideoScorer`. A `rewards.latents.LatentScorer`
            is given latents instead of pictures.
        weight: of its advantages (`combine=weighted_sum`, `gdpo`) or of its scores (`raw`); 0 only logs it, and a
            negative one punishes. None is 1 for a component that is alone, and an error for one of several.
        required: if it fails for good the run stops; else the group goes without it, which is counted.
        perfect: the full score, if there is one: evaluation reports the share of samples that reach it.
        frames: of videos: which frames the scorer gets, a `rewards.frames.Frames`. None gives a `VideoScorer` all of
            them, and any other scorer eight, evenly spaced.
    """

    scorer: Any
    weight: float | None = None
    required: bool = True
    perfect: float | None = None
    frames: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.scorer, Scorer | LatentScorer):
            raise ValueError(
                "scorer must have load() and score(images, prompts), or score_latents(latents, text, prompts), got "
                f"{self.scorer!r}"
            )
        if self.weight is not None and not math.isfinite(self.weight):
            raise ValueError(f"weight must be a finite number, got {self.weight}")
        if self.perfect is not None and not math.isfinite(self.perfect):
            raise ValueError(f"perfect must be a finite number or null, got {self.perfect}")
        if self.frames is not None and not isinstance(self.frames, Frames):
            raise ValueError(f"frames must have choose(num_frames), or be null, got {self.frames!r}")
        if self.frames is not None and self.sees_latents:
            raise ValueError(f"frames must be null: {type(self.scorer).__name__} scores latents, all of them")

    @property
    def sees_latents(self) -> bool:
        """Is it scored by latents, and not by pictures?"""
        return isinstance(self.scorer, LatentScorer)

    def scored_part(self, images: np.ndarray) -> np.ndarray:
        """What the scorer gets: pictures [K, H, W, 3] as they are, of videos [K, F, H, W, 3] the chosen frames."""
        if images.ndim == 4:
            return images
        return chosen(images, self.frames or (AllFrames() if isinstance(self.scorer, VideoScorer) else UniformFrames()))

    def problems(self, run: Config) -> list[Problem]:
        """The scorer's own."""
        return self.scorer.problems(run) if isinstance(self.scorer, Particular) else []


def batch_advantages(groups: Sequence[ScoredGroup], weights: Mapping[str, float], combiner: Combiner) -> Tensor:
    """float64 [B], in the order of the groups and their samples.

    Nothing stands in for a component that is missing: groups that lack the same optional components are combined among
    themselves, with what they have. When all groups have everything, which is the rule, that is the whole batch.

    Args:
        groups: with at least one component each.
        weights: of every component.
        combiner: what makes advantages of complete rewards.
    """
    alike: defaultdict[frozenset[str], list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        alike[frozenset(group.rewards)].append(index)
    parts: list[Tensor] = [torch.empty(0)] * len(groups)
    for names, members in alike.items():
        chosen = [groups[index] for index in members]
        advantages = _combine(chosen, {name: weight for name, weight in weights.items() if name in names}, combiner)
        start = 0
        for index, group in zip(members, chosen, strict=True):
            parts[index] = advantages[start : start + group.sampled.group.num_samples]
            start += len(parts[index])
    return torch.cat(parts)


def _combine(groups: Sequence[ScoredGroup], weights: Mapping[str, float], combiner: Combiner) -> Tensor:
    rewards = {name: torch.from_numpy(np.concatenate([group.rewards[name] for group in groups])) for name in weights}
    ids = torch.cat([torch.full((g.sampled.group.num_samples,), g.sampled.group.ordinal) for g in groups])
    return combiner(rewards, weights, ids)
