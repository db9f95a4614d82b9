"""Where components are scored: in a process of their own, or in the one that asks.

A worker process is spawned, keeps its scorers loaded and answers one request at a time through a pipe. It can be killed
at any moment, from either side: if it dies or does not answer in time, that is a `RewardError`, and the next request
starts another one; when the process that asked is gone, however it went, the worker goes too.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Protocol

import numpy as np

from flowrl.distributed.launch.process import MAIN_SCRIPT, epitaph, interrupts_blocked, kill_group
from flowrl.prompts import Prompt
from flowrl.rewards import scoring
from flowrl.rewards.process import WORKER, serve
from flowrl.rewards.scoring import Request, RewardError

if TYPE_CHECKING:
    from flowrl.rewards.scoring import AnyScorer

STARTING = "starting"  # spawning imports the main script anew; only then does the worker begin
TIMED_OUT = "the worker did not answer within {:g} s and was stopped"


class Worker(Protocol):
    """Scores one request at a time."""

    def start(self) -> None:
        """Begin to load; does not wait."""
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
        timeout_s: for one request.
        load_timeout_s: for start-up: imports and models.
        gpus: all that it sees, as `CUDA_VISIBLE_DEVICES` names them; "" is none.
    """

    def __init__(
        self, scorers: Mapping[str, AnyScorer], timeout_s: float, load_timeout_s: float, gpus: str = ""
    ) -> None:
        self._pickled = {name: _pickle(name, scorer) for name, scorer in scorers.items()}
        self._turn = threading.RLock()  # one question at a time
        self._lock = threading.Lock()  # of starting and closing: no process is started after `close`
        self._closed = False
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._gpus = gpus
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._loaded = False

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Spawn the process unless it runs or the worker is closed."""
        context = multiprocessing.get_context("spawn")
        with self._lock:
            if self._process is not None or self._closed:
                return
            self._connection, theirs = context.Pipe()
            arguments = (theirs, pickle.dumps(Prompt), self._pickled, self._gpus)
            process = context.Process(target=serve, args=arguments, name=WORKER, daemon=True)
            with interrupts_blocked():
                process.start()
            self._process = process
            theirs.close()  # the process has its own; ours would hide its death

    def wait(self) -> None:
        """Start if need be and wait until the process has loaded everything."""
        with self._turn:
            self.start()
            if self._loaded:
                return
            names = ", ".join(self._pickled)
            try:
                self._ask(None, self._load_timeout_s, names, STARTING)
                self._ask(None, self._load_timeout_s, names, "loading")
            except RewardError:
                self._kill()
                raise
            self._loaded = True

    def score(self, request: Request) -> np.ndarray:
        """float64 [K]."""
        with self._turn:
            self.wait()
            scores = self._ask(request, self._timeout_s, request.component, request.subject)
        assert scores is not None
        return scores

    def close(self) -> None:
        """Kill the process, wait until it is gone, and start no other."""
        with self._lock:
            self._closed = True
        self._kill()

    def _kill(self) -> None:
        process, self._process, self._loaded = self._process, None, False
        if process is not None:
            kill_group(process)
            process.join()

    def _ask(self, request: Request | None, timeout_s: float, component: str, subject: str) -> np.ndarray | None:
        """One request, or none, and the answer. When time is up the process is killed: that ends sending, too."""
        process, connection = self._process, self._connection
        if process is None or connection is None:
            raise RewardError(component, subject, "the worker is closed")
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            kill_group(process)

        timer = threading.Timer(timeout_s, expire)
        timer.start()
        try:
            if request is not None:
                connection.send(request)
            answer: np.ndarray | RewardError | None = connection.recv()
        except (EOFError, OSError) as error:
            process.join(timeout=1)  # its own exit code, if it is about to have one
            self._kill()
            cause = TIMED_OUT.format(timeout_s) if expired.is_set() else f"the worker {epitaph(process.exitcode)}"
            if subject == STARTING and process.exitcode == 1:
                cause += f". {MAIN_SCRIPT}"
            raise RewardError(component, subject, cause) from error
        finally:
            timer.cancel()
        if isinstance(answer, RewardError):
            raise answer
        return answer


@dataclass(frozen=True)
class OnHost:
    """Makes the workers of a `pool.RewardPool`: processes of this host.

    `gpus` are those that each of them sees, in their order; whoever has none never comes to know CUDA.
    """

    gpus: Sequence[str] = ()

    def __call__(
        self, index: int, scorers: Mapping[str, AnyScorer], timeout_s: float, load_timeout_s: float
    ) -> ProcessWorker:
        return ProcessWorker(scorers, timeout_s, load_timeout_s, self.gpus[index] if self.gpus else "")


def _pickle(name: str, scorer: AnyScorer) -> bytes:
    try:
        return pickle.dumps(scorer)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise scoring.failure(name, "its way to a worker", error) from error
