"""The whole of it, and what parts of a run have to do with each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from flowrl.buffer.base import Buffer
from flowrl.build import assemble
from flowrl.config import Config, ConfigError, Evaluation, LoRA, Particular, Problem, Reward
from flowrl.distributed.launch.base import Launcher
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.lora import ADAPTER_FILES, adapter_files
from flowrl.flow.advantage import Advantages
from flowrl.flow.dynamics.base import Dynamics
from flowrl.flow.schedule import Schedule
from flowrl.flow.solvers import Solver
from flowrl.flow.steps import Steps
from flowrl.hub import no_hub_id
from flowrl.models.loading import is_folder
from flowrl.models.pipeline import PipelineModel
from flowrl.preflight.rewards import evaluation, held_out, prompts, rewards
from flowrl.preflight.trainer import Trainer
from flowrl.preflight.values import AT_MOST, choices, ranges
from flowrl.rewards.combine import Component
from flowrl.tracking.loggers.base import Logger
from flowrl.types import Algorithm, EngineConfig, PolicyConfig

NUM_PROBED_ROLLOUTS = 1000  # step strategies may draw anew for each rollout
_KEEP_THE_BASE = ("gaussian", "orthogonal")  # peft's other starts change the base's weights, or need data to begin from


def preflight(cfg: DictConfig) -> Config:
    """The built run, ready to be trained. Raises `ConfigError` with everything that is wrong."""
    run, problems = assemble(cfg)
    faults = tuple(problem.path for problem in problems)
    problems.extend(_new(_types(run), faults))
    if not problems:  # components look at each other: only now is each of them what it should be
        problems.extend(_particulars(run))
        problems.extend(_model_folder(run))
    for check in (ranges, choices, _place, _sampling, _batches, _optimizer, _lora, prompts, rewards, evaluation):
        problems.extend(_new(check(run), faults))
    if problems:
        raise ConfigError(*problems)
    return run


def encoding(run: Config) -> list[Problem]:
    """What keeps the prompts of a built run from being encoded ahead of it."""
    of_model = run.model.problems(run) if isinstance(run.model, Particular) else []
    plain = [problem for problem in choices(run) if problem.path in ("device", "data.target")]
    return [*of_model, *plain, *_device(run), *prompts(run), *held_out(run)]


def _new(found: Iterable[Problem], faults: Sequence[str]) -> Iterator[Problem]:
    """Without those about a value that is not the user's, because it, or part of it, could not be built."""
    for problem in found:
        if not any(
            fault == problem.path or fault.startswith((f"{problem.path}.", f"{problem.path}[")) for fault in faults
        ):
            yield problem


def _device(run: Config) -> Iterator[Problem]:
    """Where the run is computed."""
    if isinstance(run.launcher, Ray) and run.launcher.address is not None:  # this machine may be the only one without
        if run.device == "auto":
            message = "cannot be auto with launcher.address: the cluster's machines differ from this one."
            yield Problem("device", message, "Set device=cuda or device=cpu.")
    elif run.device == "cuda" and torch.cuda.device_count() == 0:  # counts through NVML, without initialising CUDA
        yield Problem("device", "is cuda, but torch sees no CUDA device.", "Set device=cpu, or install torch for CUDA.")


def _model_folder(run: Config) -> Iterator[Problem]:
    """A folder that is not there; whether the Hub has an id, only the Hub can tell."""
    if not isinstance(run.model, PipelineModel) or run.model.init != "pretrained" or not run.model.path:
        return
    if isinstance(run.launcher, Ray) and run.launcher.address is not None:  # the cluster's machines have it, perhaps
        return
    reason = None if is_folder(run.model.path) else no_hub_id(run.model.path)
    if reason is not None:
        yield Problem("model.path", f"there is no folder {run.model.path}, and {reason}.")


def _place(run: Config) -> Iterator[Problem]:
    """Where the run is computed and where it is kept."""
    yield from _device(run)
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
    judges = run.trainer.eval.rewards
    parts = [run.model, run.algorithm, run.trainer, run.buffer, run.launcher, run.rollout.engine]
    parts += [run.sampler.dynamics, run.sampler.steps, run.sampler.solver, run.sampler.schedule]
    parts += [*run.reward.components.values(), *(judges.components.values() if judges else ())]
    for part in [*parts, *run.logger.components.values()]:
        if isinstance(part, Particular):
            yield from part.problems(run)


