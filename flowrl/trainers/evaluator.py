"""Held-out prompts, drawn with fixed seeds and scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowrl.config import Config, ConfigError, Evaluation
from flowrl.data.group_sampler import fixed_groups
from flowrl.data.prompts import load_prompts
from flowrl.flow.noise import Noise
from flowrl.rewards.pool import RewardPool
from flowrl.rollout.native import NativeEngine
from flowrl.types import Group, Policy, SampledGroup, ScoredGroup


@dataclass(frozen=True)
class Evaluated:
    """The scored groups of every held-out set, by its name, and the full score of the components that have one."""

    sets: Mapping[str, list[ScoredGroup]]
    full_scores: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """`eval/<set>/<component>_mean`, and `_perfect`: the share of samples with the full score."""
        metrics = {}
        for name, groups in self.sets.items():
            for component, scores in by_component(groups).items():
                metrics[f"eval/{name}/{component}_mean"] = float(scores.mean())
                if component in self.full_scores:
                    perfect = scores >= self.full_scores[component]
                    metrics[f"eval/{name}/{component}_perfect"] = float(perfect.mean())
        return metrics


def evaluation_engine(run: Config, policy: Policy) -> NativeEngine:
    """What evaluations draw with: their number of steps, their dynamics, their noise. Raises ConfigError."""
    settings = run.trainer.eval
    num_steps = run.sampler.num_steps if settings.num_steps is None else settings.num_steps
    try:
        return NativeEngine(
            policy,
            replace(run.sampler, num_steps=num_steps),
            Noise.of(settings.seed, "evaluation"),
            run.rollout.batch_size,
            deterministic=settings.dynamics == "ode" or run.algorithm.needs.rollout == "ode",
        )
    except ConfigError as error:
        own = {} if settings.num_steps is None else {"sampler.num_steps": "trainer.eval.num_steps"}
        raise ConfigError(*(replace(p, path=own.get(p.path, p.path)) for p in error.problems)) from error


class Evaluator:
    """The same prompts and the same starting noise every time, so that pictures can be compared one by one.

    Args:
        run: whose `trainer.eval` says what is evaluated.
        draw: draws groups with the weights and the sampler of evaluations, in any order.
        rewards: scores them.
    """

    def __init__(
        self, run: Config, draw: Callable[[Sequence[Group]], Iterator[SampledGroup]], rewards: RewardPool
    ) -> None:
        settings: Evaluation = run.trainer.eval
        self.draw = draw
        self.rewards = rewards
        components = (settings.rewards or run.reward).components
        self.full_scores = {name: c.perfect for name, c in components.items() if c.perfect is not None}
        self.sets = {
            name: fixed_groups(load_prompts(path, run.data.target), settings.samples_per_prompt)
            for name, path in settings.sets.items()
        }

    def run(self) -> Evaluated:
        """Draw and score every set with the present weights."""
        sets = {name: self._scored(groups) for name, groups in self.sets.items()}
        return Evaluated(sets, self.full_scores)

    def _scored(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        return sorted(
            self.rewards.stream(self.draw(groups), counted=False), key=lambda scored: scored.sampled.group.ordinal
        )


def by_component(groups: Sequence[ScoredGroup]) -> dict[str, np.ndarray]:
    """Scores by component, of the groups that have it."""
    names = dict.fromkeys(name for group in groups for name in group.rewards)
    return {name: np.concatenate([g.rewards[name] for g in groups if name in g.rewards]) for name in names}
