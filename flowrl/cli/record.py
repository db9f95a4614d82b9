"""What a run folder says about the run itself: `config.yaml`, `contract.json` and `run.json`."""

from __future__ import annotations

import fcntl
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import flowrl
from flowrl.config import Config, ConfigError, Problem
from flowrl.data.prompts import fingerprint
from flowrl.distributed.checkpoint.folders import Committed, Folders
from flowrl.files import write_atomic
from flowrl.tracking.loggers.jsonl import FILENAME as METRICS

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "rapidocr", "onnxruntime", "ray")
CONTRACT = "contract.json"


@dataclass(frozen=True)
class Past:
    """What an earlier process wrote about the run."""

    contract: dict[str, Any]
    finished: str | None
    steps: int  # of the finished run
    started: str
    began_from: str | None  # `resume=PATH`


def past(run: Config) -> Past | None:
    """None for a folder that holds no run. Raises ConfigError if what it holds cannot be read."""
    if not (run.run_dir / "run.json").exists():
        return None
    try:
        contract = json.loads((run.run_dir / CONTRACT).read_text())
        record = json.loads((run.run_dir / "run.json").read_text())
        steps, began_from = int(record["steps"]), record["began_from"]
        return Past(dict(contract), record["finished"], steps, record["started"], began_from)
    except (OSError, ValueError, TypeError, KeyError) as error:
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


def model_path(run: Config) -> str | None:
    """Where the run had its model from; None if it is not told by a path."""
    config = OmegaConf.load(run.run_dir / "config.yaml")
    path: str | None = OmegaConf.select(config, "model.path")
    return path


def has_progress(run: Config) -> bool:
    """Whether anything came of the run in this folder."""
    metrics = run.run_dir / METRICS
    return (metrics.exists() and metrics.stat().st_size > 0) or bool(Folders(run.checkpoints_dir).steps())


def remains(run: Config) -> str:
    """What a run that was broken off leaves behind, and what can be done."""
    steps = Folders(run.checkpoints_dir).steps()
    if steps:
        return f"{run.run_dir} holds a checkpoint; the same command goes on after step {steps[-1]}."
    return f"{run.run_dir} holds no checkpoint yet; the same command starts anew."


def begin(run: Config, cfg: DictConfig, contract: dict[str, Any], start: Committed | None) -> None:
    """Write what the run is: the resolved configuration and contract, versions, commit, command, data."""
    before = past(run) if start is not None else None
    own = start is not None and start.path.parent == run.checkpoints_dir
    began_from = before.began_from if before is not None and own else None if start is None else str(start.path)
    write_atomic(run.run_dir / "config.yaml", OmegaConf.to_yaml(_resolved(cfg)).encode())
    write_atomic(run.run_dir / CONTRACT, (json.dumps(contract, indent=1, sort_keys=True) + "\n").encode())
    _write(
        run,
        {
            "name": run.name,
            "command": shlex.join(sys.orig_argv),
            "started": _now() if before is None else before.started,
            "resumed": None if start is None else _now(),
            "resumed_from": None if start is None else start.step,
            "began_from": began_from,
            "steps": run.trainer.total_steps,
            "finished": None,
            "versions": _versions(),
            "commit": _commit(),
            "platform": platform.platform(),
            "data": {path: fingerprint(path) for path in sorted({run.data.train, *run.trainer.eval.sets.values()})},
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
