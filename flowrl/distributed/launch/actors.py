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
from flowrl.distributed.launch.failures import PlacementError, WorkerDied, WorkerError
from flowrl.distributed.launch.placement import Seat
from flowrl.distributed.launch.process import follow_raylet
from flowrl.distributed.launch.servicer import Servicer
from flowrl.distributed.records import Packed, pack

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")


class RayCluster(Cluster):
    """A placement group and the actors in it."""

    def __init__(self, group: Any, seats: Mapping[str, Seat], environment: Mapping[str, str]) -> None:
        super().__init__()
        self._group = group
        self._seats = seats
        self._environment = dict(environment)
        self._workers: dict[str, RayWorker[Any]] = {}

    def _start(self, place: str, make: Callable[[], W]) -> Remote[W]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

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

    def _end(self) -> None:
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
        self._lock = threading.Lock()  # once it is told to end it is asked nothing: the connection to Ray may be gone
        self._closing = self._killed = False

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        import ray

        reply: Reply[R] = Reply()
        request = pack((method, args, kwargs), aside=ray.ObjectRef)
        with self._lock:
            answer = None if self._closing else self._actor.call.remote(request).future()
        if answer is None:
            reply.fail(self._closed())
        else:
            answer.add_done_callback(partial(self._answered, reply))
        return reply.future

    def stream(
        self, method: Callable[Concatenate[W, P], Iterator[tuple[T, Any]]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[T]:
        import ray

        arrivals: Arrivals[T] = Arrivals()
        request = pack((method, args, kwargs), aside=ray.ObjectRef)
        with self._lock:
            closing = self._closing
            answers = None if closing else self._actor.stream.options(num_returns="streaming").remote(request)
        if closing:
            arrivals.fail(self._closed())
        else:
            threading.Thread(target=self._collect, args=(arrivals, answers), name=self.name, daemon=True).start()
        return arrivals

    def close(self, grace_s: float = GRACE_S) -> None:
        import ray

        if grace_s > 0 and not self._closing:
            ray.wait([self.ask_to_end()], timeout=grace_s)
        with self._lock:
            self._closing = True
            if not self._killed:
                self._killed = True
                ray.kill(self._actor, no_restart=True)

    def ask_to_end(self) -> Any:
        """When it has done what it was asked before; what is returned is there when the process is not."""
        with self._lock:
            self._closing = True
            return self._actor.__ray_terminate__.remote()

    def _answered(self, reply: Reply[R], answer: Future[Packed]) -> None:
        try:
            packed = answer.result()
        except Exception as error:  # Ray's, of whatever class; whoever waits has to know
            reply.fail(self._failure(error))
        else:
            reply.take(packed)

    def _collect(self, arrivals: Arrivals[T], answers: Iterator[Any]) -> None:
        last = False
        try:
            while not last:
                last = self._collect_one(arrivals, answers)
        except Exception as error:  # as in `_answered`
            arrivals.fail(self._failure(error))

    def _collect_one(self, arrivals: Arrivals[T], answers: Iterator[Any]) -> bool:
        """Whether that was the last. A method of its own: a variable that outlives it would keep the last handle."""
        import ray

        heavy = next(answers)
        try:
            light, last = ray.get(next(answers))
        except StopIteration:
            ray.get(heavy)  # raises: Ray has put what went wrong in the place of the item, and nothing after it
            raise
        arrivals.take(light, None if last else InObjectStore(heavy))
        return bool(last)

    def _closed(self) -> WorkerDied:
        return WorkerDied(self.name, "was closed")

    def _failure(self, error: Exception) -> Exception:
        """What Ray says, in our words."""
        return self._closed() if self._closing else translated(self.name, error)


def translated(worker: str, error: Exception) -> Exception:
    """A death only where Ray speaks of one: whoever replaces the dead does not help otherwise."""
    from ray import exceptions

    deaths = (
        exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError,
    )  # fmt: skip
    beginnings = (
        exceptions.RuntimeEnvSetupError, exceptions.ActorUnschedulableError, exceptions.ActorPlacementGroupRemoved,
    )  # fmt: skip
    text = " ".join(str(error).split())
    found: Exception
    if isinstance(error, beginnings) or (isinstance(error, exceptions.RayActorError) and error.actor_init_failed):
        found = PlacementError(f"worker {worker} could not be started. Ray says: {text}")
    elif isinstance(error, deaths):
        detail, causes, _ = text.partition("Worker exit detail: ")[2].partition(" Some common causes")
        guess = " (out of memory?)" if causes else ""
        found = WorkerDied(worker, f"died{guess}. Ray says: {detail or text}")
    else:
        summary = str(error).splitlines()[-1] if isinstance(error, exceptions.RayTaskError) else None  # of a traceback
        found = WorkerError(f"worker {worker} failed: {summary or f'{type(error).__name__}: {text}'}")
    found.__cause__ = error
    return found


@dataclass(frozen=True)
class InObjectStore:
    """The handle of something in Ray's object store; the driver owns it, whichever host it lies on."""

    reference: Any  # ray.ObjectRef of a Packed

    def fetch(self) -> Any:
        """A view of the store's memory, which stays while there is a view, whatever becomes of the handle.

        Raises KeyError if it is there no longer.
        """
        import ray

        if not ray.is_initialized():
            raise KeyError(f"{self.reference} is gone with the connection to Ray")
        try:
            packed: Packed = ray.get(self.reference)
        except (ray.exceptions.ObjectLostError, ValueError) as error:  # the latter: of another connection
            raise KeyError(str(error)) from error
        return packed.view()


class Worker:
    """What becomes a Ray actor: a servicer."""

    def __init__(self, name: str, make: bytes) -> None:
        follow_raylet()
        self._servicer = Servicer(name, partial(pickle.loads, make))

    def call(self, request: Packed) -> Packed:
        """See `Servicer.call`."""
        return self._servicer.call(request)

    def stream(self, request: Packed) -> Iterator[Packed | tuple[Packed, bool] | None]:
        """Of each item the heavy part (of the last: None), then (light, whether it is the last).

        Each is an object of its own. Whoever has the light part knows that the heavy one is there.
        """
        for light, heavy in self._servicer.stream(request, keep=lambda packed: packed):
            yield heavy
            yield light, heavy is None
