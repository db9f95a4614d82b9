"""Which processes a run consists of, and what is wrong with asking for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from flowrl.config import Config, Problem
from flowrl.distributed.launch.base import Place
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.weight_sync.manifest import Mode
from flowrl.distributed.weight_sync.publisher import Transport

LAYOUTS = ("shared", "colocated", "standalone")
MODES = {"lora": ("lora", "merged"), "full": ("full",)}  # what an actor of each kind can publish
DTYPES = ("float32", "bfloat16")


def on_gpu(run: Config) -> bool:
    """Does the run ask for GPUs? Counts them without initialising CUDA."""
    return run.device == "cuda" or (run.device == "auto" and torch.cuda.device_count() > 0)


def actor_places(run: Config) -> list[Place]:
    """One process for each rank; two on each GPU leave a half to either."""
    share = (0.5 if run.trainer.layout == "colocated" else 1.0) if on_gpu(run) else 0.0
    return [Place(f"actor-{rank}", num_gpus=share) for rank in range(run.actor.num_ranks)]


def rollout_places(run: Config) -> list[Place]:
    """Processes that only sample: none (shared), one beside each rank (colocated), or `rollout.num_workers`."""
    gpu = on_gpu(run)
    match run.trainer.layout:
        case "colocated":
            share = 0.5 if gpu else 0.0
            return [
                Place(f"rollout-{rank}", num_gpus=share, beside=f"actor-{rank}") for rank in range(run.actor.num_ranks)
            ]
        case "standalone":
            share = run.rollout.num_gpus_per_worker if gpu else 0.0
            return [Place(f"rollout-{i}", num_gpus=share) for i in range(run.rollout.num_workers)]
    return []


def reward_places(run: Config) -> list[Place]:
    """Under Ray, reward workers are placed like all others; elsewhere they are processes of the driver's host."""
    if not isinstance(run.launcher, Ray):
        return []
    judges = run.trainer.eval.rewards
    places = [Place(f"reward-{i}") for i in range(run.reward.num_workers)]
    return places + [Place(f"judge-{i}") for i in range(judges.num_workers if judges else 0)]


def publication_mode(run: Config) -> Mode:
    """`weight_sync.mode`, with `auto` resolved."""
    return cast("Mode", run.actor.mode if run.weight_sync.mode == "auto" else run.weight_sync.mode)


def transport(run: Config) -> Transport:
    """`weight_sync.transport`, with `auto` resolved."""
    if run.weight_sync.transport != "auto":
        return cast("Transport", run.weight_sync.transport)
    if isinstance(run.launcher, Inline):
        return "object_store"
    return "cuda_ipc" if run.trainer.layout == "colocated" and on_gpu(run) else "broadcast"


# ---------------------------------------------------------------------------------------------- what is wrong


def problems(run: Config) -> Iterator[Problem]:
    """What cannot be placed, dealt out or published. `run.trainer.layout` is one of `LAYOUTS`."""
    yield from _choices(run)
    yield from _ranks(run)
    yield from _rollout_workers(run)
    if run.trainer.layout != "shared":
        yield from _publication(run)


def _choices(run: Config) -> Iterator[Problem]:
    sync = run.weight_sync
    for path, value, allowed in (
        ("rollout.gather", run.rollout.gather, ("auto", "always", "never")),
        ("rollout.on_death", run.rollout.on_death, ("stop", "restart")),
        ("actor.master_dtype", run.actor.master_dtype, DTYPES),
        ("actor.fsdp.reduce_dtype", run.actor.fsdp.reduce_dtype, DTYPES),
        ("weight_sync.mode", sync.mode, ("auto", "lora", "merged", "full")),
        ("weight_sync.transport", sync.transport, ("auto", "broadcast", "cuda_ipc", "object_store")),
        ("weight_sync.wire_dtype", sync.wire_dtype or "float32", DTYPES),
        ("weight_sync.staging", sync.staging, ("device", "host")),
    ):
        if value not in allowed:
            yield Problem(path, f"must be {' or '.join(allowed)}, got {value!r}.")


def _ranks(run: Config) -> Iterator[Problem]:
    """Every update must be cut into equal shares."""
    ranks, updates = run.actor.num_ranks, run.algorithm.num_updates_per_batch
    prompts, samples = run.data.train_batch_size, run.data.num_samples_per_prompt
    if ranks < 1 or prompts % updates:
        return  # reported elsewhere
    per_update = prompts // updates * samples
    if per_update % ranks:
        nearest = [n for n in range(1, per_update + 1) if per_update % n == 0]
        below, above = max(n for n in nearest if n < ranks), min((n for n in nearest if n > ranks), default=None)
        hint = f"Set actor.num_ranks={below}" + (f" or {above}" if above else "")
        step = ranks // _common(ranks, prompts // updates)
        more = -(-samples // step) * step
        yield Problem(
            "actor.num_ranks",
            f"must divide the samples of an update: {prompts} prompts / {updates} updates x {samples} samples = "
            f"{per_update}, got {ranks} ranks.",
            f"{hint}, or data.num_samples_per_prompt={more}.",
        )
    if run.actor.fsdp.cpu_offload and run.actor.mode == "lora":
        message = "is for full training: with LoRA it would move the frozen base back and forth for nothing."
        yield Problem("actor.fsdp.cpu_offload", message, "Set it to false.")
    elif run.actor.fsdp.cpu_offload and ranks == 1:
        yield Problem("actor.fsdp.cpu_offload", "needs several ranks: one rank shards nothing.", "Set it to false.")


def _common(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def _rollout_workers(run: Config) -> Iterator[Problem]:
    layout, rollout = run.trainer.layout, run.rollout
    if layout != "standalone":
        if rollout.num_workers != 1:
            message = f"is for trainer.layout=standalone; {layout} has as many as there are ranks."
            yield Problem("rollout.num_workers", message, "Set it to 1.")
        if rollout.on_death == "restart":
            message = f"is for trainer.layout=standalone: in {layout} a lost process takes weights with it."
            yield Problem("rollout.on_death", message, "Set it to stop.")
    elif isinstance(run.launcher, Inline) and rollout.num_workers > 1:
        message = f"must be 1 in one process, got {rollout.num_workers}."
        yield Problem("rollout.num_workers", message, "Set launcher=spawn or launcher=ray.")


def _publication(run: Config) -> Iterator[Problem]:
    mode, allowed = publication_mode(run), MODES.get(run.actor.mode, ())
    if allowed and mode not in allowed and mode in ("lora", "merged", "full"):
        message = f"{mode} contradicts actor.mode={run.actor.mode}, which can publish {' or '.join(allowed)}."
        yield Problem("weight_sync.mode", message, f"Set weight_sync.mode={allowed[-1]}, or auto.")
    inline = isinstance(run.launcher, Inline)
    reasons = {
        "broadcast": "needs separate processes" if inline else "",
        "cuda_ipc": ""
        if run.trainer.layout == "colocated" and on_gpu(run) and not inline
        else "needs two processes on one GPU: trainer.layout=colocated",
    }
    reason = reasons.get(transport(run), "")
    if reason:
        yield Problem("weight_sync.transport", f"{transport(run)} {reason}.", "Set it to auto.")
