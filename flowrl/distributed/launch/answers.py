"""Where the answers of a worker arrive, and whoever waits for them is told."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flowrl.distributed.launch.base import LOOK_UP_S, Stream
from flowrl.distributed.launch.failures import Failure
from flowrl.distributed.records import Packed

if TYPE_CHECKING:
    from flowrl.types import Handle

T = TypeVar("T")


class Answer(Future[T]):
    """A future that cannot be cancelled, since what was sent cannot be taken back, and that signals can interrupt.

    Python notices a signal that comes just before it begins to wait for a lock only when it has the lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        while timeout is None and not self.done():
            wait([self], LOOK_UP_S)
        return super().result(timeout)


class Pending(ABC):
    """A call that has not been answered to the end."""

    def take(self, answer: Packed, heavy: Handle | None = None) -> None:
        """An item of a stream, or without `heavy` the end of it all: a `Failure`, or what the call returned."""
        try:
            value = answer.unpack()
        except Exception as error:  # of anybody's classes; whoever waits has to know
            self.fail(error)
            return
        if isinstance(value, Failure):
            self.fail(value.error())
        elif heavy is None:
            self.finish(value)
        else:
            self.put(value, heavy)

    @abstractmethod
    def put(self, light: Any, heavy: Handle) -> None:
        """One item."""

    @abstractmethod
    def finish(self, value: Any) -> None:
        """The end, with what was returned."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """The end, instead of a value or of further items."""


class Reply(Pending, Generic[T]):
    """Of a plain call."""

    def __init__(self) -> None:
        self.future: Answer[T] = Answer()

    def put(self, light: Any, heavy: Handle) -> None:
        raise AssertionError("a plain call has no items")

    def finish(self, value: T) -> None:
        self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(error)


class Arrivals(Pending, Stream[T]):
    """Of a stream. The n-th item and the n-th question meet in one future, whichever is first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Answer[tuple[T, Handle] | None]] = {}
        self._num_put = self._num_asked = 0
        self._ended = False

    def ask(self) -> Answer[tuple[T, Handle] | None]:
        future = self._meet(self._num_asked)
        self._num_asked += 1
        return future

    def put(self, light: T, heavy: Handle) -> None:
        if not self._ended:
            self._next().set_result((light, heavy))

    def finish(self, value: Any) -> None:
        if not self._ended:
            self._ended = True
            self._next().set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self._ended:
            self._ended = True
            self._next().set_exception(error)

    def _next(self) -> Answer[tuple[T, Handle] | None]:
        future = self._meet(self._num_put)
        self._num_put += 1
        return future

    def _meet(self, number: int) -> Answer[tuple[T, Handle] | None]:
        with self._lock:
            if number in self._waiting:
                return self._waiting.pop(number)
            return self._waiting.setdefault(number, Answer())
