"""A logger is two things: a frozen `Logger`, which is configuration, and the `Session` that its `start` opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a logger may know about the run it belongs to."""

    name: str
    run_dir: Path
    total_steps: int
    config_yaml: str  # the resolved configuration, as it lies in the run folder
    fps: float = 16.0  # of its videos
    resumed_from: int | None = None  # the last committed step; None for a fresh run
    elsewhere: bool = False  # that step is another run's

    @property
    def first_step(self) -> int:
        """The step from which this process writes; whatever an earlier one left from here on is forgotten."""
        return 0 if self.resumed_from is None else self.resumed_from + 1


class Session(Protocol):
    """A logger at work. Steps rise strictly: one call of `log` for a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def log_images(self, step: int, name: str, images: np.ndarray, captions: Sequence[str]) -> None:
        """Record pictures, uint8 [B, H, W, 3], with one caption each."""
        ...

    def close(self) -> None:
        """Write whatever is pending and let go of files and processes."""
        ...


@runtime_checkable
class VideoSession(Protocol):
    """A session that shows videos. Any other gets a still of each as `log_images`."""

    def log_videos(self, step: int, name: str, videos: np.ndarray, captions: Sequence[str]) -> None:
        """Record videos, uint8 [B, F, H, W, 3], with one caption each."""
        ...


@runtime_checkable
class Logger(Protocol):
    """The configuration of one logger."""

    def start(self, run: RunInfo) -> Session:
        """Begin, or go on with, the run's series. Raises what the user must put right, such as a missing key."""
        ...
