"""The numbers a run is judged by: held-out metrics before and after, in `summary.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from flowrl.files import write_atomic

FILENAME = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Held-out metrics (`eval/...`) before and after training."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    steps: int
    seconds: float  # wall-clock time of the whole run

    def __post_init__(self) -> None:
        if self.before.keys() != self.after.keys():
            raise ValueError(f"before has {sorted(self.before)}, after has {sorted(self.after)}; they must agree")

    def rows(self) -> list[tuple[str, float, float]]:
        """(name, before, after)."""
        return [(name, value, self.after[name]) for name, value in self.before.items()]

    def write(self, run_dir: Path) -> None:
        """Replace the run's `summary.json`."""
        write_atomic(run_dir / FILENAME, json.dumps(asdict(self), indent=2).encode() + b"\n")

    @classmethod
    def read(cls, run_dir: Path) -> Summary:
        """The run's `summary.json`. Raises FileNotFoundError before the run has ended."""
        return cls(**json.loads((run_dir / FILENAME).read_text()))
