"""Single values: ranges and choices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from flowrl.config import Config, Problem
from flowrl.data.prompts import TARGETS
from flowrl.types import PolicyConfig

LARGEST = 2**31
AT_MOST = {
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
FPS = (0.1, 1000.0)
"""Outside of these a film cannot be written, or not be watched."""

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
    "rollout.output": ("image", "latent", "both"),
    "rollout.on_death": ("stop", "restart"),
    "weight_sync.mode": ("auto", "lora", "merged", "full"),
    "weight_sync.transport": ("auto", "broadcast", "cuda_ipc", "object_store"),
    "weight_sync.wire_dtype": (None, *_DTYPES),
    "weight_sync.staging": ("device", "host"),
    "checkpoint.best": ("max", "min"),
}


def ranges(run: Config) -> Iterator[Problem]:
    yield from below(run, "", _AT_LEAST)
    for path in _POSITIVE:
        yield from not_positive(path, attrgetter(path)(run))
    if not FPS[0] <= run.sampler.fps <= FPS[1]:
        yield Problem("sampler.fps", f"must be from {FPS[0]:g} to {FPS[1]:g}, got {run.sampler.fps}.")
    decay = run.actor.ema.decay
    if not 0 <= decay < 1:
        yield Problem("actor.ema.decay", f"must be in [0, 1), got {decay}.")
    if isinstance(run.model, PolicyConfig) and run.model.task == "t2i" and run.sampler.frames > 1:
        message = f"must be 1 for a model that draws pictures (model.task=t2i), got {run.sampler.frames}."
        yield Problem("sampler.frames", message, "Set it to 1, or choose a model of videos.")


def not_positive(path: str, value: float) -> Iterator[Problem]:
    if not (math.isfinite(value) and value > 0):
        yield Problem(path, f"must be greater than 0, got {value}.")


def below(owner: Any, prefix: str, bounds: Mapping[str, int]) -> Iterator[Problem]:
    """Numbers under their bound; null passes, since the schema refuses it where it is not allowed."""
    for name, low in bounds.items():
        value = attrgetter(name)(owner)
        if value is not None and not (math.isfinite(value) and value >= low):
            yield Problem(f"{prefix}{name}", f"must be at least {low}, got {value}.")
        elif value is not None and value > AT_MOST.get(name, LARGEST):
            yield Problem(f"{prefix}{name}", f"must be at most {AT_MOST.get(name, LARGEST)}, got {value}.")


def choices(run: Config) -> Iterator[Problem]:
    for path, allowed in _ONE_OF.items():
        value = attrgetter(path)(run)
        if value not in allowed:
            names = ["null" if choice is None else choice for choice in allowed]
            yield Problem(path, f"must be {' or '.join(names)}, got {value!r}.")


def plain_name(path: str, name: str) -> Iterator[Problem]:
    """Names of sets and components become folders, metric names and table cells."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        yield Problem(path, f"a name must be of letters, digits, '_', '.' and '-', got {name!r}.")
