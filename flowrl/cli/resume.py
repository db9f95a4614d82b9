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
    if past is None or not (past.finished or record.has_progress(run)):
        return False
    if past.finished is None:
        with record.exclusive(run):  # which fails if that run still goes on
            pass
    _compare(past.contract, run, cfg)
    if past.finished is not None and run.trainer.total_steps <= past.steps:
        return True
    if past.finished is not None and not Folders(run.checkpoints_dir).steps():
        message = f"is {run.trainer.total_steps}, but {run.run_dir} is finished, and its checkpoints are gone."
        raise ConfigError(Problem("trainer.total_steps", message, "Set name=... to start another run."))
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
    own = _own(run)
    if own is not None:
        _compare(_settings(own), run, cfg)
        return own
    if run.resume == "auto":
        past = record.past(run)
        if past is not None and past.began_from is not None and record.has_progress(run):
            message = f"is auto, and {run.run_dir} began from {past.began_from}; it has no checkpoint of its own yet."
            raise ConfigError(Problem("resume", message, f"Set resume={past.began_from}."))
        return None
    found = _named(Path(run.resume), run)
    table = differences(_settings(found), contract(run, cfg))
    if table:
        hint = "Set them as they were there, or choose another checkpoint."
        raise ConfigError(Problem("resume", f"{found.path} belongs to a run with other settings:\n{table}\n{hint}"))
    if found.step >= run.trainer.total_steps:
        message = f"is {run.trainer.total_steps}, and {found.path} has gone {found.step} steps already."
        raise ConfigError(Problem("trainer.total_steps", message, "Set it higher."))
    return found


def _newest_good(folder: Path) -> tuple[Committed | None, dict[Path, CheckpointError]]:
    """And those that are newer, but damaged."""
    damaged: dict[Path, CheckpointError] = {}
    for path in Folders(folder).newest_first():
        try:
            return open_checkpoint(path, verify=True), damaged
        except CheckpointError as error:
            log.warning("%s It is passed over.", error)
            damaged[path] = error
    return None, damaged


def _own(run: Config) -> Committed | None:
    """What is damaged is set aside: it must not count as the newest when the run has gone on from an older one."""
    folder = run.checkpoints_dir
    good, damaged = _newest_good(folder)
    if good is None and damaged:
        hint = f"Remove {folder} to start anew, or set name=... to start another run."
        raise ConfigError(Problem("resume", f"no checkpoint can be read: {next(iter(damaged.values()))}", hint))
    for path in damaged:
        log.warning("%s is now called %s", path, Folders(folder).set_aside(path).name)
    if good is not None and good.step > run.trainer.total_steps:
        message = f"is {run.trainer.total_steps}, and {run.run_dir} has gone {good.step} steps already."
        raise ConfigError(Problem("trainer.total_steps", message, "Set it higher."))
    return good


def _named(path: Path, run: Config) -> Committed:
    """`resume=PATH`: a checkpoint, or a run's newest."""
    if path.absolute().is_relative_to(run.run_dir.absolute()):
        hint = "To go on from an earlier step of a run, give the new one another name=..."
        raise ConfigError(Problem("resume", f"must be a checkpoint of another run, got {path}.", hint))
    hint = "Set it to auto, never, a checkpoint's folder or a run's."
    if not run.resume or not path.is_dir():
        raise ConfigError(Problem("resume", f"must be auto, never or a folder, got {run.resume!r}."))
    folder = next((each for each in (path / "checkpoints", path) if Folders(each).steps()), None)
    if folder is not None:
        newest, damaged = _newest_good(folder)
        if newest is not None:
            return newest
        raise ConfigError(Problem("resume", f"no checkpoint can be read: {next(iter(damaged.values()))}", hint))
    try:
        return open_checkpoint(path, verify=True)
    except CheckpointError as error:
        raise ConfigError(Problem("resume", str(error), hint)) from error


def _settings(checkpoint: Committed) -> dict[str, Any]:
    saved: dict[str, Any] = checkpoint.json("contract.json")
    return {name: value for name, value in saved.items() if name != "base"}


def _compare(before: dict[str, Any], run: Config, cfg: DictConfig) -> None:
    table = differences(before, contract(run, cfg))
    if table:
        hint = f"Set them back, or set name=... to start another run, or remove {run.run_dir}."
        raise ConfigError(Problem("name", f"{run.run_dir} holds a run with other settings:\n{table}\n{hint}"))
