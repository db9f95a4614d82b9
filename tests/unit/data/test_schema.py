"""When two rows ask for the same, and what a sample is known by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.schema import content_id, content_key, normalised, sample_id


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("A  Cat\n", "a cat"),
        ("Straße", "STRASSE"),
        ('a sign "OK"', "a sign \u201cok\u201d"),
        ("it's", "it\u2019s"),
        ("\u00e9t\u00e9", "e\u0301te\u0301"),
        ("\uff21\uff22", "ab"),
        ("a\u200bcat", "acat"),
        ("\u2764\ufe0f", "\u2764"),
        ("a\u00a0cat", "a cat"),
    ],
)
def test_the_same_prompt(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)
    assert content_key({"prompt": one}) == content_key({"prompt": other, "target": "x", "metadata": {"n": 1}})


def test_other_prompts() -> None:
    texts = [
        "a cat",
        "a cat.",
        "acat",
        "a cap",
        "\u4f60\u597d",
        "\u4f60",
        "\U0001f469\u200d\U0001f680",
        "\U0001f469\U0001f680",
        'a "cat"',
    ]
    assert len({content_key({"prompt": text}) for text in texts}) == len(texts)


def test_media_count_in_any_order() -> None:
    row = {"prompt": "a", "images": ["1.png", "2.png"]}
    assert content_key(row) == content_key({"prompt": "A", "images": ["2.png", "1.png"]})
    assert len({content_key(r) for r in (row, {"prompt": "a"}, {"prompt": "a", "images": ["1.png"]})}) == 3


@given(st.text(min_size=1))
def test_normalising_again_changes_nothing_more_than_once(text: str) -> None:
    assert normalised(f"  {text.upper()} ") == normalised(text.upper())
    assert " " not in (normalised(text)[:1], normalised(text)[-1:])


def test_ids() -> None:
    assert sample_id({"prompt": "a", "id": 7}) == "7"
    assert sample_id({"prompt": "a", "metadata": {"sample_id": "x"}}) == "x"
    assert sample_id({"prompt": "a"}) == content_id({"prompt": "a"}) != content_id({"prompt": "b"})
    assert content_id({"prompt": "a", "target": "b"}) == content_id({"target": "b", "prompt": "a"})
