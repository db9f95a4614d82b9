"""`launcher=inline`: workers are objects of the calling process. For one GPU, for tests, and for debuggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from flowrl.config import Config, Problem
from flowrl.distributed.launch.base import GRACE_S, Cluster, Launcher, Place, Remote, Stream
from flowrl.types import Handle, InMemory

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")


@dataclass(frozen=True)
class Inline(Launcher):
    """No other process: a call has ended when it returns, and a stream works when it is asked.

    Args:
        num_threads: of torch on a CPU; 0 leaves them as they are.
    """

    num_threads: int = 0

    @contextmanager
    def open(self, places: Sequence[Place]) -> Iterator[Cluster]:
        """Any number of workers, one thing at a time."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads or before)
        try:
            cluster = InlineCluster()
            yield cluster
        finally:
            cluster.close()
            torch.set_num_threads(before)

    def problems(self, run: Config) -> list[Problem]:
        """Ranks need processes."""
        if run.actor.num_ranks == 1:
            return []
        hint = "Set launcher=spawn (one host) or launcher=ray."
        return [Problem("actor.num_ranks", f"must be 1 with launcher=inline, got {run.actor.num_ranks}.", hint)]


class InlineCluster(Cluster):
    """Nothing to be reserved, nothing to be ended: whoever has a worker can go on with it."""

    def __init__(self) -> None:
        super().__init__()
        self._workers: dict[str, InlineWorker[Any]] = {}

    def _start(self, place: str, make: Callable[[], W]) -> Remote[W]:
        worker = self._workers[place] = InlineWorker(place, make)
        return worker

    def _end(self) -> None:
        pass


class InlineWorker(Remote[W]):
    """Made by its first call."""

    def __init__(self, name: str, make: Callable[[], W]) -> None:
        self.name = name
        self._make = make
        self._made: list[W] = []

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        try:
            future.set_result(method(self._worker(), *args, **kwargs))
        except Exception as error:  # of whatever kind: it is raised where the result is asked for
            future.set_exception(error)
        return future

    def stream(
        self, method: Callable[Concatenate[W, P], Iterator[tuple[T, Any]]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[T]:
        def items() -> Iterator[tuple[T, Any]]:
            yield from method(self._worker(), *args, **kwargs)

        return LazyStream(items())

    def close(self, grace_s: float = GRACE_S) -> None:
        self._made.clear()

    def _worker(self) -> W:
        if not self._made:
            self._made.append(self._make())
        return self._made[0]


class LazyStream(Stream[T]):
    """An item is made when it is asked for."""

    def __init__(self, items: Iterator[tuple[T, Any]]) -> None:
        self._items = items

    def ask(self) -> Future[tuple[T, Handle] | None]:
        future: Future[tuple[T, Handle] | None] = Future()
        try:
            item = next(self._items, None)
            future.set_result(None if item is None else (item[0], InMemory(item[1])))
        except Exception as error:  # as in `InlineWorker.call`
            future.set_exception(error)
        return future
