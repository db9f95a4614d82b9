"""The schema of a run, and the one function that turns configuration nodes into objects.

Fixed sections are the dataclasses below. Swappable parts (a model, a dynamics, a reward) are nodes with a `_target_`
dotpath, typed `Any` here: `build` makes them. This module is a leaf: it knows no other part of flowrl, nor Hydra.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING as REQUIRED
from dataclasses import Field, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints, runtime_checkable

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

T = TypeVar("T")
FAILED = object()  # stands for a part that could not be built


@dataclass(frozen=True)
class Problem:
    """One configuration error: where it is, what is wrong, what to set instead."""

    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f" {self.hint}" if self.hint else "")


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, all at once. The command line prints it and exits with 2."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


# ---------------------------------------------------------------------------------------------- sections


@dataclass
class Sampler:
    """How pictures are drawn. Rollout and replay read this one object."""

    num_steps: int = 10
    height: int = 512
    width: int = 512
    frames: int = 1
    guidance_scale: float = 1.0  # v_u + g (v_c - v_u); 1 = off
    dynamics: Any = MISSING  # flow.dynamics: the stochastic step
    steps: Any = MISSING  # flow.steps: which steps are stochastic and trained
    solver: Any = MISSING  # flow.solvers: the deterministic solver (evaluation; rollouts of forward-process algorithms)
    schedule: Any = None  # flow.schedule; null = the model's own
    same_latent: bool = False  # all samples of a group start from one x_T


@dataclass
class Data:
    """Prompts, and how many of them make a batch. Sizes count prompts (whole groups)."""

    train: str = MISSING  # path of a text or JSONL file
    target: str = "none"  # what a reward looks for: none | quoted | field
    train_batch_size: int = MISSING
    num_samples_per_prompt: int = MISSING  # K
    seed: int = 0  # orders the prompts


@dataclass
class Reward:
    """Components by name, and the CPU processes that score with them. How they are combined: `algorithm.advantages`."""

    components: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 2  # CPU processes; 0 = score in the trainer's process
    timeout_s: float = 120.0
    retries: int = 2

    @property
    def weights(self) -> dict[str, float]:
        """Of every component, once they are built."""
        return {name: component.weight for name, component in self.components.items()}


@dataclass
class Evaluation:
    """Held-out prompts with fixed seeds. Its rewards may differ from training's, to catch reward hacking."""

    sets: dict[str, str] = field(default_factory=dict)  # name -> path
    every: int = 10  # steps; 0 = only before and after
    samples_per_prompt: int = 1
    num_steps: int | None = None  # denoising steps; null = the sampler's
    dynamics: str = "ode"  # ode | same (the training sampler with fixed steps)
    rewards: Reward | None = None  # a section like `reward`; null = training's own
    use_ema: bool = False  # evaluate the moving average of the weights, `actor.ema`
    seed: int = 1234


@dataclass
class LoRA:
    """Low-rank adapters (peft)."""

    rank: int = 32
    alpha: float = 64.0
    targets: list[str] | None = None  # name suffixes; null = the model's own
    init: str = "gaussian"  # peft's init_lora_weights: gaussian | orthogonal
    warm_start: str | None = None  # a PEFT folder to begin from


@dataclass
class Optimizer:
    """AdamW."""

    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    schedule: str = "constant"  # constant | linear | cosine
    warmup_steps: int = 0  # all three counted in optimiser steps
    decay_steps: int | None = None  # null = the whole run
    min_lr: float = 0.0


@dataclass
class EMA:
    """Exponential moving average of the trainable weights, kept if `trainer.eval.use_ema`."""

    decay: float = 0.9
    every: int = 1  # optimiser steps


