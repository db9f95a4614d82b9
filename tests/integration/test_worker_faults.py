"""Workers that die, fail, hang or lie: an error with a name, in bounded time, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.config import Config
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.spawn import Spawn
from flowrl.distributed.weight_sync.errors import PublishError
from flowrl.rollout.checks import EngineError
from flowrl.rollout.worker import RolloutWorker
from flowrl.tracking.metrics import Meter
from flowrl.trainers.rollouts import SeparateRollouts
from flowrl.trainers.worker import ActorWorker
from flowrl.types import Loss, TrainBatch, Velocity
from tests.support import tiny
from tests.support.engines import Foreign, Forgetful, Mortal
from tests.support.ranks import Ranks, advantages, configure, ranks, scored

BOUND_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Fatal(FlowGRPO):
    """Flow-GRPO whose second rank does not survive its first loss."""

    way: str = "kill"

    def loss(self, micro: TrainBatch, velocity: Velocity) -> Loss:
        if dist.get_rank() == 1:
            if self.way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("the loss of rank 1 failed")
        return super().loss(micro, velocity)


def pid(worker: ActorWorker | RolloutWorker) -> int:
    return os.getpid()


def standalone(folder: Path, *overrides: str) -> Config:
    return configure(folder, "actor=full", "trainer.layout=standalone", "rollout.num_workers=2", *overrides)


def with_engine(run: Config, engine: object) -> Config:
    return replace(run, rollout=replace(run.rollout, engine=engine))


def workers(processes: Ranks, run: Config, *, published: bool = True) -> SeparateRollouts:
    names = [f"rollout-{i}" for i in range(run.rollout.num_workers)]
    found = SeparateRollouts(run, processes.cluster, names, processes.fleet(run), Meter())
    if published:
        found.publish(0)
    return found


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("way", "error"), [("kill", WorkerDied), pytest.param("raise", KeyError, marks=pytest.mark.campaign)]
)
def test_a_rank_that_is_lost_ends_the_update_with_its_own_error(
    tiny_folder: Path, way: str, error: type[Exception]
) -> None:
    run = configure(tiny_folder, "actor=full", "actor.num_ranks=2")
    run = replace(run, algorithm=Fatal(way=way))
    with ranks(Spawn(), run) as processes:
        fleet = processes.fleet(run)
        pids = processes.all(pid)
        batch = scored(list(fleet.generate(tiny.groups(4, 4), 0, 0)))
        began = time.monotonic()
        with pytest.raises(error, match="actor-1 was killed by SIGKILL" if way == "kill" else "rank 1 failed") as info:
            fleet.update(batch, advantages(batch))
        assert time.monotonic() - began < BOUND_S
    if way == "raise":
        told = "".join([*getattr(info.value, "__notes__", []), str(info.value.__cause__)])
        assert "actor-1" in told and "in loss" in told
    assert_gone(pids)


@pytest.mark.campaign  # by default a worker is killed in test_async_faults
def test_a_rollout_worker_that_dies_is_replaced_and_nothing_is_lost_or_doubled(
    tiny_folder: Path, tmp_path: Path
) -> None:
    run = standalone(tiny_folder, "rollout.on_death=restart", "rollout.max_restarts=2", "rollout.batch_size=8")
    run = with_engine(run, Mortal(str(tmp_path / "died")))
    with ranks(Spawn(), run) as processes:
        rollouts = workers(processes, run)
        groups = tiny.groups(8, 2)
        drawn = list(rollouts.generate(groups, 0))
        assert sorted(d.group.ordinal for d in drawn) == [g.ordinal for g in groups]
        assert rollouts.num_restarts == 1 and rollouts.meter.collect()["rollout/restarts"] == 1
        expected = {d.group.ordinal: d for d in rollouts.actor.generate(groups, 0, 0)}
        for found in drawn:  # also what the dead worker had drawn
            here, there = found.drawn.fetch().trajectory, expected[found.group.ordinal].drawn.fetch().trajectory
            assert (here.final_latents - there.final_latents).abs().max() < 1e-4
        (tmp_path / "died").unlink()
        rollouts.num_restarts = 2
        with pytest.raises(WorkerDied, match="rollout-"):
            list(rollouts.generate(tiny.groups(8, 2, first=8), 1))


@pytest.mark.campaign
def test_a_worker_that_dies_while_it_commits_is_replaced_or_stops_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    run = standalone(tiny_folder, "rollout.on_death=restart")
    with ranks(Spawn(), run) as processes:
        rollouts = workers(processes, with_engine(run, Mortal(str(tmp_path / "died"), at="publish")))
        rollouts.publish(1)
        assert rollouts.num_restarts == 1
        drawn = list(rollouts.generate(tiny.groups(4, 2), 0))
        assert {d.sampling.policy_version for d in drawn} == {1}


@pytest.mark.campaign
def test_a_worker_that_hangs_fails_the_publication_in_time_and_all_keep_the_old_version(tiny_folder: Path) -> None:
    run = standalone(tiny_folder, "weight_sync.timeout_s=5", "weight_sync.retries=0")
    with ranks(Spawn(), run) as processes:
        rollouts = workers(processes, run)
        stuck = rollouts.workers[1].call(pid).result()
        os.kill(stuck, signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(PublishError, match=r"rollout-1|engine 1"):
                rollouts.publish(1)
            assert time.monotonic() - began < BOUND_S
            assert rollouts.version == 0
            assert rollouts.workers[0].call(version_of).result() == 0
        finally:
            os.kill(stuck, signal.SIGCONT)
        assert rollouts.workers[1].call(version_of).result() == 0
        rollouts.publish(1)
        assert [w.call(version_of).result() for w in rollouts.workers] == [1, 1]


@pytest.mark.campaign
def test_a_worker_that_draws_nothing_counts_as_dead(tiny_folder: Path) -> None:
    run = standalone(tiny_folder, "rollout.timeout_s=3")
    with ranks(Spawn(), run) as processes:
        rollouts = workers(processes, run)
        os.kill(rollouts.workers[1].call(pid).result(), signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=r"rollout-1 drew nothing for 3 s \(rollout.timeout_s\)"):
            list(rollouts.generate(tiny.groups(8, 2), 0))


def version_of(worker: RolloutWorker) -> int:
    return worker.receiver.version


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("latents", "latents has the shape"),
        ("next_latents", "next_latents has the shape"),
        ("log_probs", "log_probs has the shape"),
        ("images", "pictures have the shape"),
        ("version", "claims version 99"),
        ("finite", "log_probs is not finite"),
    ],
)
def test_incomplete_groups_are_refused(tiny_folder: Path, field: str, message: str) -> None:
    run = configure(tiny_folder, "actor=full", "trainer.layout=standalone", "launcher=inline")
    with ranks(Inline(), run) as processes:
        rollouts = workers(processes, with_engine(run, Forgetful(field)))
        with pytest.raises(EngineError, match=message):
            list(rollouts.generate(tiny.groups(2, 2), 0))


def test_another_engine_is_asked_for_what_the_protocol_says(tiny_folder: Path, tmp_path: Path) -> None:
    """Colocated: awake to be published to and to draw, asleep while the actor works."""
    run = configure(tiny_folder, "actor=full", "trainer.layout=colocated", "launcher=inline")
    with ranks(Inline(), run) as processes:
        rollouts = workers(processes, with_engine(run, Foreign(str(tmp_path / "log"))))
        batch = scored(list(rollouts.generate(tiny.groups(4, 4), 0)))
        rollouts.actor.update(batch, advantages(batch))
        rollouts.publish(1)
        list(rollouts.generate(tiny.groups(1, 2, first=4), 1))
    assert (tmp_path / "log").read_text().split("\n")[:-1] == [
        "sleep", "wake", "publish 0", "sleep",
        "wake", "generate 0", "generate 1", "generate 2", "generate 3", "sleep",
        "wake", "publish 1", "sleep",
        "wake", "generate 4", "sleep",
    ]  # fmt: skip
