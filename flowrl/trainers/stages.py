"""The objects of a run, made once from its configuration; a trainer mode only schedules them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from flowrl.buffer.memory import MemoryBuffer
from flowrl.config import Config, Evaluation, Reward
from flowrl.data.group_sampler import GroupSampler
from flowrl.data.prompts import load_prompts
from flowrl.flow.noise import Noise
from flowrl.rewards.pool import RewardPool
from flowrl.rollout.native import NativeEngine
from flowrl.tracking.metrics import Meter, Timers
from flowrl.trainers.actor import Actor
from flowrl.trainers.evaluator import Evaluator
from flowrl.types import Engine, Policy


@dataclass(frozen=True)
class Stages:
    """Prompts to weights, in the order that data flows."""

    device: torch.device
    policy: Policy
    data: GroupSampler
    engine: Engine
    rewards: RewardPool
    buffer: MemoryBuffer
    actor: Actor
    evaluator: Evaluator
    meter: Meter
    timers: Timers


@contextmanager
def open_stages(run: Config, total_steps: int, evaluation: Evaluation) -> Iterator[Stages]:
    """Load and warm everything before step 1; close worker processes at the end, whatever happened."""
    device = choose_device(run)
    noise = Noise.of(run.seed)
    meter = Meter()
    with ExitStack() as closing:
        closing.enter_context(torch_settings(run))
        # Reward processes load their models while this one loads the policy.
        rewards = judges = _started(run.reward, closing)
        if evaluation.rewards is not None:
            judges = _started(evaluation.rewards, closing)
        policy = run.model.load(device)
        total_updates = total_steps * run.algorithm.num_updates_per_batch
        actor = Actor(policy, run.algorithm, run.actor, noise, total_updates, meter, average=evaluation.use_ema)
        engine = NativeEngine(
            policy,
            run.sampler,
            noise.child("rollout"),
            run.rollout.batch_size,
            deterministic=run.algorithm.needs.rollout == "ode",
        )
        evaluator = Evaluator(policy, run, evaluation, judges)
        data = GroupSampler(
            load_prompts(run.data.train, run.data.target),
            run.data.train_batch_size,
            run.data.num_samples_per_prompt,
            run.data.seed,
        )
        rewards.warm()
        judges.warm()
        yield Stages(device, policy, data, engine, rewards, run.buffer, actor, evaluator, meter, Timers(device))


@contextmanager
def torch_settings(run: Config) -> Iterator[None]:
    """`launcher.num_threads` and `deterministic` for the length of a run; the next one in this process has its own."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if run.launcher.num_threads:
        torch.set_num_threads(run.launcher.num_threads)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def _started(reward: Reward, closing: ExitStack) -> RewardPool:
    pool = RewardPool.from_config(reward)
    closing.callback(pool.close)
    pool.start()
    return pool


def choose_device(run: Config) -> torch.device:
    """`device=auto` is CUDA where there is one."""
    if run.device != "auto":
        return torch.device(run.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
