"""How much of the time that scoring takes is hidden behind other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Seconds:
    """Of the wall clock in which something was scored, whatever the number of workers."""

    hidden: float  # behind drawing or training
    exposed: float  # while the trainer had everything else that it waited for


class Exposure:
    """Divides the time in which at least one group is being scored. Threads may report at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = time.perf_counter()
        self._num_scoring = 0
        self._exposed = False
        self._seconds = {False: 0.0, True: 0.0}

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """A group is scored inside."""
        with self._settled():
            self._num_scoring += 1
        try:
            yield
        finally:
            with self._settled():
                self._num_scoring -= 1

    def expose(self, exposed: bool) -> None:
        """Whether, from now on, scores are all that is waited for."""
        with self._settled():
            self._exposed = exposed

    def seconds(self) -> Seconds:
        """Up to now."""
        with self._settled():
            return Seconds(self._seconds[False], self._seconds[True])

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """What has passed since the last change belongs to the state before this one."""
        with self._lock:
            now = time.perf_counter()
            if self._num_scoring:
                self._seconds[self._exposed] += now - self._since
            self._since = now
            yield
