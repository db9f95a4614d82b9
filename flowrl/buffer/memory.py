"""`buffer=memory`: heavy parts stay where the launcher has put them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from flowrl.buffer.base import Buffer
from flowrl.buffer.replay import Store
from flowrl.distributed.launch.base import Cluster
from flowrl.types import ScoredGroup


@dataclass(frozen=True, kw_only=True)
class MemoryBuffer(Buffer):
    """This process (`launcher=inline`), shared memory (`spawn`) or Ray's object store: nothing moves.

    Whatever it is, it frees a heavy part when the last handle of it is gone.
    """

    @contextmanager
    def store(self, cluster: Cluster) -> Iterator[Store]:
        """None of the buffer's own."""
        yield AsItIs()


class AsItIs(Store):
    """Handles are kept, and forgotten."""

    def keep(self, scored: ScoredGroup) -> ScoredGroup:
        return scored

    def drop(self, kept: Sequence[ScoredGroup]) -> None:
        pass
