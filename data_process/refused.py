"""The one error of these tools: what is wrong with the data or the command, a line for each fault."""

from __future__ import annotations

from collections.abc import Iterable


class Refused(ValueError):
    """Nothing has been written."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("\n".join(self.lines))