@dataclass
class FSDP:
    """How the trained model is spread over several ranks; a single rank holds it whole."""

    reshard_after_forward: bool = True  # false keeps blocks gathered until the backward pass: faster, more memory
    param_dtype: str | None = None  # full training: what weights are gathered and computed in; null = the model's dtype
    reduce_dtype: str = "float32"  # gradients are summed over ranks in it: float32 | bfloat16
    cpu_offload: bool = False  # parameters, gradients and optimiser state on the host; full training only
    load_wave_size: int = 1  # ranks of one host, or rollout workers of all, that read the model at the same time


@dataclass
class Actor:
    """The trainable model and its optimiser, on `num_ranks` processes."""

    mode: str = "lora"  # lora | full
    num_ranks: int = 1  # processes, one GPU each where there are any
    timeout_s: float = 1800.0  # for what the ranks do together: when one is lost, the others give up by then
    micro_batch_size: int = 8  # training rows of one rank in one forward
    gradient_checkpointing: bool = False
    master_dtype: str = "float32"  # of the weights that full training updates; LoRA's are always float32
    max_skipped_updates: int = 5  # non-finite updates in a row before the run stops
    lora: LoRA = field(default_factory=LoRA)
    optimizer: Optimizer = field(default_factory=Optimizer)
    ema: EMA = field(default_factory=EMA)
    fsdp: FSDP = field(default_factory=FSDP)


@dataclass
class Rollout:
    """Generation."""

    engine: Any = MISSING  # rollout.native.Native, or any EngineConfig of flowrl.types
    batch_size: int = 64  # samples in one forward
    gather: str = "auto"  # layout shared, several ranks: hold all blocks gathered while sampling: auto | always | never
    num_workers: int = 1  # layout standalone: processes that only sample
    num_gpus_per_worker: float = 1.0  # where there are GPUs
    timeout_s: float = 1800.0  # for a worker to draw the next group; then it counts as dead
    on_death: str = "stop"  # of a rollout worker (standalone): stop | restart
    max_restarts: int = 3  # of the whole run, with on_death=restart


@dataclass
class WeightSync:
    """Publication of weights to rollout workers (layouts colocated and standalone)."""

    mode: str = "auto"  # auto (lora as lora, full as full) | lora | merged | full
    transport: str = "auto"  # auto | broadcast (gloo, NCCL) | cuda_ipc (one GPU) | object_store (the launcher's)
    wire_dtype: str | None = None  # float32 | bfloat16; null = what the model computes in
    bucket_mb: int = 512
    staging: str = "device"  # where a version waits until every worker has verified it: device | host
    timeout_s: float = 600.0
    retries: int = 1  # further attempts after a failure, before the run stops


@dataclass
class Logger:
    """Loggers by name; JSONL is always on."""

    components: dict[str, Any] = field(default_factory=dict)


@dataclass
class Artifacts:
    """Pictures and trajectories kept in the run folder."""

    keep: int = 2  # newest rollouts kept
    every: int = 10  # steps between saved rollouts; 0 = none
    trajectories: bool = False  # also save safetensors trajectories


@dataclass
class Config:
    """The root. After `build_run`, component fields hold the objects themselves."""

    name: str = "run"
    recipe: str | None = None
    runs: str = "runs"  # parent of run folders
    seed: int = 0
    deterministic: bool = False  # torch refuses operations that are not reproducible
    device: str = "auto"  # auto | cpu | cuda
    model: Any = MISSING
    sampler: Sampler = field(default_factory=Sampler)
    algorithm: Any = MISSING
    reward: Reward = field(default_factory=Reward)
    data: Data = field(default_factory=Data)
    trainer: Any = MISSING
    actor: Actor = field(default_factory=Actor)
    rollout: Rollout = field(default_factory=Rollout)
    weight_sync: WeightSync = field(default_factory=WeightSync)
    buffer: Any = MISSING
    launcher: Any = MISSING  # distributed.launch: inline | spawn | ray
    logger: Logger = field(default_factory=Logger)
    artifacts: Artifacts = field(default_factory=Artifacts)

    @property
    def run_dir(self) -> Path:
        """No timestamp: the same command means the same run, which is made once."""
        return Path(self.runs) / self.name


