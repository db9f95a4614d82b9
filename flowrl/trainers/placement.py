"""Which processes a run consists of, and what is wrong with asking for them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from flowrl.config import Config, Problem, Reward
from flowrl.distributed.launch.base import Place
from flowrl.distributed.launch.failures import PlacementError
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.placement import assign, total, visible_gpus
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.launch.spawn import Spawn
from flowrl.distributed.weight_sync.manifest import Mode
from flowrl.distributed.weight_sync.publisher import Transport
from flowrl.rewards.networks import NetworkScorer
from flowrl.rewards.worker import OnHost

LAYOUTS = ("shared", "colocated", "standalone")
MODES = {"lora": ("lora", "merged"), "full": ("full",)}  # what an actor of each kind can publish


def on_gpu(run: Config) -> bool:
    """Does the run ask for GPUs? Counts this machine's without initialising CUDA; of a cluster `device` must say it."""
    return run.device == "cuda" or (run.device == "auto" and torch.cuda.device_count() > 0)


def actor_places(run: Config) -> list[Place]:
    """One process and one GPU for each rank."""
    gpus = 1.0 if on_gpu(run) else 0.0
    return [Place(f"actor-{rank}", num_gpus=gpus) for rank in range(run.actor.num_ranks)]


def rollout_places(run: Config) -> list[Place]:
    """Processes that only sample: none (shared), one beside each rank (colocated), or `rollout.num_workers`."""
    match run.trainer.layout:
        case "colocated":  # on the GPU of its rank, whatever that is
            gpus = 1.0 if on_gpu(run) else 0.0
            return [Place(f"rollout-{i}", num_gpus=gpus, beside=f"actor-{i}") for i in range(run.actor.num_ranks)]
        case "standalone":
            gpus = run.rollout.num_gpus_per_worker if on_gpu(run) else 0.0
            return [Place(f"rollout-{i}", num_gpus=gpus) for i in range(run.rollout.num_workers)]
    return []


def drawing_places(run: Config) -> list[Place]:
    """Whoever draws: rollout workers, or else the ranks; in one process all of them are one."""
    if isinstance(run.launcher, Inline):
        return actor_places(run)[:1]
    return rollout_places(run) or actor_places(run)


def trainer_places(run: Config) -> list[Place]:
    """Whoever draws or trains."""
    return actor_places(run)[:1] if isinstance(run.launcher, Inline) else [*actor_places(run), *rollout_places(run)]


def reward_places(reward: Reward, prefix: str, drawing: Sequence[Place]) -> list[Place]:
    """The workers of one pool: without a GPU, on those of whoever draws in turn, or with their own."""
    names = [f"{prefix}-{i}" for i in range(reward.num_workers)]
    if reward.runtime == "remote":
        return [Place(name, num_gpus=reward.num_gpus_per_worker) for name in names]
    if reward.runtime == "colocated" and any(place.num_gpus for place in drawing):
        return [Place(name, beside=drawing[i % len(drawing)].name) for i, name in enumerate(names)]
    return [Place(name) for name in names]


def pool_places(run: Config) -> dict[str, list[Place]]:
    """Of the pool of the training's rewards, and of the one that evaluation may have, by prefix."""
    return {prefix: reward_places(reward, prefix, drawing_places(run)) for prefix, (_, reward) in _pools(run).items()}


def on_host(places: Sequence[Place], others: Sequence[Place]) -> OnHost:
    """Reward workers as processes of this host, at `places`, after `others` have taken their GPUs.

    Raises PlacementError if there are too few GPUs.
    """
    everybody = [*others, *places]
    assigned = assign(everybody, visible_gpus() if total(everybody) else [])
    return OnHost([",".join(assigned[place.name]) for place in places])


def _pools(run: Config) -> dict[str, tuple[str, Reward]]:
    """By the prefix of its places: where it stands in the configuration, and what it says."""
    judges: Reward | None = run.trainer.eval.rewards
    own = {} if judges is None else {"judge": ("trainer.eval.rewards", judges)}
    return {"reward": ("reward", run.reward), **own}


def publication_mode(run: Config) -> Mode:
    """`weight_sync.mode`, with `auto` resolved."""
    return cast("Mode", run.actor.mode if run.weight_sync.mode == "auto" else run.weight_sync.mode)


def transport(run: Config) -> Transport:
    """`weight_sync.transport`, with `auto` resolved."""
    if run.weight_sync.transport != "auto":
        return cast("Transport", run.weight_sync.transport)
    if isinstance(run.launcher, Inline) or shares_gpus(run):
        return "object_store"
    return "cuda_ipc" if run.trainer.layout == "colocated" and on_gpu(run) else "broadcast"


def shares_gpus(run: Config) -> bool:
    """Are there several rollout workers to a GPU? NCCL wants one for each process."""
    return run.trainer.layout == "standalone" and on_gpu(run) and run.rollout.num_gpus_per_worker < 1


# ---------------------------------------------------------------------------------------------- what is wrong


def problems(run: Config) -> Iterator[Problem]:
    """What cannot be placed, dealt out or published. `run.trainer.layout` is one of `LAYOUTS`."""
    yield from _threads(run)
    yield from _ranks(run)
    yield from _rollout_workers(run)
    yield from _reward_workers(run)
    if run.trainer.layout != "shared":
        yield from _publication(run)
    else:
        for name in ("mode", "transport"):
            value = vars(run.weight_sync)[name]
            if value != "auto":
                message = f"{value} has no effect: trainer.layout=shared publishes nothing."
                yield Problem(f"weight_sync.{name}", message, "Set it to auto, or another layout.")


