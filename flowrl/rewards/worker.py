"""Where components are scored: in a process of their own, or in the one that asks.

A worker process is spawned, keeps its scorers loaded and answers one request at a time through a pipe. It can be killed
at any moment, from either side: if it dies or does not answer in time, that is a `RewardError`, and the next request
starts another one; when the process that asked is gone, however it went, the worker goes too.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from flowrl.distributed.launch.child import Child, LostChild
from flowrl.distributed.launch.process import MAIN_SCRIPT
from flowrl.prompts import Prompt
from flowrl.rewards import scoring
from flowrl.rewards.process import WORKER, serve
from flowrl.rewards.scoring import Request, RewardError

if TYPE_CHECKING:
    from flowrl.rewards.scoring import AnyScorer

UNSENDABLE = (AttributeError, MemoryError, RecursionError, TypeError, pickle.PicklingError)
STARTING = "starting"  # spawning imports the main script anew; only then does the worker begin


class Worker(Protocol):
    """Scores one request at a time."""

    def start(self) -> None:
        """Begin to load; does not wait. Raises RewardError."""
        ...

    def wait(self) -> None:
        """Return when everything is loaded. Raises RewardError."""
        ...

    def score(self, request: Request) -> np.ndarray:
        """float64 [K]. Raises RewardError."""
        ...

    def close(self) -> None:
        """Stop for good, whatever it is doing; whoever waits for an answer gets RewardError."""
        ...


class InlineWorker:
    """Scores in the calling process; nothing can interrupt it."""

    def __init__(self, scorers: Mapping[str, AnyScorer]) -> None:
        self._scorers = copy.deepcopy(dict(scorers))  # the caller's stay as cheap as they were
        self._loaded = False

    def start(self) -> None:
        """Nothing to begin with: there is no other process to wait for."""

    def wait(self) -> None:
        """Load what is not loaded yet."""
        if not self._loaded:
            for name, scorer in self._scorers.items():
                scoring.load(name, scorer)
            self._loaded = True

    def score(self, request: Request) -> np.ndarray:
        """float64 [K]."""
        self.wait()
        return scoring.score(self._scorers, request)

    def close(self) -> None:
        """Nothing to stop."""


class ProcessWorker:
    """Scores in a spawned process, started when first needed and again after it was lost.

    Args:
        scorers: components by name; they are pickled, not yet loaded.
        load_timeout_s: for start-up: imports and models.
        gpus: all that it sees, as `CUDA_VISIBLE_DEVICES` names them; "" is none.
        is_first: of its pool; the others do not repeat what all of them wait for.
    """

    def __init__(
        self, scorers: Mapping[str, AnyScorer], load_timeout_s: float, gpus: str = "", is_first: bool = True
    ) -> None:
        pickled = {name: _pickle(name, scorer) for name, scorer in scorers.items()}
        self._child = Child(serve, (pickle.dumps(Prompt), pickled, gpus, is_first), WORKER)
        self._names = ", ".join(scorers)
        self._turn = threading.RLock()  # one question at a time
        self._load_timeout_s = load_timeout_s
        self._loaded = False

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._child.pid

    def start(self) -> None:
        """Spawn the process unless it runs or the worker is closed."""
        try:
            self._child.start()
        except LostChild as error:
            raise RewardError(self._names, STARTING, f"the worker {error}") from error

    def wait(self) -> None:
        """Start if need be and wait until the process has loaded everything."""
        with self._turn:
            self.start()
            if self._loaded:
                return
            try:
                self._ask(self._load_timeout_s, self._names, STARTING)
                self._ask(self._load_timeout_s, self._names, "loading")
            except RewardError:
                self._child.kill()
                raise
            self._loaded = True

    def score(self, request: Request) -> np.ndarray:
        """float64 [K]."""
        with self._turn:
            self.wait()
            scores = self._ask(request.timeout_s, request.component, request.subject, request)
        assert scores is not None
        return scores

    def close(self) -> None:
        """Kill the process, wait until it is gone, and start no other."""
        self._child.close()

    def _ask(self, timeout_s: float, component: str, subject: str, *request: Request) -> np.ndarray | None:
        """The answer to one request, or to none."""
        try:
            answer: np.ndarray | RewardError | None = self._child.ask(timeout_s, *request)
        except LostChild as error:
            self._loaded = False
            hint = f". {MAIN_SCRIPT}" if subject == STARTING and error.exitcode == 1 else ""
            raise RewardError(component, subject, f"the worker {error}{hint}") from error
        except UNSENDABLE as error:  # nothing was sent, and the process waits on
            raise scoring.failure(component, subject, error) from error
        if isinstance(answer, RewardError):
            raise answer
        return answer


@dataclass(frozen=True)
class OnHost:
    """Makes the workers of a `pool.RewardPool`: processes of this host.

    `gpus` are those that each of them sees, in their order; whoever has none never comes to know CUDA.
    """

    gpus: Sequence[str] = ()

    def __call__(self, index: int, scorers: Mapping[str, AnyScorer], load_timeout_s: float) -> ProcessWorker:
        return ProcessWorker(scorers, load_timeout_s, self.gpus[index] if self.gpus else "", index == 0)


def _pickle(name: str, scorer: AnyScorer) -> bytes:
    try:
        return pickle.dumps(scorer)
    except UNSENDABLE as error:
        raise scoring.failure(name, "its way to a worker", error) from error
