"""Who draws the groups of a batch, and with which version of the weights: the three layouts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from flowrl.config import Config
from flowrl.distributed.launch.base import Cluster, Remote, Stream, gather
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.distributed.launch.stuck import reporting
from flowrl.distributed.weight_sync.publisher import Publisher
from flowrl.rollout.worker import RolloutWorker
from flowrl.tracking.metrics import Meter
from flowrl.trainers.chunks import Chunk, FailedGroup, GiveUp, Listed, Source, settle
from flowrl.trainers.fleet import ActorFleet
from flowrl.trainers.placement import publication_mode, transport
from flowrl.types import Group, Handle, SampledGroup

GRACE_S = 10.0  # for all parties of a publication that has failed to say so

Arrivals = SimpleQueue[SampledGroup | FailedGroup | BaseException | None]
"""A group, drawn or not; what has ended a worker's thread: an error, or None when there was nothing more to do."""

log = logging.getLogger(__name__)


class Rollouts(Protocol):
    """What a trainer sees of generation."""

    def generate(
        self, groups: Sequence[Group], rollout_id: int, give_up: GiveUp | None = None
    ) -> Iterator[SampledGroup]:
        """Every group once, in order of arrival, drawn with the weights last published.

        Of those that cannot be drawn `give_up` is told, in the calling thread; without it the first error is raised.
        """
        ...

    def publish(self, version: int) -> None:
        """The actor's present weights are `version`: sample with them from now on."""
        ...


