"""Which requests are scored together, when, and who fails for what."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from flowrl.serving.batching import Batcher, Item, NotNowError
from flowrl.serving.host import LostError, ScoringError

T = TypeVar("T")
Payload = list[float]  # its own scores; a NaN is a sample that the scorer raises on


class Scorer:
    """Gives payloads their own numbers, and remembers them. A batch takes `seconds`, and waits until it is `free`."""

    def __init__(self, seconds: float = 0) -> None:
        self.batches: list[list[Payload]] = []
        self.seconds = seconds
        self.begun = asyncio.Event()
        self.free = asyncio.Event()
        self.free.set()

    async def __call__(self, payloads: Sequence[Payload]) -> np.ndarray:
        self.batches.append(list(payloads))
        self.begun.set()
        await self.free.wait()
        await asyncio.sleep(self.seconds)
        scores = np.concatenate([np.array(payload) for payload in payloads])
        if np.isnan(scores).any():
            raise ScoringError("it raised")
        if np.isinf(scores).any():
            raise LostError("it died")
        return scores


def batched(
    scorer: Scorer, story: Callable[[Batcher], Coroutine[Any, Any, T]], max_wait_ms: float = 0, **options: Any
) -> T:
    """What becomes of a story with a running batcher of four samples at a time."""
    limits = {"max_batch_size": 4, "queue_size": 50, "max_bytes": 1000, "repeat_s": 5, **options}

    async def run() -> T:
        batcher = Batcher(scorer, max_wait_ms=max_wait_ms, **limits)
        task = asyncio.create_task(batcher.run())
        try:
            return await asyncio.wait_for(story(batcher), 10)
        finally:
            task.cancel()

    return asyncio.run(run())


async def score(batcher: Batcher, *scores: float, kind: str = "same", num_bytes: int = 1) -> list[float]:
    place = batcher.enter(num_bytes)
    try:
        found: list[float] = (await batcher.put(item(*scores, kind=kind, num_bytes=num_bytes), place)).tolist()
        return found
    finally:
        batcher.leave(place)


def item(*scores: float, kind: str = "same", num_bytes: int = 1) -> Item:
    return Item(kind, len(scores), num_bytes, list(scores))


async def behind_another(
    scorer: Scorer, batcher: Batcher, *requests: Coroutine[Any, Any, list[float]]
) -> list[list[float] | BaseException]:
    """The outcomes of requests that all came while the scorer was busy."""
    scorer.free.clear()
    first = asyncio.create_task(score(batcher, 0.0))
    await scorer.begun.wait()
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


NAN, INF = float("nan"), float("inf")


def test_nobody_fails_for_what_another_one_has_sent() -> None:
    scorer = Scorer()

    async def story(batcher: Batcher) -> Any:
        requests = [score(batcher, 1), score(batcher, NAN), score(batcher, 3), score(batcher, INF)]
        return await behind_another(scorer, batcher, *requests)

    one, raised, three, died = batched(scorer, story)
    assert (one, three) == ([1], [3])
    assert isinstance(raised, ScoringError) and isinstance(died, LostError)


@pytest.mark.parametrize("fault", [NAN, INF])
def test_a_batch_that_fails_is_not_repeated_for_ever(fault: float) -> None:
    """0.1 s for each attempt, and 0.15 s in which one may begin: the batch, its first half and then no more."""
    scorer = Scorer()

    async def story(batcher: Batcher) -> Any:
        scorer.seconds = 0.1
        found = await behind_another(scorer, batcher, *(score(batcher, fault) for _ in range(4)))
        return [*found, await score(batcher, 5)]

    *failed, after = batched(scorer, story, repeat_s=0.15)
    assert [type(error) for error in failed] == [ScoringError if np.isnan(fault) else LostError] * 4
    assert after == [5]
    assert [len(batch) for batch in scorer.batches] == [1, 4, 2, 1]


def test_whoever_has_gone_is_scored_neither_first_nor_again() -> None:
    scorer = Scorer()

    async def story(batcher: Batcher) -> Any:
        scorer.free.clear()
        tasks = [asyncio.create_task(score(batcher, number)) for number in (0, 1, NAN)]
        await scorer.begun.wait()
        tasks += [asyncio.create_task(score(batcher, number, kind="other")) for number in (3, 4)]
        await asyncio.sleep(0)
        for left in (tasks[0], tasks[3]):
            left.cancel()
        await asyncio.sleep(0)
        scorer.free.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    batched(scorer, story, max_wait_ms=50)
    assert str(scorer.batches) == "[[[0], [1], [nan]], [[1], [nan]], [[1]], [[nan]], [[4]]]"


def test_all_may_leave_while_a_batch_is_gathered() -> None:
    scorer = Scorer()

    async def story(batcher: Batcher) -> list[float]:
        task = asyncio.create_task(score(batcher, 1))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0.02)
        return await score(batcher, 2)

    assert batched(scorer, story, max_wait_ms=100) == [2]
    assert scorer.batches == [[[2]]]


def test_giving_up_answers_all_in_the_queue_in_the_batch_and_on_their_way() -> None:
    scorer = Scorer()

    async def story(batcher: Batcher) -> Any:
        on_its_way = batcher.enter(1)
        scorer.free.clear()
        tasks = [asyncio.create_task(score(batcher, 0.0))]
        await scorer.begun.wait()
        tasks.append(asyncio.create_task(score(batcher, 1.0)))
        await asyncio.sleep(0)
        batcher.give_up(NotNowError("the server is ending"))
        found = await asyncio.gather(*tasks, batcher.put(item(2), on_its_way), return_exceptions=True)
        batcher.leave(on_its_way)
        scorer.free.set()
        return found, await score(batcher, 3), batcher.num_waiting

    found, after, num_waiting = batched(scorer, story)
    assert [str(error) for error in found] == ["the server is ending"] * 3
    assert (after, num_waiting) == ([3], 0) and scorer.batches == [[[0]], [[3]]]


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
        await scorer.begun.wait()
        tasks += [asyncio.create_task(score(batcher, number)) for number in (1, 2)]
        await asyncio.sleep(0)
        assert batcher.num_waiting == 2
        with pytest.raises(NotNowError, match="2 requests are waiting already"):
            batcher.enter(1)
        tasks[1].cancel()  # a client that has gone away leaves its place
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(score(batcher, 3.0)))
        scorer.free.set()
        await asyncio.wait(tasks)
        assert batcher.num_waiting == 0
        return [task.result()[0] for task in tasks if not task.cancelled()]

    assert batched(scorer, story, queue_size=2) == [0, 2, 3]


def test_bytes_are_counted_from_admission_to_the_answer() -> None:
    scorer = Scorer()

    async def story(batcher: Batcher) -> None:
        scorer.free.clear()
        batch = asyncio.create_task(score(batcher, 0.0, num_bytes=3000))  # alone, it may have more
        await scorer.begun.wait()
        with pytest.raises(NotNowError, match="3000 bytes are waiting already"):
            batcher.enter(1)
        scorer.free.set()
        await batch
        first, second = batcher.enter(400), batcher.enter(600)
        with pytest.raises(NotNowError, match="1000 bytes"):
            batcher.enter(1)
        with pytest.raises(NotNowError, match="400 bytes"):  # it turns out to be larger than it said
            batcher.put(item(1, num_bytes=601), second)
        assert (await batcher.put(item(1, num_bytes=600), second)).tolist() == [1]
        batcher.leave(first)
        batcher.leave(second)
        batcher.leave(batcher.enter(1000))

    batched(scorer, story)


def test_the_queue_is_as_long_as_the_scorer_is_fast() -> None:
    """At 25 ms a request, 30 s are 1,200 of them; and it is told to come back when half have been scored."""
    scorer = Scorer(seconds=0.1)

    async def story(batcher: Batcher) -> tuple[int, int, str]:
        await asyncio.gather(*(score(batcher, number) for number in range(4)))
        idle = batcher.busy_s
        with pytest.raises(NotNowError) as caught:
            for _ in range(2000):
                batcher.enter(0)
        assert 400 < batcher.num_waiting <= 1201  # the machine may be slow
        return idle, batcher.busy_s, str(caught.value)

    idle, busy, message = batched(scorer, story, max_wait_ms=50, queue_size=10_000)
    assert (idle, busy) == (1, 16) and re.fullmatch(r"\d+ requests are waiting already, for 30 s", message)


def test_a_scorer_that_is_slow_whatever_the_number_gets_no_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight clients, and batches that take longer than anybody may wait."""
    monkeypatch.setattr("flowrl.serving.batching.MAX_DELAY_S", 0.03)
    scorer = Scorer(seconds=0.04)

    async def story(batcher: Batcher) -> None:
        async def client() -> None:
            for _ in range(6):
                await score(batcher, 1)

        await asyncio.gather(*(client() for _ in range(8)))

    batched(scorer, story, max_wait_ms=5, max_batch_size=16)
    assert [len(batch) for batch in scorer.batches] == [8] * 6


def test_the_delay_is_that_of_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples a batch: whoever waits behind fewer joins the next one, however long that takes."""
    scorer = Scorer(seconds=0.05)
    monkeypatch.setattr("flowrl.serving.batching.MAX_DELAY_S", 0.01)

    async def story(batcher: Batcher) -> int:
        await score(batcher, 1)
        large, *_ = [batcher.enter(0) for _ in range(3)]
        batcher.put(item(1, 2, kind="large"), large)
        with pytest.raises(NotNowError, match="3 requests are waiting already"):
            batcher.enter(0)
        return batcher.num_waiting

    assert batched(scorer, story, max_wait_ms=0) == 3
