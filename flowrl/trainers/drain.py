"""Ctrl-C: once to end in order, twice to end at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from signal import SIGINT, SIGTERM, Signals, signal
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


class Drain:
    """Between `listen` and `close` the first SIGINT or SIGTERM is only noted, for the trainer to stop after its step.

    The next one does what it did before. Off the main thread, where Python handles no signal, nothing changes.

    Args:
        asked: called when the first one comes, in the middle of whatever is being done.
    """

    def __init__(self, asked: Callable[[], None] | None = None) -> None:
        self.signal: Signals | None = None  # the first that came
        self._asked = asked
        self._before: dict[Signals, Any] = {}

    def listen(self) -> None:
        """From now on."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal(number, self._note) for number in (SIGINT, SIGTERM)}

    def close(self) -> None:
        """Signals do what they did before. Idempotent."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = Signals(number)
        self.close()
        log.warning("%s: the step is finished and saved, then the run stops; again: it stops at once", self.signal.name)
        if self._asked is not None:
            self._asked()
