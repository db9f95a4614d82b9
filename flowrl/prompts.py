"""The one record that reward workers need. It stands alone so that they do not import torch with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One line of a data set. `target` is what a reward looks for (for OCR: the text to be read)."""

    id: str
    text: str
    target: str | None = None
    negative: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
