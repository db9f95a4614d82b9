"""Publication of weights: the driver's side, which moves no byte itself.

A version is planned, checked against every engine, transferred, verified, and only then committed: by all engines or
by none. It takes the same few calls whatever the number of buckets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from uuid import uuid4

from torch.distributed import TCPStore

from flowrl.config import Config
from flowrl.distributed.launch.base import Remote, gather, results
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.distributed.rendezvous import node_address
from flowrl.distributed.weight_sync.checksum import Checksums, verify
from flowrl.distributed.weight_sync.errors import PublishError, TransferError
from flowrl.distributed.weight_sync.manifest import Manifest
from flowrl.distributed.weight_sync.transports.base import Link, Meeting
from flowrl.distributed.weight_sync.transports.broadcast import Broadcast
from flowrl.distributed.weight_sync.transports.cuda_ipc import CudaIPC, match
from flowrl.distributed.weight_sync.transports.parcels import Parcels
from flowrl.rollout.worker import RolloutWorker
from flowrl.tracking.metrics import Meter
from flowrl.trainers.placement import transport
from flowrl.trainers.worker import ActorWorker

log = logging.getLogger(__name__)

Engines = Sequence[Remote[RolloutWorker]]


class Publisher:
    """Publishes the actor's weights to engines.

    Raises from `publish`:
        PublishError: trainer and engine do not fit together, or every attempt failed; all engines hold the version
            that they held before. A commit that failed half-way is one, too: that engine then refuses to sample.
        WorkerDied: a process is gone.
    """

    def __init__(self, run: Config, actors: Sequence[Remote[ActorWorker]], meter: Meter) -> None:
        self.run = run
        self.settings = run.weight_sync
        self.actors = actors
        self.meter = meter
        self._host = node_address()
        self._store = TCPStore(self._host, 0, is_master=True, timeout=timedelta(seconds=self.settings.timeout_s))

    def publish(self, version: int, engines: Engines) -> None:
        """Make the actor's present behaviour weights `version` of all `engines`."""
        began = time.perf_counter()
        for retries_left in reversed(range(1 + self.settings.retries)):
            try:
                manifest = self._attempt(version, engines)
                break
            except TransferError as error:
                self.meter.count("publish/failures")
                if not retries_left:
                    raise
                log.warning("%s; publishing version %d again", error, version)
        self.meter.gauge("publish/tensors", len(manifest.entries))
        self.meter.gauge("publish/bytes", manifest.total_bytes)
        self.meter.gauge("publish/version", version)
        self.meter.gauge("publish/seconds", time.perf_counter() - began)

    def _attempt(self, version: int, engines: Engines) -> Manifest:
        (manifest,) = self._all([self.actors[0].call(ActorWorker.plan, version)])
        try:
            self._all([engine.call(RolloutWorker.expect, manifest) for engine in engines])
            sent, received = self._transfer(manifest, engines)
            verify(manifest, sent, {engine.name: sums for engine, sums in zip(engines, received, strict=True)})
        except (PublishError, OSError, RuntimeError):
            self._drop(engines)
            raise
        committed = self._all([engine.call(RolloutWorker.commit) for engine in engines])
        if set(committed) != {version}:
            raise PublishError(f"engines committed versions {sorted(set(committed))} instead of {version}.")
        return manifest

    def _transfer(self, manifest: Manifest, engines: Engines) -> tuple[list[Checksums], list[Checksums]]:
        """What every sender has sent, and every engine staged, by their checksums."""
        if transport(self.run) == "object_store":
            sums, link = self._parcels(manifest)
            return [sums], self._all(self._receive(manifest, link, engines))
        link = self._link(engines)
        sending = [actor.call(ActorWorker.send, manifest, link) for actor in self.actors]
        answers: list[Any] = self._all([*sending, *self._receive(manifest, link, engines)])
        sent, received = answers[: len(sending)], answers[len(sending) :]
        return [sums for sums in sent if sums is not None], received

    def _receive(self, manifest: Manifest, link: Link, engines: Engines) -> list[Future[Checksums]]:
        return [engine.call(RolloutWorker.receive, manifest, link, i) for i, engine in enumerate(engines)]

    def _parcels(self, manifest: Manifest) -> tuple[Checksums, Link]:
        """Rank 0 leaves every bucket in the launcher's store; the other ranks help to gather."""
        helping = [actor.call(ActorWorker.send, manifest, None) for actor in self.actors[1:]]
        sums, handles = Checksums.none(manifest), []
        for part, handle in self.actors[0].stream(ActorWorker.leave, manifest):
            sums += part
            handles.append(handle)
        self._all(helping)
        return sums, Parcels(tuple(handles))

    def _link(self, engines: Engines) -> Link:
        meeting = Meeting(self._host, self._store.port, uuid4().hex, self.settings.timeout_s)
        if transport(self.run) == "broadcast":
            return Broadcast(meeting, len(engines))
        ranks = gather(self.actors, ActorWorker.device_identity, [()] * len(self.actors))
        return CudaIPC(meeting, match(ranks, gather(engines, RolloutWorker.device_identity, [()] * len(engines))))

    def _drop(self, engines: Engines) -> None:
        """Every engine that still answers forgets what it has staged."""
        for engine in engines:
            try:
                self._all([engine.call(RolloutWorker.drop)])
            except (WorkerDied, TransferError) as error:
                log.warning("%s did not drop a failed publication: %s", engine.name, error)

    def _all(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Their results in time. Raises TransferError for a worker that does not answer."""
        try:
            return results(futures, self.settings.timeout_s + MARGIN_S)
        except TimeoutError as error:
            raise TransferError(f"a worker did not answer for {self.settings.timeout_s:g} s (weight_sync.timeout_s).") from error


MARGIN_S = 30.0  # transfers notice their own time-out, and say more about it
