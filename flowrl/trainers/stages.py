"""The objects of a run, made once from its configuration; a trainer mode only schedules them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from flowrl.buffer.replay import ReplayBuffer
from flowrl.config import Config, Reward
from flowrl.data.group_sampler import GroupSampler
from flowrl.data.prompts import load_prompts
from flowrl.device import choose_device, torch_settings
from flowrl.distributed.checkpoint.folders import Committed
from flowrl.distributed.checkpoint.manifest import CheckpointError
from flowrl.distributed.launch.base import Cluster, Place, Remote, gather
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.ray import Ray
from flowrl.flow.noise import Noise
from flowrl.rewards.pool import MakeWorker, RewardPool
from flowrl.rewards.remote import OnCluster
from flowrl.tracking.metrics import Meter, Timers
from flowrl.trainers.evaluator import Evaluator
from flowrl.trainers.fleet import ActorFleet
from flowrl.trainers.placement import actor_places, on_host, pool_places, rollout_places, trainer_places
from flowrl.trainers.rollouts import Rollouts, SeparateRollouts, SharedRollouts
from flowrl.trainers.state import CONTRACT, STATE
from flowrl.trainers.worker import ActorWorker


@dataclass(frozen=True)
class Stages:
    """Prompts to weights, in the order that data flows."""

    data: GroupSampler
    rollouts: Rollouts
    rewards: RewardPool
    buffer: ReplayBuffer
    actor: ActorFleet
    evaluator: Evaluator
    meter: Meter
    timers: Timers


@contextmanager
def open_stages(run: Config, total_steps: int, start: Committed | None) -> Iterator[Stages]:
    """Load and warm everything; close worker processes at the end, whatever happened.

    With a checkpoint to `start` from, everything is as it was when that was made. Raises CheckpointError if it cannot.
    """
    inline = isinstance(run.launcher, Inline)
    meter, timers = Meter(), Timers(choose_device(run) if inline else None)
    places = [*actor_places(run), *rollout_places(run), *_placed_rewards(run), *run.buffer.places()]
    with ExitStack() as closing:
        closing.enter_context(torch_settings(run))
        cluster = closing.enter_context(run.launcher.open(places))
        # Reward processes load their models while the others load the policy.
        rewards = judges = _started(run, run.reward, cluster, "reward", closing)
        if run.trainer.eval.rewards is not None:
            judges = _started(run, run.trainer.eval.rewards, cluster, "judge", closing)
        buffer = closing.enter_context(run.buffer.open(cluster))
        actors = _actors(run, cluster, total_steps * run.algorithm.num_updates_per_batch)
        actor = ActorFleet(actors, run.algorithm, Noise.of(run.seed), meter, run.rollout.report_stuck_s)
        rollouts = _rollouts(run, cluster, actor, meter)
        data = GroupSampler(
            load_prompts(run.data.train, run.data.target),
            run.data.train_batch_size,
            run.data.num_samples_per_prompt,
            run.data.seed,
        )
        if start is not None:
            _restore(start, actor, data, buffer)
        rewards.warm()
        judges.warm()
        rollouts.publish(actor.version)
        if start is not None:
            actor.restore_generators(start.json(STATE)["actor"])
        yield Stages(data, rollouts, rewards, buffer, actor, Evaluator(run, actor.evaluate, judges), meter, timers)


def _restore(start: Committed, actor: ActorFleet, data: GroupSampler, buffer: ReplayBuffer) -> None:
    began_with = start.json(CONTRACT)["base"]
    if actor.fingerprint() != began_with:
        raise CheckpointError(
            f"{start.path}: the run began with another base model: model.path now holds other weights or settings. "
            "Put the old ones back, or set name=... to start another run."
        )
    state = start.json(STATE)
    actor.restore(start.tensors, state["actor"])
    data.load_state_dict(state["data"])
    buffer.load_state_dict(state["buffer"])


def _actors(run: Config, cluster: Cluster, total_updates: int) -> list[Remote[ActorWorker]]:
    """Every rank, its model loaded and sharded."""
    workers = [
        cluster.start(place.name, partial(ActorWorker, run, total_updates, rank))
        for rank, place in enumerate(actor_places(run))
    ]
    if len(workers) > 1:
        address = workers[0].call(ActorWorker.host).result()
        gather(workers, ActorWorker.join, [(address,)] * len(workers))
    gather(workers, ActorWorker.load, [()] * len(workers))
    return workers


def _rollouts(run: Config, cluster: Cluster, actor: ActorFleet, meter: Meter) -> Rollouts:
    if run.trainer.layout == "shared":
        return SharedRollouts(actor, run.rollout.report_stuck_s)
    names = [place.name for place in rollout_places(run)]
    return SeparateRollouts(run, cluster, names, actor, meter)


def _placed_rewards(run: Config) -> list[Place]:
    """Under Ray, reward workers are placed like all others; elsewhere they are processes of the driver's host."""
    return [place for places in pool_places(run).values() for place in places] if isinstance(run.launcher, Ray) else []


def _started(run: Config, reward: Reward, cluster: Cluster, prefix: str, closing: ExitStack) -> RewardPool:
    pools = pool_places(run)
    make: MakeWorker
    if isinstance(run.launcher, Ray):
        make = OnCluster(cluster, prefix, on_gpu=any(place.num_gpus or place.beside for place in pools[prefix]))
    else:
        before = pools["reward"] if prefix == "judge" else []
        make = on_host(pools[prefix], [*trainer_places(run), *before])
    pool = RewardPool.from_config(reward, make)
    closing.callback(pool.close)
    pool.start()
    return pool
