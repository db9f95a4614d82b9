"""The schema of a run.

Fixed sections are the dataclasses below. Swappable parts (a model, a dynamics, a reward) are nodes with a `_target_`
dotpath, typed `Any` here; `flowrl.build` makes them. This module is a leaf: it knows no other part of flowrl.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from omegaconf import MISSING


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
    fps: float = 16.0  # at which videos play that are written; changes nothing else
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
    """Components by name, and the processes that score with them. How they are combined: `algorithm.advantages`."""

    components: dict[str, Any] = field(default_factory=dict)
    runtime: str = "cpu"  # where they run: cpu | colocated (on the GPU that draws) | remote (on GPUs of their own)
    num_workers: int = 2  # processes; 0 = score in the trainer's process
    num_gpus_per_worker: float = 1.0  # with runtime=remote
    timeout_s: float = 120.0  # for one component on one group; scorers that ask a server have limits of their own
    load_timeout_s: float = 600.0  # for a worker to load all components, likewise
    retries: int = 2
    report_stuck_s: float = 60.0  # a worker that scores or loads for so long is reported

    @property
    def weights(self) -> dict[str, float]:
        """Of every component, once they are built; one that is alone need not have any."""
        return {name: 1.0 if part.weight is None else part.weight for name, part in self.components.items()}


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
    param_dtype: str | None = None  # full training: what the blocks' matrices are gathered in; null = the model's dtype
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
    output: str = "image"  # what rewards are given: image | latent (nothing is decoded) | both; evaluations are both
    batch_size: int = 64  # samples in one forward
    gather: str = "auto"  # layout shared, several ranks: hold all blocks gathered while sampling: auto | always | never
    num_workers: int = 1  # layout standalone: processes that only sample
    num_gpus_per_worker: float = 1.0  # where there are GPUs
    timeout_s: float = 1800.0  # for a worker to draw the next group; then it counts as dead
    report_stuck_s: float = (
        300.0  # waiting for a group, a batch or a publication is reported after it, ever more rarely
    )
    on_death: str = "stop"  # of a rollout worker (standalone): stop | restart
    max_restarts: int = 3  # of the whole run, with on_death=restart


@dataclass
class WeightSync:
    """Publication of weights to rollout workers (layouts colocated and standalone)."""

    mode: str = "auto"  # auto (lora as lora, full as full) | lora | merged | full
    transport: str = "auto"  # auto | broadcast (gloo, NCCL) | cuda_ipc (one GPU) | object_store (the launcher's)
    wire_dtype: str | None = None  # of the blocks' matrices: float32 | bfloat16; null = what the model computes in
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
class Checkpoint:
    """When a run saves what it needs to go on, and which of its checkpoints it keeps. The last step is always saved."""

    every: int = 10  # steps; 0 = only at the end
    keep_last: int = 2  # newest
    keep_every: int = 0  # and those of every n-th step; 0 = none of them
    keep_best: str | None = None  # and the best by this metric, like eval/heldout/ocr_mean
    best: str = "max"  # which value of it that is: max | min
    background: bool = True  # write while training goes on
    max_failures: int = 3  # failed saves in a row before the run stops


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
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    resume: str = "auto"  # auto (from the run folder's newest checkpoint) | never | a checkpoint's or a run's folder

    @property
    def run_dir(self) -> Path:
        """No timestamp: the same command means the same run, which goes on where it was."""
        return Path(self.runs) / self.name

    @property
    def checkpoints_dir(self) -> Path:
        """One folder per step that was saved."""
        return self.run_dir / "checkpoints"


@runtime_checkable
class Particular(Protocol):
    """A component that knows what it cannot be combined with."""

    def problems(self, run: Config) -> list[Problem]:
        """What `run` asks of it and it cannot do, with paths from the root; quick, without side effects."""
        ...
