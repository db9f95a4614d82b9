"""What only TransferQueue has: a package, processes of its own, and data that is freed by hand."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest

from flowrl import load_config
from flowrl.buffer.ledger import Ledger
from flowrl.buffer.replay import ReplayBuffer, Store
from flowrl.buffer.transfer_queue import InTransferQueue, Keeper, QueueStore
from flowrl.config import ConfigError
from flowrl.distributed.launch.base import Cluster
from flowrl.preflight import preflight
from flowrl.types import Handle
from tests.unit.buffer.conftest import needs_package
from tests.unit.buffer.support import SOON, group, scored


class Reader:
    """Another worker."""

    def ordinal(self, handle: Handle) -> Any:
        """Of the group that the handle is of."""
        return handle.fetch()["ordinal"]


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        preflight(load_config(["buffer=transfer_queue", *overrides]))
    return [str(problem) for problem in caught.value.problems]


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transfer_queue" else found(name))
    assert problems("launcher=inline") == [
        "buffer: transfer_queue needs Ray. Set launcher=ray, or buffer=memory.",
        "buffer: needs the package TransferQueue, which is not installed. pip install -e '.[transfer_queue]'.",
    ]


@needs_package
def test_settings_that_cannot_work() -> None:
    found = problems(
        "launcher=ray",
        "data.train_batch_size=8",
        "buffer.max_groups=16",
        "buffer.total_storage_size=15",
        "buffer.num_data_storage_units=0",
        "buffer.timeout_s=0",
    )
    assert found == [
        "buffer.num_data_storage_units: must be greater than 0, got 0.",
        "buffer.timeout_s: must be greater than 0, got 0.0.",
        "buffer.total_storage_size: must be at least buffer.max_groups = 16, got 15.",
    ]


@needs_package
def test_other_workers_fetch_and_what_was_trained_is_freed(ray_cluster: Cluster, queue_store: Store) -> None:
    buffer = ReplayBuffer(Ledger(), queue_store)
    reader = ray_cluster.start("reader", Reader)
    buffer.submit([group(1), group(2)])
    buffer.put(scored(1))
    buffer.put(scored(2))
    first, second = (each.sampled.drawn for each in buffer.take(2))
    assert isinstance(first, InTransferQueue) and first.nbytes == sum(first.sizes) > 24
    assert buffer.accounting().num_bytes == first.nbytes + second.nbytes + 2 * 90
    assert [reader.call(Reader.ordinal, handle).result(SOON) for handle in (first, second)] == [1, 2]
    buffer.trained([1])
    for gone in (lambda: first.fetch(), lambda: reader.call(Reader.ordinal, first).result(SOON)):
        with pytest.raises(KeyError, match="is gone from the TransferQueue"):
            gone()
    assert reader.call(Reader.ordinal, second).result(SOON) == 2
    buffer.evict(2, "stale")
    with pytest.raises(KeyError):
        second.fetch()
    reader.close()


@contextmanager
def stopped(name: str) -> Iterator[None]:
    """The processes of that name below this one do nothing for a while."""
    family = [child for child in psutil.Process().children(recursive=True) if child.cmdline()[:1] == [name]]
    assert family
    for process in family:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in family:
            process.send_signal(signal.SIGCONT)


@needs_package
@pytest.mark.parametrize("who", ["ray::SimpleStorageUnit", "ray::TransferQueueController"])
def test_a_process_that_hangs_is_an_error_in_time(queue_store: Store, who: str) -> None:
    """The package alone would wait for 200 s three times, or for ever."""
    assert isinstance(queue_store, QueueStore)
    kept = queue_store.keep(scored(1))
    handle = kept.sampled.drawn
    assert isinstance(handle, InTransferQueue)
    impatient = QueueStore(queue_store._keeper, timeout_s=0.5)
    with stopped(who):
        with pytest.raises(TimeoutError, match=r"did not answer within 0.5 s \(buffer.timeout_s\)"):
            replace(handle, timeout_s=0.5).fetch()
        with pytest.raises(TimeoutError, match=r"did not do keep within 0.5 s"):
            impatient.keep(scored(2))
    assert handle.fetch()["ordinal"] == 1
    queue_store.drop([kept])


@needs_package
def test_a_second_queue_is_refused(ray_cluster: Cluster, queue_store: Store) -> None:
    """The package would share the first, which somebody else may clear."""
    keeper = ray_cluster.start("reader", Keeper)
    with pytest.raises(RuntimeError, match="has a TransferQueue already, of another run or program"):
        keeper.call(Keeper.open, 1, None).result(SOON)
    keeper.close()
