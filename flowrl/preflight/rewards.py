"""Prompts, what their pictures are scored with, and held-out evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flowrl.config import Config, Problem, Reward
from flowrl.data.prompts import TARGETS, PromptFileError, load_prompts
from flowrl.preflight.trainer import Trainer
from flowrl.preflight.values import below, not_positive, plain_name
from flowrl.rewards.combine import Component
from flowrl.types import PolicyConfig

LONGEST_TIMEOUT = 7 * 24 * 3600.0
RUNTIMES = ("cpu", "colocated", "remote")
_AT_LEAST_IN_REWARD = {"num_workers": 0, "retries": 0}
_AT_LEAST_IN_EVALUATION = {"every": 0, "samples_per_prompt": 1, "num_steps": 1}


def prompts(run: Config) -> Iterator[Problem]:
    """What is trained on."""
    if run.data.train is not None:
        yield from _prompt_file("data.train", run.data.train, run)


def rewards(run: Config) -> Iterator[Problem]:
    """What is scored, by whom, and what it is worth."""
    yield from _reward("reward", run.reward, "Set reward=NAME.")
    yield from _weights(run.reward)
    yield from _outputs(run)
    if isinstance(run.trainer, Trainer) and run.trainer.eval.rewards is not None:
        hint = "Add +reward@trainer.eval.rewards=NAME, or set it to null for training's own."
        yield from _reward("trainer.eval.rewards", run.trainer.eval.rewards, hint)


def _reward(path: str, reward: Reward, hint: str) -> Iterator[Problem]:
    if not reward.components:
        yield Problem(f"{path}.components", "is empty: there is nothing to score with.", hint)
    yield from below(reward, f"{path}.", _AT_LEAST_IN_REWARD)
    yield from not_positive(f"{path}.report_stuck_s", reward.report_stuck_s)
    for name, seconds in (("timeout_s", reward.timeout_s), ("load_timeout_s", reward.load_timeout_s)):
        yield from not_positive(f"{path}.{name}", seconds)
        if seconds > LONGEST_TIMEOUT:
            yield Problem(f"{path}.{name}", f"must be at most {LONGEST_TIMEOUT} (a week), got {seconds}.")
    for name in reward.components:
        yield from plain_name(f"{path}.components", name)
    if reward.runtime not in RUNTIMES:
        yield Problem(f"{path}.runtime", f"must be {' or '.join(RUNTIMES)}, got {reward.runtime!r}.")


def _weights(reward: Reward) -> Iterator[Problem]:
    """Evaluation has none: it reports each component by itself."""
    weights = {name: part.weight for name, part in reward.components.items() if isinstance(part, Component)}
    if len(weights) > 1:
        for name in (name for name, weight in weights.items() if weight is None):
            message = f"must be set: with several components ({', '.join(weights)}) each of them needs its weight."
            path = f"reward.components.{name}.weight"
            yield Problem(path, message, f"Set {path}=1.0, or 0 only to log it.")
    if weights and all(weight == 0 for weight in weights.values()):
        yield Problem("reward.components", "all have the weight 0: there is nothing to learn from.")


def _outputs(run: Config) -> Iterator[Problem]:
    """Every component is given what it looks at. Evaluations have pictures and latents."""
    output = run.rollout.output
    for name, part in run.reward.components.items():
        if not isinstance(part, Component):
            continue
        if part.sees_latents and output == "image":
            message = f"is image, but the reward component {name!r} scores latents."
            yield Problem("rollout.output", message, "Set rollout.output=latent (nothing is decoded) or both.")
        elif not part.sees_latents and output == "latent":
            message = f"is latent, but the reward component {name!r} scores pictures, which are then not decoded."
            yield Problem("rollout.output", message, "Set rollout.output=both, or image if no component needs latents.")


def evaluation(run: Config) -> Iterator[Problem]:
    """Held-out sets, and how they are drawn."""
    if not isinstance(run.trainer, Trainer):
        return
    settings = run.trainer.eval
    yield from below(settings, "trainer.eval.", _AT_LEAST_IN_EVALUATION)
    if settings.dynamics not in ("ode", "same"):
        yield Problem("trainer.eval.dynamics", f"must be ode or same, got {settings.dynamics!r}.")
    yield from held_out(run)


def held_out(run: Config) -> Iterator[Problem]:
    """The prompts of evaluations."""
    for name, path in run.trainer.eval.sets.items():
        yield from plain_name("trainer.eval.sets", name)
        yield from _prompt_file(f"trainer.eval.sets.{name}", path, run)


def _prompt_file(path: str, file: str, run: Config) -> Iterator[Problem]:
    if run.data.target not in TARGETS:
        return
    try:
        prompts = load_prompts(file, run.data.target)
    except PromptFileError as error:
        yield Problem(path, str(error))
        return
    if isinstance(run.model, PolicyConfig):
        others = Counter(prompt.metadata.get("task", run.model.task) for prompt in prompts)
        del others[run.model.task]
        if others:
            message = f"{file}: {others.total()} of {len(prompts)} prompts are for {', '.join(map(str, others))}"
            yield Problem(path, f"{message}, but model.task is {run.model.task}.")
