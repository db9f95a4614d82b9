"""Where groups can be, how many are where, and what goes wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Of a group that has been submitted and is neither trained nor evicted: it is in flight."""

    PENDING = "pending"  # to be drawn
    RUNNING = "running"  # a worker draws it, or its rewards are being made
    FINISHED = "finished"  # drawn and scored; waits for the trainer
    FAILED = "failed"  # waits for a decision: retry or evict
    TAKEN = "taken"  # the trainer has it


class AccountingError(RuntimeError):
    """A call does not fit the state of its group."""


class BufferFull(RuntimeError):
    """Groups were submitted for which there is no room."""


class BufferClosed(RuntimeError):
    """The buffer was closed while somebody waited for it, or before."""


@dataclass(frozen=True)
class Accounting:
    """Where every submitted group is: submitted = trained + evicted + in flight, always."""

    submitted: int
    trained: int
    evicted: Mapping[str, int]  # by reason
    in_flight: Mapping[State, int]  # by state, every state
    restored: int  # became pending again because a checkpoint does not hold what was drawn
    num_bytes: int  # of groups that are finished or taken

    @property
    def num_evicted(self) -> int:
        """For whatever reason."""
        return sum(self.evicted.values())

    @property
    def num_in_flight(self) -> int:
        """In whatever state."""
        return sum(self.in_flight.values())

    def metrics(self) -> dict[str, float]:
        """`buffer/*`, in flight by state, evictions by reason."""
        counts = {
            "submitted": self.submitted,
            "trained": self.trained,
            "in_flight": self.num_in_flight,
            "restored": self.restored,
            "bytes": self.num_bytes,
        }
        reasons = {f"evicted_{reason}": count for reason, count in self.evicted.items()}
        return {f"buffer/{name}": float(count) for name, count in (counts | dict(self.in_flight) | reasons).items()}
