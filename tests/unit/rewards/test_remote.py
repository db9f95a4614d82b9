"""Reward workers at the places of a cluster; what Ray adds to it is tested with the launchers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.distributed.launch.base import Cluster, Place
from flowrl.distributed.launch.spawn import Spawn, SpawnCluster
from flowrl.prompts import Prompt
from flowrl.rewards.combine import Component
from flowrl.rewards.pool import RewardPool
from flowrl.rewards.remote import OnCluster, RemoteWorker
from flowrl.rewards.scoring import Request, RewardError
from tests.unit.rewards.scorers import Brightness, CannotLoad, Obeys, Surroundings, VisibleGPUs
from tests.unit.rewards.support import SOON, sampled_group
from tests.unit.rewards.test_pool import assert_gone, wait_for


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Spawn(num_threads=1).open([Place("reward-0"), Place("reward-1")]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[RemoteWorker]:
    worker = OnCluster(cluster)(0, {"style": Obeys()}, SOON)
    yield worker
    worker.close()


def request(component: str = "style", timeout_s: float = SOON, **orders: Any) -> Request:
    """Two grey pictures, and orders for `Obeys`."""
    images = np.full((2, 4, 4, 3), 51, np.uint8)
    return Request(component, images, Prompt("p0", "text", metadata=orders), ("p0:0:0", "p0:0:1"), timeout_s)


def test_a_pool_scores_on_a_cluster(cluster: Cluster) -> None:
    components = {"style": Component(scorer=Brightness()), "obedience": Component(scorer=Obeys())}
    groups = [sampled_group(ordinal) for ordinal in range(4)]
    with RewardPool(components, num_workers=2, make_worker=OnCluster(cluster)) as pool:
        pool.warm()
        scored = list(pool.stream(groups))
    for group, result in zip(groups, scored, strict=True):
        assert result.sampled is group
        np.testing.assert_array_equal(result.rewards["style"], group.images.mean(axis=(1, 2, 3)) / 255)
        np.testing.assert_array_equal(result.rewards["obedience"], [1, 1])


def test_errors_of_scorers_are_named(worker: RemoteWorker) -> None:
    with pytest.raises(RewardError, match=r"'style' failed on prompt 'p0' .*: ZeroDivisionError") as caught:
        worker.score(request(then="raise"))
    assert "in a_function_of_the_scorer" in caught.value.__notes__[0]
    assert worker.score(request()).tolist() == [1, 1]


def test_a_worker_that_hangs_is_killed_in_time_and_replaced(worker: RemoteWorker, tmp_path: Path) -> None:
    log, child = tmp_path / "pid", tmp_path / "child"
    with pytest.raises(RewardError, match="did not answer within 1 s and was stopped"):
        worker.score(request(timeout_s=1.0, sleep=600, log=str(log), child=str(child)))
    assert_gone(wait_for(log))
    assert_gone(wait_for(child))
    assert worker.score(request()).tolist() == [1, 1]


def test_a_worker_that_dies_is_replaced(worker: RemoteWorker) -> None:
    with pytest.raises(RewardError, match=r"worker reward-0 ended with exit code 3"):
        worker.score(request(then="exit"))
    assert worker.score(request()).tolist() == [1, 1]


def test_a_component_that_cannot_be_loaded(cluster: Cluster) -> None:
    worker = OnCluster(cluster)(1, {"big": CannotLoad()}, SOON)
    for _ in range(2):
        with pytest.raises(RewardError, match="'big' failed on loading: FileNotFoundError: no model"):
            worker.wait()
    worker.close()


def test_torch_is_not_there(cluster: Cluster) -> None:
    worker = OnCluster(cluster)(1, {"style": Surroundings()}, SOON)
    assert worker.score(request()).tolist() == [0, 1]
    worker.close()


@pytest.mark.parametrize(("on_gpu", "number"), [(False, 0), (True, 2)])
def test_gpus_are_seen_by_those_who_are_to_have_them(on_gpu: bool, number: int) -> None:
    """Whatever the cluster shows a place that asks for none."""
    cluster = SpawnCluster({"reward-0": {"CUDA_VISIBLE_DEVICES": "0,1"}}, SOON)
    worker = OnCluster(cluster, on_gpu=on_gpu)(0, {"style": VisibleGPUs()}, SOON)
    assert worker.score(request()).tolist() == [number] * 2
    cluster.close()


def test_closing_ends_whoever_waits(cluster: Cluster, tmp_path: Path) -> None:
    worker, errors = OnCluster(cluster)(1, {"style": Obeys()}, SOON), []

    def ask() -> None:
        try:
            worker.score(request(timeout_s=600, sleep=600, log=str(tmp_path / "pid")))
        except RewardError as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    pid = wait_for(tmp_path / "pid")
    os.kill(pid, signal.SIGSTOP)
    worker.close()
    thread.join(SOON)
    assert errors and "was closed" in errors[0]
    with pytest.raises(RewardError, match="the worker is closed"):
        worker.score(request())


def test_nobody_is_started_when_the_cluster_has_been_closed() -> None:
    with Spawn(num_threads=1).open([Place("reward-0")]) as cluster:
        worker = OnCluster(cluster)(0, {"style": Obeys()}, SOON)
    worker.start()
    worker.wait()
    with pytest.raises(RewardError, match="the worker is closed"):
        worker.score(request())
    worker.close()
