"""The books of the replay buffer: every group in flight, its state, and what may happen to it next.

Bookkeeping alone: one thread at a time, nobody waits, nothing is moved. `ReplayBuffer` adds the rest.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from flowrl.buffer.accounting import Accounting, AccountingError, BufferFull, State
from flowrl.prompts import Prompt
from flowrl.types import Group, ScoredGroup

ALLOWED: Mapping[str, tuple[State, ...]] = {
    "begin": (State.PENDING,),
    "put": (State.PENDING, State.RUNNING),
    "fail": (State.PENDING, State.RUNNING),
    "retry": (State.FAILED,),
    "take": (State.FINISHED,),
    "release": (State.TAKEN,),
    "trained": (State.TAKEN,),
    "evict": tuple(State),
}
"""The states in which a group may be for each call."""

WITH_DATA = (State.FINISHED, State.TAKEN)
FLOAT32_BYTES = 4
REASON = re.compile(r"[a-z][a-z0-9_]*")  # of an eviction: it becomes part of a metric's name


class Order(Protocol):
    """Which finished groups are taken first: those with the smallest key."""

    def __call__(self, scored: ScoredGroup) -> Any:
        """Asked once, when the group is put. All keys must be comparable; the older of two equals is first."""
        ...


@runtime_checkable
class Weighed(Protocol):
    """A handle that knows how heavy its thing is."""

    @property
    def nbytes(self) -> int:
        """In bytes."""
        ...


def weight(scored: ScoredGroup) -> int:
    """Bytes that a group takes: its pictures, and what its handle says of the rest.

    Of a handle that says nothing, the trajectory's latents are counted, by their shape: nothing heavy is touched.
    """
    sampled = scored.sampled
    pictures = 0 if sampled.images is None else sampled.images.nbytes
    if isinstance(sampled.drawn, Weighed):
        return pictures + sampled.drawn.nbytes
    num_latents = sampled.group.num_samples * (2 * len(sampled.sampling.step_index) + 1)  # before, after; and the last
    return pictures + num_latents * math.prod(sampled.sampling.latent_shape) * FLOAT32_BYTES


@dataclass(slots=True)
class Record:
    """One group in flight."""

    group: Group
    state: State = State.PENDING
    num_retries: int = 0
    reason: str = ""  # why it failed
    scored: ScoredGroup | None = None  # while it is finished or taken
    num_bytes: int = 0
    rank: tuple[Any, int] = (None, 0)  # its place among the finished


@dataclass
class Ledger:
    """All groups in flight, and counts of those that were.

    Every method that changes something changes all of it or, if it raises, nothing.

    Args:
        max_groups: in flight; None = any number.
        max_bytes: of groups with data, and of those that will have some; None = any number.
        order: of the finished; None = by ordinal, the oldest first.
    """

    max_groups: int | None = None
    max_bytes: int | None = None
    order: Order | None = None
    _records: dict[State, dict[int, Record]] = field(default_factory=lambda: {state: {} for state in State}, init=False)
    _finished: list[tuple[Any, int]] = field(default_factory=list, init=False)  # sorted: (key, ordinal)
    _newest: int = field(default=-1, init=False)  # ordinal
    _submitted: int = field(default=0, init=False)
    _trained: int = field(default=0, init=False)
    _evicted: Counter[str] = field(default_factory=Counter, init=False)
    _restored: int = field(default=0, init=False)
    _num_bytes: int = field(default=0, init=False)
    _largest: int = field(default=0, init=False)  # bytes of a group so far

    # ------------------------------------------------------------------------------------------ changes

    def submit(self, groups: Sequence[Group]) -> None:
        """They are pending. Raises AccountingError for an ordinal that is not new, BufferFull without room."""
        newest = self._newest
        for group in groups:
            if group.ordinal <= newest:
                raise AccountingError(f"submit({group.ordinal}): ordinals must go up, and {newest} was the last.")
            newest = group.ordinal
        if not self.has_room(len(groups)):
            raise BufferFull(self.fullness(len(groups)))
        self._records[State.PENDING] |= {group.ordinal: Record(group) for group in groups}
        self._newest = newest
        self._submitted += len(groups)

    def begin(self, ordinal: int) -> None:
        """Pending -> running."""
        self._move(self.find("begin", ordinal), State.RUNNING)

    def put(self, scored: ScoredGroup) -> None:
        """Pending or running -> finished."""
        ordinal = scored.sampled.group.ordinal
        record = self.find("put", ordinal)
        key = ordinal if self.order is None else self.order(scored)
        if key != key:
            raise ValueError(f"buffer.order gave {key} for group {ordinal}, which is not comparable.")
        bisect_left(self._finished, (key, ordinal))  # raises TypeError for another kind of key, before anything changes
        record.scored, record.rank, record.num_bytes = scored, (key, ordinal), weight(scored)
        self._num_bytes += record.num_bytes
        self._largest = max(self._largest, record.num_bytes)
        self._move(record, State.FINISHED)

    def fail(self, ordinal: int, reason: str) -> None:
        """Pending or running -> failed."""
        record = self.find("fail", ordinal)
        record.reason = reason
        self._move(record, State.FAILED)

    def retry(self, ordinal: int) -> Group:
        """Failed -> pending, and counted for the group."""
        record = self.find("retry", ordinal)
        record.num_retries += 1
        self._move(record, State.PENDING)
        return record.group

    def take(self, count: int) -> list[ScoredGroup]:
        """The first `count` of the finished -> taken. Raises AccountingError when there are fewer."""
        if not 0 <= count <= len(self._finished):
            raise AccountingError(f"take({count}): {len(self._finished)} groups are finished.")
        first = [self.find("take", ordinal) for _, ordinal in self._finished[:count]]
        for record in first:
            self._move(record, State.TAKEN)
        return _data(first)

    def release(self, ordinals: Iterable[int]) -> None:
        """Taken -> finished: they were not trained after all."""
        for record in self._find_all("release", ordinals):
            self._move(record, State.FINISHED)

    def trained(self, ordinals: Iterable[int]) -> list[ScoredGroup]:
        """Taken -> out, counted. Returns what the groups held."""
        records = self._find_all("trained", ordinals)
        for record in records:
            self._remove(record)
        self._trained += len(records)
        return _data(records)

    def evict(self, ordinal: int, reason: str) -> list[ScoredGroup]:
        """Out, whatever its state, counted under `reason`. Returns what the group held, if anything."""
        if not REASON.fullmatch(reason):
            raise ValueError(f"a reason must be a word like {REASON.pattern}, since metrics bear it, got {reason!r}.")
        record = self.find("evict", ordinal)
        self._remove(record)
        self._evicted[reason] += 1
        return _data([record])

    # ------------------------------------------------------------------------------------------ questions

    def find(self, call: str, ordinal: int) -> Record:
        """The group's record. Raises AccountingError if `call` does not fit its state."""
        for state, records in self._records.items():
            if ordinal in records:
                if state in ALLOWED[call]:
                    return records[ordinal]
                raise AccountingError(f"{call}({ordinal}): the group is {state}, not {' or '.join(ALLOWED[call])}.")
        raise AccountingError(f"{call}({ordinal}): the group is not in flight.")

    def groups(self, state: State) -> list[Group]:
        """In the order in which they came to that state."""
        return [record.group for record in self._records[state].values()]

    def failed(self) -> dict[int, tuple[str, int]]:
        """(reason, number of retries so far) of every failed group, by ordinal."""
        return {ordinal: (record.reason, record.num_retries) for ordinal, record in self._records[State.FAILED].items()}

    def num_finished(self) -> int:
        """How many can be taken."""
        return len(self._finished)

    def num_to_come(self) -> int:
        """How many are to be drawn, or are being drawn, or may be drawn again."""
        return sum(len(records) for state, records in self._records.items() if state not in WITH_DATA)

    def accounting(self) -> Accounting:
        """The balance now."""
        in_flight = {state: len(records) for state, records in self._records.items()}
        return Accounting(
            self._submitted, self._trained, dict(self._evicted), in_flight, self._restored, self._num_bytes
        )

    # ------------------------------------------------------------------------------------------ room

    def has_room(self, count: int) -> bool:
        """Whether so many more groups may be submitted. Those without data yet weigh as much as the largest so far."""
        in_flight = sum(map(len, self._records.values()))
        to_come = count + self.num_to_come()
        return _at_most(count + in_flight, self.max_groups) and _at_most(
            self._num_bytes + to_come * self._largest, self.max_bytes
        )

    def could_have_room(self, count: int) -> bool:
        """Whether there would be room if nothing else were in flight."""
        return _at_most(count, self.max_groups) and _at_most(count * self._largest, self.max_bytes)

    def fullness(self, count: int) -> str:
        """Why there is no room for so many more, for users."""
        balance = self.accounting()
        return (
            f"the replay buffer has no room for {count} more groups: {balance.num_in_flight} are in flight "
            f"(buffer.max_groups={self.max_groups}), {balance.num_bytes / 1e6:.1f} MB are held, and a group takes up "
            f"to {self._largest / 1e6:.1f} MB (buffer.max_bytes={self.max_bytes})."
        )

    # ------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Counts, and every group in flight without its data: values that JSON knows, if the prompts' metadata are."""
        records = [record for held in self._records.values() for record in held.values()]
        return {
            "newest": self._newest,
            "submitted": self._submitted,
            "trained": self._trained,
            "evicted": dict(self._evicted),
            "restored": self._restored,
            "largest": self._largest,
            "groups": [_plain(record) for record in sorted(records, key=lambda record: record.group.ordinal)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: groups are pending again, counted as restored; those that had failed still wait.

        There may be more of them than the bounds allow; then there is no room until there are fewer.
        Raises AccountingError unless the ledger is new, and ValueError if the counts do not add up.
        """
        if self._submitted:
            raise AccountingError("load_state_dict: the buffer has been used already.")
        records = [_record(entry) for entry in state["groups"]]
        if state["submitted"] != state["trained"] + sum(state["evicted"].values()) + len(records):
            raise ValueError("the buffer's checkpoint is damaged: submitted is not trained + evicted + in flight.")
        for record in records:
            self._records[record.state][record.group.ordinal] = record
        self._newest, self._largest = state["newest"], state["largest"]
        self._submitted, self._trained = state["submitted"], state["trained"]
        self._evicted = Counter(state["evicted"])
        self._restored = state["restored"] + len(self._records[State.PENDING])

    # ------------------------------------------------------------------------------------------ within

    def _find_all(self, call: str, ordinals: Iterable[int]) -> list[Record]:
        ordinals = list(ordinals)
        for ordinal, times in Counter(ordinals).items():
            if times > 1:
                raise AccountingError(f"{call}({ordinal}): the group was named {times} times.")
        return [self.find(call, ordinal) for ordinal in ordinals]

    def _move(self, record: Record, state: State) -> None:
        self._leave(record)
        record.state = state
        self._records[state][record.group.ordinal] = record
        if state is State.FINISHED:
            insort(self._finished, record.rank)

    def _remove(self, record: Record) -> None:
        self._leave(record)
        self._num_bytes -= record.num_bytes

    def _leave(self, record: Record) -> None:
        ordinal = record.group.ordinal
        del self._records[record.state][ordinal]
        if record.state is State.FINISHED:
            del self._finished[bisect_left(self._finished, record.rank)]


def _data(records: Iterable[Record]) -> list[ScoredGroup]:
    return [record.scored for record in records if record.scored is not None]


def _at_most(value: int, bound: int | None) -> bool:
    return bound is None or value <= bound


def _plain(record: Record) -> dict[str, Any]:
    group = record.group
    return {
        "ordinal": group.ordinal,
        "prompt": vars(group.prompt) | {"metadata": dict(group.prompt.metadata)},
        "occurrence": group.occurrence,
        "num_samples": group.num_samples,
        "state": str(record.state),
        "num_retries": record.num_retries,
        "reason": record.reason,
    }


def _record(entry: Mapping[str, Any]) -> Record:
    """What is left of a group: pending, or failed if it was."""
    group = Group(entry["ordinal"], Prompt(**entry["prompt"]), entry["occurrence"], entry["num_samples"])
    state = State.FAILED if entry["state"] == State.FAILED else State.PENDING
    return Record(group, state, entry["num_retries"], entry["reason"])
