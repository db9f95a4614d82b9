"""Every error of a configuration that can be known before work starts, all of them at once.

Nothing is written, no model is read, no process is started and CUDA is not initialised; torch is the heaviest import.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from omegaconf import DictConfig

from flowrl.buffer.memory import MemoryBuffer
from flowrl.config import Config, ConfigError, Evaluation, Particular, Problem, assemble
from flowrl.data.prompts import TARGETS, PromptFileError, load_prompts
from flowrl.flow.advantage import Advantages
from flowrl.flow.dynamics.base import Dynamics
from flowrl.flow.schedule import Schedule
from flowrl.flow.solvers import Solver
from flowrl.flow.steps import Steps
from flowrl.rewards.combine import Component
from flowrl.tracking.loggers.base import Logger
from flowrl.types import Algorithm, PolicyConfig

NUM_PROBED_ROLLOUTS = 1000  # step strategies may draw anew for each rollout


@runtime_checkable
class Trainer(Protocol):
    """A trainer mode (`trainer` in the configuration)."""

    @property
    def eval(self) -> Evaluation:
        """Held-out evaluation."""
        ...

    def fit(self, run: Config) -> None:
        """Train from the first step to the last and leave the report in the run folder."""
        ...


def preflight(cfg: DictConfig) -> Config:
    """The built run, ready to be trained. Raises `ConfigError` with everything that is wrong."""
    run, problems = assemble(cfg)
    problems.extend(_types(run))
    if not problems:  # components look at each other: only now is each of them what it should be
        problems.extend(_particulars(run))
    for check in (_ranges, _choices, _place, _sampling, _batches, _optimizer, _lora, _prompts, _evaluation):
        problems.extend(check(run))
    if problems:
        raise ConfigError(*problems)
    return run


# ---------------------------------------------------------------------------------------------- single values

_AT_LEAST = {
    "sampler.num_steps": 1,
    "sampler.height": 1,
    "sampler.width": 1,
    "sampler.frames": 1,
    "sampler.guidance_scale": 0,
    "data.train_batch_size": 1,
    "data.num_samples_per_prompt": 1,
    "actor.micro_batch_size": 1,
    "actor.max_skipped_updates": 1,
    "actor.lora.rank": 1,
    "actor.optimizer.weight_decay": 0,
    "actor.optimizer.warmup_steps": 0,
    "actor.optimizer.decay_steps": 1,
    "actor.optimizer.min_lr": 0,
    "actor.ema.every": 1,
    "rollout.batch_size": 1,
    "reward.num_workers": 0,
    "reward.retries": 0,
    "artifacts.keep": 0,
    "artifacts.every": 0,
    "launcher.num_threads": 0,
}
_POSITIVE = (
    "actor.lora.alpha",
    "actor.optimizer.lr",
    "actor.optimizer.eps",
    "actor.optimizer.max_grad_norm",
    "reward.timeout_s",
)
_ONE_OF = {
    "device": ("auto", "cpu", "cuda"),
    "data.target": TARGETS,
    "actor.mode": ("lora", "full"),
    "actor.optimizer.schedule": ("constant", "linear", "cosine"),
    "rollout.engine": ("native",),
    "launcher.kind": ("inline",),
}
_AT_LEAST_IN_EVALUATION = {"every": 0, "samples_per_prompt": 1, "num_steps": 1}


def _ranges(run: Config) -> Iterator[Problem]:
    yield from _below(run, "", _AT_LEAST)
    for path in _POSITIVE:
        value = attrgetter(path)(run)
        if not (math.isfinite(value) and value > 0):
            yield Problem(path, f"must be greater than 0, got {value}.")
    decay = run.actor.ema.decay
    if not 0 <= decay < 1:
        yield Problem("actor.ema.decay", f"must be in [0, 1), got {decay}.")


def _below(owner: Any, prefix: str, bounds: dict[str, int]) -> Iterator[Problem]:
    """Numbers under their bound; null passes, where the schema allows it or where it stands for an earlier problem."""
    for name, low in bounds.items():
        value = attrgetter(name)(owner)
        if value is not None and not (math.isfinite(value) and value >= low):
            yield Problem(f"{prefix}{name}", f"must be at least {low}, got {value}.")


def _choices(run: Config) -> Iterator[Problem]:
    for path, allowed in _ONE_OF.items():
        value = attrgetter(path)(run)
        if value not in allowed:
            yield Problem(path, f"must be {' or '.join(allowed)}, got {value!r}.")


def _place(run: Config) -> Iterator[Problem]:
    """Where the run is computed and where it is kept."""
    if run.device == "cuda" and torch.cuda.device_count() == 0:  # counts through NVML, without initialising CUDA
        yield Problem("device", "is cuda, but torch sees no CUDA device.", "Set device=cpu, or install torch for CUDA.")
    parts = Path(run.name).parts
    if not parts or Path(run.name).is_absolute() or ".." in parts:
        yield Problem("name", f"must name a folder below `runs`, got {run.name!r}.")
        return
    above = next(folder for folder in run.run_dir.absolute().parents if folder.exists())
    if not above.is_dir():
        yield Problem("runs", f"{above} is a file, so the run folder {run.run_dir} cannot be made.", "Set runs=FOLDER.")


# ---------------------------------------------------------------------------------------------- components


def _particulars(run: Config) -> Iterator[Problem]:
    """What the components themselves object to."""
    rewards = {**run.reward.components, **(run.trainer.eval.rewards or {})}
    for part in (run.model, run.algorithm, run.trainer, run.buffer, *rewards.values(), *run.logger.components.values()):
        if isinstance(part, Particular):
            yield from part.problems(run)


def _types(run: Config) -> Iterator[Problem]:
    """Each part must be what its place asks for. None stands for a problem already known."""
    yield from _expected("model", run.model, PolicyConfig, "a model: a dataclass with load(device)")
    yield from _expected("sampler.dynamics", run.sampler.dynamics, Dynamics, "a Dynamics of flowrl.flow.dynamics")
    yield from _expected("sampler.steps", run.sampler.steps, Steps, "a Steps of flowrl.flow.steps")
    yield from _expected("sampler.solver", run.sampler.solver, Solver, "a Solver of flowrl.flow.solvers")
    yield from _expected("sampler.schedule", run.sampler.schedule, Schedule, "a Schedule of flowrl.flow.schedule")
    yield from _expected("algorithm", run.algorithm, Algorithm, "an Algorithm (flowrl.types)")
    yield from _expected("trainer", run.trainer, Trainer, "a trainer: a dataclass with eval and fit(run)")
    yield from _expected("buffer", run.buffer, MemoryBuffer, "a buffer of flowrl.buffer")
    yield from _rewards("reward.components", run.reward.components)
    for name, component in (run.logger.components or {}).items():
        yield from _expected(f"logger.components.{name}", component, Logger, "a logger: a dataclass with start(run)")
    if run.reward.components == {}:
        yield Problem("reward.components", "is empty: there is nothing to learn from.", "Set reward=NAME.")


def _rewards(path: str, components: dict[str, Any] | None) -> Iterator[Problem]:
    for name, component in (components or {}).items():
        yield from _expected(f"{path}.{name}", component, Component, "a Component of flowrl.rewards.combine")


def _expected(path: str, part: Any, kind: type, words: str) -> Iterator[Problem]:
    if part is not None and not isinstance(part, kind):
        yield Problem(path, f"must be {words}, got {part!r}.", f"Set {path}._target_ to the dotpath of one.")


def _sampling(run: Config) -> Iterator[Problem]:
    """The trained steps exist, and the dynamics can train them."""
    sampler, num_steps = run.sampler, run.sampler.num_steps
    if not isinstance(sampler.steps, Steps) or not isinstance(run.algorithm, Algorithm) or num_steps < 1:
        return
    if run.algorithm.needs.rollout == "ode":
        return
    messages = sampler.steps.problems(num_steps)
    yield from (Problem("sampler.steps", f"{message}.", "See sampler.num_steps.") for message in messages)
    if messages or not isinstance(sampler.dynamics, Dynamics):
        return
    drawn = {step for rollout in range(NUM_PROBED_ROLLOUTS) for step in sampler.steps.choose(rollout, num_steps)}
    for message in sampler.dynamics.problems(sorted(drawn), num_steps):
        yield Problem("sampler.dynamics", f"{message}.", "Change sampler.dynamics or sampler.steps.")


# ---------------------------------------------------------------------------------------------- batches, actor


def _batches(run: Config) -> Iterator[Problem]:
    """Whole groups in equal updates, and groups that can be compared within themselves."""
    if not isinstance(run.algorithm, Algorithm):
        return
    batch, updates = run.data.train_batch_size, run.algorithm.num_updates_per_batch
    if batch is not None and batch > 0 and batch % updates:
        below = batch - batch % updates
        sizes = [size for size in (below, below + updates) if size > 0]
        divisors = _nearest([n for n in range(1, batch + 1) if batch % n == 0], updates)
        yield Problem(
            "data.train_batch_size",
            f"must be a multiple of algorithm.num_updates_per_batch: {batch} / {updates} = {batch / updates:.4g} "
            "prompts in each update.",
            f"Set data.train_batch_size={_either(sizes)}, or algorithm.num_updates_per_batch={_either(divisors)}.",
        )
    per_prompt = run.data.num_samples_per_prompt
    if per_prompt == 1 and isinstance(run.algorithm.advantages, Advantages):
        message = "must be at least 2: advantages compare the samples of one prompt, and got 1."
        yield Problem("data.num_samples_per_prompt", message)


def _nearest(numbers: list[int], to: int) -> list[int]:
    """The numbers next to `to` on both sides."""
    return [n for n in numbers if n <= to][-1:] + [n for n in numbers if n > to][:1]


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))


def _optimizer(run: Config) -> Iterator[Problem]:
    settings = run.actor.optimizer
    if len(settings.betas) != 2 or not all(0 <= beta < 1 for beta in settings.betas):
        yield Problem("actor.optimizer.betas", f"must be two numbers in [0, 1), got {settings.betas}.")
    if settings.min_lr > settings.lr > 0:
        message = f"must not exceed actor.optimizer.lr = {settings.lr}, got {settings.min_lr}."
        yield Problem("actor.optimizer.min_lr", message)
    if settings.decay_steps is not None and settings.decay_steps <= settings.warmup_steps:
        message = f"must exceed actor.optimizer.warmup_steps = {settings.warmup_steps}, got {settings.decay_steps}."
        yield Problem("actor.optimizer.decay_steps", message)


def _lora(run: Config) -> Iterator[Problem]:
    if run.actor.mode != "lora":
        return
    if run.actor.lora.targets == []:
        yield Problem(
            "actor.lora.targets", "is empty: nothing would be trained.", "Set it to null for the model's own."
        )
    warm_start = run.actor.lora.warm_start
    if warm_start is not None and not (Path(warm_start) / "adapter_config.json").is_file():
        message = f"{warm_start!r} is no PEFT folder: it has no adapter_config.json."
        yield Problem("actor.lora.warm_start", message)


# ---------------------------------------------------------------------------------------------- prompts


def _prompts(run: Config) -> Iterator[Problem]:
    if run.data.train is not None:
        yield from _prompt_file("data.train", run.data.train, run.data.target)


def _evaluation(run: Config) -> Iterator[Problem]:
    if not isinstance(run.trainer, Trainer):
        return
    settings = run.trainer.eval
    yield from _below(settings, "trainer.eval.", _AT_LEAST_IN_EVALUATION)
    if settings.dynamics not in ("ode", "same"):
        yield Problem("trainer.eval.dynamics", f"must be ode or same, got {settings.dynamics!r}.")
    if settings.use_ema and not run.actor.ema.enabled:
        yield Problem("trainer.eval.use_ema", "needs the moving average.", "Set actor.ema.enabled=true.")
    yield from _rewards("trainer.eval.rewards", settings.rewards)
    for name, path in settings.sets.items():
        yield from _prompt_file(f"trainer.eval.sets.{name}", path, run.data.target)


def _prompt_file(path: str, file: str, target: str) -> Iterator[Problem]:
    if target not in TARGETS:
        return
    try:
        load_prompts(file, target)
    except PromptFileError as error:
        yield Problem(path, str(error))
