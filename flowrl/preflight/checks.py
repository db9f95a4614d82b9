"""Every error of a configuration that can be known before work starts, all of them at once.

Nothing is written, no model is read, no process is started and CUDA is not initialised; torch is the heaviest import.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from signal import Signals
from typing import Any, Protocol, runtime_checkable

import torch
from omegaconf import DictConfig

from flowrl.buffer.base import Buffer
from flowrl.build import assemble
from flowrl.config import Config, ConfigError, Evaluation, LoRA, Particular, Problem, Reward
from flowrl.data.prompts import TARGETS, PromptFileError, load_prompts
from flowrl.distributed.checkpoint.folders import Committed
from flowrl.distributed.launch.base import Launcher
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.lora import ADAPTER_FILES, adapter_files
from flowrl.flow.advantage import Advantages
from flowrl.flow.dynamics.base import Dynamics
from flowrl.flow.schedule import Schedule
from flowrl.flow.solvers import Solver
from flowrl.flow.steps import Steps
from flowrl.rewards.combine import Component
from flowrl.tracking.loggers.base import Logger
from flowrl.types import Algorithm, EngineConfig, PolicyConfig

LONGEST_TIMEOUT = 7 * 24 * 3600.0
LARGEST = 2**31
NUM_PROBED_ROLLOUTS = 1000  # step strategies may draw anew for each rollout


@runtime_checkable
class Trainer(Protocol):
    """A trainer mode (`trainer` in the configuration)."""

    @property
    def total_steps(self) -> int:
        """After which the run is finished."""
        ...

    @property
    def eval(self) -> Evaluation:
        """Held-out evaluation."""
        ...

    @property
    def layout(self) -> str:
        """Who samples: shared | colocated | standalone."""
        ...

    def fit(self, run: Config, start: Committed | None) -> Signals | None:
        """Train to the last step, from a checkpoint if there is one, and leave the report in the run folder.

        Returns None at the end, or the signal that was answered by saving and stopping before it.
        """
        ...


def preflight(cfg: DictConfig) -> Config:
    """The built run, ready to be trained. Raises `ConfigError` with everything that is wrong."""
    run, problems = assemble(cfg)
    faults = tuple(problem.path for problem in problems)
    problems.extend(_new(_types(run), faults))
    if not problems:  # components look at each other: only now is each of them what it should be
        problems.extend(_particulars(run))
    for check in (_ranges, _choices, _place, _sampling, _batches, _optimizer, _lora, _prompts, _rewards, _evaluation):
        problems.extend(_new(check(run), faults))
    if problems:
        raise ConfigError(*problems)
    return run


def _new(found: Iterable[Problem], faults: Sequence[str]) -> Iterator[Problem]:
    """Without those about a value that is not the user's, because it, or part of it, could not be built."""
    for problem in found:
        if not any(
            fault == problem.path or fault.startswith((f"{problem.path}.", f"{problem.path}[")) for fault in faults
        ):
            yield problem


# ---------------------------------------------------------------------------------------------- single values

_AT_MOST = {
    "sampler.num_steps": 10_000,
    "num_steps": 10_000,  # of an evaluation
}
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
    "actor.num_ranks": 1,
    "actor.fsdp.load_wave_size": 1,
    "actor.lora.rank": 1,
    "actor.optimizer.weight_decay": 0,
    "actor.optimizer.warmup_steps": 0,
    "actor.optimizer.decay_steps": 1,
    "actor.optimizer.min_lr": 0,
    "actor.ema.every": 1,
    "rollout.batch_size": 1,
    "rollout.num_workers": 1,
    "rollout.max_restarts": 0,
    "weight_sync.bucket_mb": 1,
    "weight_sync.retries": 0,
    "artifacts.keep": 0,
    "artifacts.every": 0,
    "checkpoint.every": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 0,
    "checkpoint.max_failures": 1,
}
_POSITIVE = (
    "sampler.fps",
    "actor.lora.alpha",
    "actor.optimizer.lr",
    "actor.optimizer.eps",
    "actor.optimizer.max_grad_norm",
    "rollout.num_gpus_per_worker",
    "rollout.timeout_s",
    "rollout.report_stuck_s",
    "actor.timeout_s",
    "weight_sync.timeout_s",
)
_DTYPES = ("float32", "bfloat16")
_ONE_OF = {
    "device": ("auto", "cpu", "cuda"),
    "data.target": TARGETS,
    "actor.mode": ("lora", "full"),
    "actor.optimizer.schedule": ("constant", "linear", "cosine"),
    "actor.master_dtype": _DTYPES,
    "actor.fsdp.param_dtype": (None, *_DTYPES),
    "actor.fsdp.reduce_dtype": _DTYPES,
    "rollout.gather": ("auto", "always", "never"),
    "rollout.on_death": ("stop", "restart"),
    "weight_sync.mode": ("auto", "lora", "merged", "full"),
    "weight_sync.transport": ("auto", "broadcast", "cuda_ipc", "object_store"),
    "weight_sync.wire_dtype": (None, *_DTYPES),
    "weight_sync.staging": ("device", "host"),
    "checkpoint.best": ("max", "min"),
}
_AT_LEAST_IN_REWARD = {"num_workers": 0, "retries": 0}
_AT_LEAST_IN_EVALUATION = {"every": 0, "samples_per_prompt": 1, "num_steps": 1}
_KEEP_THE_BASE = ("gaussian", "orthogonal")  # peft's other starts change the base's weights, or need data to begin from


