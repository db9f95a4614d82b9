"""When two rows ask for the same, and what a sample is known by."""

from __future__ import annotations

import sys
import unicodedata

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
        ("\u03b0", "\u03b0".upper()),
        ('say "hi"', "say ``hi''"),
        ("5\u2033 \u00b4", "5\" '"),
    ],
)
def test_the_same_prompt(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)
    assert content_key({"prompt": one}) == content_key({"prompt": other, "target": "x", "metadata": {"n": 1}})


def test_what_cannot_be_seen_makes_no_difference() -> None:
    """All that Unicode calls default-ignorable or a control character; format characters that are seen are others."""
    seen = [*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13440)]
    unseen = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) == "Cf" and ord(c) not in seen]
    unseen += map(chr, [*range(0x7F, 0x85), *range(0x86, 0xA0), 0x34F, 0x115F, 0x180E, *range(0xFE00, 0xFE10), 0xE0100])
    assert len(unseen) > 150 and {normalised(f"a {c}cat{c}") for c in unseen} == {"a cat"}
    assert len({normalised(f"a {chr(c)}cat") for c in seen[:13]}) == 13


def test_kinds_of_quotes() -> None:
    """All that Unicode calls quotation marks."""
    single = "'\u2018\u2019\u201a\u201b\u2039\u203a\uff07`"
    double = '"\u00ab\u00bb\u201c\u201d\u201e\u201f\u2e42\u300c\u300d\u300e\u300f\u301d\u301e\u301f'
    double += "\ufe41\ufe42\ufe43\ufe44\uff02\uff62\uff63"
    assert {normalised(f"a {quote}cat") for quote in single} == {"a 'cat"}
    assert {normalised(f"a {quote}cat") for quote in double} == {'a "cat'}


def test_case_makes_no_difference_and_once_is_enough() -> None:
    """But for the Turkish letter without a dot, which Unicode's case folding leaves apart from i."""
    others = []
    for character in map(chr, range(sys.maxunicode + 1)):
        once = normalised(f"a{character}b")
        if once != normalised(f"a{character}b".upper()):
            others.append(character)
        assert normalised(once) == once
    assert others == ["\u0131"]


def test_other_prompts() -> None:
    texts = [
        "a cat",
        "a cat.",
        "acat",
        "a cap",
        "\u4f60\u597d",
        "\u4f60",
        "\U0001f469\U0001f680",
        "\U0001f469",
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
