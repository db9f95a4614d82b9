"""The run's own record: `metrics.jsonl`, one line per step."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowrl.config import ConfigError, Problem
from flowrl.files import write_atomic
from flowrl.tracking.loggers.base import RunInfo

FILENAME = "metrics.jsonl"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class JSONLLogger:
    """`{"step": 3, "train/loss": 0.1, ...}` per line, appended and flushed as the step ends. Always on.

    Numbers that JSON lacks are the strings "nan", "inf" and "-inf", which `float` reads. A run that goes on from step n
    first drops every line after n, and a last line that a kill cut short, so a series has no step twice.
    """

    def start(self, run: RunInfo) -> JSONLSession:
        path = run.run_dir / FILENAME
        if run.resumed_from is not None and not run.elsewhere and not path.exists():
            log.warning("%s is gone: the series begins anew after step %d", path, run.resumed_from)
        rewind(path, run.first_step)
        return JSONLSession(path)


class JSONLSession:
    """An open `metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step} | {name: _encoded(float(value)) for name, value in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # a checkpoint must never be ahead of it

    def log_images(self, step: int, name: str, images: np.ndarray, captions: Sequence[str]) -> None:
        """Pictures are not numbers; `artifacts` keeps them."""

    def close(self) -> None:
        self._file.close()


def rewind(path: Path, first_step: int) -> None:
    """Forget the lines from `first_step` on, and a line that was cut short; the file is replaced whole."""
    if path.exists():
        try:
            lines = _lines(path)
        except ValueError as error:
            hint = "Remove that line, or set name=... to start another run."
            raise ConfigError(Problem("name", f"the run's metrics are damaged: {error}.", hint)) from error
        write_atomic(path, b"".join(line for step, line in lines if step < first_step))


def read_metrics(path: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) of every whole line, in order. Raises ValueError, naming the line, for one that is no record."""
    records = []
    for _, line in _lines(path):
        record = json.loads(line)
        step = record.pop("step")
        records.append((step, {name: float(value) for name, value in record.items()}))
    return records


def _lines(path: Path) -> list[tuple[int, bytes]]:
    """(step, line) of the whole lines; bytes after the last newline are a line that was cut short."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    lines = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f'{path}, line {number}: must be a JSON object with a "step", got {line[:80]!r}'
            ) from error
        lines.append((step, line + b"\n"))
    return lines


def _encoded(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