def _ranges(run: Config) -> Iterator[Problem]:
    yield from _below(run, "", _AT_LEAST)
    for path in _POSITIVE:
        yield from _not_positive(path, attrgetter(path)(run))
    decay = run.actor.ema.decay
    if not 0 <= decay < 1:
        yield Problem("actor.ema.decay", f"must be in [0, 1), got {decay}.")
    if isinstance(run.model, PolicyConfig) and run.model.task == "t2i" and run.sampler.frames > 1:
        message = f"must be 1 for a model that draws pictures (model.task=t2i), got {run.sampler.frames}."
        yield Problem("sampler.frames", message, "Set it to 1, or choose a model of videos.")


def _not_positive(path: str, value: float) -> Iterator[Problem]:
    if not (math.isfinite(value) and value > 0):
        yield Problem(path, f"must be greater than 0, got {value}.")


def _below(owner: Any, prefix: str, bounds: Mapping[str, int]) -> Iterator[Problem]:
    """Numbers under their bound; null passes, since the schema refuses it where it is not allowed."""
    for name, low in bounds.items():
        value = attrgetter(name)(owner)
        if value is not None and not (math.isfinite(value) and value >= low):
            yield Problem(f"{prefix}{name}", f"must be at least {low}, got {value}.")
        elif value is not None and value > _AT_MOST.get(name, LARGEST):
            yield Problem(f"{prefix}{name}", f"must be at most {_AT_MOST.get(name, LARGEST)}, got {value}.")


def _choices(run: Config) -> Iterator[Problem]:
    for path, allowed in _ONE_OF.items():
        value = attrgetter(path)(run)
        if value not in allowed:
            names = ["null" if choice is None else choice for choice in allowed]
            yield Problem(path, f"must be {' or '.join(names)}, got {value!r}.")


def _place(run: Config) -> Iterator[Problem]:
    """Where the run is computed and where it is kept."""
    if isinstance(run.launcher, Ray) and run.launcher.address is not None:  # this machine may be the only one without
        if run.device == "auto":
            message = "cannot be auto with launcher.address: the cluster's machines differ from this one."
            yield Problem("device", message, "Set device=cuda or device=cpu.")
    elif run.device == "cuda" and torch.cuda.device_count() == 0:  # counts through NVML, without initialising CUDA
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
    if not isinstance(steps, Steps) or not 1 <= num_steps <= _AT_MOST["sampler.num_steps"]:
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


# ---------------------------------------------------------------------------------------------- prompts, evaluation


def _prompts(run: Config) -> Iterator[Problem]:
    if run.data.train is not None:
        yield from _prompt_file("data.train", run.data.train, run)


def _rewards(run: Config) -> Iterator[Problem]:
    yield from _reward("reward", run.reward, "Set reward=NAME.")
    if isinstance(run.trainer, Trainer) and run.trainer.eval.rewards is not None:
        hint = "Add +reward@trainer.eval.rewards=NAME, or set it to null for training's own."
        yield from _reward("trainer.eval.rewards", run.trainer.eval.rewards, hint)


def _reward(path: str, reward: Reward, hint: str) -> Iterator[Problem]:
    if not reward.components:
        yield Problem(f"{path}.components", "is empty: there is nothing to score with.", hint)
    yield from _below(reward, f"{path}.", _AT_LEAST_IN_REWARD)
    yield from _not_positive(f"{path}.timeout_s", reward.timeout_s)
    yield from _not_positive(f"{path}.report_stuck_s", reward.report_stuck_s)
    if reward.timeout_s is not None and reward.timeout_s > LONGEST_TIMEOUT:
        yield Problem(f"{path}.timeout_s", f"must be at most {LONGEST_TIMEOUT} (a week), got {reward.timeout_s}.")
    for name in reward.components:
        yield from _plain_name(f"{path}.components", name)
    weights = [part.weight for part in reward.components.values() if isinstance(part, Component)]
    if weights and not any(weights):
        yield Problem(f"{path}.components", "all have the weight 0: there is nothing to learn from.")


def _plain_name(path: str, name: str) -> Iterator[Problem]:
    """Names of sets and components become folders, metric names and table cells."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        yield Problem(path, f"a name must be of letters, digits, '_', '.' and '-', got {name!r}.")


def _evaluation(run: Config) -> Iterator[Problem]:
    if not isinstance(run.trainer, Trainer):
        return
    settings = run.trainer.eval
    yield from _below(settings, "trainer.eval.", _AT_LEAST_IN_EVALUATION)
    if settings.dynamics not in ("ode", "same"):
        yield Problem("trainer.eval.dynamics", f"must be ode or same, got {settings.dynamics!r}.")
    for name, path in settings.sets.items():
        yield from _plain_name("trainer.eval.sets", name)
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
