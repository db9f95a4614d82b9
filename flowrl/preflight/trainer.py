"""What a trainer mode is."""

from __future__ import annotations

from signal import Signals
from typing import Protocol, runtime_checkable

from flowrl.config import Config, Evaluation
from flowrl.distributed.checkpoint.folders import Committed


@runtime_checkable
class Trainer(Protocol):
    """A trainer mode (`trainer` in the configuration)."""

    @property
    def total_steps(self) -> int:
        """After which the run is finished."""
        ...

    @property
    def eval(self) -> Evaluation:
        """Held-out evaluation."""
        ...

    @property
    def layout(self) -> str:
        """Who samples: shared | colocated | standalone."""
        ...

    def fit(self, run: Config, start: Committed | None) -> Signals | None:
        """Train to the last step, from a checkpoint if there is one, and leave the report in the run folder.

        Returns None at the end, or the signal that was answered by saving and stopping before it.
        """
        ...