@runtime_checkable
class Particular(Protocol):
    """A component that knows what it cannot be combined with."""

    def problems(self, run: Config) -> list[Problem]:
        """What `run` asks of it and it cannot do, with paths from the root; quick, without side effects."""
        ...


# ---------------------------------------------------------------------------------------------- build


def build_run(cfg: DictConfig) -> Config:
    """The typed `Config` of a composed configuration, components built. All faults come as one `ConfigError`."""
    run, problems = assemble(cfg)
    if problems:
        raise ConfigError(*problems)
    return run


def assemble(cfg: DictConfig) -> tuple[Config, list[Problem]]:
    """`build_run` for those who have more to check: a `Config`, and the faults.

    For what is at fault the `Config` has the schema's default, or None if there is none.
    """
    problems: list[Problem] = []
    return _build_fields(Config, _plain(cfg, ""), "", problems), problems


def _build_fields(schema: type[T], tree: Any, path: str, problems: list[Problem]) -> T:
    """A section dataclass from its plain tree: nested sections recurse, everything else is a leaf or a component."""
    arguments: dict[str, Any] = {}
    hints = get_type_hints(schema)
    known = {f.name: f for f in fields(schema)}  # type: ignore[arg-type]
    for key in tree.keys() - known.keys():  # `+key=value` gets them past Hydra
        problems.append(Problem(f"{path}.{key}" if path else key, *_unknown(key, known, schema)))
    for f in known.values():
        where = f"{path}.{f.name}" if path else f.name
        if is_dataclass(hints[f.name]):
            arguments[f.name] = _build_fields(hints[f.name], tree[f.name], where, problems)
        else:
            value = _build(tree[f.name], where, problems)
            arguments[f.name] = _default(f) if value is FAILED else value
    return schema(**arguments)


def _default(f: Field[Any]) -> Any:
    if f.default_factory is not REQUIRED:
        return f.default_factory()
    return None if f.default is REQUIRED or f.default == MISSING else f.default


def build(node: Any, path: str, expected: type[T] | tuple[type, ...] = object) -> T:  # type: ignore[assignment]
    """The object that `node` describes: `_target_` is a dotpath to a dataclass, the other keys are its fields.

    Children with a `_target_` are built first. Keys and types are checked against the dataclass, so a misspelt key or
    a wrong type is a `ConfigError` with its path; several faults in one node come together.
    """
    problems: list[Problem] = []
    value = _build(_plain(node, path) if isinstance(node, DictConfig | ListConfig) else node, path, problems)
    if not problems and not isinstance(value, expected):
        names = " or ".join(c.__name__ for c in (expected if isinstance(expected, tuple) else (expected,)))
        problems.append(Problem(path, f"must be a {names}, got {_describe(value)}.", f"Set {path}._target_ to one."))
    if problems:
        raise ConfigError(*problems)
    return value  # type: ignore[no-any-return]


def _plain(node: DictConfig | ListConfig, path: str) -> Any:
    try:
        return OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(Problem(str(error.full_key or path), str(error).splitlines()[0])) from error


def _build(value: Any, path: str, problems: list[Problem]) -> Any:
    """The object, or `FAILED` once the reasons are in `problems`."""
    if value == "???":
        problems.append(Problem(path, "must be set.", f"Set {path}=..."))
        return FAILED
    if isinstance(value, list):
        items = [_build(item, f"{path}[{i}]", problems) for i, item in enumerate(value)]
        return FAILED if FAILED in items else items
    if not isinstance(value, Mapping):
        return value
    children = {key: _build(item, f"{path}.{key}", problems) for key, item in value.items() if key != "_target_"}
    if "_target_" not in value:
        return FAILED if FAILED in children.values() else children
    target = _locate(value["_target_"], path, problems)
    return FAILED if target is None else _construct(target, children, path, problems)


