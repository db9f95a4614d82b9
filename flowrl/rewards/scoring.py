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

if TYPE_CHECKING:
    from flowrl.prompts import Prompt
    from flowrl.types import Scorer


# A scorer is anybody's code: all of its errors stop the run by one name, and so does its wish to end the process.
FAULTS = (Exception, SystemExit)


class RewardError(RuntimeError):
    """A reward component gave no usable score. What failed inside a worker carries the worker's traceback as a note."""

    def __init__(self, component: str, subject: str, cause: str) -> None:
        super().__init__(component, subject, cause)
        self.component = component

    def __str__(self) -> str:
        component, subject, cause = self.args
        return f"reward component {component!r} failed on {subject}: {cause}"


@dataclass(frozen=True)
class Request:
    """All pictures of one prompt for one component, or the frames of its videos that are to be scored."""

    component: str
    images: np.ndarray  # uint8 [K, H, W, 3], or of videos [K, n, H, W, 3]
    prompt: Prompt
    sample_ids: tuple[str, ...]

    @property
    def subject(self) -> str:
        """What an error is about."""
        return f"prompt {self.prompt.id!r} ({self.prompt.text})"


def load(component: str, scorer: Scorer) -> None:
    """Load `scorer`, or raise RewardError."""
    try:
        scorer.load()
    except FAULTS as error:
        raise failure(component, "loading", error) from error


def score(scorers: Mapping[str, Scorer], request: Request) -> np.ndarray:
    """The checked scores float64 [K]. Raises RewardError for whatever goes wrong in the scorer or with its scores.

    Of videos, a `VideoScorer` scores each as a whole; the scores that any other gives the frames are averaged.
    """
    scorer, images, ids = scorers[request.component], request.images, request.sample_ids
    prompts = [request.prompt] * len(images)
    if images.ndim == 4:
        return _checked(scorer.score, images, prompts, ids, request)
    if isinstance(scorer, VideoScorer):
        return _checked(scorer.score_videos, images, prompts, ids, request)
    num = images.shape[1]
    of_frames = [f"{sample} in scored frame {frame}" for sample in ids for frame in range(num)]
    scores = _checked(scorer.score, *as_pictures(images, prompts), of_frames, request)
    means: np.ndarray = scores.reshape(-1, num).mean(axis=1)
    return means


def _checked(
    method: Callable[[np.ndarray, Sequence[Prompt]], np.ndarray],
    images: np.ndarray,
    prompts: Sequence[Prompt],
    ids: Sequence[str],
    request: Request,
) -> np.ndarray:
    """One finite float64 for each of `images`, which are told apart by `ids`, or a RewardError."""
    try:
        scores = method(images, prompts)
    except FAULTS as error:
        raise failure(request.component, request.subject, error) from error
    fault = _fault(scores, ids)
    if fault:
        raise RewardError(request.component, request.subject, fault)
    return scores


def failure(component: str, subject: str, error: BaseException) -> RewardError:
    """`error` as a RewardError that survives the way to another process, traceback and all."""
    wrapped = RewardError(component, subject, f"{type(error).__name__}: {error}")
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
