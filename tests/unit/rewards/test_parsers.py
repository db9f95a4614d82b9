"""Numbers from what a vision-language model says, and errors where it says none."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.prompts import Prompt
from flowrl.rewards.ocr import ocr_score
from flowrl.rewards.parsers import Answer, Parser, Rating, Transcription, YesNo
from flowrl.rewards.transport import AnswerError
from tests.support import golden

PROMPT = Prompt("p7", "a sign", "Flow")


def score(parser: Parser, text: str = "", *, is_cut: bool = False, **first_token: float) -> float:
    """Of an answer; `first_token` are probabilities."""
    return parser.score(Answer(text, is_cut, {token: math.log(p) for token, p in first_token.items()}), PROMPT)


# ------------------------------------------------------------------------------------------ ratings


@given(low=st.integers(-50, 50), span=st.integers(1, 100), share=st.floats(0, 1))
def test_ratings_are_scaled_to_their_range(low: int, span: int, share: float) -> None:
    rating = round(low + share * span, 3)
    parsed = score(Rating(low=low, high=low + span), f"I say {rating:.3f} for it")
    assert 0 <= parsed <= 1 and parsed == pytest.approx((rating - low) / span)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("7", {}, 6 / 9),
        (" **8.5**/10 because of 3 errors", {}, 7.5 / 9),
        ("10", {}, 1.0),
        ("1", {}, 0.0),
        ("-1 of [-2, 2]", {"low": -2, "high": 2}, 0.25),
        ("On a scale of 1 to 5\nFinal Score: 4", {"pattern": r"Final Score:\s*(\d)", "high": 5}, 0.75),
        ("Alignment 3, <score>2</score>", {"pattern": "<score>([^<]+)</score>", "high": 3}, 0.5),
        ("cut, but behind the 4 (", {"high": 5}, 0.75),
    ],
)
def test_the_first_match_is_the_rating(text: str, options: dict[str, Any], expected: float) -> None:
    assert score(Rating(**options), text, is_cut="cut" in text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "no rating .* in the answer ''"),
        ("I cannot judge that." * 50, {}, "no rating .* in the answer 'I cannot judge that"),
        ("0", {}, r"the rating 0 is not in \[1, 10\]: '0'"),
        ("11/10!", {}, r"the rating 11 is not in \[1, 10\]"),
        ("Score: high", {"pattern": r"Score: (\w+)"}, "the rating 'high' is not a number"),
        ("Score: nan", {"pattern": r"Score: (\w+)"}, r"the rating nan is not in"),
        ("none", {"pattern": r"(\d)?"}, "the rating None is not a number"),
        ("The rating is 1", {"cut": True}, "max_tokens ended the answer within the rating"),
    ],
)
def test_what_is_no_rating_is_an_error(text: str, options: dict[str, Any], message: str) -> None:
    is_cut = options.pop("cut", False)
    with pytest.raises(AnswerError, match=message) as caught:
        score(Rating(**options), text, is_cut=is_cut)
    assert len(str(caught.value)) < 200


# ------------------------------------------------------------------------------------------ yes or no


@given(yes=st.floats(1e-6, 1), no=st.floats(1e-6, 1))
def test_yes_against_no(yes: float, no: float) -> None:
    total = yes + no
    assert score(YesNo(), Yes=yes / total, no=no / total) == pytest.approx(yes / total)


def test_spellings_are_added_up() -> None:
    tokens = {"Yes": 0.3, " yes": 0.1, "YES": 0.1, "no": 0.2, "\nNo": 0.05, "Maybe": 0.2, "yesterday": 0.05}
    assert score(YesNo(), **tokens) == pytest.approx(0.5 / 0.75)
    assert score(YesNo(yes_word="maybe", no_word="Yesterday"), **tokens) == pytest.approx(0.8)


def listed(**first: float) -> dict[str, float]:
    """Twenty tokens, the rest of which are as likely as the least likely of these."""
    least = min(first.values())
    return first | {f"w{n}": least for n in range(20 - len(first))}


def test_a_word_beyond_the_listed_tokens_counts_nothing_if_it_cannot_matter() -> None:
    assert score(YesNo(), **listed(Yes=0.97, a=0.001)) == 1.0
    assert score(YesNo(), **listed(No=0.97, a=0.001)) == 0.0
    assert score(YesNo(), Yes=0.97) == 1.0  # all tokens are listed


@pytest.mark.parametrize(
    "tokens", [listed(Yes=0.3, a=0.01), listed(No=0.02, a=0.02), listed(a=0.5, b=0.01), {"<think>": 1.0}]
)
def test_an_answer_that_is_neither_is_an_error(tokens: dict[str, float]) -> None:
    first = max(tokens, key=lambda token: tokens[token])
    with pytest.raises(AnswerError, match=f"neither 'yes' nor 'no': its likeliest first tokens are \\['{first}'"):
        score(YesNo(), **tokens)


def test_a_server_without_log_probabilities() -> None:
    with pytest.raises(AnswerError, match=r"gave no log-probabilities with the answer 'Yes\.'"):
        score(YesNo(), "Yes.")


# ------------------------------------------------------------------------------------------ transcriptions


@pytest.mark.parametrize("pair", golden.load_json("ocr_reward")["pairs"], ids=lambda pair: str(pair["target"]))
def test_transcriptions_are_scored_as_ocr_is(pair: dict[str, Any]) -> None:
    text, prompt = "".join(pair["recognised_lines"]), Prompt("p", "a sign", pair["target"])
    answer = Answer(text, True, {})
    assert Transcription(normalise="none").score(answer, prompt) == pair["reward"]
    strict = Transcription(normalise="none", substring=False)
    assert strict.score(answer, prompt) == pair["reward_no_substring_rule"]


def test_transcriptions_may_be_empty_and_targets_may_not() -> None:
    assert score(Transcription(), "") == 0 and score(Transcription(), " F l\nOW ") == 1
    assert score(Transcription(), "Flour") == ocr_score("Flour", "Flow")
    with pytest.raises(ValueError, match="prompt 'p' has no target"):
        Transcription().score(Answer("x", False, {}), Prompt("p", "a sign"))


# ------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Rating, {"pattern": "("}, "pattern must be a regular expression"),
        (Rating, {"low": 3.0, "high": 3.0}, "low must be less than high, got 3.0 and 3.0"),
        (Rating, {"high": math.inf}, "low must be less than high"),
        (Rating, {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        (Transcription, {"max_tokens": -5}, "max_tokens must be at least 1, got -5"),
        (YesNo, {"yes_word": " No"}, "yes_word and no_word must be two words"),
        (YesNo, {"no_word": " "}, "yes_word and no_word must be two words"),
        (Transcription, {"normalise": "NFD"}, "normalise must be none or NFC or NFKC, got 'NFD'"),
    ],
)
def test_impossible_settings(kind: type[Parser], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)
