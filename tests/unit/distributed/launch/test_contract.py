"""What every launcher keeps to, with real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.distributed.launch.base import Cluster, Place, gather, merge, results
from flowrl.distributed.launch.failures import ClusterClosed, WorkerDied, WorkerError
from flowrl.distributed.launch.inline import InlineWorker
from tests.unit.distributed.launch.conftest import LAUNCHERS, Staff
from tests.unit.distributed.launch.support import SOON, Clerks, eventually, gone
from tests.unit.distributed.launch.workers import Clerk, fail_to_make

# ------------------------------------------------------------------------------------------ calls


def test_calls_run_in_turn_and_keep_the_worker(clerks: Clerks) -> None:
    before = clerks[0].call(Clerk.add, 0).result(SOON)
    futures = [clerks[0].call(Clerk.add, 1, times=2) for _ in range(5)]
    assert [future.result(SOON) - before for future in futures] == [2, 4, 6, 8, 10]


def test_gather_keeps_the_order_of_the_remotes(clerks: Clerks) -> None:
    before = gather(clerks, Clerk.add, [(0,), (0,)])
    assert gather(clerks, Clerk.add, [(1,), (2,)]) == [before[0] + 1, before[1] + 2]


def test_arrays_and_tensors_come_back_as_they_went(clerks: Clerks) -> None:
    sent: dict[str, Any] = {"images": np.arange(200_000, dtype=np.uint8), "weights": torch.randn(300, 2).bfloat16()}
    found = clerks[0].call(Clerk.echo, sent).result(SOON)
    np.testing.assert_array_equal(found["images"], sent["images"])
    assert found["weights"].dtype == torch.bfloat16 and torch.equal(found["weights"], sent["weights"])
    found["images"][0] = 1  # writable, wherever it comes from
    found["weights"][0] = 1


def test_an_exception_comes_as_itself(clerks: Clerks) -> None:
    with pytest.raises(ValueError, match="no good") as caught:
        clerks[1].call(Clerk.fail, "no good").result(SOON)
    if not isinstance(clerks[1], InlineWorker):
        told = str(caught.value.__cause__)
        assert told.startswith("in worker clerk-1:\nTraceback") and "in fail\n" in told
    assert clerks[1].call(Clerk.echo, 1).result(SOON) == 1


@pytest.mark.parametrize("kind", ["inline", "spawn"])  # Ray's actors have the same servicer as spawned processes
def test_what_making_a_worker_raises_comes_from_every_call(kind: str, request: pytest.FixtureRequest) -> None:
    remote = request.getfixturevalue(f"{kind}_cluster").start("spare", fail_to_make)
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="no model here"):
            remote.call(Clerk.add, 1).result(SOON)
    with pytest.raises(FileNotFoundError, match="no model here"):
        next(remote.stream(Clerk.items, [1]))


def test_what_cannot_be_sent(distant_clerks: Clerks) -> None:
    clerk = distant_clerks[0]
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        clerk.call(Clerk.echo, lambda: 1)
    with pytest.raises(WorkerError, match=r"clerk-0 failed: .*Unpicklable: a thing: a reason"):
        clerk.call(Clerk.fail_badly).result(SOON)
    with pytest.raises(WorkerError, match="SystemExit: enough"):
        clerk.call(Clerk.quit).result(SOON)
    assert clerk.call(Clerk.echo, 1).result(SOON) == 1


# ------------------------------------------------------------------------------------------ streams


def test_heavy_things_wait_behind_handles(clerks: Clerks) -> None:
    items = list(clerks[0].stream(Clerk.items, [3, 4], size=100_000))
    assert [light for light, _ in items] == [3, 4]
    for light, handle in items:
        heavy = handle.fetch()
        assert heavy.shape == (100_000,) and (heavy == light).all()
    handles = [handle for _, handle in items]
    if not isinstance(clerks[1], InlineWorker):
        assert clerks[1].call(Clerk.totals, handles).result(SOON) == [300_000, 400_000]


def test_an_empty_stream_ends_and_stays_so(clerks: Clerks) -> None:
    stream = clerks[0].stream(Clerk.items, [])
    assert list(stream) == [] and list(stream) == []


def test_a_stream_that_fails_gives_what_came_before(clerks: Clerks) -> None:
    stream = clerks[0].stream(Clerk.items_then_fail)
    light, handle = next(stream)
    assert (light, handle.fetch()) == (1, 10)
    with pytest.raises(ZeroDivisionError, match="after one"):
        next(stream)
    assert list(stream) == []
    assert clerks[0].call(Clerk.echo, "still there").result(SOON) == "still there"


def test_merge_gives_everything_once(clerks: Clerks) -> None:
    streams = [clerk.stream(Clerk.items, range(10 * index, 10 * index + 5)) for index, clerk in enumerate(clerks)]
    merged = list(merge(streams))
    assert sorted(light for light, _ in merged) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert all(int(handle.fetch()[0]) == light for light, handle in merged)


def test_merge_ends_with_the_first_failure(clerks: Clerks) -> None:
    merged = merge([clerks[0].stream(Clerk.items_then_fail), clerks[1].stream(Clerk.items, [1, 2, 3])])
    with pytest.raises(ZeroDivisionError):
        list(merged)


def test_merge_waits_for_nobody(distant_clerks: Clerks) -> None:
    gather(distant_clerks, Clerk.add, [(0,), (0,)])
    slow = distant_clerks[0].stream(Clerk.items, [1], pause=0.5)
    fast = distant_clerks[1].stream(Clerk.items, [2, 3])
    assert [light for light, _ in merge([slow, fast])] == [2, 3, 1]


def test_a_stream_begins_with_the_call(distant_clerks: Clerks, tmp_path: Path) -> None:
    stream = distant_clerks[0].stream(Clerk.touch_and_yield, tmp_path / "begun")
    assert eventually((tmp_path / "begun").exists)
    assert len(list(stream)) == 1


# ------------------------------------------------------------------------------------------ surroundings


def test_a_worker_finds_its_environment_before_any_library(distant_staff: Staff) -> None:
    environment, torch_was_there = distant_staff("spare").call(Clerk.surroundings).result(SOON)
    assert environment["OMP_NUM_THREADS"] == "1" and environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert not environment.get("CUDA_VISIBLE_DEVICES"), "none was asked for"
    assert not torch_was_there


# ------------------------------------------------------------------------------------------ ends


def test_a_death_ends_what_was_being_done_and_leaves_what_was_done(distant_staff: Staff) -> None:
    victim, witness = distant_staff("clerk-0"), distant_staff("clerk-1")
    stream = victim.stream(Clerk.items_then_die)
    later = victim.call(Clerk.add, 1)
    light, handle = next(stream)
    for lost in (lambda: next(stream), later.result, lambda: victim.call(Clerk.add, 1).result(SOON)):
        with pytest.raises(WorkerDied, match=r"worker clerk-0 .*out of memory"):
            lost()
    assert (light, witness.call(Clerk.echo, handle).result(SOON).fetch()) == (1, 10)
    replacement = distant_staff("clerk-0")
    assert replacement is not victim and replacement.call(Clerk.add, 7).result(SOON) == 7


def test_the_dead_are_named_before_those_who_miss_them(distant_clerks: Clerks) -> None:
    with pytest.raises(WorkerDied, match="worker clerk-1") as caught:
        gather(distant_clerks, Clerk.lose_peer, [("complain",), ("die",)])
    assert "RuntimeError: [pair.cc:534] Connection closed by peer" in caught.value.__notes__[-1]


def test_a_worker_is_closed_with_what_it_has_started(distant_staff: Staff) -> None:
    clerk = distant_staff("clerk-0")
    pids = clerk.call(Clerk.pid).result(SOON), clerk.call(Clerk.child).result(SOON)
    hanging = clerk.call(Clerk.sleep, 600)
    clerk.close(grace_s=0.1)
    clerk.close()
    assert gone(*pids)
    for lost in (hanging, clerk.call(Clerk.pid), clerk.stream(Clerk.items, [1]).ask()):
        with pytest.raises(WorkerDied, match="clerk-0 was closed"):
            lost.result(SOON)


@pytest.mark.parametrize("kind", ["inline", "spawn", "ray"])
def test_nothing_is_started_once_the_cluster_is_closed(kind: str, ray_cluster: Cluster) -> None:
    with LAUNCHERS[kind].open([Place("late")]) as cluster:
        pass
    cluster.close()
    with pytest.raises(ClusterClosed, match="worker late cannot be started: its cluster is closed"):
        cluster.start("late", Clerk)


def test_a_real_error_waits_for_nobody(hire: Callable[[str], Staff]) -> None:
    clerks = [hire("spawn")("clerk-0"), hire("spawn")("clerk-1")]
    started = time.monotonic()
    with pytest.raises(ValueError, match="wrong"):
        gather(clerks, Clerk.sleep_or_fail, [(600, ""), (0, "wrong")])
    with pytest.raises(TimeoutError):
        results([clerks[0].call(Clerk.pid)], timeout_s=0.1)
    assert time.monotonic() - started < SOON
    clerks[0].close(grace_s=0)


def test_a_complaint_without_a_death_is_raised_itself(hire: Callable[[str], Staff]) -> None:
    clerks = [hire("spawn")("clerk-0"), hire("spawn")("clerk-1")]
    with pytest.raises(RuntimeError, match="closed by peer"):
        gather(clerks, Clerk.lose_peer, [("complain",), ("complain",)])
