"""Every backend. All tests of the folder share one Ray session and one TransferQueue, which take seconds to start."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flowrl.buffer.base import Buffer
from flowrl.buffer.ledger import Ledger
from flowrl.buffer.memory import MemoryBuffer
from flowrl.buffer.replay import ReplayBuffer, Store
from flowrl.buffer.transfer_queue import TransferQueueBuffer
from flowrl.distributed.launch.base import Cluster, Place
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.ray import Ray

MakeBuffer = Callable[..., ReplayBuffer]  # with the arguments of `Ledger`

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("transfer_queue") is None, reason="TransferQueue is not installed"
)


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Cluster]:
    """As many logical CPUs as there are places: none for actors that want their own."""
    with Ray(num_threads=1).open([Place("reader"), *TransferQueueBuffer().places()]) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def memory_store() -> Iterator[Store]:
    """Nothing to be started."""
    with Inline().open([]) as cluster, MemoryBuffer().store(cluster) as store:
        yield store


@pytest.fixture(scope="package")
def queue_store(ray_cluster: Cluster) -> Iterator[Store]:
    """Of a running TransferQueue."""
    buffer: Buffer = TransferQueueBuffer(timeout_s=60.0)
    with buffer.store(ray_cluster) as store:
        yield store


@pytest.fixture(params=["memory", pytest.param("queue", marks=needs_package)])
def make_buffer(request: pytest.FixtureRequest) -> MakeBuffer:
    """A new buffer of each backend, over a store that all tests share."""
    store: Store = request.getfixturevalue(f"{request.param}_store")

    def make(**bounds: Any) -> ReplayBuffer:
        return ReplayBuffer(Ledger(**bounds), store)

    return make
