"""How deep metadata may be."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.prompts import MAX_DEPTH, is_too_deep


def nested(depth: int, kind: type = list) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"n": value} if kind is dict else kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_depth_is_that_of_what_lies_in_one_another(kind: type) -> None:
    assert not is_too_deep(nested(MAX_DEPTH, kind)) and is_too_deep(nested(MAX_DEPTH + 1, kind))
    assert is_too_deep({"a": 1, "b": ["c", nested(MAX_DEPTH - 1, kind)]})
    assert is_too_deep(nested(100_000, kind))
    assert not is_too_deep([[]] * 1000) and not is_too_deep("[" * 1000)
