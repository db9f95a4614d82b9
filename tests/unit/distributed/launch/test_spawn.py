"""What only spawned processes have: shared memory, an environment, and a main script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from flowrl.distributed.launch import wire
from flowrl.distributed.launch.base import Cluster, Place
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.distributed.launch.shelf import Shelf
from flowrl.distributed.launch.spawn import Spawn
from flowrl.distributed.records import pack
from tests.unit.distributed.launch.conftest import Staff
from tests.unit.distributed.launch.support import SOON, Clerks, eventually, gone
from tests.unit.distributed.launch.test_ends import REPOSITORY, shelved
from tests.unit.distributed.launch.workers import Clerk


@pytest.fixture
def clerks(hire: Callable[[str], Staff]) -> Clerks:
    """Of the cluster of the folder."""
    return [hire("spawn")("clerk-0"), hire("spawn")("clerk-1")]


# ------------------------------------------------------------------------------------------ shared memory


def test_shared_memory_goes_with_the_last_handle(clerks: Clerks) -> None:
    before = shelved(os.getpid())
    handles = [handle for _, handle in clerks[0].stream(Clerk.items, [1, 2, 3])]
    assert len(shelved(os.getpid()) - before) == 3
    future = clerks[1].call(Clerk.total, handles[0])
    del handles[0]  # while it may still be on its way
    assert future.result(SOON) == 1000
    assert eventually(lambda: len(shelved(os.getpid()) - before) == 2)
    del handles
    assert shelved(os.getpid()) == before


def test_closing_takes_everything_with_it() -> None:
    before = shelved(os.getpid())
    with Spawn(num_threads=1).open([Place("clerk")]) as cluster:
        clerk = cluster.start("clerk", Clerk)
        items = list(clerk.stream(Clerk.items, [1, 2]))
        unread = clerk.stream(Clerk.items, [3])
        pid = clerk.call(Clerk.pid).result(SOON)
        assert len(shelved(os.getpid()) - before) == 3
    assert gone(pid) and shelved(os.getpid()) == before
    with pytest.raises(KeyError, match="its run has ended"):
        items[0][1].fetch()
    assert next(unread)[0] == 3


def test_no_room_is_the_workers_error(spawn_cluster: Cluster) -> None:
    before = shelved(os.getpid())
    clerk = spawn_cluster.start("spare", Clerk)
    clerk.call(Clerk.write_at_most, 100_000).result(SOON)
    with pytest.raises(OSError, match=r"1 MiB do not fit; enlarge /dev/shm \(docker: --shm-size\)"):
        list(clerk.stream(Clerk.items, [1], size=100_000))
    assert shelved(os.getpid()) == before
    assert len(list(clerk.stream(Clerk.items, [1], size=100))) == 1


def test_a_shelf_has_room_for_large_and_empty_things() -> None:
    shelf = Shelf()
    try:
        value = {"large": np.arange(3_000_000), "empty": np.zeros((0, 3)), "none": None}
        found = shelf.put(pack(value)).fetch()
        np.testing.assert_array_equal(found["large"], value["large"])
        assert found["empty"].shape == (0, 3) and found["none"] is None
    finally:
        shelf.clear()


# ------------------------------------------------------------------------------------------ processes


def test_the_end_of_a_process_is_told(spawn_cluster: Cluster) -> None:
    with pytest.raises(WorkerDied, match=r"worker spare ended with exit code 3$"):
        spawn_cluster.start("spare", Clerk).call(Clerk.end, 3).result(SOON)


def test_whoever_calls_is_not_held_up_by_a_process_that_does_not_listen(spawn_cluster: Cluster) -> None:
    clerk = spawn_cluster.start("spare", Clerk)
    os.kill(clerk.call(Clerk.pid).result(SOON), signal.SIGSTOP)
    futures = [clerk.call(Clerk.echo, np.zeros(10_000_000, np.uint8)) for _ in range(2)]
    clerk.close(grace_s=0.1)
    for future in futures:
        with pytest.raises(WorkerDied, match="was closed"):
            future.result(SOON)


def test_an_answer_that_cannot_be_received(hire: Callable[[str], Staff], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it for ever, nor for those after it."""
    clerk = hire("spawn")("spare")
    pid = clerk.call(Clerk.pid).result(SOON)

    def receive(connection: Connection) -> NoReturn:
        raise MemoryError("too large")

    monkeypatch.setattr(wire, "receive", receive)
    for lost in [clerk.call(Clerk.echo, 1), clerk.stream(Clerk.items, [1]).ask(), clerk.call(Clerk.sleep, 600)]:
        with pytest.raises(WorkerDied, match=r"spare was stopped: .* could not be received \(MemoryError: too large\)"):
            lost.result(SOON)
    assert gone(pid)


def test_arguments_are_those_of_the_moment_of_the_call(clerks: Clerks) -> None:
    clerks[0].call(Clerk.sleep, 0.3)
    array = np.ones(1000)
    future = clerks[0].call(Clerk.echo, array)
    array[:] = 0
    assert (future.result(SOON) == 1).all()


def test_a_process_that_does_not_come_up_is_stopped() -> None:
    with Spawn(start_timeout_s=0.001).open([Place("clerk")]) as cluster:
        clerk = cluster.start("clerk", Clerk)
        with pytest.raises(WorkerDied, match=r"did not come up within 0.001 s \(launcher.start_timeout_s\)"):
            clerk.call(Clerk.pid).result(SOON)


def test_a_main_script_that_starts_workers_on_import(tmp_path: Path) -> None:
    script = tmp_path / "careless.py"
    script.write_text(
        "from flowrl.distributed.launch.base import Place\n"
        "from flowrl.distributed.launch.spawn import Spawn\n"
        "from tests.unit.distributed.launch.workers import Clerk\n"
        "with Spawn().open([Place('clerk')]) as cluster:\n"
        "    cluster.start('clerk', Clerk).call(Clerk.pid).result()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert 'put what that runs under `if __name__ == "__main__":`' in ended.stderr.splitlines()[-1]


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="start_timeout_s must be greater than 0, got 0"):
        Spawn(start_timeout_s=0)
