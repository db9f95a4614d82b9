"""One component on one group: what runs inside a reward worker. Scores are checked here, whatever made them.

Free of torch, like everything that a worker imports: a process that only reads words needs half the memory.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowrl.rewards.frames import VideoScorer, as_pictures
from flowrl.rewards.latents import Latents, LatentScorer

if TYPE_CHECKING:
    from flowrl.prompts import Prompt
    from flowrl.types import Scorer

    AnyScorer = Scorer | LatentScorer


# A scorer is anybody's code: all of its errors stop the run by one name, and so does its wish to end the process.
FAULTS = (Exception, SystemExit)


class FinalError(Exception):
    """Raised by a scorer that would fail again: an answer that breaks a protocol, say. It is not asked twice."""


class RewardError(RuntimeError):
    """A reward component gave no usable score. What failed inside a worker carries the worker's traceback as a note.

    `final`: further attempts would not help.
    """

    def __init__(self, component: str, subject: str, cause: str, final: bool = False) -> None:
        super().__init__(component, subject, cause, final)
        self.component = component
        self.final = final

    def __str__(self) -> str:
        component, subject, cause, _ = self.args
        return f"reward component {component!r} failed on {subject}: {cause}"


@dataclass(frozen=True)
class Request:
    """All samples of one prompt for one component: pictures, the frames of videos that are to be scored, or latents."""

    component: str
    shown: np.ndarray | Latents  # uint8 [K, H, W, 3], of videos [K, n, H, W, 3]; latents for a LatentScorer
    prompt: Prompt
    sample_ids: tuple[str, ...]

    @property
    def subject(self) -> str:
        """What an error is about."""
        return f"prompt {self.prompt.id!r} ({self.prompt.text})"


def load(component: str, scorer: AnyScorer) -> None:
    """Load `scorer`, or raise RewardError."""
    try:
        scorer.load()
    except FAULTS as error:
        raise failure(component, "loading", error) from error


def score(scorers: Mapping[str, AnyScorer], request: Request) -> np.ndarray:
    """The checked scores float64 [K]. Raises RewardError for whatever goes wrong in the scorer or with its scores.

    Of videos, a `VideoScorer` scores each as a whole; the scores that any other gives the frames are averaged.
    """
    scorer, shown, ids = scorers[request.component], request.shown, request.sample_ids
    prompts = [request.prompt] * len(ids)
    if isinstance(scorer, LatentScorer):
        assert isinstance(shown, Latents)
        return _checked(lambda: scorer.score_latents(shown.samples, shown.text, prompts), ids, request)
    assert isinstance(shown, np.ndarray)
    if shown.ndim == 4:
        return _checked(lambda: scorer.score(shown, prompts), ids, request)
    if isinstance(scorer, VideoScorer):
        return _checked(lambda: scorer.score_videos(shown, prompts), ids, request)
    num = shown.shape[1]
    pictures, of_pictures = as_pictures(shown, prompts)
    of_frames = [f"{sample} in scored frame {frame}" for sample in ids for frame in range(num)]
    scores = _checked(lambda: scorer.score(pictures, of_pictures), of_frames, request)
    means: np.ndarray = scores.reshape(-1, num).mean(axis=1)
    return means


def _checked(ask: Callable[[], np.ndarray], ids: Sequence[str], request: Request) -> np.ndarray:
    """What `ask` gives, if that is one finite float64 for each of `ids`; else a RewardError."""
    try:
        scores = ask()
    except FAULTS as error:
        raise failure(request.component, request.subject, error) from error
    fault = _fault(scores, ids)
    if fault:
        raise RewardError(request.component, request.subject, fault)
    return scores


def failure(component: str, subject: str, error: BaseException) -> RewardError:
    """`error` as a RewardError that survives the way to another process, traceback and all."""
    final = isinstance(error, FinalError)
    wrapped = RewardError(component, subject, f"{type(error).__name__}: {error}", final)
    wrapped.add_note("".join(traceback.format_exception(error)).rstrip())
    return wrapped


def _fault(scores: object, ids: Sequence[str]) -> str | None:
    """What is wrong with `scores`, if anything."""
    if not isinstance(scores, np.ndarray):
        return f"it must return a numpy array, got {type(scores).__name__}"
    if scores.dtype != np.float64:
        return f"its scores must be float64, got {scores.dtype}"
    if scores.shape != (len(ids),):
        return f"it must return one score for each of {len(ids)} pictures, got shape {list(scores.shape)}"
    bad = [f"{score} for sample {name}" for score, name in zip(scores, ids, strict=True) if not np.isfinite(score)]
    return f"its scores are not finite: {', '.join(bad)}" if bad else None
