"""Who draws the groups of a batch, and with which version of the weights: the three layouts."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from flowrl.config import Config
from flowrl.distributed.launch.base import Cluster, Remote, gather
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.distributed.weight_sync.publisher import Publisher
from flowrl.rollout.worker import RolloutWorker
from flowrl.tracking.metrics import Meter
from flowrl.trainers.fleet import ActorFleet
from flowrl.trainers.placement import publication_mode, transport
from flowrl.types import Group, SampledGroup

GRACE_S = 10.0  # for all parties of a publication that has failed to say so

Arrivals = SimpleQueue[SampledGroup | BaseException | None]  # a group, a worker's failure, or the end of its work

log = logging.getLogger(__name__)


class Rollouts(Protocol):
    """What a trainer sees of generation."""

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        """Every group once, in order of arrival, drawn with the weights last published."""
        ...

    def publish(self, version: int) -> None:
        """The actor's present weights are `version`: sample with them from now on."""
        ...


@dataclass(frozen=True)
class Chunk:
    """What a worker draws in one go, all with the same stochastic steps."""

    groups: Sequence[Group]
    rollout_id: int


class Source(Protocol):
    """Where workers get their next chunk; asked by several threads."""

    def next(self) -> Chunk | None:
        """Waits until there is one; None when no more will come."""
        ...

    def give_back(self, chunk: Chunk) -> None:
        """Another worker may have it."""
        ...


class Listed:
    """A source that is known from the beginning, and never makes anyone wait."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = deque(chunks)

    def next(self) -> Chunk | None:
        """See `Source`."""
        try:
            return self._chunks.popleft()
        except IndexError:
            return None

    def give_back(self, chunk: Chunk) -> None:
        """See `Source`."""
        self._chunks.append(chunk)

    def clear(self) -> None:
        """Nothing more is to be done."""
        self._chunks.clear()


class SharedRollouts:
    """Layout shared: the actor's ranks sample with their own modules, so publishing is naming."""

    def __init__(self, actor: ActorFleet) -> None:
        self.actor = actor
        self.version = 0

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        """See `Rollouts`."""
        return self.actor.generate(groups, rollout_id, self.version)

    def publish(self, version: int) -> None:
        """See `Rollouts`."""
        self.version = version


