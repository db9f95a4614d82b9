"""Dynamic batching: requests that come at about the same time are scored together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.serving.host import LostError, ScoringError


@dataclass(frozen=True)
class Item:
    """What one request wants to have scored."""

    kind: Hashable  # only items of one kind are scored together
    num: int  # of its samples
    payload: Any


class QueueFullError(RuntimeError):
    """So many requests wait that another one had better go elsewhere, or come back."""


@dataclass(frozen=True, eq=False)
class _Job:
    item: Item
    place: object
    scores: asyncio.Future[np.ndarray]
    since: float = field(default_factory=time.monotonic)


class Batcher:
    """A bounded queue before one scorer, which scores one batch at a time, in a thread.

    A batch is the oldest request and those of its kind that fit, in the order of their arrival. It begins when it is
    full, or when the oldest request has waited for `max_wait_ms`. A request is never split: one with more than
    `max_batch_size` samples is a batch of its own.

    A batch that fails is scored again request by request, so that nobody fails for what another one has sent.

    Args:
        score: blocks; float64, the scores of all samples of the payloads. Raises ScoringError or LostError.
        max_batch_size: samples.
        max_wait_ms: of the oldest request, for others to join it.
        queue_size: requests that may wait or be on their way to the queue; those in the batch do not count.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Any]], np.ndarray],
        max_batch_size: int,
        max_wait_ms: float,
        queue_size: int,
    ) -> None:
        self._score = score
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_ms / 1000
        self._queue_size = queue_size
        self._places: set[object] = set()
        self._queue: deque[_Job] = deque()
        self._arrival = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "flowrl-score")

    @property
    def num_waiting(self) -> int:
        """Requests that have a place and are not yet being scored."""
        return len(self._places)

    def enter(self) -> object:
        """A place in the queue, to be had before a request is read. Raises QueueFullError."""
        if len(self._places) >= self._queue_size:
            raise QueueFullError(f"{self._queue_size} requests are waiting already")
        place = object()
        self._places.add(place)
        return place

    def leave(self, place: object) -> None:
        """Give up a place; scoring has done so already."""
        self._places.discard(place)

    async def score(self, item: Item, place: object) -> np.ndarray:
        """float64 [num]. Raises ScoringError or LostError if this item fails by itself."""
        job = _Job(item, place, asyncio.get_running_loop().create_future())
        self._queue.append(job)
        self._arrival.set()
        return await job.scores

    async def run(self) -> None:
        """Score what comes, until cancelled."""
        while True:
            await self._until(lambda: bool(self._queue))
            batch = await self._collected()
            for job in batch:
                self._queue.remove(job)
                self._places.discard(job.place)
            await self._answer(batch)

    def close(self) -> None:
        """Give the thread back; what it is doing must end by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _collected(self) -> list[_Job]:
        """The next batch, which is still in the queue."""
        left = self._queue[0].since + self._max_wait_s - time.monotonic()
        try:
            async with asyncio.timeout(max(left, 0)):
                await self._until(lambda: self._next()[1])
        except TimeoutError:
            pass
        return self._next()[0]

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._arrival.clear()
            await self._arrival.wait()

    def _next(self) -> tuple[list[_Job], bool]:
        """What would be scored together now, and whether it is full: the next of its kind does not fit, or nothing."""
        batch: list[_Job] = []
        size, kind = 0, self._queue[0].item.kind
        for job in self._queue:
            if job.item.kind != kind:
                continue
            if batch and size + job.item.num > self._max_batch_size:
                return batch, True
            batch.append(job)
            size += job.item.num
        return batch, size >= self._max_batch_size

    async def _answer(self, batch: Sequence[_Job]) -> None:
        """Score the jobs together, or if that fails one by one, and give each its scores or its error."""
        payloads = [job.item.payload for job in batch]
        try:
            scores = await asyncio.get_running_loop().run_in_executor(self._thread, self._score, payloads)
        except (ScoringError, LostError) as error:
            if len(batch) > 1:
                for job in batch:
                    await self._answer([job])
            else:
                _settle(batch[0], error)
        else:
            parts = np.split(scores, np.cumsum([job.item.num for job in batch])[:-1])
            for job, part in zip(batch, parts, strict=True):
                _settle(job, part)


def _settle(job: _Job, outcome: np.ndarray | Exception) -> None:
    if job.scores.done():  # whoever asked has gone away
        return
    if isinstance(outcome, Exception):
        job.scores.set_exception(outcome)
    else:
        job.scores.set_result(outcome)
