"""Saving a run while it goes on, and stopping it in order."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Self

from flowrl.config import Config, ConfigError, Problem
from flowrl.distributed.checkpoint.folders import Committed, Folders
from flowrl.distributed.checkpoint.manifest import CheckpointError
from flowrl.trainers.drain import Drain
from flowrl.trainers.journal import Journal
from flowrl.trainers.stages import Stages
from flowrl.trainers.state import CONTRACT, SHOWN, STATE

METRICS, CONFIG = "metrics.json", "config.yaml"
FAULTS = (CheckpointError, OSError)  # a disk that is full or gone; a rank that dies is another matter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that the ranks are writing."""

    step: int
    folder: Path
    documents: Mapping[str, bytes]


class Checkpoints:
    """A run's checkpoints, at most one of them in the making: the state after a step, and which steps are left.

    A save that fails is a warning, counted in `perf/checkpoint_failures`; the run's last one, and too many in a row,
    are errors. What is still being written when the context ends is lost.

    Args:
        start: the checkpoint that this process goes on from.
        held: inside, no group is submitted.
        on_signal: called when the first signal asks the run to stop.
    """

    def __init__(
        self,
        run: Config,
        total_steps: int,
        stages: Stages,
        journal: Journal,
        start: Committed | None,
        held: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_signal: Callable[[], None] | None = None,
    ) -> None:
        self.run = run
        self.settings = run.checkpoint
        self.total_steps = total_steps
        self.stages = stages
        self.journal = journal
        self.stopped_by: Signals | None = None
        self.num_failures = 0
        self._done = 0 if start is None else start.step
        self._failures_in_a_row = 0
        self._unfinished: Unfinished | None = None
        self._folders = Folders(run.checkpoints_dir)
        self._held = held
        self._drain = Drain(on_signal)
        self._contract = json.loads((run.run_dir / CONTRACT).read_text()) | {"base": stages.actor.fingerprint()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drain.close()

    def steps(self) -> Iterator[int]:
        """Those that are left. A signal ends them early, once the step that it came in has been saved."""
        self._drain.listen()
        for step in range(self._done + 1, self.total_steps + 1):
            yield step
            if self.stopped_by is not None:
                return

    # ------------------------------------------------------------------------------------------ saving

    def after(self, step: int) -> None:
        """The step has been logged: save if it is due. The last one is on the disk when this returns."""
        if step < self.total_steps:
            self.stopped_by = self._drain.signal
        last = step == self.total_steps or self.stopped_by is not None
        with self.stages.timers.phase("checkpoint"):
            if last or (self.settings.every and step % self.settings.every == 0):
                self._commit(wait=True)
                self._save(step, last)
                self._commit(wait=last)
            else:
                self._commit(wait=False)
        self.stages.meter.gauge("perf/checkpoint_failures", self.num_failures)

    def _save(self, step: int, last: bool) -> None:
        """Begin; what is saved is what things are now, whatever training does next."""
        self._check_best()
        try:
            folder = self._folders.begin(step)
            actor = self.stages.actor.checkpoint(folder, self.settings.background and not last)
            self._unfinished = Unfinished(step, folder, self._documents(step, actor))
        except FAULTS as error:
            self._failed(step, error)

    def _documents(self, step: int, actor: Mapping[str, object]) -> dict[str, bytes]:
        with self._held():
            groups = {"data": self.stages.data.state_dict(), "buffer": self.stages.buffer.state_dict()}
        state = {"step": step, "seconds": self.journal.seconds(), "actor": actor, **groups}
        metrics = {name: value for name, value in self.journal.logged.items() if math.isfinite(value)}
        return {
            STATE: _json(state),
            METRICS: _json(metrics),
            CONTRACT: _json(self._contract),
            CONFIG: (self.run.run_dir / CONFIG).read_bytes(),
            SHOWN: self.journal.shown(),
        }

    def _commit(self, *, wait: bool) -> None:
        """Once all ranks have written: their files and the documents become a checkpoint."""
        unfinished = self._unfinished
        if unfinished is None:
            return
        try:
            written = self.stages.actor.written(wait)
            if written is None:
                return
            self._unfinished = None
            self._folders.commit(unfinished.step, unfinished.folder, unfinished.documents, *written)
            self._folders.rotate(self._kept())
        except FAULTS as error:
            self._unfinished = None
            self._failed(unfinished.step, error)
        else:
            self._failures_in_a_row = 0

    def _failed(self, step: int, error: Exception) -> None:
        self.num_failures += 1
        self._failures_in_a_row += 1
        last = step == self.total_steps or self.stopped_by is not None
        if last or self._failures_in_a_row >= self.settings.max_failures:
            raise CheckpointError(f"the checkpoint of step {step} could not be saved: {error}") from error
        log.warning("the checkpoint of step %d could not be saved, training goes on: %s", step, error)

    # ------------------------------------------------------------------------------------------ keeping

    def _kept(self) -> list[int]:
        """Which steps' checkpoints stay."""
        steps, settings = self._folders.steps(), self.settings
        kept = steps[-settings.keep_last :]
        if settings.keep_every:
            kept += [step for step in steps if step % settings.keep_every == 0]
        if settings.keep_best is not None:
            sign = 1 if settings.best == "max" else -1
            values = {checkpoint.step: self._metric(checkpoint) for checkpoint in self._folders.committed()}
            ranked = [(sign * value, step) for step, value in values.items() if value is not None]
            kept += [step for _, step in sorted(ranked)[-1:]]
        return kept

    def _metric(self, checkpoint: Committed) -> float | None:
        """None where it was not measured: most steps are not evaluated."""
        value: float | None = checkpoint.json(METRICS).get(self.settings.keep_best)
        return value

    def _check_best(self) -> None:
        name = self.settings.keep_best
        if name is not None and self._done == 0 and name not in self.journal.names:
            known = ", ".join(sorted(name for name in self.journal.names if name.startswith("eval/")))
            message = f"no metric of this run is called {name!r}."
            raise ConfigError(Problem("checkpoint.keep_best", message, f"Its evaluations give {known}."))


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"
