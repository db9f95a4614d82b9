"""The OCR reward's formula, and what it makes of recognised lines."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.prompts import Prompt
from flowrl.rewards.ocr import OCR, ocr_score
from flowrl.rewards.recognisers import Line
from flowrl.rewards.scoring import FinalError
from tests.support import golden

GOLDEN = golden.load_json("ocr_reward")
TEXT = st.text(min_size=1).filter(lambda text: text.strip() != "")


@dataclass(kw_only=True)
class Reads:
    """A recogniser that reads the same lines in every picture."""

    lines: Sequence[Line]

    def load(self) -> None:
        pass

    def read(self, images: np.ndarray) -> list[list[Line]]:
        return [list(self.lines)] * len(images)


def score(lines: Sequence[Line], target: str | None, **options: object) -> float:
    scorer = OCR(recogniser=Reads(lines=lines), **options)
    scorer.load()
    scores = scorer.score(np.zeros((1, 8, 8, 3), np.uint8), [Prompt("p7", "a sign", target)])
    assert scores.dtype == np.float64 and scores.shape == (1,)
    return float(scores[0])


# ------------------------------------------------------------------------------------------ golden


@pytest.mark.parametrize("pair", GOLDEN["pairs"], ids=lambda pair: f"{pair['recognised_lines']}-{pair['target']}")
def test_formula_agrees_with_the_published_scorers(pair: dict[str, object]) -> None:
    recognised = "".join(pair["recognised_lines"])
    assert ocr_score(recognised, pair["target"]) == pair["reward"]
    assert ocr_score(recognised, pair["target"], substring=False) == pair["reward_no_substring_rule"]


@pytest.mark.parametrize("case", GOLDEN["multi_line"], ids=lambda case: str(case["recognised_lines"]))
def test_lines_are_joined_as_published(case: dict[str, object]) -> None:
    lines = list(map(Line, case["recognised_lines"], case["confidences"]))
    assert score(lines, case["target"], normalise="none") == case["reward"]
    assert score(lines, case["target"]) == case["reward"]


# ------------------------------------------------------------------------------------------ formula


@given(recognised=st.text(), target=TEXT)
def test_scores_are_shares_of_the_target_and_the_substring_rule_only_adds(recognised: str, target: str) -> None:
    strict, lenient = ocr_score(recognised, target, substring=False), ocr_score(recognised, target)
    assert 0 <= strict <= lenient <= 1


@given(before=st.text(), target=TEXT, after=st.text())
def test_text_around_the_target_costs_nothing(before: str, target: str, after: str) -> None:
    assert (
        ocr_score(before + " " + target + " " + after, target) == 1 or "Σ" in target
    )  # final sigma has two lower cases


@given(target=TEXT, other=st.text())
def test_spaces_and_case_do_not_count(target: str, other: str) -> None:
    spaced = "  ".join(other)
    assert ocr_score(spaced, target) == ocr_score(spaced.replace(" ", ""), f" {target} ")


@given(word=st.text("abc", min_size=1, max_size=8), extra=st.text("xyz", max_size=20))
def test_letters_too_many_cost_one_each_up_to_the_length_of_the_target(word: str, extra: str) -> None:
    expected = 1 - min(len(extra), len(word)) / len(word)
    assert ocr_score(word + extra, word, substring=False) == expected


@pytest.mark.parametrize("target", ["你好世界", "Ünïcødé", "🎉party🎉", "Привет", "لوحة"])
def test_targets_of_any_script(target: str) -> None:
    assert ocr_score(target, target) == 1
    assert ocr_score(target[:-1], target) == pytest.approx(1 - 1 / len(target))
    assert ocr_score("", target) == 0


def test_new_lines_of_the_target_do_not_count() -> None:
    assert ocr_score("HelloWorld", "Hello\n\u3000World") == 1


def test_an_empty_target_is_an_error() -> None:
    with pytest.raises(ValueError, match="target is empty"):
        ocr_score("abc", "\u3000 \n")


# ------------------------------------------------------------------------------------------ scorer


def test_unicode_forms() -> None:
    composed, decomposed = unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")
    line = [Line(composed, 1.0)]
    assert score(line, decomposed) == 1
    assert score(line, decomposed, normalise="none") < 1
    wide = [Line("\uff33\uff21\uff2c\uff25\uff01", 1.0)]
    assert score(wide, "SALE!") == 0
    assert score(wide, "SALE!", normalise="NFKC") == 1


def test_unsure_lines_are_left_out() -> None:
    lines = [Line("open", 0.9), Line("late", 0.5)]
    assert score(lines, "open late") == 1
    assert score(lines, "open late", min_confidence=0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("target", [None, "", "  "])
def test_a_prompt_without_a_target_is_named(target: str | None) -> None:
    with pytest.raises(FinalError, match="prompt 'p7' has no target"):
        score([Line("x", 1.0)], target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recogniser": "rapidocr"}, "recogniser must have load"),
        ({"min_confidence": 1.0}, r"min_confidence must be in \[0, 1\)"),
        ({"normalise": "NFD"}, "normalise must be none or NFC or NFKC"),
    ],
)
def test_impossible_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OCR(**({"recogniser": Reads(lines=())} | options))
