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
from flowrl.rewards.scoring import FinalError
from flowrl.rewards.transport import AnswerError
from tests.support import golden

PROMPT = Prompt("p7", "a sign", "Flow")
NUMBER = r"-?\d+(?:\.\d+)?"


def score(parser: Parser, text: str = "", *, is_cut: bool = False, **first_token: float) -> float:
    """Of an answer; `first_token` are probabilities."""
    return parser.score(Answer(text, is_cut, {token: math.log(p) for token, p in first_token.items()}), PROMPT)


# ------------------------------------------------------------------------------------------ ratings


@given(low=st.integers(-50, 50), span=st.integers(1, 100), share=st.floats(0, 1))
def test_ratings_are_scaled_to_their_range(low: int, span: int, share: float) -> None:
    rating = round(low + share * span, 3)
    parsed = score(Rating(low=low, high=low + span), f"{rating:.3f}")
    assert 0 <= parsed <= 1 and parsed == pytest.approx((rating - low) / span)


@pytest.mark.parametrize(
    ("text", "high", "expected"),
    [
        ("7", 10, 6 / 9),
        (" 8.5\n", 10, 7.5 / 9),
        ("8/10", 10, 7 / 9),
        ("8.25 / 10.", 10, 7.25 / 9),
        ("Rating: 8", 10, 7 / 9),
        ("rating: 8/10.", 10, 7 / 9),
        ("10", 10, 1.0),
        ("1", 10, 0.0),
        ("4/5", 5, 0.75),
        ("2/2.5", 2.5, 2 / 3),
    ],
)
def test_the_answer_is_the_rating(text: str, high: float, expected: float) -> None:
    assert score(Rating(high=high), text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (" **8.5**/10 because of 3 errors", {"pattern": NUMBER}, 7.5 / 9),
        ("-1 of [-2, 2]", {"pattern": NUMBER, "low": -2, "high": 2}, 0.25),
        ("On a scale of 1 to 5\nFinal Score: 4", {"pattern": r"Final Score:\s*(\d)", "high": 5}, 0.75),
        ("Alignment 3, <score>2</score>", {"pattern": "<score>([^<]+)</score>", "high": 3}, 0.5),
        ("cut, but behind the 4 (", {"pattern": NUMBER, "high": 5}, 0.75),
    ],
)
def test_the_first_match_of_a_pattern_is_the_rating(text: str, options: dict[str, Any], expected: float) -> None:
    assert score(Rating(**options), text, is_cut="cut" in text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text",
    [
        "The prompt asks for 2 cats and there are 2, so I would rate it 9.",
        "1,5",
        "8 out of 10",
        "8/5",
        "8/100",
        "7 8",
        "8-9",
        "8%",
        "**8**",
        "Rating: good",
        ".8",
        "8\nBecause it is sharp.",
        "",
    ],
)
def test_a_number_in_an_answer_is_not_the_rating(text: str) -> None:
    with pytest.raises(AnswerError, match="the answer is no rating: ") as caught:
        score(Rating(), text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("I cannot judge that." * 50, {}, "the answer is no rating: 'I cannot judge that"),
        ("none", {"pattern": NUMBER}, r"the answer has no rating \(pattern .*\): 'none'"),
        ("0", {}, r"the rating 0 is not in \[1, 10\]: '0'"),
        ("11/10!", {"pattern": NUMBER}, r"the rating 11 is not in \[1, 10\]"),
        ("Score: high", {"pattern": r"Score: (\w+)"}, "the rating 'high' is not a number"),
        ("Score: nan", {"pattern": r"Score: (\w+)"}, r"the rating nan is not in"),
        ("none", {"pattern": r"(\d)?"}, "the rating None is not a number"),
        ("The rating is 1", {"pattern": NUMBER, "cut": True}, "max_tokens ended the answer within the rating"),
        ("Rating: 1", {"cut": True}, "max_tokens ended the answer within the rating"),
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
    assert score(YesNo(), Yes=0.992, a=0.004) == 1.0
    assert score(YesNo(), Yes=0.6, a=0.4) == 1.0  # all tokens are listed
    assert score(YesNo(), No=1.0) == 0.0


@pytest.mark.parametrize("tokens", [listed(a=0.5, b=0.01), {"<think>": 1.0}])
def test_an_answer_that_is_neither_is_an_error(tokens: dict[str, float]) -> None:
    first = max(tokens, key=lambda token: tokens[token])
    with pytest.raises(AnswerError, match=f"neither 'yes' nor 'no': its likeliest first tokens are \\['{first}'"):
        score(YesNo(), **tokens)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (listed(Yes=0.3, a=0.01), "'no' is not among 20 first tokens, and may have a probability of 0.01, beside 0.3"),
        (listed(No=0.02, a=0.02), "'yes' is not among 20 first tokens, and may have a probability of 0.02, beside"),
        ({"Yes": 0.3, "The": 0.1, "It": 0.09, "This": 0.08, "A": 0.07}, "'no' is not among 5 .* probability of 0.07"),
        ({"Yes": 0.97}, "'no' is not among 1 first tokens, and may have a probability of 0.03"),
    ],
)
def test_a_word_that_is_not_listed_and_might_matter(tokens: dict[str, float], message: str) -> None:
    """However few tokens a server lists."""
    with pytest.raises(AnswerError, match=message):
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
    with pytest.raises(FinalError, match="prompt 'p' has no target"):
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
