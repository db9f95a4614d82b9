"""Ranks that find each other, and one that is lost."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from flowrl.distributed import rendezvous
from flowrl.distributed.launch.base import Place, gather
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.distributed.launch.spawn import Spawn
from flowrl.distributed.rendezvous import Address


class Rank:
    """Joins, sums, and may die of it."""

    def listen(self) -> Address:
        self.store, address = rendezvous.open_store(timeout_s=30)
        return address

    def join(self, address: Address, rank: int, world_size: int) -> None:
        store = self.store if rank == 0 else rendezvous.connect(address, timeout_s=30)
        rendezvous.join(store, rank, world_size, "gloo", timeout_s=60)

    def sum(self, value: float, *, die: bool = False) -> float:
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor(value)
        dist.all_reduce(total)
        return float(total)

    def sum_or_die(self, value: float, die: bool) -> float:
        return self.sum(value, die=die)

    def leave(self) -> None:
        dist.destroy_process_group()


def test_ranks_meet_and_a_lost_one_is_named() -> None:
    with Spawn(num_threads=1).open([Place("rank-0"), Place("rank-1")]) as cluster:
        ranks = [cluster.start(f"rank-{index}", Rank) for index in range(2)]
        address = ranks[0].call(Rank.listen).result(timeout=60)
        assert address.port > 0
        for _ in range(2):  # a group can be left and made anew
            gather(ranks, Rank.join, [(address, rank, 2) for rank in range(2)])
            assert gather(ranks, Rank.sum, [(1.5,), (2.0,)]) == [3.5, 3.5]
            gather(ranks, Rank.leave, [(), ()])
            address = ranks[0].call(Rank.listen).result(timeout=60)
        gather(ranks, Rank.join, [(address, rank, 2) for rank in range(2)])
        with pytest.raises(WorkerDied, match="rank-1 was killed by SIGKILL"):
            gather(ranks, Rank.sum_or_die, [(1.0, False), (1.0, True)])


@pytest.mark.parametrize(("timeout_s", "connect_s"), [(0.2, 30.0), (1800.0, 0.2)])
def test_nobody_at_the_address(timeout_s: float, connect_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said soon, however long collectives may take."""
    monkeypatch.setattr(rendezvous, "CONNECT_S", connect_s)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        port = taken.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(ConnectionError, match=rf"no connection to 127\.0\.0\.1, port {port}, within 0.2 s"):
            rendezvous.connect(Address("127.0.0.1", port), timeout_s)
    assert time.monotonic() - started < 20


def test_waiting_in_the_store_has_the_time_that_was_given() -> None:
    store, address = rendezvous.open_store(timeout_s=1800, host="127.0.0.1")
    other = rendezvous.connect(address, timeout_s=1800)
    assert other.timeout == store.timeout == timedelta(seconds=1800)  # type: ignore[attr-defined]


def test_an_address_of_this_host() -> None:
    assert rendezvous.node_address().count(".") == 3
