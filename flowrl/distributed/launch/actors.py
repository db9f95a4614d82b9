"""Workers that are Ray actors."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from flowrl.distributed.launch.answers import Arrivals, Reply
from flowrl.distributed.launch.base import GRACE_S, Cluster, Remote, Stream
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.distributed.launch.host import Host
from flowrl.distributed.launch.placement import Seat
from flowrl.distributed.launch.process import follow_raylet
from flowrl.distributed.records import Packed, pack

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")


class RayCluster(Cluster):
    """A placement group and the actors in it."""

    def __init__(self, group: Any, seats: Mapping[str, Seat], environment: Mapping[str, str]) -> None:
        self._group = group
        self._seats = seats
        self._environment = dict(environment)
        self._workers: dict[str, RayWorker[Any]] = {}

    def start(self, place: str, make: Callable[[], W]) -> Remote[W]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if place in self._workers:
            self._workers.pop(place).close(grace_s=0)
        seat = self._seats[place]
        actor = ray.remote(Worker).options(
            num_cpus=seat.num_cpus,
            num_gpus=seat.num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, seat.bundle),
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": self._environment},
        )
        worker: RayWorker[W] = RayWorker(place, actor.remote(place, ray.cloudpickle.dumps(make)))
        self._workers[place] = worker
        return worker

    def close(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        workers = list(self._workers.values())
        try:
            ending = [worker.ask_to_end() for worker in workers]
            if ending:
                ray.wait(ending, num_returns=len(ending), timeout=GRACE_S)
        finally:  # another Ctrl-C does not save them
            for worker in workers:
                worker.close(grace_s=0)
            self._workers.clear()
            remove_placement_group(self._group)


class RayWorker(Remote[W]):
    """An actor. Ray keeps the order of its calls; a thread for each stream waits for its items."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor
        self._closing = False

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        import ray

        reply: Reply[R] = Reply()
        answer = self._actor.call.remote(pack((method, args, kwargs), aside=ray.ObjectRef))
        answer.future().add_done_callback(partial(self._answered, reply))
        return reply.future

    def stream(
        self, method: Callable[Concatenate[W, P], Iterator[tuple[T, Any]]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[T]:
        import ray

        arrivals: Arrivals[T] = Arrivals()
        request = pack((method, args, kwargs), aside=ray.ObjectRef)
        answers = self._actor.stream.options(num_returns="streaming").remote(request)
        threading.Thread(target=self._collect, args=(arrivals, answers), name=self.name, daemon=True).start()
        return arrivals

    def close(self, grace_s: float = GRACE_S) -> None:
        import ray

        if grace_s > 0:
            ray.wait([self.ask_to_end()], timeout=grace_s)
        self._closing = True
        ray.kill(self._actor, no_restart=True)

    def ask_to_end(self) -> Any:
        """When it has done what it was asked before; what is returned is there when the process is not."""
        self._closing = True
        return self._actor.__ray_terminate__.remote()

    def _answered(self, reply: Reply[R], answer: Future[Packed]) -> None:
        from ray.exceptions import RayError

        try:
            packed = answer.result()
        except RayError as error:
            reply.fail(self._death(error))
        else:
            reply.take(packed)

    def _collect(self, arrivals: Arrivals[T], answers: Any) -> None:
        import ray

        last = False
        try:
            while not last:
                last = self._collect_one(arrivals, answers)
        except ray.exceptions.RayError as error:
            arrivals.fail(self._death(error))

    def _collect_one(self, arrivals: Arrivals[T], answers: Any) -> bool:
        """Whether that was the last. A method of its own: a variable that outlives it would keep the last handle."""
        import ray

        light, last = ray.get(next(answers))
        arrivals.take(light, None if last else InObjectStore(next(answers)))
        return bool(last)

    def _death(self, error: Exception) -> WorkerDied:
        if self._closing:
            return WorkerDied(self.name, "was closed")
        text = " ".join(str(error).split())
        detail = text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
        return WorkerDied(self.name, f"died (out of memory?). Ray says: {detail or text}")


@dataclass(frozen=True)
class InObjectStore:
    """The handle of something in Ray's object store; the driver owns it, whichever host it lies on."""

    reference: Any  # ray.ObjectRef of a Packed

    def fetch(self) -> Any:
        """A copy. Raises KeyError if it is there no longer."""
        import ray

        if not ray.is_initialized():
            raise KeyError(f"{self.reference} is gone with the connection to Ray")
        try:
            packed: Packed = ray.get(self.reference)
        except (ray.exceptions.ObjectLostError, ValueError) as error:  # the latter: of another connection
            raise KeyError(str(error)) from error
        return packed.unpack()


class Worker:
    """What becomes a Ray actor: a host."""

    def __init__(self, name: str, make: bytes) -> None:
        follow_raylet()
        self._host = Host(name, partial(pickle.loads, make))

    def call(self, request: Packed) -> Packed:
        """See `Host.call`."""
        return self._host.call(request)

    def stream(self, request: Packed) -> Iterator[tuple[Packed, bool] | Packed]:
        """(light, whether it is the last) and, unless it is, the heavy part: each an object of its own."""
        for light, heavy in self._host.stream(request, keep=lambda packed: packed):
            yield light, heavy is None
            if heavy is not None:
                yield heavy
