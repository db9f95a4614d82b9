"""`Rows`: one mechanism for indexing and joining every batch in the package."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.types import SHARED, Rows


@dataclass(frozen=True)
class Inner(Rows):
    x: Tensor


@dataclass(frozen=True)
class Outer(Rows):
    inner: Inner
    names: tuple[str, ...]
    maybe: Tensor | None = None
    common: Tensor = field(kw_only=True, metadata=SHARED)


def outer(start: int, size: int, *, maybe: bool = False) -> Outer:
    values = torch.arange(start, start + size)
    return Outer(
        Inner(values), tuple(f"n{i}" for i in values.tolist()), values if maybe else None, common=torch.ones(3)
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_concat_then_rows_is_the_rows_of_the_parts(sizes: list[int], data: st.DataObject) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    whole = Outer.concat([outer(start, size, maybe=True) for start, size in zip(starts, sizes, strict=True)])
    assert len(whole) == sum(sizes)
    index = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6))
    part = whole.rows(torch.tensor(index, dtype=torch.int64))
    assert part.inner.x.tolist() == index
    assert part.names == tuple(f"n{i}" for i in index)
    assert part.maybe is not None and part.maybe.tolist() == index
    assert torch.equal(part.common, torch.ones(3))


def test_concat_refuses_what_does_not_belong_together() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Outer.concat([])
    other = Outer(Inner(torch.arange(1)), ("n",), None, common=torch.zeros(3))
    with pytest.raises(ValueError, match="common differs"):
        Outer.concat([outer(0, 1), other])
    with pytest.raises(ValueError, match="set in some parts"):
        Outer.concat([outer(0, 1), outer(1, 1, maybe=True)])


def test_to_moves_every_tensor() -> None:
    moved = outer(0, 2, maybe=True).to("meta")
    assert moved.inner.x.is_meta and moved.common.is_meta and moved.maybe is not None and moved.maybe.is_meta
    assert moved.names == ("n0", "n1")
