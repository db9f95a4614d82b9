"""Where a run begins: anew, from a checkpoint, or not at all because it is finished."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from flowrl.cli import record
from flowrl.cli.contract import contract, differences
from flowrl.config import Config, ConfigError, Problem
from flowrl.distributed.checkpoint.folders import Committed, Folders, open_checkpoint
from flowrl.distributed.checkpoint.manifest import CheckpointError

log = logging.getLogger(__name__)


def is_finished(run: Config, cfg: DictConfig) -> bool:
    """Does the run folder hold this very run, with all of its steps?

    Raises:
        ConfigError: it holds another run, one that is being written, or one that may not go on (`resume=never`).
    """
    past = record.past(run)
    if past is None or not record.has_progress(run):
        return False
    if past.finished is None:
        with record.exclusive(run):  # which fails if that run still goes on
            pass
    _compare(f"{run.run_dir} holds a run", past.contract, contract(run, cfg), run)
    if past.finished is not None and run.trainer.total_steps <= past.steps:
        return True
    if run.resume == "never":
        message = f"is never, and {run.run_dir} holds a run that can go on."
        raise ConfigError(Problem("resume", message, "Set name=... to start another, or remove the folder."))
    return False


def starting_point(run: Config, cfg: DictConfig) -> Committed | None:
    """The checkpoint to go on from: the newest good one in the run folder, else the one that `resume` names, if any.

    One that is damaged is passed over with a warning. Reads all files of a checkpoint, to be sure of it.

    Raises:
        ConfigError: all checkpoints are damaged, or `resume` names none, or another run's.
    """
    if run.resume == "never":
        return None
    own = _newest_good(run.checkpoints_dir, run)
    if own is not None or run.resume == "auto":
        return own
    found = _named(Path(run.resume), run)
    _compare(f"{found.path} belongs to a run", _settings(found), contract(run, cfg), run)
    return found


def _newest_good(folder: Path, run: Config) -> Committed | None:
    faults: list[CheckpointError] = []
    for path in Folders(folder).newest_first():
        try:
            return open_checkpoint(path, verify=True)
        except CheckpointError as error:
            log.warning("%s It is passed over.", error)
            faults.append(error)
    if faults:
        hint = f"Remove {folder} to start anew, or set name=... to start another run."
        raise ConfigError(Problem("resume", f"no checkpoint of {run.run_dir} can be read: {faults[0]}", hint))
    return None


def _named(path: Path, run: Config) -> Committed:
    """`resume=PATH`: a checkpoint, or a run's newest."""
    if path.absolute().is_relative_to(run.run_dir.absolute()):
        hint = "To go on from an earlier step of a run, give the new one another name=..."
        raise ConfigError(Problem("resume", f"must be a checkpoint of another run, got {path}.", hint))
    if (path / "checkpoints").is_dir():
        newest = _newest_good(path / "checkpoints", run)
        if newest is not None:
            return newest
    try:
        return open_checkpoint(path, verify=True)
    except CheckpointError as error:
        hint = "Set it to auto, never, a checkpoint's folder or a run's."
        raise ConfigError(Problem("resume", str(error), hint)) from error


def _settings(checkpoint: Committed) -> dict[str, Any]:
    saved: dict[str, Any] = checkpoint.json("contract.json")
    return {name: value for name, value in saved.items() if name != "base"}


def _compare(what: str, before: dict[str, Any], now: dict[str, Any], run: Config) -> None:
    table = differences(before, now)
    if table:
        hint = f"Set them back, or set name=... to start another run, or remove {run.run_dir}."
        raise ConfigError(Problem("name", f"{what} with other settings:\n{table}\n{hint}"))
