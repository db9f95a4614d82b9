"""Who draws the groups of a batch, and with which version of the weights: the three layouts."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
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

log = logging.getLogger(__name__)


class Rollouts(Protocol):
    """What a trainer sees of generation."""

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        """Every group once, in order of arrival, drawn with the weights last published."""
        ...

    def publish(self, version: int) -> None:
        """The actor's present weights are `version`: sample with them from now on."""
        ...


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
        if self._turns:
            gather(self.workers, RolloutWorker.wake, [()] * len(self.workers))
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
            per_call = max(1, self.run.rollout.batch_size // groups[0].num_samples)
            per_call = min(per_call, -(-len(groups) // len(self.workers)))
            todo = deque(groups[i : i + per_call] for i in range(0, len(groups), per_call))
            arrived: SimpleQueue[SampledGroup | BaseException] = SimpleQueue()
            threads = ThreadPoolExecutor(len(self.workers), "flowrl-rollout")
            for index in range(len(self.workers)):
                threads.submit(self._serve, index, todo, rollout_id, arrived).add_done_callback(
                    partial(_report, arrived)
                )
            try:
                for _ in groups:
                    item = arrived.get()
                    if isinstance(item, BaseException):
                        raise item
                    yield item
            finally:
                todo.clear()
                threads.shutdown(wait=False)

    def _serve(
        self,
        index: int,
        todo: deque[Sequence[Group]],
        rollout_id: int,
        arrived: SimpleQueue[SampledGroup | BaseException],
    ) -> None:
        """One worker's turns, until nothing is left to be done."""
        while todo:
            try:
                chunk = todo.popleft()
            except IndexError:  # another worker was faster
                return
            left = {group.ordinal: group for group in chunk}
            try:
                for sampled, handle in self.workers[index].stream(RolloutWorker.generate, chunk, rollout_id):
                    del left[sampled.group.ordinal]
                    arrived.put(replace(sampled, drawn=handle))
            except WorkerDied as death:
                with self._lock:
                    self._replace(death)
                    self.publisher.publish(self.version, [self.workers[index]])
                todo.append(list(left.values()))

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
        self.workers[index].call(RolloutWorker.load).result()

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


def _report(arrived: SimpleQueue[SampledGroup | BaseException], done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        arrived.put(error)
