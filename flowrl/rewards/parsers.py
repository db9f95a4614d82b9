"""What a vision-language model said, as a number: a rating, yes or no, or the text that it read.

Nothing stands in for an answer that cannot be understood: it is an `AnswerError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from flowrl.rewards.excerpt import shortened
from flowrl.rewards.ocr import FORMS, text_score
from flowrl.rewards.transport import AnswerError

if TYPE_CHECKING:
    from flowrl.prompts import Prompt

TOP_LOGPROBS = 20  # as many as servers give without being told to allow more
WHOLE = r"^\s*(?:[Rr]ating:\s*)?(-?[0-9]+(?:\.[0-9]+)?)(?:\s*/\s*{high})?\.?\s*$"
UNSURE = 0.01  # how much a probability that is not among them may change the score


@dataclass(frozen=True)
class Answer:
    """The one choice of a chat completion."""

    text: str
    is_cut: bool  # it reached max_tokens
    first_token: Mapping[str, float]  # log-probability of each likely first token, if asked for


@runtime_checkable
class Parser(Protocol):
    """Makes a score of an answer."""

    needs_target: ClassVar[bool]  # of every prompt

    def asks(self) -> dict[str, Any]:
        """Further fields of the request: at least `max_tokens`, which bounds the answer."""
        ...

    def score(self, answer: Answer, prompt: Prompt) -> float:
        """Raises AnswerError for an answer that says nothing, ValueError for a prompt that cannot be scored."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rating:
    """A number as the answer, with `low` to `high` as 0 to 1.

    Args:
        pattern: a regular expression; its first match is the number, or its first group if it has one. None takes the
            answer as a whole: `8`, `8.5`, `8/10` (of 10 if that is `high`), `Rating: 8`.
        low: the worst rating, 0 as a score.
        high: the best, 1 as a score. What lies outside is an error.
        max_tokens: of an answer; it is an error if they end within the rating.
    """

    pattern: str | None = None
    low: float = 1.0
    high: float = 10.0
    max_tokens: int = 64
    needs_target: ClassVar[bool] = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern must be a regular expression, got {self.pattern!r}: {error}") from error
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low must be less than high, got {self.low} and {self.high}")
        _check(self.max_tokens)

    def asks(self) -> dict[str, Any]:
        """Nothing but the text."""
        return {"max_tokens": self.max_tokens}

    def score(self, answer: Answer, prompt: Prompt) -> float:
        """(rating - low) / (high - low)."""
        found = re.search(self.pattern or WHOLE.format(high=re.escape(f"{self.high:g}")), answer.text)
        if found is None:
            wanted = "is no rating" if self.pattern is None else f"has no rating (pattern {self.pattern})"
            raise AnswerError(f"the answer {wanted}: {quoted(answer)}")
        if answer.is_cut and found.end() == len(answer.text):
            raise AnswerError(f"max_tokens ended the answer within the rating: {quoted(answer)}")
        number = found[1] if found.re.groups else found[0]
        try:
            rating = float(number)
        except (TypeError, ValueError) as error:
            raise AnswerError(f"the rating {number!r} is not a number, in the answer {quoted(answer)}") from error
        if not self.low <= rating <= self.high:
            raise AnswerError(f"the rating {number} is not in [{self.low:g}, {self.high:g}]: {quoted(answer)}")
        return (rating - self.low) / (self.high - self.low)


@dataclass(frozen=True, kw_only=True)
class YesNo:
    """P(yes) / (P(yes) + P(no)) of the answer's first token: smooth where the answer itself would only be 0 or 1.

    Spaces and case do not count: " Yes" and "yes" are added up. Servers list the likeliest tokens, 20 or fewer. A word
    that is not among them counts 0, if it could not change the score by more than 0.01; else that is an error. It can
    be no likelier than any of them, nor than all that is left to 1.

    Args:
        yes_word: becomes 1; an answer must begin with it, and the model must have one token for it.
        no_word: becomes 0; likewise.
    """

    yes_word: str = "yes"
    no_word: str = "no"
    needs_target: ClassVar[bool] = False

    def __post_init__(self) -> None:
        words = [_word(self.yes_word), _word(self.no_word)]
        if not all(words) or words[0] == words[1]:
            raise ValueError(f"yes_word and no_word must be two words, got {self.yes_word!r} and {self.no_word!r}")

    def asks(self) -> dict[str, Any]:
        """One token, and the log-probabilities of all that it might have been."""
        return {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}

    def score(self, answer: Answer, prompt: Prompt) -> float:
        """In [0, 1]."""
        first = answer.first_token
        if not first:
            raise AnswerError(f"the server gave no log-probabilities with the answer {quoted(answer)}")
        yes, no = _probability(first, self.yes_word), _probability(first, self.no_word)
        listed = [math.exp(logprob) for logprob in first.values()]
        unlisted = min(*listed, 1 - math.fsum(listed))
        likeliest = f"its likeliest first tokens are {sorted(first, key=lambda token: -first[token])[:3]}"
        if yes + no == 0:
            raise AnswerError(f"the answer begins with neither {self.yes_word!r} nor {self.no_word!r}: {likeliest}")
        if min(yes, no) == 0 and unlisted > UNSURE * (yes + no):
            word, odds = (self.no_word, yes) if yes else (self.yes_word, no)
            told = f"may have a probability of {unlisted:.2g}, beside {odds:.2g} for the other word"
            raise AnswerError(f"{word!r} is not among {len(first)} first tokens, and {told}: {likeliest}")
        return yes / (yes + no)


@dataclass(frozen=True, kw_only=True)
class Transcription:
    """The OCR reward's formula of the text that the model says it reads, against `Prompt.target`.

    A transcription that reached `max_tokens` counts as it is: models repeat themselves over letters that are none.

    Args:
        substring: text around the target costs nothing; see `flowrl.rewards.ocr`.
        normalise: Unicode form of both texts: none | NFC | NFKC.
        max_tokens: of a transcription.
    """

    substring: bool = True
    normalise: str = "NFC"
    max_tokens: int = 64
    needs_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.normalise not in FORMS:
            raise ValueError(f"normalise must be {' or '.join(FORMS)}, got {self.normalise!r}")
        _check(self.max_tokens)

    def asks(self) -> dict[str, Any]:
        """Nothing but the text."""
        return {"max_tokens": self.max_tokens}

    def score(self, answer: Answer, prompt: Prompt) -> float:
        """In [0, 1]. Raises ValueError for a prompt without a target."""
        return text_score(answer.text, prompt, substring=self.substring, normalise=self.normalise)


def quoted(answer: Answer) -> str:
    """The beginning of an answer, for an error."""
    return repr(shortened(answer.text, 100))


def _check(max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")


def _probability(first_token: Mapping[str, float], word: str) -> float:
    return sum(math.exp(logprob) for token, logprob in first_token.items() if _word(token) == _word(word))


def _word(token: str) -> str:
    return token.strip().casefold()
