"""What every launcher keeps to, with real processes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.distributed.launch.base import Cluster, gather, merge, results
from flowrl.distributed.launch.failures import WorkerDied, WorkerError
from flowrl.distributed.launch.inline import InlineWorker
from tests.unit.distributed.launch.support import SOON, Clerks, Guests, eventually, gone
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
    sent = {"images": np.arange(200_000, dtype=np.uint8), "weights": torch.randn(300, 2).bfloat16()}
    found = clerks[0].call(Clerk.echo, sent).result(SOON)
    np.testing.assert_array_equal(found["images"], sent["images"])
    assert found["weights"].dtype == torch.bfloat16 and torch.equal(found["weights"], sent["weights"])
    found["images"][0] = 1  # writable, wherever it comes from
    found["weights"][0] = 1


def test_an_exception_comes_as_itself(clerks: Clerks) -> None:
    with pytest.raises(ValueError, match="no good") as caught:
        clerks[1].call(Clerk.fail, "no good").result(SOON)
    if not isinstance(clerks[1], InlineWorker):
        (note,) = caught.value.__notes__
        assert note.startswith("In worker clerk-1:") and "in fail\n" in note
    assert clerks[1].call(Clerk.echo, 1).result(SOON) == 1


@pytest.mark.parametrize("kind", ["inline", "spawn", "ray"])
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
        heavy[:] = 0  # one's own
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


# ------------------------------------------------------------------------------------------ deaths


def test_a_death_ends_what_was_being_done_and_leaves_what_was_done(
    processes: Cluster, victims: Clerks, guests: Guests
) -> None:
    stream = victims[0].stream(Clerk.items_then_die)
    later = victims[0].call(Clerk.add, 1)
    light, handle = next(stream)
    for lost in (lambda: next(stream), later.result, lambda: victims[0].call(Clerk.add, 1).result(SOON)):
        with pytest.raises(WorkerDied, match=r"worker guest-0 .*out of memory"):
            lost()
    assert (light, victims[1].call(Clerk.echo, handle).result(SOON).fetch()) == (1, 10)
    guests[processes, "guest-0"] = processes.start("guest-0", partial(Clerk, 3))
    assert guests[processes, "guest-0"].call(Clerk.add, 7).result(SOON) == 10


def test_the_dead_are_named_before_those_who_miss_them(victims: Clerks) -> None:
    with pytest.raises(WorkerDied, match="worker guest-1") as caught:
        gather(victims, Clerk.lose_peer, [("complain",), ("die",)])
    assert "RuntimeError: [pair.cc:534] Connection closed by peer" in caught.value.__notes__[-1]


def test_a_worker_is_closed_with_what_it_has_started(victims: Clerks) -> None:
    pids = victims[0].call(Clerk.pid).result(SOON), victims[0].call(Clerk.child).result(SOON)
    hanging = victims[0].call(Clerk.sleep, 600)
    victims[0].close(grace_s=0.1)
    victims[0].close()
    assert gone(*pids)
    for lost in (hanging, victims[0].call(Clerk.pid)):
        with pytest.raises(WorkerDied, match="guest-0 was closed"):
            lost.result(SOON)


def test_a_real_error_waits_for_nobody(spawn_cluster: Cluster) -> None:
    workers = [spawn_cluster.start(f"guest-{index}", Clerk) for index in range(2)]
    gather(workers, Clerk.add, [(0,), (0,)])
    started = time.monotonic()
    with pytest.raises(ValueError, match="wrong"):
        gather(workers, Clerk.sleep_or_fail, [(600, ""), (0, "wrong")])
    assert time.monotonic() - started < SOON


def test_results_that_do_not_come_in_time(spawn_cluster: Cluster) -> None:
    worker = spawn_cluster.start("guest-0", Clerk)
    with pytest.raises(TimeoutError):
        results([worker.call(Clerk.sleep, 600)], timeout_s=0.1)
    assert results([spawn_cluster.start("guest-0", Clerk).call(Clerk.add, 1)], timeout_s=SOON) == [1]


def test_a_complaint_without_a_death_is_raised_itself(spawn_cluster: Cluster) -> None:
    workers = [spawn_cluster.start(f"guest-{index}", Clerk) for index in range(2)]
    with pytest.raises(RuntimeError, match="closed by peer"):
        gather(workers, Clerk.lose_peer, [("complain",), ("complain",)])
