"""What the two sides of a transfer do for themselves; whole publications: `test_publisher`."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from flowrl.distributed.weight_sync.errors import AbortedError, PublishError, TransferError
from flowrl.distributed.weight_sync.transports import base, cuda_ipc
from flowrl.distributed.weight_sync.transports.base import FAILED, Meeting, Signals
from flowrl.distributed.weight_sync.transports.broadcast import Group
from flowrl.distributed.weight_sync.transports.cuda_ipc import CudaIPCInlet, CudaIPCOutlet, match
from flowrl.distributed.weight_sync.transports.sharing import SharedBuffers, adopt
from tests.unit.distributed.weight_sync.workers import CPU, Trainer


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """The driver's."""
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_store_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CONNECT_S", 0.5)
    with pytest.raises(TransferError, match="does not answer"):
        Meeting("127.0.0.1", 1, "key", 0.5).join()


def test_engines_are_matched_by_device() -> None:
    assert match(["GPU a", "GPU b"], ["GPU b", "GPU a"]) == (1, 0)
    assert match(["GPU a"], ["GPU a", "GPU a"]) == (0, 0)
    assert match(["host", "host"], ["host", "host"]) == (0, 1)
    with pytest.raises(PublishError, match="engine 1 is on GPU c, where no trainer rank is"):
        match(["GPU a", "GPU b"], ["GPU a", "GPU c"])


# ---------------------------------------------------------------------------------------------- failures


class Blocking:
    """A backend that notes whether the others had been told when it was to be aborted, which could block."""

    def __init__(self, store: TCPStore) -> None:
        self.store = store
        self.told: list[bool] = []

    def abort(self) -> None:
        self.told.append(self.store.check([FAILED]))

    def shutdown(self) -> None:
        pass


def test_a_group_tells_the_others_before_it_aborts(store: TCPStore) -> None:
    group, backend = Group(Signals(store, 1), 0, 2, CPU), Blocking(store)
    group._made.append((None, backend))  # type: ignore[arg-type]
    group.close("out of memory")
    assert backend.told == [True]


def test_nobody_waits_in_the_backend_for_a_party_that_gave_up_before(store: TCPStore) -> None:
    gone, late = Group(Signals(store, 10), 0, 2, CPU), Group(Signals(store, 10), 1, 2, CPU)
    gone.signals.fail("out of memory")
    with pytest.raises(AbortedError, match="out of memory"):
        gone.open()
    store.delete_key(FAILED)  # as if the late one had looked just before
    began = time.monotonic()
    with pytest.raises(AbortedError, match="another party"):
        late.open()
    assert time.monotonic() - began < 2


def test_no_bucket_is_begun_once_a_party_has_failed(store: TCPStore) -> None:
    group = Group(Signals(store, 10), 0, 2, CPU)
    group.signals.fail("out of memory")
    with pytest.raises(AbortedError, match="out of memory"):
        group.broadcast(torch.zeros(16, dtype=torch.uint8))


def test_shared_buffers_are_given_back_after_the_others_were_told(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(SharedBuffers, "release", lambda self: told.append(store.check([FAILED])))
    monkeypatch.setattr(cuda_ipc, "forget", lambda *_: told.append(store.check([FAILED])))
    CudaIPCOutlet(Signals(store, 1), 0, [0], Trainer("full").plan(1), CPU).close("out of memory")
    store.delete_key(FAILED)
    CudaIPCInlet(Signals(store, 1), 0, 0, CPU).close("out of memory")
    assert told == [True, True]


def test_a_store_that_has_gone_does_not_hide_why_a_transfer_failed() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=2))
    signals = Signals(client, 1)
    del server
    with pytest.raises(TransferError, match="does not answer any more"):
        signals.bump("joined")
    signals.fail("out of memory")


# ---------------------------------------------------------------------------------------------- shared memory


def test_shared_buffers_are_the_same_memory() -> None:
    shared = SharedBuffers(CPU)
    shared.take(2, 48)
    theirs = adopt(shared.handles(), CPU)
    shared.tensors[1][7] = 5
    assert [tensor.numel() for tensor in theirs] == [48, 48]
    assert theirs[1][7] == 5 and theirs[0].count_nonzero() == 0
    handles = shared.handles()
    shared.release()
    assert theirs[1][7] == 5  # as long as the other process wants
    with pytest.raises(PublishError, match="cannot take over the trainer's buffers"):
        adopt(handles, CPU)


class Evil:
    """A pickle that runs what it likes."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def test_handles_from_the_network_run_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for device in (CPU, torch.device("cuda", 0)):
        for handles in (pickle.dumps([Evil(mark)]), b"", json.dumps([{"storage_handle": 1}]).encode(), b"[[1]]"):
            with pytest.raises(PublishError, match="cannot take over"):
                adopt(handles, device)
    assert not mark.exists()