def _threads(run: Config) -> Iterator[Problem]:
    if isinstance(run.launcher, Inline | Spawn | Ray):
        most, asked = 8 * (os.cpu_count() or 1), run.launcher.num_threads  # far more end a process without a word
        if not 0 <= asked <= most:
            yield Problem("launcher.num_threads", f"must be from 0 to {most}, got {asked}.")


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
        step = ranks // math.gcd(ranks, prompts // updates)
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


def _rollout_workers(run: Config) -> Iterator[Problem]:
    layout, rollout = run.trainer.layout, run.rollout
    if layout != "standalone":
        for name in ("num_workers", "num_gpus_per_worker"):
            if vars(rollout)[name] != 1:
                message = f"is for trainer.layout=standalone; {layout} has as many as there are ranks."
                yield Problem(f"rollout.{name}", message, "Set it to 1.")
        if rollout.on_death == "restart":
            message = f"is for trainer.layout=standalone: in {layout} a lost process takes weights with it."
            yield Problem("rollout.on_death", message, "Set it to stop.")
    elif isinstance(run.launcher, Inline) and rollout.num_workers > 1:
        message = f"must be 1 in one process, got {rollout.num_workers}."
        yield Problem("rollout.num_workers", message, "Set launcher=spawn or launcher=ray.")
    if rollout.num_gpus_per_worker > 1:
        message = f"must be at most 1: a worker computes on one GPU; got {rollout.num_gpus_per_worker}."
        yield Problem("rollout.num_gpus_per_worker", message)


def _reward_workers(run: Config) -> Iterator[Problem]:
    for path, reward in _pools(run).values():
        share, remote = reward.num_gpus_per_worker, reward.runtime == "remote"
        if not remote and share != 1:
            yield Problem(f"{path}.num_gpus_per_worker", f"is for {path}.runtime=remote.", "Set it to 1.")
        elif not (0 < share <= 1 or (1 < share < math.inf and share == int(share))):
            message = f"must be a part of one GPU, or a whole number of them, got {share:g}."
            yield Problem(f"{path}.num_gpus_per_worker", message)
        if reward.num_workers == 0 and (remote or (reward.runtime == "colocated" and not _draws_itself(run))):
            message = f"must be at least 1 with {path}.runtime={reward.runtime}: the trainer's process has no such GPU."
            yield Problem(f"{path}.num_workers", message)
        yield from _networks(run, path, reward)
    yield from _reward_gpus(run)


def _networks(run: Config, path: str, reward: Reward) -> Iterator[Problem]:
    """Where workers see no GPU, a network is computed by one core: hours for what a GPU does in seconds.

    Without workers it is computed where the trainer is.
    """
    if reward.num_workers == 0 or reward.runtime == "remote" or (reward.runtime == "colocated" and on_gpu(run)):
        return
    for name, part in reward.components.items():
        if not isinstance(part.scorer, NetworkScorer):
            continue
        device = f"{path}.components.{name}.scorer.device"
        hint = f"Set {path}.runtime=colocated, or remote (GPUs of its own); or {device}=cpu, if that is meant."
        if part.scorer.device == "cuda":
            yield Problem(device, f"is cuda, but with {path}.runtime={reward.runtime} its workers see no GPU.", hint)
        elif part.scorer.device == "auto" and on_gpu(run):
            message = f"is {reward.runtime}: the network of {name!r} would be computed by one core of the CPU."
            yield Problem(f"{path}.runtime", message, hint)


def _draws_itself(run: Config) -> bool:
    return isinstance(run.launcher, Inline) or not on_gpu(run)


def _reward_gpus(run: Config) -> Iterator[Problem]:
    """Are there enough on this machine? Only of somebody else's cluster nobody knows."""
    remote = [path for path, reward in _pools(run).values() if reward.runtime == "remote"]
    if not remote or (isinstance(run.launcher, Ray) and run.launcher.address is not None):
        return
    gpus, hint = visible_gpus(), f"Set {remote[0]}.runtime=colocated or cpu"
    if not gpus:
        yield Problem(f"{remote[0]}.runtime", "remote needs GPUs, and this machine has none.", f"{hint}.")
        return
    try:
        assign([*trainer_places(run), *(place for places in pool_places(run).values() for place in places)], gpus)
    except PlacementError as error:
        yield Problem(f"{remote[0]}.runtime", f"remote: {error}.", f"{hint}, or {remote[0]}.num_workers lower.")


def _publication(run: Config) -> Iterator[Problem]:
    mode, allowed = publication_mode(run), MODES.get(run.actor.mode, ())
    if allowed and mode not in allowed and mode in ("lora", "merged", "full"):
        message = f"{mode} contradicts actor.mode={run.actor.mode}, which can publish {' or '.join(allowed)}."
        yield Problem("weight_sync.mode", message, f"Set weight_sync.mode={allowed[-1]}, or auto.")
    inline = isinstance(run.launcher, Inline)
    reasons = {
        "broadcast": "needs separate processes"
        if inline
        else ("needs a GPU for each worker" if shares_gpus(run) else ""),
        "cuda_ipc": ""
        if run.trainer.layout == "colocated" and on_gpu(run) and not inline
        else "needs two processes on one GPU: trainer.layout=colocated",
    }
    reason = reasons.get(transport(run), "")
    if reason:
        yield Problem("weight_sync.transport", f"{transport(run)} {reason}.", "Set it to auto.")
