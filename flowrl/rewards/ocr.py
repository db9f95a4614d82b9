"""The OCR reward of Flow-GRPO (arXiv 2505.05470): is what can be read in the picture what the prompt asks for?"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from Levenshtein import distance

from flowrl.config import Particular, Problem
from flowrl.rewards.frames import as_pictures
from flowrl.rewards.recognisers import Line, Recogniser
from flowrl.rewards.scoring import FinalError

if TYPE_CHECKING:
    from flowrl.config import Config
    from flowrl.prompts import Prompt

FORMS = ("none", "NFC", "NFKC")


def ocr_score(recognised: str, target: str, *, substring: bool = True) -> float:
    """1 - d / |target| in [0, 1]: how much of `target` stands in `recognised`.

    White space is removed from both and both are put into lower case. d is 0 if the target occurs anywhere in the
    recognised text, else their Levenshtein distance, at most |target|; all counted in code points.

    Args:
        recognised: the lines read, joined by nothing.
        target: raises ValueError if it holds nothing but white space.
        substring: False leaves out the rule that other text around the target costs nothing, as Flow-GRPO's scorer for
            videos does.
    """
    recognised, target = _comparable(recognised), _comparable(target)
    if not target:
        raise ValueError("the target is empty")
    if substring and target in recognised:
        return 1.0
    return 1 - min(distance(recognised, target), len(target)) / len(target)


def _comparable(text: str) -> str:
    return "".join(text.split()).lower()


def text_score(recognised: str, prompt: Prompt, *, substring: bool, normalise: str) -> float:
    """`ocr_score` against the prompt's target, both in the Unicode form `normalise`, one of `FORMS`.

    Raises FinalError for a prompt without a target, by its id.
    """
    if prompt.target is None or not prompt.target.strip():
        raise FinalError(f"prompt {prompt.id!r} has no target, so there is no text to look for: {prompt.text}")
    return ocr_score(_normal(recognised, normalise), _normal(prompt.target, normalise), substring=substring)


def _normal(text: str, form: str) -> str:
    return text if form == "none" else unicodedata.normalize(form, text)  # type: ignore[arg-type]  # one of FORMS


def without_targets(run: Config) -> list[Problem]:
    """What is wrong with prompts that have no targets."""
    if run.data.target != "none":
        return []
    message = "is none, but the OCR reward needs the text that each prompt asks for."
    hint = "Set data.target=quoted, or data.target=field for a JSONL file with targets."
    return [Problem("data.target", message, hint)]


@dataclass(kw_only=True, eq=False)
class OCR:
    """`ocr_score` of what a recogniser reads in each picture against `Prompt.target`.

    Args:
        recogniser: one of `flowrl.rewards.recognisers`, or your own.
        substring: text around the target costs nothing.
        min_confidence: lines that were read with this confidence or less are left out. The published 0 leaves out only
            what was not read at all; PaddleOCR 2.x itself left out lines under 0.5.
        normalise: Unicode form of both texts before they are compared. NFC makes an accented letter one code point,
            however it was typed; NFKC also makes full-width letters and ligatures equal to plain ones; "none" compares
            code points as they are.
    """

    recogniser: Any
    substring: bool = True
    min_confidence: float = 0.0
    normalise: str = "NFC"

    def __post_init__(self) -> None:
        if not isinstance(self.recogniser, Recogniser):
            raise ValueError(f"recogniser must have load() and read(images), got {self.recogniser!r}")
        if not (math.isfinite(self.min_confidence) and 0 <= self.min_confidence < 1):
            raise ValueError(f"min_confidence must be in [0, 1), got {self.min_confidence}")
        if self.normalise not in FORMS:
            raise ValueError(f"normalise must be {' or '.join(FORMS)}, got {self.normalise!r}")

    def problems(self, run: Config) -> list[Problem]:
        """Without targets there is nothing to look for, and without its packages nothing to look with."""
        problems = self.recogniser.problems(run) if isinstance(self.recogniser, Particular) else []
        return [*without_targets(run), *problems]

    def load(self) -> None:
        """Load the recogniser."""
        self.recogniser.load()

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B] in [0, 1]. Raises FinalError for a prompt without a target, by its id."""
        texts = [self._joined(lines) for lines in self.recogniser.read(images)]
        scores = [
            text_score(text, prompt, substring=self.substring, normalise=self.normalise)
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        return np.array(scores, dtype=np.float64)

    def _joined(self, lines: Sequence[Line]) -> str:
        return "".join(line.text for line in lines if line.confidence > self.min_confidence)


@dataclass(kw_only=True, eq=False)
class VideoOCR(OCR):
    """Flow-GRPO's reward of videos: the mean over the frames in which something of the target can be read.

    Frames that score 0 do not count, so that the text need not be there all the time; if all do, the score is 0. The
    published scorer has no substring rule and looks at every fourth frame, which is for the component to say: `frames`.
    """

    substring: bool = False

    def score_videos(self, videos: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [K] in [0, 1]. Raises FinalError for a prompt without a target, by its id."""
        scores = self.score(*as_pictures(videos, prompts)).reshape(videos.shape[:2])
        num_read = (scores > 0).sum(axis=1)
        means: np.ndarray = scores.sum(axis=1) / np.maximum(num_read, 1)
        return means
