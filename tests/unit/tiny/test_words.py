"""The prompts that ship with tiny_sd3, and the words that it must never have seen."""

from pathlib import Path

import pytest

import flowrl
from flowrl.tiny.words import NUM_TRAIN_WORDS, heldout_words, pretraining_words, prompt, train_words

PROMPTS = Path(flowrl.__file__).parent / "assets" / "tiny_words"


def test_heldout_words_are_in_no_training_prompt_and_in_no_picture() -> None:
    heldout = set(heldout_words())
    assert len(heldout) == 96
    assert not heldout & set(train_words())
    assert not heldout & set(pretraining_words(20_000, seed=0))


def test_train_words_are_distinct_and_short() -> None:
    words = train_words()
    assert len(words) == len(set(words)) == NUM_TRAIN_WORDS
    assert all(3 <= len(word) <= 5 and word.isascii() and word.isupper() for word in words)


@pytest.mark.parametrize(("name", "words"), [("train", train_words()), ("heldout", heldout_words())])
def test_shipped_prompts_are_what_the_code_makes(name: str, words: list[str]) -> None:
    lines = (PROMPTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert lines == [prompt(word) for word in words]
