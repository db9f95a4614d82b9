"""Progress in the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from flowrl.tracking.console import Terminal, duration, number, sparkline
from flowrl.tracking.loggers.base import RunInfo

HISTORY = 24  # steps in the sparkline


@dataclass(frozen=True, kw_only=True)
class ConsoleLogger:
    """A live bar with step, reward, held-out score, pictures per second and time left; a line for each evaluation.

    Where standard output is no terminal (a file, a CI log), one plain line per step. The fields name the metrics shown.
    """

    reward: str = "reward/mean"
    score: str | None = None  # null = the first `eval/` metric of a step
    speed: str = "perf/rollout_samples_per_s"

    def start(self, run: RunInfo) -> ConsoleSession:
        return ConsoleSession(self, run, Terminal())


class ConsoleSession:
    """Progress of one run on one `rich` console."""

    def __init__(self, names: ConsoleLogger, run: RunInfo, console: Console) -> None:
        self._names, self._run, self._console = names, run, console
        self._rewards: list[float] = []
        self._scores: list[float] = []
        self._began: tuple[int, float] | None = None  # step and time of the first record
        self._progress = Progress(
            SpinnerColumn("dots" if self._draws_blocks else "line"),
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task(run.name, total=run.total_steps, completed=max(run.first_step - 1, 0))
        self._live = Live(self._progress, console=console, refresh_per_second=8)
        if console.is_terminal:
            self._live.start(refresh=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._began = self._began or (step, time.monotonic())
        if self._names.reward in metrics:
            self._rewards = [*self._rewards[1 - HISTORY :], metrics[self._names.reward]]
        score = self._names.score or next((name for name in metrics if name.startswith("eval/")), "")
        if score in metrics:
            self._scores.append(metrics[score])
        status = self._status(step, metrics)
        if not self._console.is_terminal:
            self._console.print(self._numbered(step, status), soft_wrap=True)
            return
        self._progress.update(self._task, completed=step)
        self._live.update(Group(self._progress, Text("  ").append_text(status)))
        if score in metrics:
            self._console.print(self._numbered(step, self._evaluation()))

    def log_images(self, step: int, name: str, images: np.ndarray, captions: Sequence[str]) -> None:
        """A terminal shows no pictures."""

    def close(self) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def _numbered(self, step: int, text: Text) -> Text:
        width = len(str(self._run.total_steps))
        return Text(f"step {step:>{width}}/{self._run.total_steps}", "dim").append("  ").append_text(text)

    def _status(self, step: int, metrics: Mapping[str, float]) -> Text:
        parts: list[tuple[str, str]] = []
        if self._rewards:
            trend = " " + sparkline(self._rewards) if self._console.is_terminal and self._draws_blocks else ""
            parts.append(("reward", number(self._rewards[-1]) + trend))
        if self._scores:
            parts.append(("held-out", number(self._scores[-1])))
        if self._names.speed in metrics:
            parts.append(("images/s", f"{metrics[self._names.speed]:.1f}"))
        remaining = self._remaining(step)
        if remaining is not None:
            parts.append(("ETA", duration(remaining)))
        return Text("   ").join(Text(label + " ", "dim").append(value, "bold not dim") for label, value in parts)

    def _evaluation(self) -> Text:
        text = Text("held-out ").append(number(self._scores[-1]), "bold")
        return text.append(f"  from {number(self._scores[0])}", "dim") if len(self._scores) > 1 else text

    def _remaining(self, step: int) -> float | None:
        """Seconds to the end at the pace since the first record; None before there is a pace."""
        if self._began is None or step == self._began[0]:
            return None
        first, began = self._began
        return (time.monotonic() - began) / (step - first) * (self._run.total_steps - step)

    @property
    def _draws_blocks(self) -> bool:
        return self._console.encoding.startswith("utf")
