"""Range checks of component fields: the error names the field, what it must be and what it got."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def require(condition: bool, owner: Any, field: str, expected: str) -> None:
    """Raise ValueError unless `condition`: "FlowSDE.noise_level must be >= 0, got -1.0"."""
    if not condition:
        raise ValueError(f"{type(owner).__name__}.{field} must be {expected}, got {getattr(owner, field)!r}")


def require_at_least(owner: Any, field: str, low: float) -> None:
    """The number in `field` must be finite and at least `low`."""
    value = getattr(owner, field)
    require(math.isfinite(value) and value >= low, owner, field, f"a number >= {low}")


def require_one_of(owner: Any, field: str, choices: Sequence[str]) -> None:
    """The string in `field` must be one of `choices`."""
    require_choice(f"{type(owner).__name__}.{field}", getattr(owner, field), choices)


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """The same for an argument called `name`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
