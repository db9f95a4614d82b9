"""What every backend keeps to: states, order, waiting, the heavy part, the ends."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from flowrl.buffer import replay
from flowrl.buffer.accounting import AccountingError, BufferClosed, BufferFull, State
from flowrl.buffer.replay import ReplayBuffer
from flowrl.types import Group
from tests.unit.buffer.conftest import MakeBuffer
from tests.unit.buffer.support import SOON, group, ordinals, scored

BEGUN = 0.05  # seconds, for another thread to be waiting


def with_finished(buffer: ReplayBuffer, *finished: int) -> ReplayBuffer:
    """These groups submitted and put."""
    buffer.submit([group(ordinal) for ordinal in finished])
    for ordinal in finished:
        buffer.put(scored(ordinal, version=ordinal))
    return buffer


def test_a_group_goes_from_submission_to_training(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    buffer.submit([group(5), group(6)])
    assert buffer.pending() == [group(5), group(6)]
    buffer.begin(6)
    buffer.put(scored(6, reward=0.5))
    (taken,) = buffer.take(1)
    assert taken.sampled.group == group(6) and taken.rewards["ocr"].tolist() == [0.5, 0.5]
    assert (taken.sampled.images == 6).all()
    heavy = taken.sampled.drawn.fetch()
    assert heavy["ordinal"] == 6 and heavy["latents"].tolist() == [[6.0] * 3] * 2 and heavy["empty"].shape == (0,)
    heavy["latents"] += 1  # one's own memory, or the only copy
    buffer.trained([6])
    balance = buffer.accounting()
    assert (balance.submitted, balance.trained, balance.in_flight[State.PENDING]) == (2, 1, 1)
    assert balance.num_bytes == 0


def test_the_oldest_are_taken_first_and_come_back_to_their_place(make_buffer: MakeBuffer) -> None:
    buffer = with_finished(make_buffer(), 1, 2, 3, 4)
    assert ordinals(buffer.take(2)) == [1, 2]
    buffer.release([2, 1])
    assert ordinals(buffer.take(3)) == [1, 2, 3]
    assert buffer.accounting().in_flight == {
        State.PENDING: 0,
        State.RUNNING: 0,
        State.FINISHED: 1,
        State.FAILED: 0,
        State.TAKEN: 3,
    }


def test_a_failed_group_is_drawn_again_or_given_up(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    buffer.submit([group(1), group(2)])
    buffer.begin(1)
    buffer.fail(1, "out of memory")
    assert buffer.retry(1) == group(1)
    buffer.fail(1, "out of memory again")
    buffer.fail(2, "worker died")
    assert buffer.failed() == {1: ("out of memory again", 1), 2: ("worker died", 0)}
    buffer.retry(2)
    buffer.evict(1, "rollout_failed")
    assert buffer.pending() == [group(2)]
    assert buffer.accounting().metrics()["buffer/evicted_rollout_failed"] == 1


def test_what_comes_after_an_eviction_is_refused(make_buffer: MakeBuffer) -> None:
    buffer = with_finished(make_buffer(), 1, 2)
    buffer.submit([group(3)])
    buffer.evict(3, "stuck")
    with pytest.raises(AccountingError, match=r"put\(3\): the group is not in flight"):
        buffer.put(scored(3))
    with pytest.raises(AccountingError, match=r"put\(2\): the group is finished, not pending or running"):
        buffer.put(scored(2))
    assert ordinals(buffer.take(2)) == [1, 2]


def test_misuse_names_the_group_its_state_and_the_call(make_buffer: MakeBuffer) -> None:
    buffer = with_finished(make_buffer(), 1, 2)
    buffer.take(1)
    for call, message in (
        (lambda: buffer.trained([1, 2]), r"trained\(2\): the group is finished, not taken"),
        (lambda: buffer.trained([1, 1]), r"trained\(1\): the group was named 2 times"),
        (lambda: buffer.begin(1), r"begin\(1\): the group is taken, not pending"),
        (lambda: buffer.retry(7), r"retry\(7\): the group is not in flight"),
        (lambda: buffer.submit([group(3), group(2)]), r"submit\(2\): ordinals must go up, and 3 was the last"),
        (lambda: buffer.submit([group(3), group(3)]), r"submit\(3\): .* 3 was the last"),
        (lambda: buffer.submit([group(2)]), r"submit\(2\): .* 2 was the last"),
    ):
        with pytest.raises(AccountingError, match=message):
            call()
    with pytest.raises(ValueError, match="a reason must be a word"):
        buffer.evict(1, "no such luck")
    assert (buffer.accounting().submitted, buffer.accounting().in_flight[State.TAKEN]) == (2, 1)


def test_a_resumed_run_draws_again_what_was_in_flight(make_buffer: MakeBuffer) -> None:
    buffer = with_finished(make_buffer(), 1, 2, 3, 4)
    buffer.submit([group(5), group(6), group(7)])
    buffer.begin(6)
    buffer.fail(7, "worker died")
    buffer.retry(7)
    buffer.fail(7, "worker died")
    buffer.take(2)
    buffer.trained([1])
    buffer.evict(3, "stale")
    saved = json.loads(json.dumps(buffer.state_dict()))

    resumed = make_buffer()
    resumed.load_state_dict(saved)
    assert resumed.pending() == [group(2), group(4), group(5), group(6)]
    assert resumed.failed() == {7: ("worker died", 1)}
    balance = resumed.accounting()
    assert (balance.submitted, balance.trained, balance.evicted, balance.restored) == (7, 1, {"stale": 1}, 4)
    with pytest.raises(AccountingError, match="7 was the last"):
        resumed.submit([group(1)])
    with pytest.raises(AccountingError, match="used already"):
        resumed.load_state_dict(saved)
    again = make_buffer()
    again.load_state_dict(resumed.state_dict())
    assert again.accounting().restored == 8
    with pytest.raises(ValueError, match="damaged"):
        make_buffer().load_state_dict(saved | {"trained": 2})


# ------------------------------------------------------------------------------------------ waiting


@pytest.fixture
def no_looking_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits has to be told."""
    monkeypatch.setattr(replay, "LOOK_UP_S", 100 * SOON)


