"""Which requests are scored together, when, and who fails for what."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from flowrl.serving.batching import Batcher, Item, QueueFullError
from flowrl.serving.host import LostError, ScoringError

T = TypeVar("T")
Payload = list[float]  # its own scores; a NaN is a sample that the scorer raises on


class Scorer:
    """Gives payloads their own numbers, and remembers them. While `held`, it takes its time."""

    def __init__(self) -> None:
        self.batches: list[list[Payload]] = []
        self.begun = threading.Event()
        self.free = threading.Event()
        self.free.set()

    def __call__(self, payloads: Sequence[Payload]) -> np.ndarray:
        self.batches.append(list(payloads))
        self.begun.set()
        assert self.free.wait(5)
        scores = np.concatenate([np.array(payload) for payload in payloads])
        if np.isnan(scores).any():
            raise ScoringError("it raised")
        if np.isinf(scores).any():
            raise LostError("it died")
        return scores


def batched(
    scorer: Scorer, story: Callable[[Batcher], Coroutine[Any, Any, T]], max_wait_ms: float = 0, queue_size: int = 50
) -> T:
    """What becomes of a story with a running batcher of four samples at a time."""

    async def run() -> T:
        batcher = Batcher(scorer, 4, max_wait_ms, queue_size)
        task = asyncio.create_task(batcher.run())
        try:
            return await asyncio.wait_for(story(batcher), 10)
        finally:
            scorer.free.set()
            task.cancel()
            batcher.close()

    return asyncio.run(run())


async def score(batcher: Batcher, *scores: float, kind: str = "same") -> list[float]:
    place = batcher.enter()
    try:
        found: list[float] = (await batcher.score(Item(kind, len(scores), list(scores)), place)).tolist()
        return found
    finally:
        batcher.leave(place)


async def behind_another(
    scorer: Scorer, batcher: Batcher, *requests: Coroutine[Any, Any, list[float]]
) -> list[list[float] | BaseException]:
    """The outcomes of requests that all came while the scorer was busy."""
    scorer.free.clear()
    first = asyncio.create_task(score(batcher, 0.0))
    await asyncio.to_thread(scorer.begun.wait, 5)
    tasks = [asyncio.create_task(request) for request in requests]
    await asyncio.sleep(0)
    scorer.free.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_what_waits_is_scored_together_and_each_gets_its_own() -> None:
    scorer = Scorer()

    async def story(batcher: Batcher) -> Any:
        return await behind_another(scorer, batcher, score(batcher, 1, 2), score(batcher, 3), score(batcher, 4))

    assert batched(scorer, story) == [[1, 2], [3], [4]]
    assert scorer.batches == [[[0.0]], [[1, 2], [3], [4]]]


def test_a_request_is_never_split_and_order_is_kept() -> None:
    scorer = Scorer()

    async def story(batcher: Batcher) -> Any:
        requests = [score(batcher, 1, 2, 3), score(batcher, 4, 5), score(batcher, *range(6, 12)), score(batcher, 12)]
        return await behind_another(scorer, batcher, *requests)

    assert batched(scorer, story) == [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12]]
    assert scorer.batches[1:] == [[[1, 2, 3]], [[4, 5]], [[6, 7, 8, 9, 10, 11]], [[12]]]


def test_only_one_kind_is_scored_at_a_time_and_the_oldest_goes_first() -> None:
    scorer = Scorer()

    async def story(batcher: Batcher) -> Any:
        requests = [score(batcher, float(number), kind="ab"[number % 2]) for number in range(1, 6)]
        return await behind_another(scorer, batcher, *requests)

    assert batched(scorer, story) == [[1], [2], [3], [4], [5]]
    assert scorer.batches[1:] == [[[1], [3], [5]], [[2], [4]]]


def test_nobody_fails_for_what_another_one_has_sent() -> None:
    scorer = Scorer()

    async def story(batcher: Batcher) -> Any:
        nan, inf = float("nan"), float("inf")
        requests = [score(batcher, 1), score(batcher, nan), score(batcher, 3), score(batcher, inf)]
        return await behind_another(scorer, batcher, *requests)

    one, raised, three, died = batched(scorer, story)
    assert (one, three) == ([1], [3])
    assert isinstance(raised, ScoringError) and isinstance(died, LostError)


def test_a_full_batch_does_not_wait_and_others_do_not_wait_for_long() -> None:
    scorer = Scorer()

    async def story(batcher: Batcher) -> tuple[float, float]:
        started = time.monotonic()
        await asyncio.gather(*(score(batcher, number) for number in range(4)))
        full = time.monotonic()
        await score(batcher, 1.0)
        return full - started, time.monotonic() - full

    full, alone = batched(scorer, story, max_wait_ms=400)
    assert full < 0.3 and alone >= 0.39
    assert [len(batch) for batch in scorer.batches] == [4, 1]


def test_a_full_queue_takes_nobody_until_there_is_room() -> None:
    scorer = Scorer()

    async def story(batcher: Batcher) -> list[float]:
        scorer.free.clear()
        tasks = [asyncio.create_task(score(batcher, 0.0))]
        await asyncio.to_thread(scorer.begun.wait, 5)
        tasks += [asyncio.create_task(score(batcher, number)) for number in (1, 2)]
        await asyncio.sleep(0)
        assert batcher.num_waiting == 2
        with pytest.raises(QueueFullError, match="2 requests are waiting already"):
            batcher.enter()
        tasks[1].cancel()  # a client that has gone away leaves its place
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(score(batcher, 3.0)))
        scorer.free.set()
        await asyncio.wait(tasks)
        assert batcher.num_waiting == 0
        return [task.result()[0] for task in tasks if not task.cancelled()]

    assert batched(scorer, story, queue_size=2) == [0, 2, 3]
