"""Dynamic batching: requests that come at about the same time are scored together."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.serving.host import LostError, ScoringError

MEMORY = 0.2  # how much the last batch counts in the mean time of one
MAX_DELAY_S = 30.0  # of a request before its turn: whoever had to wait for much longer might not be there any more


@dataclass(frozen=True)
class Item:
    """What one request wants to have scored."""

    kind: Hashable  # only items of one kind are scored together
    num: int  # of its samples
    num_bytes: int  # of its payload
    payload: Any


class NotNowError(RuntimeError):
    """A request is not scored, for reasons that have nothing to do with it; one sentence."""


class Place:
    """Of one request, from when it has come until it is answered."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num = 1  # of its samples, at least, until there is an item
        self.item: Item
        self.scores: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self.since = 0.0  # when it was put into the queue

    def settle(self, outcome: np.ndarray | Exception) -> None:
        """Give it its scores or its error, unless it has one or was left."""
        if self.scores.done():
            return
        if isinstance(outcome, Exception):
            self.scores.set_exception(outcome)
            self.scores.exception()  # it may have been left since: nobody need look at it
        else:
            self.scores.set_result(outcome)


class Batcher:
    """A bounded queue before one scorer, which scores one batch at a time.

    A batch is the oldest request and those of its kind that fit, in the order of their arrival. It begins when it is
    full, or when the oldest request has waited for `max_wait_ms`. A request is never split: one with more than
    `max_batch_size` samples is a batch of its own.

    A batch that fails is scored again in halves, and these in halves, so that nobody fails for what another one has
    sent; but no part is begun later than `repeat_s` after the batch. What is left then fails as it failed together.

    Nobody is let in before whom whole batches would take long: the queue is as long as the scorer is fast, and never
    shorter than one full batch. Were it, a scorer whose batches take their time however small they are would be given
    ever smaller ones.

    Args:
        score: float64, the scores of all samples of the payloads. Raises ScoringError or LostError.
        max_batch_size: samples.
        max_wait_ms: of the oldest request, for others to join it.
        queue_size: requests that may wait; those in the batch do not count.
        max_bytes: of all requests that have a place, in the batch, too; one that is alone may have more.
        repeat_s: for a batch that fails to be begun again in parts.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Any]], Awaitable[np.ndarray]],
        *,
        max_batch_size: int,
        max_wait_ms: float,
        queue_size: int,
        max_bytes: int,
        repeat_s: float,
    ) -> None:
        self._score = score
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_ms / 1000
        self._queue_size = queue_size
        self._max_bytes = max_bytes
        self._repeat_s = repeat_s
        self._places: set[Place] = set()
        self._waiting: set[Place] = set()
        self._queue: list[Place] = []
        self._change = asyncio.Event()
        self._batch_s = 0.0  # mean time of a batch in the scorer

    @property
    def num_waiting(self) -> int:
        """Requests that have a place and are not yet being scored."""
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Of all requests that have a place, in the batch, too."""
        return sum(place.num_bytes for place in self._places)

    @property
    def busy_s(self) -> int:
        """Whole seconds, at least 1, until about half of those that wait have been scored."""
        return max(1, math.ceil(math.ceil(self._num_batches) * self._batch_s / 2))

    @property
    def _num_batches(self) -> float:
        """That wait, the last of which may not be full."""
        return sum(min(place.num, self._max_batch_size) for place in self._waiting) / self._max_batch_size

    def check_open(self) -> None:
        """Raises NotNowError if the queue has no place for anybody."""
        if len(self._waiting) >= self._queue_size:
            raise NotNowError(f"{self._queue_size} requests are waiting already")
        delay_s = math.floor(self._num_batches) * self._batch_s  # whoever comes now may still join the last batch
        if delay_s > MAX_DELAY_S:
            raise NotNowError(f"{self.num_waiting} requests are waiting already, for {delay_s:.0f} s")

    def enter(self, num_bytes: int) -> Place:
        """A place in the queue, for a request of which all has come. Raises NotNowError."""
        self.check_open()
        self._check_room(num_bytes, 0)
        place = Place(num_bytes)
        self._places.add(place)
        self._waiting.add(place)
        return place

    def reserve(self, num_bytes: int, place: Place) -> None:
        """Have room for what a request is going to need. Raises NotNowError."""
        self._check_room(num_bytes, place.num_bytes)
        place.num_bytes = num_bytes

    def put(self, item: Item, place: Place) -> asyncio.Future[np.ndarray]:
        """The scores to come, float64 [num], or the error with which this item fails. Raises NotNowError."""
        self.reserve(item.num_bytes, place)
        place.item, place.num, place.since = item, item.num, time.monotonic()
        if not place.scores.done():
            self._queue.append(place)
            self._change.set()
        return place.scores

    def leave(self, place: Place) -> None:
        """Give up a place; what is not being scored never will be."""
        place.scores.cancel()
        self._places.discard(place)
        self._waiting.discard(place)
        if place in self._queue:
            self._queue.remove(place)
            self._change.set()

    def give_up(self, error: NotNowError) -> None:
        """Answer all who wait, in the queue or in the batch."""
        for place in self._places:
            place.settle(error)
        self._queue.clear()

    async def run(self) -> None:
        """Score what comes, until cancelled."""
        while True:
            await self._until(lambda: bool(self._queue))
            batch = await self._collected()
            for place in batch:
                self._queue.remove(place)
                self._waiting.discard(place)
            await self._answer(batch, time.monotonic() + self._repeat_s)

    def _check_room(self, num_bytes: int, own: int) -> None:
        others = self.num_bytes - own
        if others and others + num_bytes > self._max_bytes:
            raise NotNowError(f"{others} bytes are waiting already")

    async def _collected(self) -> list[Place]:
        """The next batch, which is still in the queue; none if all have left."""
        left = self._queue[0].since + self._max_wait_s - time.monotonic()
        try:
            async with asyncio.timeout(max(left, 0)):
                await self._until(lambda: self._next()[1])
        except TimeoutError:
            pass
        return self._next()[0]

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._change.clear()
            await self._change.wait()

    def _next(self) -> tuple[list[Place], bool]:
        """What would be scored together now, and whether it is full: the next of its kind does not fit, or nothing."""
        batch: list[Place] = []
        size = 0
        for place in self._queue:
            if place.item.kind != self._queue[0].item.kind:
                continue
            if batch and size + place.item.num > self._max_batch_size:
                return batch, True
            batch.append(place)
            size += place.item.num
        return batch, size >= self._max_batch_size or not batch

    async def _answer(self, batch: Sequence[Place], repeat_until: float) -> None:
        """Give each its scores or its error, all together or, if that fails, in parts."""
        present = [place for place in batch if not place.scores.done()]
        if not present:
            return
        started = time.monotonic()
        try:
            scores = await self._score([place.item.payload for place in present])
        except (ScoringError, LostError) as error:
            half = len(present) // 2
            for part in (present[:half], present[half:]) if half else ():
                if time.monotonic() < repeat_until:
                    await self._answer(part, repeat_until)
            for place in present:
                place.settle(error)
        else:
            self._learn(time.monotonic() - started)
            ends = np.cumsum([place.item.num for place in present])
            for place, own in zip(present, np.split(scores, ends[:-1]), strict=True):
                place.settle(own)

    def _learn(self, batch_s: float) -> None:
        self._batch_s += (batch_s - self._batch_s) * (MEMORY if self._batch_s else 1)
