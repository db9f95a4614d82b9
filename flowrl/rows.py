"""Batch-first records: frozen dataclasses whose rows can be chosen, moved and joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

SHARED = {"shared": True}
"""Metadata of a field that all rows have in common: it is neither indexed nor concatenated."""
RAGGED = {"ragged": True}
"""Metadata of tensors [B, L, ...] whose L may differ between parts: joined, the shorter ones end in zeros."""


@dataclass(frozen=True)
class Rows:
    """A frozen dataclass of batch-first fields: tensors, tuples, other `Rows`; `None` is passed over.

    Fields with the metadata `SHARED` belong to the batch as a whole and must be equal in all parts of a `concat`.
    """

    def __len__(self) -> int:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and not f.metadata.get("shared"):
                return len(value)
        raise TypeError(f"{type(self).__name__} has no batched field")

    def rows(self, index: Tensor) -> Self:
        """The rows at `index` (int64 [M], repeats allowed), in that order."""
        return self._map(lambda value: _take(value, index))

    def to(self, device: torch.device | str) -> Self:
        """Every tensor on `device`; dtypes stay."""

        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor | Rows) else value

        return self._map(move, include_shared=True)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all `parts` in order. Raises ValueError for no parts or for shared fields that differ."""
        if not parts:
            raise ValueError(f"{cls.__name__}.concat needs at least one part")
        merged: dict[str, Any] = {}
        for f in fields(parts[0]):
            values = [getattr(part, f.name) for part in parts]
            if f.metadata.get("shared"):
                if not all(_same(values[0], value) for value in values[1:]):
                    raise ValueError(f"{cls.__name__}.{f.name} differs between the parts to be joined")
                merged[f.name] = values[0]
            else:
                merged[f.name] = _join(_padded(values) if f.metadata.get("ragged") else values)
        return replace(parts[0], **merged)

    def _map(self, function: Any, *, include_shared: bool = False) -> Self:
        chosen = [f for f in fields(self) if include_shared or not f.metadata.get("shared")]
        values = {f.name: getattr(self, f.name) for f in chosen}
        return replace(self, **{name: function(value) for name, value in values.items() if value is not None})


def _take(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value[index.to(value.device)]
    if isinstance(value, Rows):
        return value.rows(index)
    return tuple(value[i] for i in index.tolist())


def _padded(values: list[Any]) -> list[Any]:
    """All of the length of the longest."""
    longest = max((value.shape[1] for value in values if value is not None), default=0)
    return [value if value is None else _lengthened(value, longest) for value in values]


def _lengthened(value: Tensor, length: int) -> Tensor:
    if value.shape[1] == length:
        return value
    return torch.cat([value, value.new_zeros(len(value), length - value.shape[1], *value.shape[2:])], dim=1)


def _join(values: list[Any]) -> Any:
    first = values[0]
    if first is None:
        if any(value is not None for value in values):
            raise ValueError("a field is set in some parts and missing in others")
        return None
    if isinstance(first, Tensor):
        return torch.cat(values)
    if isinstance(first, Rows):
        return type(first).concat(values)
    return tuple(item for value in values for item in value)


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
