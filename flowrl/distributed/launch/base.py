"""What every launcher keeps to: places are reserved, workers are started in them and called through a `Remote`.

A call takes the *function*, never its name: `remote.call(Actor.update, batch)` runs `Actor.update(actor, batch)` where
the actor lives, so type checkers see it. Heavy results stay behind a `Handle`.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from flowrl.config import Config, Problem
from flowrl.distributed.launch.failures import ClusterClosed, WorkerDied, is_consequence, root

if TYPE_CHECKING:
    from flowrl.types import Handle

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")

GRACE_S = 3.0  # for a worker to end by itself
LOOK_UP_S = 0.5  # from waiting, for a signal that came just before it
ROOT_CAUSE_S = 2.0  # for the worker whose death the others complain about to be found dead


@dataclass(frozen=True)
class Place:
    """Where one worker process is to run, and what it needs.

    Args:
        name: unique, like "actor-0".
        num_cpus: of Ray's logical ones; no launcher ties a process to cores.
        num_gpus: whole ones are the worker's alone; with less than one, workers share a GPU.
        beside: an earlier place on whose GPUs this worker runs, too: they take turns.
    """

    name: str
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    beside: str | None = None


class Stream(ABC, Generic[T]):
    """What a worker yields, in its order: (light, handle of the heavy).

    Left before its end, it goes on in the worker, and what still comes is lost.
    """

    _over = False

    @abstractmethod
    def ask(self) -> Future[tuple[T, Handle] | None]:
        """The next item when it is there, or None at the end. Not to be called again after that or a failure."""

    def __iter__(self) -> Iterator[tuple[T, Handle]]:
        return self

    def __next__(self) -> tuple[T, Handle]:
        if self._over:
            raise StopIteration
        self._over = True
        item = self.ask().result()
        if item is None:
            raise StopIteration
        self._over = False
        return item


class Remote(ABC, Generic[W]):
    """A worker somewhere. Calls return at once and run in turn, in the order in which they were made.

    An exception in the worker is raised by the caller's `result()` as itself (`WorkerError` if it cannot be pickled);
    its cause is a `WorkerTraceback`. `WorkerDied` says that its process ended.
    """

    name: str

    @abstractmethod
    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """`method(worker, *args, **kwargs)`; arguments and result are copies unless the worker is inline."""

    @abstractmethod
    def stream(
        self, method: Callable[Concatenate[W, P], Iterator[tuple[T, Any]]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[T]:
        """Pairs (light, heavy) that `method` yields, as they come.

        Work begins with this call, not with the first `next` (inline: lazily). The heavy parts wait outside of the
        worker: they survive its death.
        """

    @abstractmethod
    def close(self, grace_s: float = GRACE_S) -> None:
        """Let the worker end by itself for that long, then kill it with all that it has started. Idempotent."""


class Cluster(ABC):
    """Reserved places."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a worker is started before the end, and ended with the others, or not at all
        self._closed = False
        self._workers: Mapping[str, Remote[Any]] = {}  # by place

    def start(self, place: str, make: Callable[[], W]) -> Remote[W]:
        """Start a worker process, which calls `make`; does not wait. What `make` raises comes from the first call.

        A second worker at the same place replaces the first, which is killed if it still lives. Raises ClusterClosed
        after `close`: whoever replaces the dead may come too late.
        """
        with self._lock:
            if self._closed:
                raise ClusterClosed(f"worker {place} cannot be started: its cluster is closed")
            if place in self._workers:
                self._workers[place].close(grace_s=0)
            return self._start(place, make)

    def close(self) -> None:
        """End all workers, whatever they are doing, and give up the places; handles are void. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._end()

    @abstractmethod
    def _start(self, place: str, make: Callable[[], W]) -> Remote[W]:
        """A worker at a place that is free; it is put into `_workers`."""

    @abstractmethod
    def _end(self) -> None:
        """Of `_workers` and of what else the cluster has. Nothing is started any more."""


class Launcher(ABC):
    """How workers come to be: `launcher` in the configuration."""

    @abstractmethod
    def open(self, places: Sequence[Place]) -> AbstractContextManager[Cluster]:
        """Reserve all `places` at once, and give everything up in the end. Raises PlacementError."""

    @abstractmethod
    def problems(self, run: Config) -> list[Problem]:
        """What `run` asks of this launcher that it cannot give; CUDA is not initialised."""


def gather(
    remotes: Sequence[Remote[W]], method: Callable[Concatenate[W, ...], R], arguments: Sequence[tuple[Any, ...]]
) -> list[R]:
    """`method` on every remote at once, with its own arguments; results in the order of the remotes.

    Raises the first failure, without waiting for the others, which may hang in a collective that one has left; if the
    first only complains about a lost peer, that peer's. The caller closes the cluster, then.
    """
    return results([remote.call(method, *own) for remote, own in zip(remotes, arguments, strict=True)])


def results(futures: Sequence[Future[R]], timeout_s: float | None = None) -> list[R]:
    """Of calls that belong together, in their order; failures as in `gather`. Raises TimeoutError."""
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    pending: Sequence[Future[R]] = futures
    while pending:
        done = _finished(pending, deadline)
        pending = [future for future in pending if future not in done]
    return [future.result() for future in futures]


def merge(streams: Sequence[Stream[T]]) -> Iterator[tuple[T, Handle]]:
    """Items of all streams in the order of their arrival. One failure ends it, as in `gather`."""
    asked = {stream.ask(): stream for stream in streams}
    while asked:
        for future in _finished(list(asked)):
            stream, item = asked.pop(future), future.result()
            if item is not None:
                yield item
                asked[stream.ask()] = stream


def _finished(futures: Sequence[Future[T]], until: float = math.inf) -> list[Future[T]]:
    """Those that are done, at least one. Raises if one of them failed, and TimeoutError when none is by then."""
    done, pending = wait(futures, 0, FIRST_COMPLETED)
    while not done:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError
        done, pending = wait(futures, min(left, LOOK_UP_S), FIRST_COMPLETED)
    failed = _errors(done)
    deadline = time.monotonic() + ROOT_CAUSE_S
    while failed and pending and all(map(is_consequence, failed)) and (left := deadline - time.monotonic()) > 0:
        more, pending = wait(pending, left, FIRST_COMPLETED)
        failed += _errors(more)
    if failed:
        raise root(failed)
    return [future for future in futures if future in done]


def _errors(done: set[Future[T]]) -> list[BaseException]:
    """Of futures that were found done together; deaths first, since they make others fail."""
    errors = [error for future in done if (error := future.exception()) is not None]
    return sorted(errors, key=lambda error: not isinstance(error, WorkerDied))
