"""Scorers that behave in every way a scorer can. A module of its own, so that worker processes import nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Needs nothing to be loaded."""

    def load(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Brightness(Scores):
    """The mean of each picture, in [0, 1]."""

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> np.ndarray:
        return images.mean(axis=(1, 2, 3), dtype=np.float64) / 255


@dataclass(frozen=True, kw_only=True)
class Returns(Scores):
    """Always the same, whatever it is."""

    value: Any

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> Any:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Obeys(Scores):
    """Does what `prompt.metadata` says: `sleep` seconds, then `raise`, `exit`, `quit`, `nan`, or score 1.

    First it writes its process id to the file `log`, and that of a process which it starts to `child`, if told to.
    """

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> np.ndarray:
        orders = prompts[0].metadata
        if "log" in orders:
            Path(orders["log"]).write_text(str(os.getpid()))
        if "child" in orders:
            child = subprocess.Popen(["sleep", "600"])
            Path(orders["child"]).write_text(str(child.pid))
        time.sleep(orders.get("sleep", 0))
        match orders.get("then"):
            case "raise":
                return Raises().score(images, prompts)
            case "exit":
                os._exit(3)
            case "quit":
                sys.exit()
            case "nan":
                return np.full(len(images), np.nan)
        return np.ones(len(images))


@dataclass(frozen=True, kw_only=True)
class Raises(Scores):
    """Divides by zero, in a function with a name that can be found in a traceback."""

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> np.ndarray:
        return self.a_function_of_the_scorer(images)

    def a_function_of_the_scorer(self, images: np.ndarray) -> np.ndarray:
        return np.ones(len(images) // 0)


@dataclass(frozen=True, kw_only=True)
class FailsOnce(Scores):
    """Ends its process, as running out of memory does, unless `log` exists."""

    log: str

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> np.ndarray:
        if not Path(self.log).exists():
            Path(self.log).touch()
            os._exit(3)
        return np.ones(len(images))


@dataclass(frozen=True, kw_only=True)
class CannotLoad:
    """Has no model."""

    def load(self) -> None:
        raise FileNotFoundError("no model.onnx")

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> np.ndarray:
        return np.ones(len(images))


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Whether torch was there when it was loaded, and the number of threads that libraries were told."""

    def load(self) -> None:
        object.__setattr__(self, "seen", [float("torch" in sys.modules), float(os.environ["OMP_NUM_THREADS"])])

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> np.ndarray:
        return np.array(vars(self)["seen"])
