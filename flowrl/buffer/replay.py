"""The replay buffer: what producers put, from many threads, and one trainer takes."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from flowrl.buffer.accounting import Accounting, BufferClosed, BufferFull, State
from flowrl.buffer.ledger import Ledger
from flowrl.distributed.launch.base import LOOK_UP_S
from flowrl.types import Group, ScoredGroup


class Store(ABC):
    """Where the heavy part of a group lies while it is in the buffer. Called from many threads."""

    @abstractmethod
    def keep(self, scored: ScoredGroup) -> ScoredGroup:
        """The same group with its heavy part here. Twice the same group is two things to be dropped."""

    @abstractmethod
    def drop(self, kept: Sequence[ScoredGroup]) -> None:
        """Nobody will fetch these again; they are what `keep` gave."""


class ReplayBuffer:
    """Groups from their submission until they are trained or given up; each is atomic and goes by its ordinal.

    An object of the driver under every launcher: it holds records and handles, the heavy parts are in the store. All
    methods may be called from any thread. AccountingError says that a call does not fit the state of a group; then
    nothing has changed.

        submit -> pending -> begin -> running -> put -> finished -> take -> taken -> trained
                     |                   |                 ^                  |
                     +------ fail -------+                 +----- release ----+
                               v
                            failed -> retry -> pending;            evict: out, from any state

    Args:
        ledger: a new one, with the bounds.
        store: of the heavy parts.
    """

    def __init__(self, ledger: Ledger, store: Store) -> None:
        self._ledger = ledger
        self._store = store
        self._changed = threading.Condition()
        self._closed: BaseException | None = None

    # ------------------------------------------------------------------------------------------ producing

    def submit(self, groups: Iterable[Group]) -> None:
        """These are to be drawn: pending.

        Bounds hold here and nowhere else: what has been submitted can always be put. Raises BufferFull when there is
        no room for all of them (`wait_for_room` first), and BufferClosed or the error that the buffer was closed with.
        """
        with self._changed:
            self._check_open()
            self._ledger.submit(list(groups))

    def begin(self, ordinal: int) -> None:
        """A worker draws a pending group: running."""
        with self._changed:
            self._ledger.begin(ordinal)

    def put(self, scored: ScoredGroup) -> None:
        """A pending or running group is finished. Its heavy part moves to the store before anybody can take it."""
        with self._changed:
            self._ledger.find("put", scored.sampled.group.ordinal)
        kept = self._store.keep(scored)  # takes time: others go on
        with ExitStack() as undoing:
            undoing.callback(self._store.drop, [kept])
            with self._changed:
                self._ledger.put(kept)
                self._changed.notify_all()
            undoing.pop_all()

    def fail(self, ordinal: int, reason: str) -> None:
        """A pending or running group could not be drawn or scored, because of `reason`: failed."""
        with self._changed:
            self._ledger.fail(ordinal, reason)
            self._changed.notify_all()

    def retry(self, ordinal: int) -> Group:
        """A failed group is to be drawn again: pending. How often is counted for the group; see `failed`."""
        with self._changed:
            return self._ledger.retry(ordinal)

    def evict(self, ordinal: int, reason: str) -> None:
        """Give a group up, whatever its state, counted under `reason`, a word. Its worker may still put it: refused."""
        with self._changed:
            dropped = self._ledger.evict(ordinal, reason)
            self._changed.notify_all()
        self._store.drop(dropped)

    # ------------------------------------------------------------------------------------------ consuming

    def take(self, count: int, timeout_s: float | None = None) -> list[ScoredGroup]:
        """The first `count` finished groups in the buffer's order, once there are so many: taken.

        Raises BufferFull at once if there will never be: none is to come, and there is no room for another. Raises
        TimeoutError when there are fewer after `timeout_s` (None: it waits for as long as it takes), and BufferClosed
        or the error that the buffer was closed with.
        """

        def ready() -> bool:
            if self._ledger.num_finished() >= count:
                return True
            if not self._ledger.num_to_come() and not self._ledger.has_room(1):
                raise BufferFull(f"{self._ledger.fullness(1)} It cannot hold {count} finished groups: raise the bound.")
            return False

        with self._changed:
            self._wait(ready, timeout_s, f"{count} finished groups")
            return self._ledger.take(count)

    def release(self, ordinals: Iterable[int]) -> None:
        """Taken groups of an update that was not made: finished again, all or none."""
        with self._changed:
            self._ledger.release(ordinals)
            self._changed.notify_all()

    def trained(self, ordinals: Iterable[int]) -> None:
        """Taken groups were trained: out, all or none. Their heavy parts can be fetched no longer."""
        with self._changed:
            dropped = self._ledger.trained(ordinals)
            self._changed.notify_all()
        self._store.drop(dropped)

    # ------------------------------------------------------------------------------------------ room

    def room(self, count: int) -> bool:
        """Whether `submit` would take so many groups now."""
        with self._changed:
            return self._ledger.has_room(count)

    def wait_for_room(self, count: int, timeout_s: float | None = None) -> None:
        """Until `submit` would take so many groups.

        Raises BufferFull at once if not even an empty buffer would, TimeoutError after `timeout_s`, and BufferClosed or
        the error that the buffer was closed with.
        """

        def ready() -> bool:
            if not self._ledger.could_have_room(count):  # may turn out while waiting, from the size of what comes
                raise BufferFull(f"{self._ledger.fullness(count)} Not even an empty one would have: raise the bound.")
            return self._ledger.has_room(count)

        with self._changed:
            self._wait(ready, timeout_s, f"room for {count} groups")

    # ------------------------------------------------------------------------------------------ questions

    def pending(self) -> list[Group]:
        """Groups that nobody draws yet; after a resume, all those that have to be drawn again."""
        with self._changed:
            return self._ledger.groups(State.PENDING)

    def failed(self) -> dict[int, tuple[str, int]]:
        """(reason, number of retries so far) of every failed group, by ordinal."""
        with self._changed:
            return self._ledger.failed()

    def accounting(self) -> Accounting:
        """The balance now."""
        with self._changed:
            return self._ledger.accounting()

    # ------------------------------------------------------------------------------------------ the ends

    def close(self, error: BaseException | None = None) -> None:
        """Nothing more is to come: whoever waits, now or later, gets `error`, or else BufferClosed; so does `submit`.

        What is in flight may still be put, evicted, counted and saved. The first call decides.
        """
        with self._changed:
            if self._closed is None:
                self._closed = BufferClosed("the replay buffer is closed.") if error is None else error
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Counts, and every group in flight without what was drawn: values for JSON, if the prompts' metadata are."""
        with self._changed:
            return self._ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, in a new buffer.

        What was drawn is gone, so every group that had not failed is pending again, counted as restored; `pending`
        lists them. Failed groups still wait for a decision. Raises AccountingError if the buffer is not new, and
        ValueError for a state that does not add up.
        """
        with self._changed:
            self._ledger.load_state_dict(state)

    # ------------------------------------------------------------------------------------------ within

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        """Holding the lock before and after. In short turns: a signal that comes just before one is seen after it."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._check_open()
        while not ready():
            left = LOOK_UP_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                in_flight = self._ledger.accounting().in_flight
                found = ", ".join(f"{count} {state}" for state, count in in_flight.items())
                raise TimeoutError(f"the replay buffer had no {what} within {timeout_s:g} s; in flight: {found}.")
            self._changed.wait(min(left, LOOK_UP_S))
            self._check_open()
