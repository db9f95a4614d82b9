"""What workers draw in one go, where it comes from, and what becomes of groups that could not be drawn."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flowrl.distributed.launch.failures import WorkerDied
from flowrl.rollout.checks import EngineError
from flowrl.types import Group

MAX_DEATHS = 2  # a group that has cost so many workers is at fault itself
FAILED, DIED = "rollout_failed", "rollout_died"  # reasons of evictions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """What a worker draws in one go, all with the same stochastic steps."""

    groups: Sequence[Group]
    rollout_id: int
    num_deaths: int = 0  # of workers that drew these groups

    def __str__(self) -> str:
        first, last = self.groups[0].ordinal, self.groups[-1].ordinal
        groups = f"group {first}" if len(self.groups) == 1 else f"groups {first}-{last}"
        return f"{groups} of rollout {self.rollout_id}"


@dataclass(frozen=True)
class FailedGroup:
    """A group that cannot be drawn, and why: its engine's answer was refused, or raised, or its workers died of it."""

    group: Group
    reason: str  # FAILED | DIED
    error: Exception

    def __str__(self) -> str:
        why = str(self.error).rstrip(".")
        return f"group {self.group.ordinal} ({self.group.prompt.text}) could not be drawn: {why}"


GiveUp = Callable[[FailedGroup], None]


class Source(Protocol):
    """Where workers get their next chunk; asked by several threads."""

    @property
    def tolerant(self) -> bool:
        """Whether groups may fail; else the first failure is the run's."""
        ...

    def next(self) -> Chunk | None:
        """Waits until there is one; None when no more will come."""
        ...

    def give_back(self, chunk: Chunk) -> None:
        """Another worker may have it."""
        ...

    def give_up(self, failed: FailedGroup) -> None:
        """Nobody will draw it. Raises its error, or another, if that ends the run."""
        ...


class Listed:
    """A source that is known from the beginning, and never makes anyone wait. Tolerant with `give_up`."""

    def __init__(self, chunks: Sequence[Chunk], give_up: GiveUp | None = None) -> None:
        self._chunks = deque(chunks)
        self._give_up = give_up

    @property
    def tolerant(self) -> bool:
        """See `Source`."""
        return self._give_up is not None

    def next(self) -> Chunk | None:
        """See `Source`."""
        try:
            return self._chunks.popleft()
        except IndexError:
            return None

    def give_back(self, chunk: Chunk) -> None:
        """See `Source`."""
        self._chunks.append(chunk)

    def give_up(self, failed: FailedGroup) -> None:
        """See `Source`."""
        if self._give_up is None:
            raise failed.error
        self._give_up(failed)

    def clear(self) -> None:
        """Nothing more is to be done."""
        self._chunks.clear()


def settle(source: Source, chunk: Chunk, left: Sequence[Group], error: Exception) -> int:
    """`chunk` was broken off by `error`, and `left` of it was not drawn.

    Groups that are at fault are given up. The others, which may have suffered from their neighbours, are given back one
    by one, and counted. Raises `error` if it is not about these groups, or if `source` does not tolerate failures other
    than deaths.
    """
    died = isinstance(error, WorkerDied)
    if not died and not (source.tolerant and left):
        raise error
    num_back = 0
    for group in left:
        if _at_fault(group, chunk, error, alone=len(left) == 1):
            source.give_up(FailedGroup(group, DIED if died else FAILED, error))
        else:
            source.give_back(Chunk([group], chunk.rollout_id, chunk.num_deaths + died))
            num_back += 1
    if num_back and not died:
        log.warning("%s failed: %s; what is left is drawn again, one by one", chunk, str(error).rstrip("."))
    return num_back


def _at_fault(group: Group, chunk: Chunk, error: Exception, *, alone: bool) -> bool:
    if isinstance(error, WorkerDied):
        return chunk.num_deaths + 1 >= MAX_DEATHS
    return alone or (isinstance(error, EngineError) and error.ordinal == group.ordinal)
