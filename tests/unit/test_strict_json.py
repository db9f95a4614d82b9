"""What is read, and what is said of everything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.strict_json import JSONFault, parse

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


@given(VALUES, st.booleans())
def test_what_json_can_hold_comes_out_as_it_went_in(value: object, ensure_ascii: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=ensure_ascii)) == value


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is not JSON: Expecting value in column 1"),
        ('{"a": 1,}', "is not JSON: "),
        ('[{"a": 1, "b": 2, "a": 3}]', "has 'a' twice"),
        ('{"a": NaN}', "holds NaN, which is not JSON"),
        ("[-Infinity]", "holds -Infinity, which is not JSON"),
        (r'"a \ud83d cat"', "holds U+D83D, which is not text"),
        (r'{"\uDC00": 1}', "holds U+DC00, which is not text"),
        ("1" * 5000, "holds an integer of more than 4300 digits"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_what_is_wrong_is_said(text: str, fault: str) -> None:
    with pytest.raises(JSONFault) as caught:
        parse(text)
    assert str(caught.value).startswith(fault)
