"""Processes in simulated time: the kernel of `simulation`."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

R = TypeVar("R")
T = TypeVar("T")

Process = Generator["float | Event", None, R]
"""`yield seconds` works for so long, `yield event` waits until it has happened."""


class Event:
    """Something that happens once."""

    def __init__(self) -> None:
        self.has_happened = False
        self._waiting: list[Callable[[], None]] = []

    def happen(self) -> None:
        """Now; whoever waits goes on, in the order in which they came."""
        self.has_happened = True
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def then(self, go_on: Callable[[], None]) -> None:
        """Call it once this has happened."""
        if self.has_happened:
            go_on()
        else:
            self._waiting.append(go_on)


class Change:
    """Something that happens again and again: whoever waits for it looks again whether what it needs is there."""

    def __init__(self) -> None:
        self.next = Event()

    def happen(self) -> None:
        """Now."""
        happened, self.next = self.next, Event()
        happened.happen()


class Queue(Generic[T]):
    """First in, first out; also of those who wait for something to come."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiting: deque[Event] = deque()

    def put(self, item: T) -> None:
        """One of those who wait goes on."""
        self._items.append(item)
        if self._waiting:
            self._waiting.popleft().happen()

    def get(self) -> Process[T]:
        """The next, when there is one."""
        while not self._items:
            self._waiting.append(turn := Event())
            yield turn
        return self._items.popleft()


class Clock:
    """Simulated seconds.

    Args:
        num_cores: that all working processes share equally, each of which can use one; None: everybody has its own.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        self.now = 0.0
        self._num_cores = num_cores
        self._work = 0.0  # what each process that never waits would have done by now: the same share for everybody
        self._working: list[tuple[float, int, Process[None]]] = []  # until `_work` is so much
        self._ready: deque[Process[None]] = deque()
        self._number = itertools.count()  # of two that end at the same moment, the first to begin goes on first

    def start(self, process: Process[None]) -> None:
        """It begins now, after all that go on now."""
        self._ready.append(process)

    def run(self, end: Event) -> None:
        """Until `end`, or RuntimeError when everybody waits."""
        while not end.has_happened:
            if not self._ready:
                self._advance()
            self._go_on(self._ready.popleft())

    def _advance(self) -> None:
        """To the next moment at which work is done."""
        if not self._working:
            raise RuntimeError(f"after {self.now:g} simulated seconds everybody waits for something")
        num_working = len(self._working)
        work, _, process = heapq.heappop(self._working)
        share = 1.0 if self._num_cores is None else min(1.0, self._num_cores / num_working)
        self.now += (work - self._work) / share
        self._work = work
        self._ready.append(process)

    def _go_on(self, process: Process[None]) -> None:
        try:
            asked = next(process)
        except StopIteration:
            return
        if isinstance(asked, Event):
            asked.then(lambda: self._ready.append(process))
        else:
            heapq.heappush(self._working, (self._work + asked, next(self._number), process))
