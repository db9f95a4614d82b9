"""`buffer=transfer_queue`: heavy parts move to the storage units of the TransferQueue package.

A worker, the keeper, starts the package's actors and moves what is put; the driver touches nothing heavy. Whoever
fetches a handle asks the storage units directly. The books are the same as everywhere: of the package, only its storage
is used.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

from flowrl.buffer.base import Buffer
from flowrl.buffer.replay import Store
from flowrl.config import Config, Problem
from flowrl.distributed.launch.base import Cluster, Place, Remote
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.records import pack, restore
from flowrl.types import Handle, ScoredGroup

P = ParamSpec("P")
R = TypeVar("R")

INSTALL = "pip install -e '.[transfer_queue]'"
KEEPER = "transfer-queue"
PARTITION = "flowrl"
CONTROLLER = ("TransferQueueController", "transfer_queue")  # name and namespace, by which the package finds it
QUIET = {"TQ_LOGGING_LEVEL": "ERROR", "TQ_NUM_THREADS": "1"}  # or it warns of few cores with every call


@dataclass(frozen=True, kw_only=True)
class TransferQueueBuffer(Buffer):
    """Storage units of their own, spread over the hosts of Ray's cluster, hold what is to be trained on.

    The package must be installed on every host; a cluster has one queue at a time. Its ports are open to the network
    and unpickle what anybody sends: only where the network can be trusted.

    Args:
        num_data_storage_units: processes that hold the data.
        total_storage_size: groups that the units take together; null = any number.
        start_timeout_s: for the package's processes to come up.
        timeout_s: for one group to be moved or fetched; by itself the package waits for 10 minutes if a storage unit
            has died, and for ever if its controller has.
    """

    num_data_storage_units: int = 2
    total_storage_size: int | None = None
    start_timeout_s: float = 120.0
    timeout_s: float = 120.0

    def problems(self, run: Config) -> list[Problem]:
        """The launcher, the package, and what the units must hold."""
        found = super().problems(run)
        if not isinstance(run.launcher, Ray):
            found.append(Problem("buffer", "transfer_queue needs Ray.", "Set launcher=ray, or buffer=memory."))
        if importlib.util.find_spec("transfer_queue") is None:
            found.append(Problem("buffer", "needs the package TransferQueue, which is not installed.", f"{INSTALL}."))
        for name in ("num_data_storage_units", "start_timeout_s", "timeout_s"):
            value = vars(self)[name]
            if not value > 0:
                found.append(Problem(f"buffer.{name}", f"must be greater than 0, got {value}."))
        size, least = self.total_storage_size, self.max_groups or run.data.train_batch_size
        if size is not None and size < least:
            bound = "data.train_batch_size" if self.max_groups is None else "buffer.max_groups"
            found.append(Problem("buffer.total_storage_size", f"must be at least {bound} = {least}, got {size}."))
        return found

    def places(self) -> list[Place]:
        """The keeper's."""
        return [Place(KEEPER)]

    @contextmanager
    def store(self, cluster: Cluster) -> Iterator[Store]:
        """Start the package's processes, and end them."""
        keeper = cluster.start(KEEPER, Keeper)
        try:
            ask(self.start_timeout_s, keeper, Keeper.open, self.num_data_storage_units, self.total_storage_size)
            yield QueueStore(keeper, self.timeout_s)
            ask(self.timeout_s, keeper, Keeper.close)
        finally:
            keeper.close()  # after a failure, too: Ray ends the actors of a process that has ended
            if "transfer_queue" in sys.modules:
                transfer_queue().close()  # or this process would stay with this queue when there is another


class QueueStore(Store):
    """The driver's side: the keeper is told what to move."""

    def __init__(self, keeper: Remote[Keeper], timeout_s: float) -> None:
        self._keeper = keeper
        self._timeout_s = timeout_s

    def keep(self, scored: ScoredGroup) -> ScoredGroup:
        key = uuid4().hex
        sizes = ask(self._timeout_s, self._keeper, Keeper.keep, key, scored.sampled.drawn)
        handle = InTransferQueue(key, sizes, self._timeout_s)
        return replace(scored, sampled=replace(scored.sampled, drawn=handle))

    def drop(self, kept: Sequence[ScoredGroup]) -> None:
        keys = [each.sampled.drawn.key for each in kept if isinstance(each.sampled.drawn, InTransferQueue)]
        if keys:
            ask(self._timeout_s, self._keeper, Keeper.drop, keys)


