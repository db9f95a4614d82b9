"""The same held-out prompts and noise with the base and with the trained weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from flowrl.cli.statistics import Comparison, compare
from flowrl.cli.trained import Trained, check_base, install, settle
from flowrl.config import Config, ConfigError, Problem
from flowrl.data.prompts import PromptFileError
from flowrl.device import choose_device, torch_settings
from flowrl.distributed.launch.base import Place
from flowrl.distributed.launch.failures import PlacementError
from flowrl.rewards.pool import RewardPool
from flowrl.trainers.evaluator import Evaluated, Evaluator, evaluation_engine
from flowrl.trainers.placement import on_gpu, on_host, reward_places
from flowrl.types import ScoredGroup

Compared = Mapping[str, Mapping[str, Comparison]]
"""By set, by measure: a component's name, or with `_perfect` the share of full scores."""


def scored(run: Config, trained: Trained) -> tuple[Evaluated, Evaluated]:
    """The run's evaluation with the model as it is loaded, and with the trained weights.

    Raises LoadError, RewardError, and ConfigError for a set whose file cannot be read, or too few GPUs for the rewards.
    """
    reward = run.trainer.eval.rewards or run.reward
    here = [Place("evaluation", num_gpus=1.0 if on_gpu(run) else 0.0)]
    try:
        workers = on_host(reward_places(reward, "reward", here), here)
    except PlacementError as error:
        raise ConfigError(Problem("run", f"its rewards do not fit on this machine: {error}.")) from error
    with torch_settings(run), RewardPool.from_config(reward, workers) as rewards:
        rewards.start()  # its models load while the policy does
        policy = run.model.load(choose_device(run))
        check_base(policy, trained)
        settle(policy)
        rewards.warm()
        engine = evaluation_engine(run, policy)
        try:
            evaluator = Evaluator(run, partial(engine.generate, rollout_id=0), rewards)
        except PromptFileError as error:
            raise ConfigError(Problem("run", f"a held-out set cannot be read: {error}")) from error
        before = evaluator.run()
        install(policy, run.actor, trained)
        return before, evaluator.run()


def compared(before: Evaluated, after: Evaluated) -> Compared:
    """Every component of every set. Raises ConfigError for a set of a single prompt, which tells nothing for sure."""
    found: dict[str, dict[str, Comparison]] = {}
    for name in before.sets:
        first, second = _measures(before, name), _measures(after, name)
        found[name] = {}
        for measure in first.keys() & second.keys():
            both = sorted(first[measure].keys() & second[measure].keys())  # an optional component may have failed
            if len(both) < 2:
                message = f"{name} has {len(both)} scored prompts: an interval needs at least 2."
                raise ConfigError(Problem("sets", message))
            base, trained = (np.array([part[measure][ordinal] for ordinal in both]) for part in (first, second))
            found[name][measure] = compare(base, trained)
        found[name] = dict(sorted(found[name].items()))
    return found


def _measures(evaluated: Evaluated, name: str) -> dict[str, dict[int, float]]:
    """By measure, by the prompt's ordinal: the mean over the prompt's samples."""
    found: dict[str, dict[int, float]] = {}
    for group in evaluated.sets[name]:
        for measure, values in _values(group, evaluated.full_scores).items():
            found.setdefault(measure, {})[group.sampled.group.ordinal] = float(values.mean())
    return found


def _values(group: ScoredGroup, full_scores: Mapping[str, float]) -> dict[str, np.ndarray]:
    perfect = {
        f"{name}_perfect": scores >= full_scores[name] for name, scores in group.rewards.items() if name in full_scores
    }
    return {**group.rewards, **perfect}