@pytest.mark.usefixtures("no_looking_up")
def test_take_waits_for_enough(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    buffer.submit([group(1), group(2), group(3)])
    buffer.put(scored(2))
    with pytest.raises(TimeoutError, match=r"no 2 finished groups within 0.01 s; in flight: 2 pending, .* 1 finished"):
        buffer.take(2, timeout_s=0.01)
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(buffer.take, 2, 2 * SOON)
        time.sleep(BEGUN)
        buffer.put(scored(1))
        assert ordinals(taking.result(SOON)) == [1, 2]
        taking = thread.submit(buffer.take, 1, 2 * SOON)
        time.sleep(BEGUN)
        buffer.release([2])
        assert ordinals(taking.result(SOON)) == [2]


@pytest.mark.usefixtures("no_looking_up")
def test_take_ends_where_enough_will_never_come(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(max_groups=2)
    buffer.submit([group(1), group(2)])
    buffer.put(scored(1))
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(buffer.take, 3, 2 * SOON)
        time.sleep(BEGUN)
        assert not taking.done()  # one is still to come: it might be evicted, and make room
        buffer.put(scored(2))
        with pytest.raises(
            BufferFull, match=r"2 are in flight \(buffer.max_groups=2\).* cannot hold 3 finished groups"
        ):
            taking.result(SOON)
    assert ordinals(buffer.take(2)) == [1, 2]


@pytest.mark.usefixtures("no_looking_up")
def test_submission_waits_for_room(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(max_groups=3)
    buffer.wait_for_room(3, timeout_s=0)
    buffer.submit([group(1), group(2)])
    assert buffer.room(1) and not buffer.room(2)
    with pytest.raises(BufferFull, match=r"no room for 2 more groups: 2 are in flight \(buffer.max_groups=3\)"):
        buffer.submit([group(3), group(4)])
    with pytest.raises(TimeoutError, match="room for 2 groups"):
        buffer.wait_for_room(2, timeout_s=0.01)
    with pytest.raises(BufferFull, match="Not even an empty one"):
        buffer.wait_for_room(4, SOON)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(buffer.wait_for_room, 2, 2 * SOON)
        time.sleep(BEGUN)
        buffer.put(scored(1))
        buffer.take(1)
        assert not buffer.room(2)  # whoever has taken it may give it back
        buffer.trained([1])
        waiting.result(SOON)
        waiting = thread.submit(buffer.wait_for_room, 3, 2 * SOON)
        time.sleep(BEGUN)
        buffer.evict(2, "stuck")
        waiting.result(SOON)
    buffer.submit([group(3), group(4), group(5)])


@pytest.mark.usefixtures("no_looking_up")
@pytest.mark.parametrize("error", [None, RuntimeError("the reward is down")])
def test_closing_wakes_whoever_waits(make_buffer: MakeBuffer, error: RuntimeError | None) -> None:
    buffer = with_finished(make_buffer(max_groups=2), 1)
    kind, message = (BufferClosed, "is closed") if error is None else (RuntimeError, "the reward is down")
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(buffer.take, 2), threads.submit(buffer.wait_for_room, 2)]
        time.sleep(BEGUN)
        buffer.close(error)
        for future in waiting:
            with pytest.raises(kind, match=message):
                future.result(SOON)
    buffer.close(ValueError("too late"))
    for call in (lambda: buffer.take(1), lambda: buffer.submit([group(2)]), lambda: buffer.wait_for_room(1)):
        with pytest.raises(kind, match=message):
            call()
    buffer.evict(1, "drained")
    assert buffer.state_dict()["evicted"] == {"drained": 1}


def test_producers_and_a_consumer_at_once(make_buffer: MakeBuffer) -> None:
    """Some groups fail once, some for good; the submitter is held back; every group is trained or evicted once."""
    buffer = make_buffer(max_groups=6)
    todo: SimpleQueue[Group | None] = SimpleQueue()
    most = []

    def submit() -> None:
        for ordinal in range(0, 40, 2):
            buffer.wait_for_room(2, SOON)
            buffer.submit([group(ordinal), group(ordinal + 1)])
            most.append(buffer.accounting().num_in_flight)
            todo.put(group(ordinal))
            todo.put(group(ordinal + 1))

    def produce() -> None:
        while (each := todo.get()) is not None:
            buffer.begin(each.ordinal)
            if each.ordinal % 10 == 3 and each.ordinal not in buffer.failed() and each.ordinal not in seen:
                seen.add(each.ordinal)
                buffer.fail(each.ordinal, "once")
                todo.put(buffer.retry(each.ordinal))
            elif each.ordinal % 10 == 7:
                buffer.fail(each.ordinal, "for good")
                buffer.evict(each.ordinal, "failed")
            else:
                buffer.put(scored(each.ordinal))

    def consume() -> list[int]:
        trained: list[int] = []
        while len(trained) < 36:
            batch = ordinals(buffer.take(2, SOON))
            buffer.trained(batch)
            trained += batch
        return trained

    seen: set[int] = set()
    with ThreadPoolExecutor(5) as threads:
        working = [threads.submit(produce) for _ in range(3)]
        submitting, consuming = threads.submit(submit), threads.submit(consume)
        submitting.result(3 * SOON)
        trained = consuming.result(3 * SOON)
        for _ in working:
            todo.put(None)
        for future in working:
            future.result(SOON)
    assert sorted(trained) == [ordinal for ordinal in range(40) if ordinal % 10 != 7]
    assert max(most) <= 6 and seen == {3, 13, 23, 33}
    balance = buffer.accounting()
    assert (balance.submitted, balance.trained, balance.evicted) == (40, 36, {"failed": 4})
    assert balance.num_in_flight == balance.num_bytes == 0


def test_two_workers_with_one_group_put_it_once(make_buffer: MakeBuffer) -> None:
    """A worker that was given up and its successor."""
    buffer = make_buffer()
    buffer.submit([group(1)])
    start = threading.Barrier(2)

    def put() -> None:
        start.wait()
        buffer.put(scored(1))

    with ThreadPoolExecutor(2) as threads:
        errors = [future.exception(SOON) for future in [threads.submit(put), threads.submit(put)]]
    assert sorted(type(error) for error in errors if error is not None) == [AccountingError]
    (taken,) = buffer.take(1)
    assert taken.sampled.drawn.fetch()["ordinal"] == 1  # the loser's copy is dropped, not the winner's
