"""The driver's side of publications. It holds no weights; the number of its calls does not depend on their size."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from flowrl.distributed.launch.base import Remote, Stream
from flowrl.distributed.launch.failures import WorkerDied, is_consequence
from flowrl.distributed.rendezvous import Address, open_store
from flowrl.distributed.weight_sync.checksum import Checksums, verify
from flowrl.distributed.weight_sync.errors import AbortedError, PublishError, TransferError, some
from flowrl.distributed.weight_sync.manifest import Manifest
from flowrl.distributed.weight_sync.transports.base import Link, Meeting, Signals
from flowrl.distributed.weight_sync.transports.broadcast import Broadcast
from flowrl.distributed.weight_sync.transports.cuda_ipc import CudaIPC, match
from flowrl.distributed.weight_sync.transports.parcels import Parcels
from flowrl.types import Handle

Transport = Literal["broadcast", "cuda_ipc", "object_store"]
ATTEMPTS = "publication"  # what their keys in the store begin with
log = logging.getLogger(__name__)
T = TypeVar("T")


class Publishes(Protocol):
    """A worker of the actor: what a `Sender` does, with the weights that rollouts sample with."""

    def plan(self, version: int) -> Manifest:
        """`Sender.plan`; rank 0 alone is asked."""
        ...

    def send(self, manifest: Manifest, link: Link | None) -> Checksums | None:
        """`Sender.send`."""
        ...

    def leave(self, manifest: Manifest) -> Iterator[tuple[Checksums, Tensor]]:
        """`Sender.stream`; rank 0 alone is asked."""
        ...

    def device_identity(self) -> str:
        """`cuda_ipc.identity` of its device."""
        ...


class Receives(Protocol):
    """A rollout worker: what a `Receiver` does."""

    def expect(self, manifest: Manifest) -> None:
        """`Receiver.expect`."""
        ...

    def receive(self, manifest: Manifest, link: Link, engine: int) -> Checksums:
        """`Receiver.receive`."""
        ...

    def commit(self) -> int:
        """`Receiver.commit`. The version that it samples with from now on."""
        ...

    def drop(self) -> None:
        """`Receiver.drop`."""
        ...

    def device_identity(self) -> str:
        """`cuda_ipc.identity` of its device."""
        ...


A = TypeVar("A", bound=Publishes)
E = TypeVar("E", bound=Receives)


@dataclass(frozen=True)
class Published:
    """What a publication took."""

    version: int
    num_tensors: int
    num_bytes: int
    num_failures: int  # attempts before the one that succeeded
    seconds: float  # all attempts

    def metrics(self) -> dict[str, float]:
        """By their names in the log."""
        return {
            "publish/version": self.version,
            "publish/tensors": self.num_tensors,
            "publish/bytes": self.num_bytes,
            "publish/failures": self.num_failures,
            "perf/publication_s": self.seconds,
        }


class Publisher(Generic[A]):
    """Brings versions from the trainer's ranks to engines, which commit once all of them have verified all of it.

    Whatever fails before the first commit leaves every engine on its old version. A commit takes no memory and waits
    for nobody, so what can still fail then is a process or its device: that engine is lost, and others may have the
    new version. They all meet again in the next publication that succeeds, which may be of the same version.

    Args:
        trainers: all ranks, rank 0 first.
        transport: one that the placement of trainers and engines allows.
        timeout_s: for one transfer; after it, it has failed.
        grace_s: beyond that, for all parties to say so.
        retries: further attempts after a transfer that failed.
        host: this process's address as the workers reach it; None looks it up.
    """

    def __init__(
        self,
        trainers: Sequence[Remote[A]],
        transport: Transport,
        *,
        timeout_s: float = 600.0,
        grace_s: float = 30.0,
        retries: int = 1,
        host: str | None = None,
    ) -> None:
        self.trainers = trainers
        self.transport = transport
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self.retries = retries
        self.host = host
        self._num_attempts = 0
        self._served: tuple[TCPStore, Address] | None = None

    def publish(self, version: int, engines: Sequence[Remote[E]]) -> Published:
        """The trainer's present weights become `version` on every engine.

        Raises:
            PublishError: trainer and engine do not fit together, or the last attempt failed (`TransferError`). Every
                engine keeps the version it has.
            WorkerDied: of any worker. If it died while it committed, others may have committed; else as above.
        """
        began = time.monotonic()
        for failures in range(self.retries + 1):
            try:
                manifest = self._attempt(version, engines)
            except TransferError as error:
                if failures == self.retries:
                    raise
                log.warning("%s Version %d is published again.", error, version)
            else:
                sizes = len(manifest.entries), sum(entry.nbytes for entry in manifest.entries)
                return Published(version, *sizes, failures, time.monotonic() - began)
        raise AssertionError("unreachable")

    def _attempt(self, version: int, engines: Sequence[Remote[E]]) -> Manifest:
        try:
            manifest = self._settle(self.trainers[:1], [self.trainers[0].call(_plan, version)])[0]
            self._settle(engines, [engine.call(_expect, manifest) for engine in engines])
            sent, received = self._transfer(manifest, engines)
            names = [engine.name for engine in engines]
            verify(manifest, sent, dict(zip(names, received, strict=True)))
            committed = self._settle(engines, [engine.call(_commit) for engine in engines])
        except BaseException:
            wait([engine.call(_drop) for engine in engines], self.grace_s)
            raise
        if set(committed) != {version}:
            raise PublishError(f"version {version} was committed as {sorted(set(committed))}.")
        return manifest

    # ------------------------------------------------------------------------------------------ transfer

    def _transfer(self, manifest: Manifest, engines: Sequence[Remote[E]]) -> tuple[list[Checksums], list[Checksums]]:
        """Checksums of the ranks that sent, and of the engines in their order."""
        if self.transport == "object_store":
            return self._by_handles(manifest, engines)
        link = self._link(engines)
        sends = [trainer.call(_send, manifest, link) for trainer in self.trainers]
        receives = [engine.call(_receive, manifest, link, i) for i, engine in enumerate(engines)]
        parties: list[Remote[Any]] = [*self.trainers, *engines]
        futures: list[Future[Any]] = [*sends, *receives]
        try:
            self._settle(parties, futures, link.meeting)
        finally:
            if all(future.done() for future in futures):  # a party that is stuck has to find the reason to give up
                self._tidy()
        return [sent for future in sends if (sent := future.result())], [future.result() for future in receives]

    def _by_handles(self, manifest: Manifest, engines: Sequence[Remote[E]]) -> tuple[list[Checksums], list[Checksums]]:
        parcels = collected(self.trainers[0].stream(_leave, manifest))
        helpers = [trainer.call(_send, manifest, None) for trainer in self.trainers[1:]]
        futures: list[Future[Any]] = [parcels, *helpers]
        self._settle(self.trainers, futures)
        shares, handles = zip(*parcels.result(), strict=True)
        link = Parcels(handles)
        receives = [engine.call(_receive, manifest, link, i) for i, engine in enumerate(engines)]
        return [sum(shares, start=Checksums.none(manifest))], self._settle(engines, receives)

    def _link(self, engines: Sequence[Remote[E]]) -> Broadcast | CudaIPC:
        """A fresh one for every attempt."""
        self._num_attempts += 1
        _, address = self._store()
        meeting = Meeting(address.host, address.port, f"{ATTEMPTS}/{self._num_attempts}", self.timeout_s)
        if self.transport == "broadcast":
            return Broadcast(meeting, len(engines))
        ranks = self._settle(self.trainers, [trainer.call(_device) for trainer in self.trainers])
        devices = self._settle(engines, [engine.call(_device) for engine in engines])
        return CudaIPC(meeting, match(ranks, devices))

    def _store(self) -> tuple[TCPStore, Address]:
        """Served from the first need on, for all publications."""
        if self._served is None:
            self._served = open_store(self.timeout_s, self.host)
        return self._served

    def _tidy(self) -> None:
        """What attempts have left in the store; nobody is in one."""
        store, _ = self._store()
        for key in store.list_keys():
            if key.startswith(f"{ATTEMPTS}/"):
                store.delete_key(key)

    # ------------------------------------------------------------------------------------------ answers

    def _settle(
        self, remotes: Sequence[Remote[Any]], futures: Sequence[Future[T]], meeting: Meeting | None = None
    ) -> list[T]:
        """All answers, or the error that explains the others, once nobody works on the attempt any more."""
        done, pending = wait(futures, self.timeout_s + self.grace_s, FIRST_EXCEPTION)
        errors = _errors(futures, done)
        if pending:
            if meeting is not None:
                reason = str(errors[0]) if errors else "a party does not answer"
                store, _ = self._store()
                Signals(PrefixStore(meeting.key, store), self.grace_s).fail(reason)
            done, pending = wait(pending, self.grace_s)
            errors += _errors(futures, done)
        if not errors and not pending:
            return [future.result() for future in futures]
        stuck = [remote.name for remote, future in zip(remotes, futures, strict=True) if future in pending]
        raise _explained(root_of(errors), stuck)


def _errors(futures: Sequence[Future[T]], done: set[Future[T]]) -> list[BaseException]:
    return [error for future in futures if future in done and (error := future.exception()) is not None]


def _explained(root: BaseException | None, stuck: Sequence[str]) -> BaseException:
    """What to raise. Workers that are stuck explain a transfer that failed; any other error explains them."""
    if root is None or (stuck and isinstance(root, TransferError)):
        error = PublishError(f"{some(stuck)} does not answer; the publication was given up.")
        error.__cause__ = root
        return error
    if stuck:
        root.add_note(f"Then {some(stuck)} did not answer.")
    return root


def root_of(errors: Sequence[BaseException]) -> BaseException | None:
    """Deaths explain lost connections between ranks, those the transfers that failed, and those whoever gave up."""

    def depth(error: BaseException) -> int:
        if isinstance(error, WorkerDied):
            return 0
        if isinstance(error, TransferError):
            return 4 if isinstance(error, AbortedError) else 3
        return 2 if is_consequence(error) else 1

    return min(errors, key=depth, default=None)


def collected(stream: Stream[T]) -> Future[list[tuple[T, Handle]]]:
    """All items of a stream as one answer, which can be waited for together with others."""
    whole: Future[list[tuple[T, Handle]]] = Future()
    items: list[tuple[T, Handle]] = []

    def take(asked: Future[tuple[T, Handle] | None]) -> None:
        while True:
            if (error := asked.exception()) is not None:
                whole.set_exception(error)
                return
            if (item := asked.result()) is None:
                whole.set_result(items)
                return
            items.append(item)
            asked = stream.ask()
            if not asked.done():  # else no callback: they would call one another, bucket by bucket
                asked.add_done_callback(take)
                return

    stream.ask().add_done_callback(take)
    return whole


# ---------------------------------------------------------------------------------------------- in the workers
# A `Remote` calls functions, and a protocol's methods have no body: these find the worker's own.


def _plan(worker: Publishes, version: int) -> Manifest:
    return worker.plan(version)


def _send(worker: Publishes, manifest: Manifest, link: Link | None) -> Checksums | None:
    return worker.send(manifest, link)


def _leave(worker: Publishes, manifest: Manifest) -> Iterator[tuple[Checksums, Tensor]]:
    return worker.leave(manifest)


def _expect(worker: Receives, manifest: Manifest) -> None:
    worker.expect(manifest)


def _receive(worker: Receives, manifest: Manifest, link: Link, engine: int) -> Checksums:
    return worker.receive(manifest, link, engine)


def _commit(worker: Receives) -> int:
    return worker.commit()


def _drop(worker: Receives) -> None:
    worker.drop()


def _device(worker: Publishes | Receives) -> str:
    return worker.device_identity()
