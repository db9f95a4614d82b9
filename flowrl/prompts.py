"""The one record that reward workers need. It stands alone so that they do not import torch with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 100  # of metadata: what is nested much deeper can be read, and not be sent to another process


@dataclass(frozen=True)
class Prompt:
    """One line of a data set. `target` is what a reward looks for (for OCR: the text to be read)."""

    id: str
    text: str
    target: str | None = None
    negative: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def is_too_deep(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Whether objects and lists lie in one another more than `limit` deep."""
    if not isinstance(value, Mapping | list | tuple):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return limit == 0 or any(is_too_deep(part, limit - 1) for part in inner)
