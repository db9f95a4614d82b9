"""The one place that a trainer reports to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np

from flowrl.tracking.loggers.base import Logger, RunInfo, Session, VideoSession
from flowrl.tracking.loggers.jsonl import JSONLLogger
from flowrl.tracking.video import stills

log = logging.getLogger(__name__)


class Tracker:
    """Fans metrics and pictures out to the loggers: `start`, `log` once per step, `close` (or a `with` block).

    JSON lines are always written, and first: a logger that fails raises, and by then the step is on disk.
    """

    def __init__(self, loggers: Sequence[Logger] = ()) -> None:
        others = [logger for logger in loggers if not isinstance(logger, JSONLLogger)]
        self._loggers: list[Logger] = [JSONLLogger(), *others]
        self._sessions: list[Session] = []
        self._last_step = -1

    def start(self, run: RunInfo) -> None:
        """Open every logger; if one cannot start, those already open are closed and its error is raised."""
        run.run_dir.mkdir(parents=True, exist_ok=True)
        sessions: list[Session] = []
        with ExitStack() as opened:
            for logger in self._loggers:
                sessions.append(logger.start(run))
                opened.callback(sessions[-1].close)
            opened.pop_all()  # all are open: they stay so until `close`
        self._sessions = sessions
        self._last_step = run.first_step - 1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step. Raises ValueError unless steps rise strictly: a step has one record, evaluation included."""
        if step <= self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}; log each step once, in order")
        self._last_step = step
        for session in self._sessions:
            session.log(step, metrics)

    def log_images(self, step: int, name: str, images: np.ndarray, captions: Sequence[str]) -> None:
        """Record pictures, uint8 [B, H, W, 3], or videos, [B, F, H, W, 3], with one caption each.

        Raises ValueError for anything else. Loggers that know no videos get a still of each.
        """
        if images.dtype != np.uint8 or images.ndim not in (4, 5) or images.shape[-1] != 3:
            wanted = "uint8 [B, H, W, 3], or [B, F, H, W, 3] of videos"
            raise ValueError(f"images must be {wanted}, got {images.dtype} {list(images.shape)}")
        if len(captions) != len(images):
            raise ValueError(f"{len(images)} images need as many captions, got {len(captions)}")
        shown = stills(images)
        for session in self._sessions:
            if images.ndim == 5 and isinstance(session, VideoSession):
                session.log_videos(step, name, images, captions)
            else:
                session.log_images(step, name, shown, captions)

    def close(self) -> None:
        """Close every logger, the last opened first. One that fails is a warning: every step was logged by then."""
        sessions, self._sessions = self._sessions, []
        for session in reversed(sessions):
            try:
                session.close()
            except Exception as error:  # of whatever kind: it must not cost a finished run its success
                log.warning("%s could not be closed: %s: %s", type(session).__name__, type(error).__name__, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