def _types(run: Config) -> Iterator[Problem]:
    """Each part must be what its place asks for."""
    yield from _expected("model", run.model, PolicyConfig, "a model: a dataclass with task and load(device)")
    yield from _expected("sampler.dynamics", run.sampler.dynamics, Dynamics, "a Dynamics of flowrl.flow.dynamics")
    yield from _expected("sampler.steps", run.sampler.steps, Steps, "a Steps of flowrl.flow.steps")
    yield from _expected("sampler.solver", run.sampler.solver, Solver, "a Solver of flowrl.flow.solvers")
    if run.sampler.schedule is not None:  # the model's own
        yield from _expected("sampler.schedule", run.sampler.schedule, Schedule, "a Schedule of flowrl.flow.schedule")
    yield from _expected("algorithm", run.algorithm, Algorithm, "an Algorithm (flowrl.types)")
    yield from _expected(
        "trainer", run.trainer, Trainer, "a trainer: a dataclass with total_steps, eval, layout and fit(run, start)"
    )
    yield from _expected("buffer", run.buffer, Buffer, "a Buffer of flowrl.buffer.base")
    yield from _expected("launcher", run.launcher, Launcher, "a Launcher of flowrl.distributed.launch")
    yield from _expected(
        "rollout.engine", run.rollout.engine, EngineConfig, "an engine: a dataclass with open(run, policy)"
    )
    for name, component in run.logger.components.items():
        yield from _expected(f"logger.components.{name}", component, Logger, "a logger: a dataclass with start(run)")
    yield from _components("reward", run.reward)
    if isinstance(run.trainer, Trainer) and run.trainer.eval.rewards is not None:
        yield from _components("trainer.eval.rewards", run.trainer.eval.rewards)


def _components(path: str, reward: Reward) -> Iterator[Problem]:
    for name, component in reward.components.items():
        yield from _expected(f"{path}.components.{name}", component, Component, "a Component of flowrl.rewards.combine")


def _expected(path: str, part: Any, kind: type, words: str) -> Iterator[Problem]:
    if not isinstance(part, kind):
        yield Problem(path, f"must be {words}, got {part!r}.", f"Set {path}._target_ to the dotpath of one.")


def _sampling(run: Config) -> Iterator[Problem]:
    """The stochastic steps exist, and the dynamics has a density there; also in evaluation that samples alike."""
    if not isinstance(run.algorithm, Algorithm):
        return
    if run.algorithm.needs.rollout == "ode":
        if run.sampler.same_latent:
            message = "with deterministic rollouts makes all samples of a prompt one and the same picture."
            yield Problem("sampler.same_latent", message, "Set it to false.")
        return
    found = list(_stochastic(run, run.sampler.num_steps, NUM_PROBED_ROLLOUTS))
    yield from found
    settings = run.trainer.eval if isinstance(run.trainer, Trainer) else Evaluation()
    if not found and settings.dynamics == "same" and settings.num_steps is not None:
        for problem in _stochastic(run, settings.num_steps, 1):
            hint = "Change trainer.eval.num_steps, or set trainer.eval.dynamics=ode."
            yield Problem("trainer.eval.num_steps", f"cannot be sampled like training: {problem.message}", hint)


def _stochastic(run: Config, num_steps: int, num_rollouts: int) -> Iterator[Problem]:
    """What keeps the first rollouts of `num_steps` steps from being drawn."""
    steps, dynamics = run.sampler.steps, run.sampler.dynamics
    if not isinstance(steps, Steps) or not 1 <= num_steps <= AT_MOST["sampler.num_steps"]:
        return
    reasons = steps.invalid(num_steps)
    yield from (Problem("sampler.steps", f"{reason}.", "See sampler.num_steps.") for reason in reasons)
    if reasons or not isinstance(dynamics, Dynamics):
        return
    drawn = {step for rollout in range(num_rollouts) for step in steps.choose(rollout, num_steps)}
    for reason in dynamics.untrainable(sorted(drawn), num_steps):
        yield Problem("sampler.dynamics", f"{reason}.", "Change sampler.dynamics or sampler.steps.")


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
        if run.actor.lora.warm_start is not None:
            message = "is an adapter, which full training would pass over in silence."
            yield Problem("actor.lora.warm_start", message, "Set actor=lora, or warm_start to null.")
        return
    if run.actor.lora.targets == []:
        yield Problem(
            "actor.lora.targets", "is empty: nothing would be trained.", "Set it to null for the model's own."
        )
    yield from _lora_start(run.actor.lora)


def _lora_start(lora: LoRA) -> Iterator[Problem]:
    """Training begins at the base itself, or at an adapter that is there."""
    if lora.init not in _KEEP_THE_BASE:
        message = f"must be {' or '.join(_KEEP_THE_BASE)}, which begin at the base model itself, got {lora.init!r}."
        yield Problem("actor.lora.init", message)
    elif lora.init == "orthogonal" and lora.rank % 2:
        yield Problem("actor.lora.rank", f"must be even with actor.lora.init=orthogonal, got {lora.rank}.")
    if lora.warm_start is not None and not adapter_files(Path(lora.warm_start)):
        message = f"{lora.warm_start!r} holds no adapter: there is neither {' nor '.join(ADAPTER_FILES)}."
        yield Problem("actor.lora.warm_start", message)