class Keeper:
    """A worker that owns the package's processes. They end with it."""

    def open(self, num_units: int, total_size: int | None) -> None:
        """Start a controller and storage units.

        The package's own `init` is passed over: its actors want a free CPU each, so it would wait for ever on a cluster
        that has exactly as many as its workers; and it would join whatever queue is there already.
        """
        settings = {"total_storage_size": total_size, "num_data_storage_units": num_units}
        self.tq = transfer_queue()
        from omegaconf import OmegaConf
        from transfer_queue.controller import TransferQueueController
        from transfer_queue.storage.simple_storage import SimpleStorageUnit

        name, namespace = CONTROLLER
        options = {"num_cpus": 0, "runtime_env": {"env_vars": QUIET}, "scheduling_strategy": "SPREAD"}
        try:
            controller = TransferQueueController.options(name=name, namespace=namespace, **options).remote()
        except ValueError as error:
            message = "the Ray cluster has a TransferQueue already, of another run or program: set buffer=memory"
            raise RuntimeError(message) from error
        units = [SimpleStorageUnit.options(**options).remote(config=settings) for _ in range(num_units)]
        self.actors = [controller, *units]  # Ray ends them when they are forgotten
        infos = [actor.get_zmq_server_info.remote().future().result() for actor in self.actors]
        storage = settings | {"zmq_info": {info.id: info for info in infos[1:]}}
        backend = {"storage_backend": "SimpleStorage", "SimpleStorage": storage}
        tree = {"controller": {"zmq_info": infos[0]}, "backend": backend}
        config = OmegaConf.create(tree, flags={"allow_objects": True})
        controller.store_config.remote(config).future().result()
        self.tq.init()  # joins

    def keep(self, key: str, handle: Handle) -> tuple[int, ...]:
        """Move what `handle` stands for; returns the sizes of its parts in bytes. It can be fetched from now on."""
        import torch

        packed = pack(handle.fetch())
        parts = [torch.frombuffer(bytearray(packed.header), dtype=torch.uint8), *map(torch.from_numpy, packed.buffers)]
        row = {str(number): part for number, part in enumerate(parts)}
        self.tq.kv_put(key=key, partition_id=PARTITION, fields=row)
        # A put whose controller was not told is only logged; this read raises then.
        self.tq.kv_batch_get(keys=key, partition_id=PARTITION, select_fields=["0"])
        return tuple(part.nbytes for part in parts)

    def drop(self, keys: Sequence[str]) -> None:
        """Free what lies under these keys."""
        self.tq.kv_clear(keys=list(keys), partition_id=PARTITION)

    def close(self) -> None:
        """End the package's processes."""
        self.tq.close()
        self.actors.clear()


@dataclass(frozen=True)
class InTransferQueue:
    """The handle of something in the storage units."""

    key: str
    sizes: tuple[int, ...]  # of the header and of each buffer, in bytes
    timeout_s: float

    @property
    def nbytes(self) -> int:
        """What lies there."""
        return sum(self.sizes)

    def fetch(self) -> Any:
        """A copy. Raises KeyError if it is there no longer, and TimeoutError if a storage unit does not answer."""
        with ThreadPoolExecutor(1) as thread:  # of its own: this one may have an event loop
            row = thread.submit(asyncio.run, self._read()).result()
        # The package packs a column of rows into one nested tensor; there is one row.
        parts = [row[str(number)].unbind()[0].numpy() for number in range(len(self.sizes))]
        return restore(parts[0].tobytes(), parts[1:])

    async def _read(self) -> Any:
        fields = [str(number) for number in range(len(self.sizes))]
        reading = transfer_queue().async_kv_batch_get(self.key, PARTITION, fields)
        try:
            return await asyncio.wait_for(reading, self.timeout_s)
        except TimeoutError as error:
            message = f"TransferQueue did not answer within {self.timeout_s:g} s (buffer.timeout_s); has a unit died?"
            raise TimeoutError(message) from error
        except (AssertionError, ValueError) as error:  # no queue; no such key
            raise KeyError(f"{self.key} is gone from the TransferQueue: {error}") from error


def transfer_queue() -> Any:
    """The package, which reads its settings from the environment when it is imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import transfer_queue as package

    return package


def ask(
    timeout_s: float,
    keeper: Remote[Keeper],
    method: Callable[Concatenate[Keeper, P], R],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Call and wait. Raises TimeoutError."""
    try:
        return keeper.call(method, *args, **kwargs).result(timeout_s)
    except TimeoutError as error:
        message = f"TransferQueue did not do {method.__name__} within {timeout_s:g} s; see buffer.timeout_s"
        raise TimeoutError(message) from error
