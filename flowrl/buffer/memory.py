"""The in-memory replay buffer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from flowrl.types import Group, ScoredGroup


class AccountingError(RuntimeError):
    """A group was put, taken or evicted that the buffer does not hold in that state."""


@dataclass(frozen=True)
class Accounting:
    """Where every submitted group is: submitted = trained + evicted + in flight, always."""

    submitted: int
    trained: int
    evicted: dict[str, int]
    in_flight: int

    def metrics(self) -> dict[str, float]:
        """`buffer/*`, evictions by reason."""
        counts = {"submitted": self.submitted, "trained": self.trained, "in_flight": self.in_flight}
        reasons = {f"evicted_{reason}": count for reason, count in self.evicted.items()}
        return {f"buffer/{name}": float(count) for name, count in (counts | reasons).items()}


@dataclass
class MemoryBuffer:
    """Whole groups only, oldest first. A group is pending from `submit` to `put`, finished until `take` or `evict`."""

    _pending: OrderedDict[int, Group] = field(default_factory=OrderedDict, init=False, repr=False)
    _finished: OrderedDict[int, ScoredGroup] = field(default_factory=OrderedDict, init=False, repr=False)
    _submitted: int = field(default=0, init=False)
    _trained: int = field(default=0, init=False)
    _evicted: dict[str, int] = field(default_factory=dict, init=False)

    def submit(self, groups: Iterable[Group]) -> None:
        """Groups that generation has been asked for. Raises AccountingError for one that is already in flight."""
        for group in groups:
            if group.ordinal in self._pending or group.ordinal in self._finished:
                raise AccountingError(f"group {group.ordinal} is already in flight")
            self._pending[group.ordinal] = group
            self._submitted += 1

    def put(self, scored: ScoredGroup) -> None:
        """A finished group. Raises AccountingError unless it is pending."""
        ordinal = scored.sampled.group.ordinal
        if ordinal not in self._pending:
            raise AccountingError(f"group {ordinal} was never submitted, or is finished already")
        del self._pending[ordinal]
        self._finished[ordinal] = scored

    def evict(self, ordinal: int, reason: str) -> None:
        """Give a group up, counted under `reason`. Raises AccountingError for one that is not in flight."""
        if self._pending.pop(ordinal, None) is None and self._finished.pop(ordinal, None) is None:
            raise AccountingError(f"group {ordinal} is not in flight")
        self._evicted[reason] = self._evicted.get(reason, 0) + 1

    def take(self, num_groups: int) -> list[ScoredGroup]:
        """The `num_groups` oldest finished groups, for training. Raises AccountingError when there are fewer."""
        if len(self._finished) < num_groups:
            raise AccountingError(f"{num_groups} groups were asked for, {len(self._finished)} are finished")
        oldest = sorted(self._finished)[:num_groups]
        self._trained += num_groups
        return [self._finished.pop(ordinal) for ordinal in oldest]

    def accounting(self) -> Accounting:
        """The balance now."""
        in_flight = len(self._pending) + len(self._finished)
        return Accounting(self._submitted, self._trained, dict(self._evicted), in_flight)