def _locate(dotpath: str, path: str, problems: list[Problem]) -> type | None:
    """The dataclass at `dotpath`; importing it is what registers it."""
    module_name, _, name = str(dotpath).rpartition(".")
    try:
        target = vars(importlib.import_module(module_name))[name]
    except (ImportError, KeyError, ValueError) as error:
        hint = "Is the module on PYTHONPATH and the name spelt as in the file?"
        problems.append(Problem(f"{path}._target_", f"cannot import {dotpath!r} ({error}).", hint))
        return None
    if not (isinstance(target, type) and is_dataclass(target)) or inspect.isabstract(target):
        problems.append(
            Problem(f"{path}._target_", f"{dotpath!r} must be a concrete dataclass, got {_describe(target)}.")
        )
        return None
    return target


def _construct(target: type, children: dict[str, Any], path: str, problems: list[Problem]) -> Any:
    known = {f.name: f for f in fields(target) if f.init}
    faults = [Problem(f"{path}.{key}", *_unknown(key, known, target)) for key in children if key not in known]
    for f in known.values():
        if f.default is REQUIRED and f.default_factory is REQUIRED and f.name not in children:
            faults.append(Problem(f"{path}.{f.name}", f"is required by {target.__name__}."))
    arguments = {
        key: FAILED if item is FAILED else _checked(target, key, item, path, faults)
        for key, item in children.items()
        if key in known
    }
    problems.extend(faults)
    if faults or FAILED in arguments.values():
        return FAILED
    try:
        return target(**arguments)
    except ValueError as error:
        problems.append(Problem(path, str(error)))
        return FAILED


def _checked(target: type, key: str, item: Any, path: str, faults: list[Problem]) -> Any:
    """`item` converted to the type that `target` declares for `key`; objects (built children) pass as they are."""
    hint = get_type_hints(target)[key]
    section = _section(hint)
    if section is not None and isinstance(item, Mapping):
        return _construct(section, dict(item), f"{path}.{key}", faults)
    if _holds_objects(item):
        return item
    try:
        schema = OmegaConf.structured(make_dataclass(target.__name__, [(key, _as_list(hint))]))
    except ValidationError:
        return item  # an annotation that OmegaConf does not know: the component's own business
    try:
        schema[key] = item
        value = schema[key]
    except OmegaConfBaseException as error:
        faults.append(Problem(f"{path}.{key}", f"{str(error).splitlines()[0]}."))
        return FAILED
    if isinstance(value, float) and not math.isfinite(value):
        faults.append(Problem(f"{path}.{key}", f"must be a finite number, got {value}."))
        return FAILED
    return OmegaConf.to_object(value) if isinstance(value, DictConfig | ListConfig) else value


def _section(hint: Any) -> type | None:
    """The dataclass that the hint `Section` or `Section | None` names."""
    kinds = (
        [kind for kind in get_args(hint) if kind is not NoneType] if get_origin(hint) in (Union, UnionType) else [hint]
    )
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and is_dataclass(kinds[0]) else None


def _as_list(hint: Any) -> Any:
    """OmegaConf knows lists, not other sequences."""
    return list[get_args(hint)[0]] if get_origin(hint) in (Sequence, tuple) else hint  # type: ignore[misc]


def _holds_objects(item: Any) -> bool:
    if isinstance(item, Mapping):
        return any(_holds_objects(value) for value in item.values())
    if isinstance(item, list | tuple):
        return any(_holds_objects(value) for value in item)
    return not isinstance(item, str | int | float | bool | None)


def _unknown(key: str, known: Mapping[str, Any], target: type) -> tuple[str, str]:
    return f"is not a field of {target.__name__}.", f"Fields: {', '.join(known)}."


def _describe(value: Any) -> str:
    return type(value).__name__ if not isinstance(value, type) else value.__name__
