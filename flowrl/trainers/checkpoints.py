"""Saving a run while it goes on, and stopping it in order."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Self

from flowrl.config import Config, ConfigError, Problem
from flowrl.distributed.checkpoint.folders import Committed, Folders, open_checkpoint
from flowrl.distributed.checkpoint.manifest import CheckpointError
from flowrl.trainers.drain import Drain
from flowrl.trainers.journal import Journal
from flowrl.trainers.stages import Stages
from flowrl.trainers.state import CONTRACT, SHOWN, STATE

METRICS = "metrics.json"
OF_THE_RUN = ("config.yaml", "run.json")  # as they lie in the run folder: settings, versions, command
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
        self._done = self._newest = 0 if start is None else start.step
        self._failure: Exception | None = None  # the last
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
        """The step has been logged: save if it is due. The last one is on the disk when this returns.

        Raises CheckpointError if the last one cannot be saved, or too many in a row, and ConfigError for a `keep_best`
        that is no metric.
        """
        self._check_best()
        due = self.settings.every > 0 and step % self.settings.every == 0
        with self.stages.timers.phase("checkpoint"):
            self._commit(wait=due)
            if due:
                self._save(step, background=self.settings.background)
            if step < self.total_steps:
                self.stopped_by = self._drain.signal  # one that comes from now on ends the next step
            if step == self.total_steps or self.stopped_by is not None:
                self._save_last(step, begun=due)
        self.stages.meter.gauge("perf/checkpoint_failures", self.num_failures)

    def _save_last(self, step: int, *, begun: bool) -> None:
        """Wait for it; if that fails, or has failed before, try once more, and fail."""
        self._commit(wait=True)
        if not (begun and self._newest == step):
            self._save(step, background=False)
            self._commit(wait=True)
        if self._newest != step:
            raise CheckpointError(f"the checkpoint of step {step}, the last, could not be saved: {self._failure}")

    def _save(self, step: int, *, background: bool) -> None:
        """Begin; what is saved is what things are now, whatever training does next."""
        folder = None
        try:
            of_the_run = {name: (self.run.run_dir / name).read_bytes() for name in OF_THE_RUN}
            folder = self._folders.begin(step)
            actor = self.stages.actor.checkpoint(folder, background)
            self._unfinished = Unfinished(step, folder, of_the_run | self._documents(step, actor))
        except FAULTS as error:
            self._failed(step, folder, error)

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
            self._folders.commit(unfinished.step, unfinished.folder, unfinished.documents, written.files, written.keys)
        except FAULTS as error:
            self._unfinished = None
            self._failed(unfinished.step, unfinished.folder, error)
        else:
            self._failures_in_a_row = 0
            self._newest = unfinished.step
            self._rotate()

    def _failed(self, step: int, folder: Path | None, error: Exception) -> None:
        """No rank writes any more: what is there would only fill the disk."""
        self.num_failures += 1
        self._failures_in_a_row += 1
        self._failure = error
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if self._failures_in_a_row >= self.settings.max_failures:
            raise CheckpointError(f"the checkpoint of step {step} could not be saved: {error}") from error
        log.warning("the checkpoint of step %d could not be saved, training goes on: %s", step, error)

    def _documents(self, step: int, actor: Mapping[str, object]) -> dict[str, bytes]:
        with self._held():
            groups = {"data": self.stages.data.state_dict(), "buffer": self.stages.buffer.state_dict()}
        journal = {"seconds": self.journal.seconds(), "names": sorted(self.journal.names)}
        state = {"step": step, "journal": journal, "actor": actor, **groups}
        metrics = {name: value for name, value in self.journal.logged.items() if math.isfinite(value)}
        return {
            STATE: _json(state),
            METRICS: _json(metrics),
            CONTRACT: _json(self._contract),
            SHOWN: self.journal.shown(),
        }

    # ------------------------------------------------------------------------------------------ keeping

    def _rotate(self) -> None:
        """Remove what is not to be kept. A fault here is no failure of saving."""
        try:
            self._folders.rotate(self._kept())
        except FAULTS as error:
            log.warning("old checkpoints could not be removed: %s", error)

    def _kept(self) -> list[int]:
        """Which steps' checkpoints stay."""
        steps, settings = self._folders.steps(), self.settings
        kept = steps[-settings.keep_last :]
        if settings.keep_every:
            kept += [step for step in steps if step % settings.keep_every == 0]
        if settings.keep_best is not None:
            sign = 1 if settings.best == "max" else -1
            values = {step: self._metric(step) for step in steps}
            ranked = [(sign * value, step) for step, value in values.items() if value is not None]
            kept += [step for _, step in sorted(ranked)[-1:]]
        return kept

    def _metric(self, step: int) -> float | None:
        """None where it was not measured, as most steps are not evaluated, or cannot be read."""
        try:
            metrics = open_checkpoint(self._folders.path(step), verify=False).json(METRICS)
        except CheckpointError as error:
            log.warning("%s", error)
            return None
        value: float | None = metrics.get(self.settings.keep_best)
        return value

    def _check_best(self) -> None:
        name, names = self.settings.keep_best, self.journal.names
        if name is not None and name not in names:
            known = ", ".join(sorted(name for name in names if name.startswith("eval/")))
            message = f"no metric of this run is called {name!r}."
            raise ConfigError(Problem("checkpoint.keep_best", message, f"Its evaluations give {known or 'none'}."))


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"
