"""What a replay buffer is configured with; backends differ in where the heavy part of a group lies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from flowrl.buffer.ledger import Ledger
from flowrl.buffer.replay import ReplayBuffer, Store
from flowrl.config import Config, Problem
from flowrl.distributed.launch.base import Cluster, Place


@dataclass(frozen=True, kw_only=True)
class Buffer(ABC):
    """`buffer` in the configuration.

    Args:
        max_groups: in flight, from submission until they are trained; null = any number.
        max_bytes: of finished and taken groups, and of those to come, which are expected to weigh as much as the
            largest so far; null = any number. Counts pictures, and trajectories wherever they lie.
        order: which finished groups are taken first, an `Order` of `flowrl.buffer.ledger`; null = the oldest.
    """

    max_groups: int | None = None
    max_bytes: int | None = None
    order: Any = None

    def problems(self, run: Config) -> list[Problem]:
        """Bounds that no batch keeps to."""
        found = []
        batch = run.data.train_batch_size
        if self.max_groups is not None and self.max_groups < batch:
            message = f"must be at least data.train_batch_size = {batch}, got {self.max_groups}."
            found.append(Problem("buffer.max_groups", message))
        if self.max_bytes is not None and self.max_bytes < 1:
            found.append(Problem("buffer.max_bytes", f"must be at least 1, got {self.max_bytes}."))
        if self.order is not None and not callable(self.order):
            message = f"must be called with a scored group and give a key, got {self.order!r}."
            found.append(Problem("buffer.order", message, "Set buffer.order._target_ to the dotpath of such a class."))
        return found

    def places(self) -> list[Place]:
        """Workers of the buffer's own."""
        return []

    @abstractmethod
    def store(self, cluster: Cluster) -> AbstractContextManager[Store]:
        """Where heavy parts lie, for as long as the run takes."""

    @contextmanager
    def open(self, cluster: Cluster) -> Iterator[ReplayBuffer]:
        """A new buffer of a run on `cluster`, which has the buffer's `places`; closed in the end."""
        with self.store(cluster) as store:
            buffer = ReplayBuffer(Ledger(self.max_groups, self.max_bytes, self.order), store)
            try:
                yield buffer
            finally:
                buffer.close()