class SeparateRollouts:
    """Layouts colocated and standalone: processes of their own, which get their weights by publication.

    Colocated, a worker and a rank have one GPU in turns: whoever is not at work keeps its weights on the host.
    """

    def __init__(self, run: Config, cluster: Cluster, names: Sequence[str], actor: ActorFleet, meter: Meter) -> None:
        self.run = run
        self.cluster = cluster
        self.names = names
        self.actor = actor
        self.meter = meter
        self.version = -1  # nothing has been published yet
        self.num_restarts = 0
        self._turns = run.trainer.layout == "colocated"
        self._lock = threading.Lock()
        self.workers = [self._start(name) for name in names]
        for wave in _waves(self.workers, run.actor.fsdp.load_wave_size):
            gather(wave, RolloutWorker.load, [()] * len(wave))
        sync = run.weight_sync
        self.publisher = Publisher(
            actor.workers, transport(run), timeout_s=sync.timeout_s, retries=sync.retries, grace_s=GRACE_S
        )
        if self._turns:
            gather(self.workers, RolloutWorker.sleep, [()] * len(names))

    def _start(self, name: str) -> Remote[RolloutWorker]:
        return self.cluster.start(name, partial(RolloutWorker, self.run, publication_mode(self.run)))

    # ------------------------------------------------------------------------------------------ weights

    def publish(self, version: int) -> None:
        """See `Rollouts`. Raises PublishError once the retries are used up; all workers then hold the old version."""
        if version == self.version:  # the batch has changed nothing
            return
        if self._turns:
            gather(self.workers, RolloutWorker.wake, [()] * len(self.workers))
        with self._lock:
            while self.version != version:
                try:
                    published = self.publisher.publish(version, self.workers)
                    self.version = version
                    for name, value in published.metrics().items():
                        self.meter.gauge(name, value)
                except WorkerDied as death:
                    self._replace(death)
        if self._turns:
            gather(self.workers, RolloutWorker.sleep, [()] * len(self.workers))

    # ------------------------------------------------------------------------------------------ drawing

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        """See `Rollouts`. Each worker takes the next few groups as soon as it has done its last."""
        with self._turn():
            size = self.chunk_size(len(groups), groups[0].num_samples)
            source = Listed([Chunk(groups[i : i + size], rollout_id) for i in range(0, len(groups), size)])
            arrived: Arrivals = SimpleQueue()
            threads = ThreadPoolExecutor(len(self.workers), "flowrl-rollout")
            for index in range(len(self.workers)):
                serving = threads.submit(self.serve, index, source, arrived.put)
                serving.add_done_callback(lambda done: arrived.put(done.exception()))
            num_serving = len(self.workers)
            try:
                while num_serving:
                    item = arrived.get()
                    if item is None:
                        num_serving -= 1
                    elif isinstance(item, BaseException):
                        raise item
                    else:
                        yield item
            finally:
                source.clear()
                threads.shutdown(wait=False)

    def chunk_size(self, num_groups: int, num_samples: int) -> int:
        """Groups that a worker draws in one go: a full forward, unless that leaves other workers without work."""
        return min(max(1, self.run.rollout.batch_size // num_samples), -(-num_groups // len(self.workers)))

    def serve(self, index: int, source: Source, sink: Callable[[SampledGroup], None]) -> None:
        """Draw what `source` has with one worker until nothing comes any more; `sink` gets every group once.

        A worker that dies is replaced, if that is the policy, and what it left undone goes back to the source.
        """
        while (chunk := source.next()) is not None:
            left = {group.ordinal: group for group in chunk.groups}
            try:
                for sampled in self._drawn(self.workers[index], chunk):
                    del left[sampled.group.ordinal]
                    sink(sampled)
            except WorkerDied as death:
                with self._lock:
                    self._replace(death)
                    self.publisher.publish(self.version, [self.workers[index]])
                if left:
                    source.give_back(Chunk(list(left.values()), chunk.rollout_id))

    def _drawn(self, worker: Remote[RolloutWorker], chunk: Chunk) -> Iterator[SampledGroup]:
        """As they come. A worker that draws nothing for too long is killed, and counts as dead."""
        stream = worker.stream(RolloutWorker.generate, chunk.groups, chunk.rollout_id)
        while True:
            asked = stream.ask()
            try:
                item = asked.result(self.run.rollout.timeout_s)
            except TimeoutError as error:
                if asked.done():  # the worker's own
                    raise
                worker.close(grace_s=0)
                cause = f"drew nothing for {self.run.rollout.timeout_s:g} s (rollout.timeout_s), and was killed"
                raise WorkerDied(worker.name, cause) from error
            if item is None:
                return
            sampled, handle = item
            yield replace(sampled, drawn=handle)

    def _replace(self, death: WorkerDied) -> None:
        """Another process in its place, without weights yet. Raises `death` if that is not the policy."""
        may_restart = self.run.rollout.on_death == "restart" and self.num_restarts < self.run.rollout.max_restarts
        if not may_restart or death.worker not in self.names:
            raise death
        self.num_restarts += 1
        self.meter.count("rollout/restarts")
        log.warning("%s; it is replaced (%d of %d)", death, self.num_restarts, self.run.rollout.max_restarts)
        index = self.names.index(death.worker)
        self.workers[index].close()
        self.workers[index] = self._start(self.names[index])
        self.workers[index].call(RolloutWorker.load).result(self.run.rollout.timeout_s)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Colocated: the GPU is the workers' inside. After a failure nothing is given back: the run ends."""
        if self._turns:
            self.actor.offload()
            gather(self.workers, RolloutWorker.wake, [()] * len(self.workers))
        yield
        if self._turns:
            gather(self.workers, RolloutWorker.sleep, [()] * len(self.workers))
            self.actor.reload()


def _waves(workers: Sequence[Remote[RolloutWorker]], size: int) -> Iterator[Sequence[Remote[RolloutWorker]]]:
    """A few at a time, so that a host does not hold a copy of the model for every one of them."""
    yield from (workers[i : i + size] for i in range(0, len(workers), size))
