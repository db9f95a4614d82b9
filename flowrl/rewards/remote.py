"""Scoring on a cluster's own places: reward workers on Ray, on whichever host has room."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from flowrl.distributed.launch.base import Cluster, Remote
from flowrl.distributed.launch.child import TIMED_OUT
from flowrl.distributed.launch.failures import FAULTS, ClusterClosed, WorkerDied
from flowrl.rewards import scoring
from flowrl.rewards.process import GPUS_VARIABLE
from flowrl.rewards.scoring import Request, RewardError
from flowrl.rewards.worker import InlineWorker

if TYPE_CHECKING:
    from flowrl.rewards.scoring import AnyScorer

R = TypeVar("R")


@dataclass(frozen=True)
class OnCluster:
    """Makes the workers of a `RewardPool`: the first at the place `<prefix>-0`, and so on.

    Unless their places have GPUs (`on_gpu`) they see none, whatever the cluster thinks of that.
    """

    cluster: Cluster
    prefix: str = "reward"
    on_gpu: bool = False

    def __call__(self, index: int, scorers: Mapping[str, AnyScorer], load_timeout_s: float) -> RemoteWorker:
        make = InlineWorker if self.on_gpu else _without_gpus
        return RemoteWorker(self.cluster, f"{self.prefix}-{index}", scorers, load_timeout_s, make)


def _without_gpus(scorers: Mapping[str, AnyScorer]) -> InlineWorker:
    """In a process of its own."""
    os.environ[GPUS_VARIABLE] = ""
    return InlineWorker(scorers)


class RemoteWorker:
    """Scores in a worker of `cluster`, started when first needed and again after it was lost.

    Args:
        cluster: open for as long as this worker is.
        place: its own.
        scorers: components by name; they are pickled, not yet loaded.
        load_timeout_s: for start-up: imports and models.
        make: what becomes of the scorers there.
    """

    def __init__(
        self,
        cluster: Cluster,
        place: str,
        scorers: Mapping[str, AnyScorer],
        load_timeout_s: float,
        make: Callable[[Mapping[str, AnyScorer]], InlineWorker],
    ) -> None:
        self._spawn = partial(cluster.start, place, partial(make, dict(scorers)))
        self._names = ", ".join(scorers)
        self._load_timeout_s = load_timeout_s
        self._turn = threading.RLock()  # one question at a time
        self._lock = threading.Lock()  # of starting and closing: nothing is started after `close`
        self._closed = False
        self._remote: Remote[InlineWorker] | None = None
        self._loading: Future[None] | None = None

    def start(self) -> None:
        """Start the worker unless it runs or is closed."""
        with self._lock:
            if self._remote is None and not self._closed:
                try:
                    self._remote = self._spawn()
                except ClusterClosed:  # the run is ending
                    self._closed = True
                else:
                    self._loading = self._remote.call(InlineWorker.wait)

    def wait(self) -> None:
        """Start if need be and wait until everything is loaded."""
        with self._turn:
            self.start()
            if self._loading is not None:
                self._answer(self._loading, self._load_timeout_s, self._names, "loading")

    def score(self, request: Request) -> np.ndarray:
        """float64 [K]."""
        with self._turn:
            self.wait()
            remote = self._remote
            if remote is None:
                raise RewardError(request.component, request.subject, "the worker is closed")
            asked = remote.call(InlineWorker.score, request)
            return self._answer(asked, request.timeout_s, request.component, request.subject)

    def close(self) -> None:
        """Kill the worker and start no other."""
        with self._lock:
            self._closed = True
        self._kill()

    def _kill(self) -> None:
        remote, self._remote, self._loading = self._remote, None, None
        if remote is not None:
            remote.close(grace_s=0)

    def _answer(self, future: Future[R], timeout_s: float, component: str, subject: str) -> R:
        """Whatever goes wrong is a RewardError; without its scorers, or out of time, the worker is of no use."""
        try:
            return future.result(timeout_s)
        except RewardError:
            if future is self._loading:
                self._kill()
            raise
        except TimeoutError as error:
            self._kill()
            raise RewardError(component, subject, f"the worker {TIMED_OUT.format(timeout_s)}") from error
        except WorkerDied as error:
            self._kill()
            raise RewardError(component, subject, str(error)) from error
        except FAULTS as error:
            self._kill()
            raise scoring.failure(component, subject, error) from error
