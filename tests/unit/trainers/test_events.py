"""Simulated time."""

from __future__ import annotations

import pytest

from flowrl.trainers.events import Clock, Event, Process, Queue


def run(clock: Clock, *processes: Process[None]) -> None:
    """Until all of them have ended."""
    end = Event()

    def whole() -> Process[None]:
        endings = [Event() for _ in processes]
        for process, ending in zip(processes, endings, strict=True):
            clock.start(then(process, ending))
        yield from endings
        end.happen()

    clock.start(whole())
    clock.run(end)


def then(process: Process[None], ending: Event) -> Process[None]:
    yield from process
    ending.happen()


def test_workers_with_a_core_each_do_not_notice_each_other() -> None:
    clock, ended = Clock(), {}

    def work(seconds: float) -> Process[None]:
        yield seconds
        yield seconds
        ended[seconds] = clock.now

    run(clock, work(1), work(2), work(5))
    assert ended == {1: 2, 2: 4, 5: 10}


def test_workers_share_the_cores_that_there_are() -> None:
    """Three on two cores: each gets 2/3 of a core until one ends, then a whole one."""
    clock, ended = Clock(num_cores=2), {}

    def work(name: str, seconds: float) -> Process[None]:
        yield seconds
        ended[name] = clock.now

    run(clock, work("a", 2), work("b", 4), work("c", 4))
    assert ended == pytest.approx({"a": 3, "b": 5, "c": 5})


def test_those_who_wait_take_no_core() -> None:
    clock, opened = Clock(num_cores=1), Event()

    def wait() -> Process[None]:
        yield opened
        yield 1.0

    def work() -> Process[None]:
        yield 3.0
        opened.happen()

    run(clock, wait(), wait(), work())
    assert clock.now == pytest.approx(3 + 2)


def test_a_queue_is_first_in_first_out_for_things_and_for_people() -> None:
    clock, got = Clock(), []
    queue: Queue[int] = Queue()

    def take(name: str) -> Process[None]:
        got.append((name, (yield from queue.get())))

    def bring() -> Process[None]:
        yield 1.0
        for item in (1, 2, 3):
            queue.put(item)

    run(clock, take("a"), take("b"), take("c"), bring())
    assert got == [("a", 1), ("b", 2), ("c", 3)]


def test_nobody_waits_for_ever() -> None:
    def wait() -> Process[None]:
        yield 2.0
        yield Event()

    with pytest.raises(RuntimeError, match="after 2 simulated seconds everybody waits"):
        run(Clock(), wait())
