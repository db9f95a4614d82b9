"""The text that a prompt asks for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.targets import first_quoted
from tests.support import golden


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ('A sign that says "OPEN" on a door', "OPEN"),
        ('Two signs, "first" and "second"', "first"),
        ("A menu with “Crème brûlée” on it", "Crème brûlée"),
        ('Curly “one” before straight "two"', "two"),
        ('A 5" nail beside a sign “NAILS”', "NAILS"),
        ('A poster: "你好世界"', "你好世界"),
        ('A balloon with "🎉 party 👩‍🚀"', "🎉 party 👩‍🚀"),
        ('A sign "two\nlines"', "two\nlines"),
        ('Nothing in "" here', ""),
        ('Spaces in "  " here', "  "),
        ("It's Bob's 'sign'", None),
        ('A 5" nail', None),
        ("”The wrong way round“", None),
        ("", None),
    ],
)
def test_first_quoted(text: str, target: str | None) -> None:
    assert first_quoted(text) == target


def test_agrees_with_the_published_rule_on_its_prompts() -> None:
    for pair in golden.load_json("ocr_reward")["pairs"]:
        assert first_quoted(pair["prompt"]) == pair["target"]


@given(before=st.text(), target=st.text(), after=st.text())
def test_finds_whatever_stands_between_the_first_two_straight_quotes(before: str, target: str, after: str) -> None:
    before, target = before.replace('"', ""), target.replace('"', "")
    assert first_quoted(f'{before}"{target}"{after}') == target
