"""What a run folder says about the run itself: `config.yaml` and `run.json`."""

from __future__ import annotations

import fcntl
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import flowrl
from flowrl.config import Config, ConfigError, Problem
from flowrl.data.prompts import fingerprint
from flowrl.tracking.files import write_atomic
from flowrl.tracking.loggers.jsonl import FILENAME as METRICS

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "rapidocr", "onnxruntime", "ray")
FREE = ("name", "runs", "recipe")  # keys that only say where a run is kept


def is_finished(run: Config, cfg: DictConfig) -> bool:
    """Does the run folder hold this very run, finished? A run that ended before its first metrics does not count.

    Raises:
        ConfigError: it holds another run, one that was broken off, or one that is being written.
    """
    if not (run.run_dir / "run.json").exists() or not _has_metrics(run):
        return False
    hint = f"Set name=... to start another, or remove {run.run_dir}."
    past = _past(run)
    if past.finished is None:
        with exclusive(run):  # which fails if that run still goes on
            pass
    changes = _changes(past.config, _resolved(cfg))
    if changes:
        raise ConfigError(
            Problem("name", f"{run.run_dir} holds a run with other settings ({'; '.join(changes)}).", hint)
        )
    if past.data != _data(run):
        raise ConfigError(Problem("name", f"{run.run_dir} holds a run with other prompts in the same files.", hint))
    if past.finished is None:
        raise ConfigError(
            Problem("name", f"{run.run_dir} holds a run that was broken off; it cannot be resumed.", hint)
        )
    return True


class _Past(NamedTuple):
    config: DictConfig | ListConfig
    data: dict[str, str]
    finished: str | None


def _past(run: Config) -> _Past:
    """What an earlier run wrote about itself. Raises ConfigError if that cannot be read."""
    try:
        config = OmegaConf.load(run.run_dir / "config.yaml")
        record = json.loads((run.run_dir / "run.json").read_text())
        return _Past(config, record["data"], record["finished"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError, OmegaConfBaseException) as error:
        message = f"{run.run_dir} holds no readable run."
        raise ConfigError(Problem("name", message, "Remove the folder, or choose another name.")) from error


@contextmanager
def exclusive(run: Config) -> Iterator[None]:
    """Make the run folder and keep other processes from writing into it. The lock ends with the process at the latest.

    Raises:
        ConfigError: another process writes there.
    """
    run.run_dir.mkdir(parents=True, exist_ok=True)
    with (run.run_dir / ".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"{run.run_dir} is being written by another process."
            raise ConfigError(Problem("name", message, "Set name=... to start another run.")) from error
        yield


def remains(run: Config) -> str:
    """What a run that was broken off leaves behind, and what can be done."""
    if _has_metrics(run):
        return f"{run.run_dir} holds what was written; a run cannot be resumed: set name=... or remove the folder."
    return f"{run.run_dir} holds only the run's configuration; the same command starts anew."


def _has_metrics(run: Config) -> bool:
    metrics = run.run_dir / METRICS
    return metrics.exists() and metrics.stat().st_size > 0


def begin(run: Config, cfg: DictConfig) -> None:
    """Write what the run is: the resolved configuration, versions, commit, command, data."""
    write_atomic(run.run_dir / "config.yaml", OmegaConf.to_yaml(_resolved(cfg)).encode())
    _write(
        run,
        {
            "name": run.name,
            "command": shlex.join(sys.orig_argv),
            "started": _now(),
            "finished": None,
            "versions": _versions(),
            "commit": _commit(),
            "platform": platform.platform(),
            "data": _data(run),
        },
    )


def finish(run: Config) -> None:
    """Note the time at which the run ended."""
    record = json.loads((run.run_dir / "run.json").read_text())
    _write(run, record | {"finished": _now()})


def _write(run: Config, record: dict[str, Any]) -> None:
    write_atomic(run.run_dir / "run.json", (json.dumps(record, indent=2) + "\n").encode())


def _resolved(cfg: DictConfig) -> DictConfig:
    resolved = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert isinstance(resolved, DictConfig)
    return resolved


def _changes(old: Any, new: DictConfig) -> list[str]:
    before, after = _leaves(OmegaConf.to_container(old)), _leaves(OmegaConf.to_container(new))
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key) and key not in FREE)
    return [f"{key}: {before.get(key)} there, {after.get(key)} now" for key in keys]


def _leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {
        key: value
        for name, child in tree.items()
        for key, value in _leaves(child, f"{path}.{name}" if path else str(name)).items()
    }


def _data(run: Config) -> dict[str, str]:
    """SHA-256 of every prompt file."""
    return {path: fingerprint(path) for path in sorted({run.data.train, *run.trainer.eval.sets.values()})}


def _versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), "flowrl": flowrl.__version__} | {
        name: _version(name) for name in PACKAGES
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that flowrl runs from, with "+" after it if files differ; None outside of one."""
    checkout = Path(flowrl.__file__).parents[1]
    if not (checkout / ".git").exists():
        return None
    describe = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        result = subprocess.run(describe, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
