"""States, order, weight and room, by enumeration and by closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from flowrl.buffer.accounting import AccountingError, BufferFull, State
from flowrl.buffer.ledger import Ledger, weight
from flowrl.types import InMemory, ScoredGroup
from tests.unit.buffer.support import group, ordinals, scored


@dataclass(frozen=True)
class HighestReward:
    """An order of one's own: the best groups first."""

    def __call__(self, scored: ScoredGroup) -> Any:
        return -float(scored.rewards["ocr"].mean())


@dataclass(frozen=True)
class Heavy:
    """A handle that says what it weighs."""

    nbytes: int

    def fetch(self) -> None:
        raise AssertionError("nobody fetches to weigh")


def filled(ledger: Ledger, rewards: list[float]) -> Ledger:
    ledger.submit([group(ordinal) for ordinal in range(len(rewards))])
    for ordinal, reward in enumerate(rewards):
        ledger.put(scored(ordinal, reward=reward))
    return ledger


WAYS: dict[str, list[str]] = {  # to every state
    "pending": [],
    "running": ["begin"],
    "finished": ["put"],
    "failed": ["fail"],
    "taken": ["put", "take"],
    "trained": ["put", "take", "trained"],
    "evicted": ["evict"],
}
CALLS: dict[str, Callable[[Ledger], object]] = {
    "begin": lambda ledger: ledger.begin(0),
    "put": lambda ledger: ledger.put(scored(0)),
    "fail": lambda ledger: ledger.fail(0, "reason"),
    "retry": lambda ledger: ledger.retry(0),
    "take": lambda ledger: ledger.take(1),
    "release": lambda ledger: ledger.release([0]),
    "trained": lambda ledger: ledger.trained([0]),
    "evict": lambda ledger: ledger.evict(0, "reason"),
}
FIT = {
    ("pending", "begin"): "running",
    ("pending", "put"): "finished",
    ("running", "put"): "finished",
    ("pending", "fail"): "failed",
    ("running", "fail"): "failed",
    ("failed", "retry"): "pending",
    ("finished", "take"): "taken",
    ("taken", "release"): "finished",
    ("taken", "trained"): "trained",
    **{(state, "evict"): "evicted" for state in ("pending", "running", "finished", "failed", "taken")},
}


def where(ledger: Ledger) -> str:
    """The only group is."""
    balance = ledger.accounting()
    found = [str(state) for state, count in balance.in_flight.items() if count]
    found += ["trained"] * balance.trained + ["evicted"] * balance.num_evicted
    (state,) = found
    return state


@pytest.mark.parametrize("state", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_in_every_state(state: str, call: str) -> None:
    ledger = Ledger()
    ledger.submit([group(0)])
    for step in WAYS[state]:
        CALLS[step](ledger)
    assert where(ledger) == state
    if (state, call) in FIT:
        CALLS[call](ledger)
        assert where(ledger) == FIT[state, call]
    else:
        with pytest.raises(AccountingError):
            CALLS[call](ledger)
        assert where(ledger) == state


def test_an_order_of_ones_own() -> None:
    ledger = filled(Ledger(order=HighestReward()), [0.1, 0.9, 0.5, 0.9])
    assert ordinals(ledger.take(1)) == [1]  # the older of two equals
    ledger.evict(2, "stale")
    ledger.release([1])
    assert ordinals(ledger.take(3)) == [1, 3, 0]


@pytest.mark.parametrize(("key", "error"), [(float("nan"), ValueError), ("a word", TypeError)])
def test_keys_that_cannot_be_compared_change_nothing(key: Any, error: type[Exception]) -> None:
    keys = iter([0.5, key, 0.25])
    ledger = Ledger(order=lambda scored: next(keys))
    ledger.submit([group(0), group(1)])
    ledger.put(scored(0))
    with pytest.raises(error):
        ledger.put(scored(1))
    assert ledger.accounting().in_flight[State.PENDING] == 1
    ledger.put(scored(1))
    assert ordinals(ledger.take(2)) == [1, 0]


def test_what_a_group_weighs() -> None:
    one = scored(1)
    pictures = 2 * 3 * 5 * 3
    latents = 2 * (2 * 2 + 1) * (4 * 2 * 2) * 4  # samples, states of two steps and the last, elements, bytes
    assert weight(one) == pictures + latents
    blind = replace(one.sampled, images=None)
    assert weight(replace(one, sampled=blind)) == latents
    assert weight(replace(one, sampled=replace(one.sampled, drawn=Heavy(1000)))) == pictures + 1000


def test_room_in_bytes_expects_the_largest_so_far() -> None:
    small, large = scored(0), scored(1)
    small = replace(small, sampled=replace(small.sampled, images=None, drawn=Heavy(10)))
    large = replace(large, sampled=replace(large.sampled, images=None, drawn=Heavy(40)))
    ledger = Ledger(max_bytes=100)
    assert ledger.has_room(1000)  # nothing is known yet
    ledger.submit([group(0), group(1), group(2)])
    ledger.put(small)
    ledger.begin(1)
    ledger.fail(2, "worker died")
    assert ledger.has_room(7) and not ledger.has_room(8)  # 10 held, 2 to come, 10 each
    ledger.put(large)
    assert ledger.accounting().num_bytes == 50
    assert not ledger.has_room(1) and ledger.has_room(0)  # 50 held, 1 to come of 40, and another 40
    assert ledger.could_have_room(2) and not ledger.could_have_room(3)
    ledger.retry(2)
    ledger.put(replace(small, sampled=replace(small.sampled, group=group(2))))
    assert not ledger.has_room(2) and ledger.has_room(1)  # 60 held; the next may be as large as the largest
    with pytest.raises(BufferFull, match=r"0.0 MB .*max_bytes=100"):
        ledger.submit([group(3), group(4)])
    ledger.take(2)
    assert not ledger.has_room(2)
    ledger.trained([1])
    assert ledger.has_room(2) and not ledger.has_room(3)  # 20 held


def test_what_was_submitted_can_be_put_beyond_the_bound() -> None:
    ledger = Ledger(max_bytes=100)
    ledger.submit([group(0), group(1)])
    for ordinal in (0, 1):
        each = scored(ordinal)
        ledger.put(replace(each, sampled=replace(each.sampled, images=None, drawn=Heavy(90))))
    assert ledger.accounting().num_bytes == 180
    assert ordinals(ledger.take(2)) == [0, 1]


def test_a_resumed_ledger_knows_how_heavy_groups_are() -> None:
    ledger = filled(Ledger(max_bytes=1500), [0.0])
    resumed = Ledger(max_bytes=1500)
    resumed.load_state_dict(ledger.state_dict())
    assert weight(scored(0)) == 730
    assert resumed.has_room(1) and not resumed.has_room(2)
    assert isinstance(scored(0).sampled.drawn, InMemory)  # which says nothing: its shape was asked
