"""The pool of reward workers: pictures are scored while the next ones are drawn."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Self

import numpy as np

from flowrl import config
from flowrl.distributed.launch.stuck import reporting
from flowrl.rewards.combine import Component
from flowrl.rewards.exposure import Exposure
from flowrl.rewards.latents import Latents, LatentScorer
from flowrl.rewards.scoring import FAULTS, FinalError, Request, RewardError, failure, limit_s, load_limit_s, num_scored
from flowrl.rewards.worker import InlineWorker, OnHost, Worker
from flowrl.types import Drawn, SampledGroup, ScoredGroup, Scorer

MakeWorker = Callable[[int, Mapping[str, Scorer | LatentScorer], float], Worker]
"""A worker's number, the scorers by name, `load_timeout_s` -> the worker, not yet started."""

log = logging.getLogger(__name__)


class RewardPool:
    """Scores groups with every component, `num_workers` groups at a time.

    Each worker is a spawned process that holds all components; a thread waits for its answer. Components that fail are
    tried again, `retries` times; then a required one raises `RewardError` from the group's future, and an optional one
    is left out of the group's rewards and counted.

    Args:
        components: by name.
        num_workers: processes; 0 scores in the calling process, inside `submit` and without a time limit.
        timeout_s: for one component on one group; a worker that takes longer is killed and replaced. Scorers that are
            `SelfTimed` have their own limits instead, here and for loading.
        retries: further attempts after a failure of whatever kind, on a new worker if the old one was lost.
        report_stuck_s: who scores or loads for longer than that is reported.
        load_timeout_s: for a worker to import and load all components.
        make_worker: where they run: `worker.OnHost`, by default without a GPU, or `remote.OnCluster`.

    `exposure` divides the time in which groups are scored that count. `stream` tells it what is waited for; who calls
    `submit` does so itself.
    """

    def __init__(
        self,
        components: Mapping[str, Component],
        num_workers: int = 2,
        timeout_s: float = 120.0,
        retries: int = 2,
        load_timeout_s: float = 600.0,
        report_stuck_s: float = 60.0,
        make_worker: MakeWorker | None = None,
    ) -> None:
        self._components = dict(components)
        # An advantage cannot come from what is only logged; if nothing has a weight, as in evaluations, all counts.
        self._decisive = {name for name, part in components.items() if part.weight != 0} or set(components)
        self._retries = retries
        self._timeout_s = timeout_s
        scorers = {name: component.scorer for name, component in components.items()}
        self._load_timeout_s = load_limit_s(scorers.values(), load_timeout_s)
        self._report_stuck_s = report_stuck_s
        self._closed = False
        self._totals = defaultdict[str, float](float, samples=0, seconds=0, retries=0)
        self._lock = threading.Lock()
        self.exposure = Exposure()
        make = make_worker or OnHost()
        self._workers = [make(index, scorers, self._load_timeout_s) for index in range(num_workers)] or [
            InlineWorker(scorers)
        ]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, "flowrl-reward") if num_workers else None

    @classmethod
    def from_config(cls, reward: config.Reward, make_worker: MakeWorker | None = None) -> Self:
        """The pool of the `reward` section."""
        return cls(
            reward.components,
            reward.num_workers,
            reward.timeout_s,
            reward.retries,
            reward.load_timeout_s,
            reward.report_stuck_s,
            make_worker,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Let the workers begin to load; returns at once."""
        for worker in self._workers:
            worker.start()

    def warm(self) -> None:
        """Return when all workers have loaded. Raises RewardError for a component that cannot be loaded."""
        self.start()
        for worker in self._workers:
            with self._reporting(worker, f"loads {', '.join(self._components)}", self._load_timeout_s):
                worker.wait()

    def submit(self, sampled: SampledGroup, *, counted: bool = True) -> Future[ScoredGroup]:
        """The scored group; `result()` raises RewardError if a required component failed for good.

        What it takes is added to the `totals` if it is `counted`.
        """
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        if self._threads:
            return self._threads.submit(self._score, sampled, counted)
        future: Future[ScoredGroup] = Future()
        try:
            future.set_result(self._score(sampled, counted))
        except RewardError as error:
            future.set_exception(error)
        return future

    def stream(self, groups: Iterable[SampledGroup], *, counted: bool = True) -> Iterator[ScoredGroup]:
        """All groups scored, in their order, while `groups` goes on generating. See `submit`."""
        pending: deque[Future[ScoredGroup]] = deque()
        if counted:
            self.exposure.expose(not self.overlaps)
        try:
            for group in groups:
                pending.append(self.submit(group, counted=counted))
                while pending and pending[0].done():
                    yield pending.popleft().result()
            if counted:
                self.exposure.expose(True)
            while pending:
                yield pending.popleft().result()
        finally:
            if counted:
                self.exposure.expose(False)
            for future in pending:
                future.cancel()

    @property
    def overlaps(self) -> bool:
        """Can anything be drawn meanwhile by whoever calls `submit`?"""
        return self._threads is not None

    def totals(self) -> dict[str, float]:
        """Of what was to be counted, since the pool was made.

        `samples` scored (once for each component), `seconds` that workers took for them, `retries`, and
        `dropped/<component>`, the groups that go without an optional component; `hidden` and `exposed`, see `Exposure`.
        """
        wall = self.exposure.seconds()
        with self._lock:
            return {**self._totals, "hidden": wall.hidden, "exposed": wall.exposed}

    def close(self) -> None:
        """End all workers, whatever they are doing; groups not yet scored are lost. Can be called twice."""
        self._closed = True
        for worker in self._workers:
            worker.close()
        if self._threads:
            self._threads.shutdown(cancel_futures=True)

    # -- one group ------------------------------------------------------------------------------------------------

    def _score(self, sampled: SampledGroup, counted: bool) -> ScoredGroup:
        worker, spent, subject = self._idle.get(), defaultdict[str, float](float), Subject(sampled)
        try:
            with self.exposure.scoring() if counted else nullcontext():
                found = {name: self._attempt(worker, name, subject, spent) for name in self._components}
        finally:
            self._idle.put(worker)
            if counted:
                with self._lock:
                    for name, amount in spent.items():
                        self._totals[name] += amount
        rewards = {name: scores for name, scores in found.items() if scores is not None}
        if not rewards.keys() & self._decisive:
            raise RewardError(", ".join(sorted(self._decisive)), subject.name, "no component that counts gave a score")
        return ScoredGroup(sampled, rewards)

    def _attempt(self, worker: Worker, name: str, subject: Subject, spent: dict[str, float]) -> np.ndarray | None:
        """The scores, or None for an optional component that failed every time; `spent` is added to."""
        component = self._components[name]
        for retries_left in reversed(range(1 + self._retries)):
            try:
                request = subject.request(name, component, self._timeout_s)
                started = time.perf_counter()
                with self._reporting(worker, f"scores {name} on {request.subject}", request.timeout_s):
                    scores = worker.score(request)
            except RewardError as error:
                if not self._closed and retries_left and not error.final:
                    spent["retries"] += 1
                    log.warning("%s; trying again", error)
                elif self._closed or component.required:
                    raise
                else:
                    spent[f"dropped/{name}"] += 1
                    log.warning("%s; the group goes without this optional component", error)
                    break
            else:
                spent["samples"] += len(scores)
                spent["seconds"] += time.perf_counter() - started
                return scores
        return None

    def _reporting(self, worker: Worker, task: str, timeout_s: float) -> AbstractContextManager[None]:
        name = f"reward worker {self._workers.index(worker)}" if self._threads else "this process, without a limit,"
        limit = f"; it is killed after {timeout_s:g} s" if self._threads else ""
        return reporting(self._report_stuck_s, lambda: f"{name} {task}{limit}")


class Subject:
    """A group on its way to the scorers. Latents are fetched where it is scored, and once for all components."""

    def __init__(self, sampled: SampledGroup) -> None:
        self._sampled = sampled
        self._latents: Latents | None = None

    @property
    def name(self) -> str:
        """What an error is about."""
        return f"prompt {self._sampled.group.prompt.id!r}"

    def request(self, name: str, component: Component, timeout_s: float) -> Request:
        """Only what is scored goes to the worker: a second of video has megabytes.

        Raises RewardError for whatever keeps it from being shown.
        """
        group = self._sampled.group
        ids = tuple(group.sample_id(slot) for slot in range(group.num_samples))
        try:
            shown = self._fetched() if component.sees_latents else component.scored_part(self._pictures())
        except FAULTS as error:
            raise failure(name, self.name, error) from error
        limit = limit_s(component.scorer, num_scored(component.scorer, shown), timeout_s)
        return Request(name, shown, group.prompt, ids, limit)

    def _pictures(self) -> np.ndarray:
        if self._sampled.images is None:
            raise FinalError("the rollout kept no pictures to score (rollout.output)")
        return self._sampled.images

    def _fetched(self) -> Latents:
        if self._latents is None:
            drawn: Drawn = self._sampled.drawn.fetch()
            self._latents = Latents.of(drawn)
        return self._latents
