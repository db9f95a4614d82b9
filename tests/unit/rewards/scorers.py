"""Scorers that behave in every way a scorer can. A module of its own, so that worker processes import nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
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
class Energy(Scores):
    """The mean square of each sample's latents, plus the mean of the prompt's embedding, if there is one."""

    def score_latents(self, latents: np.ndarray, text: Mapping[str, np.ndarray], prompts: Sequence[Any]) -> np.ndarray:
        assert latents.dtype == np.float32 and len(prompts) == len(latents)
        offset = np.mean(text["prompt_embeds"], dtype=np.float64) if text else 0.0
        return np.mean(latents.astype(np.float64) ** 2, axis=tuple(range(1, latents.ndim))) + offset


@dataclass(frozen=True, kw_only=True)
class Returns(Scores):
    """Always the same, whatever it is."""

    value: Any

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> Any:
        return self.value


@dataclass(frozen=True, kw_only=True)
class ReturnsForLatents(Scores):
    """The same of latents."""

    value: Any

    def score_latents(self, latents: np.ndarray, text: Mapping[str, np.ndarray], prompts: Sequence[Any]) -> Any:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Obeys(Scores):
    """Does what `prompt.metadata` says: `sleep` seconds, then `raise`, `refuse`, `exit`, `quit`, `nan`, or score 1.

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
            case "refuse":
                from flowrl.rewards.scoring import FinalError

                raise FinalError("no target")
            case "exit":
                os._exit(3)
            case "quit":
                sys.exit()
            case "nan":
                return np.full(len(images), np.nan)
        return np.ones(len(images))


@dataclass(frozen=True, kw_only=True)
class Patient(Obeys):
    """The same, and it knows how long that takes at most."""

    load_limit_s: float = 20.0
    sample_s: float = 20.0

    def score_limit_s(self, num_samples: int) -> float:
        return num_samples * self.sample_s


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
class NeverLoads(Scores):
    """Waits for something."""

    def load(self) -> None:
        time.sleep(600)

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> np.ndarray:
        return np.ones(len(images))


@dataclass(frozen=True, kw_only=True)
class VisibleGPUs(Scores):
    """Their number, for each picture; -1 if they are not set and all of them are there."""

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> np.ndarray:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        number = -1 if named is None else len([gpu for gpu in named.split(",") if gpu])
        return np.full(len(images), float(number))


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Whether torch was there when it was loaded, and the number of threads that libraries were told."""

    def load(self) -> None:
        object.__setattr__(self, "seen", [float("torch" in sys.modules), float(os.environ["OMP_NUM_THREADS"])])

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> np.ndarray:
        return np.array(vars(self)["seen"])


@dataclass(frozen=True, kw_only=True)
class Refused(Scores):
    """Writes a line for each attempt, and would fail for ever."""

    log: str

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> np.ndarray:
        from flowrl.rewards.scoring import FinalError

        with Path(self.log).open("a") as file:
            file.write("asked\n")
        raise FinalError("400 Bad Request")
