"""One component on one group: what runs inside a reward worker. Scores are checked here, whatever made them.

Free of torch, like everything that a worker imports: a process that only reads words needs half the memory.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

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
    """All pictures of one prompt for one component."""

    component: str
    images: np.ndarray  # uint8 [K, H, W, 3]
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
    """The checked scores float64 [K]. Raises RewardError for whatever goes wrong in the scorer or with its scores."""
    prompts = [request.prompt] * len(request.images)
    try:
        scores = scorers[request.component].score(request.images, prompts)
    except FAULTS as error:
        raise failure(request.component, request.subject, error) from error
    fault = _fault(scores, request)
    if fault:
        raise RewardError(request.component, request.subject, fault)
    return scores


def failure(component: str, subject: str, error: BaseException) -> RewardError:
    """`error` as a RewardError that survives the way to another process, traceback and all."""
    wrapped = RewardError(component, subject, f"{type(error).__name__}: {error}")
    wrapped.add_note("".join(traceback.format_exception(error)).rstrip())
    return wrapped


def _fault(scores: object, request: Request) -> str | None:
    """What is wrong with `scores`, if anything."""
    if not isinstance(scores, np.ndarray):
        return f"it must return a numpy array, got {type(scores).__name__}"
    if scores.dtype != np.float64:
        return f"its scores must be float64, got {scores.dtype}"
    if scores.shape != (len(request.images),):
        return f"it must return one score for each of {len(request.images)} pictures, got shape {list(scores.shape)}"
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        return "its scores are not finite: " + ", ".join(f"{scores[i]} for sample {request.sample_ids[i]}" for i in bad)
    return None