class SharedRollouts:
    """Layout shared: the actor's ranks sample with their own modules, so publishing is naming."""

    def __init__(self, actor: ActorFleet, report_stuck_s: float) -> None:
        self.actor = actor
        self.report_stuck_s = report_stuck_s
        self.version = 0

    def generate(
        self, groups: Sequence[Group], rollout_id: int, give_up: GiveUp | None = None
    ) -> Iterator[SampledGroup]:
        """See `Rollouts`. With several ranks, which sample in step, `give_up` must be None."""
        source = Listed([Chunk(groups, rollout_id)], give_up)
        while (chunk := source.next()) is not None:
            left = {group.ordinal: group for group in chunk.groups}
            drawn = self.actor.generate(chunk.groups, rollout_id, self.version)
            try:
                while (sampled := self._next(drawn, chunk)) is not None:
                    del left[sampled.group.ordinal]
                    yield sampled
            except WorkerDied:  # it had the weights
                raise
            except Exception as error:  # an engine is anybody's code
                _count_redrawn(self.actor.meter, settle(source, chunk, list(left.values()), error))

    def _next(self, drawn: Iterator[SampledGroup], chunk: Chunk) -> SampledGroup | None:
        with reporting(self.report_stuck_s, lambda: f"the actor draws the next of {chunk}"):
            return next(drawn, None)

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
        self._lock = threading.RLock()  # of the workers and their weights
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
        return self.cluster.start(name, partial(RolloutWorker, self.run, name, publication_mode(self.run)))

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
                    with reporting(self.run.rollout.report_stuck_s, partial(self._publication, version)):
                        published = self.publisher.publish(version, self.workers)
                    self.version = version
                    for name, value in published.metrics().items():
                        self.meter.gauge(name, value)
                except WorkerDied as death:
                    self._replace(death)
        if self._turns:
            gather(self.workers, RolloutWorker.sleep, [()] * len(self.workers))

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """For whatever the trainer asks of the actor while workers draw.

        A worker that is replaced meanwhile waits for the end. Else it would get weights in the middle of an update, as
        the version that was published before; and the ranks would be asked by two threads, in different orders.
        """
        with self._lock:
            yield

    def _publication(self, version: int) -> str:
        return (
            f"version {version} of the weights is published to {', '.join(self.names)}; "
            f"weight_sync.timeout_s = {self.run.weight_sync.timeout_s:g} bounds each transfer"
        )

    # ------------------------------------------------------------------------------------------ drawing

    def generate(
        self, groups: Sequence[Group], rollout_id: int, give_up: GiveUp | None = None
    ) -> Iterator[SampledGroup]:
        """See `Rollouts`. Each worker takes the next few groups as soon as it has done its last."""
        with self._turn():
            size = self.chunk_size(len(groups), groups[0].num_samples)
            arrived: Arrivals = SimpleQueue()
            chunks = [Chunk(groups[i : i + size], rollout_id) for i in range(0, len(groups), size)]
            source = Listed(chunks, None if give_up is None else arrived.put)
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
                    elif isinstance(item, FailedGroup):
                        assert give_up is not None
                        give_up(item)
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

        A worker that dies is replaced, if that is the policy. What is left undone goes back to the source, or is given
        up; see `settle`.
        """
        while (chunk := source.next()) is not None:
            left = {group.ordinal: group for group in chunk.groups}
            worker = self.workers[index]
            error = self._draw(worker, chunk, left, sink)
            if isinstance(error, WorkerDied):
                with self._lock:
                    if self.workers[index] is worker:  # else a publication has found it dead, and replaced it
                        self._replace(error)
                        self.publisher.publish(self.version, [self.workers[index]])
            if error is not None:
                _count_redrawn(self.meter, settle(source, chunk, list(left.values()), error))

    def _draw(
        self,
        worker: Remote[RolloutWorker],
        chunk: Chunk,
        left: dict[int, Group],
        sink: Callable[[SampledGroup], None],
    ) -> Exception | None:
        """What has broken it off, if anything. Groups that `sink` gets are taken out of `left`."""
        stream = worker.stream(RolloutWorker.generate, chunk.groups, chunk.rollout_id)
        while True:
            item = self._next(worker, stream, chunk, len(left))
            if item is None or isinstance(item, Exception):
                return item
            sampled, handle = item
            del left[sampled.group.ordinal]
            sink(replace(sampled, drawn=handle))

    def _next(
        self, worker: Remote[RolloutWorker], stream: Stream[SampledGroup], chunk: Chunk, num_left: int
    ) -> tuple[SampledGroup, Handle] | Exception | None:
        """The next group, None at the end, or what has broken off the drawing.

        A worker that draws nothing for too long is killed, and counts as dead.
        """
        settings = self.run.rollout

        def doing() -> str:
            todo = f"{num_left} of {len(chunk.groups)} are left, and it is killed after {settings.timeout_s:g} s"
            return f"{worker.name} draws the next of {chunk}; {todo} (rollout.timeout_s)"

        asked = stream.ask()
        try:
            with reporting(settings.report_stuck_s, doing):
                return asked.result(settings.timeout_s)
        except TimeoutError as error:
            if asked.done():  # the engine's own
                return error
            cause = f"drew nothing for {settings.timeout_s:g} s (rollout.timeout_s), and was killed"
            log.warning("%s: worker %s %s", chunk, worker.name, cause)  # others may be the first to find it dead
            worker.close(grace_s=0)
            return WorkerDied(worker.name, cause)
        except Exception as error:  # an engine is anybody's code
            return error

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
        loading, timeout_s = self.workers[index].call(RolloutWorker.load), self.run.rollout.timeout_s
        try:
            loading.result(timeout_s)
        except TimeoutError as error:
            if loading.done():  # the model's own
                raise
            cause = f"did not load the model within {timeout_s:g} s (rollout.timeout_s)"
            raise WorkerDied(death.worker, cause) from error

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


def _count_redrawn(meter: Meter, num_groups: int) -> None:
    if num_groups:
        meter.count("rollout/redrawn", num_groups)


def _waves(workers: Sequence[Remote[RolloutWorker]], size: int) -> Iterator[Sequence[Remote[RolloutWorker]]]:
    """A few at a time, so that a host does not hold a copy of the model for every one of them."""
    yield from (workers[i : i + size] for i in range(0, len(workers), size))
