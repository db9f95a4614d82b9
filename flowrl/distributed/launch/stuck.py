"""Whoever waits for somebody else's work says so when it takes long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def reporting(after_s: float, doing: Callable[[], str]) -> Iterator[None]:
    """Warn when the block has taken `after_s`, and again whenever it has taken twice as long as at the last warning.

    `doing` is asked then, from another thread: who does what, as a clause such as "rollout-1 draws groups 4-7".
    """
    over = threading.Event()
    watching = threading.Thread(target=_watch, args=(over, after_s, doing), name="flowrl-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()


def _watch(over: threading.Event, after_s: float, doing: Callable[[], str]) -> None:
    began, due = time.monotonic(), after_s
    while not over.wait(min(began + due - time.monotonic(), threading.TIMEOUT_MAX)):
        log.warning("stuck? For %.3g s now %s", due, doing())
        due *= 2
