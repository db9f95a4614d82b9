"""One component on one group: what runs inside a reward worker. Scores are checked here, whatever made them.

Free of torch, like everything that a worker imports: a process that only reads words needs half the memory.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from flowrl.errors import ExplainedError
from flowrl.rewards.frames import VideoScorer, as_pictures
from flowrl.rewards.latents import Latents, LatentScorer

if TYPE_CHECKING:
    from flowrl.prompts import Prompt
    from flowrl.types import Scorer

    AnyScorer = Scorer | LatentScorer


# A scorer is anybody's code: all of its errors stop the run by one name, and so does its wish to end the process.
FAULTS = (Exception, SystemExit)

waiting = logging.getLogger("flowrl.rewards.waiting")
"""For what all workers of a pool wait for alike, while they load: the first of them alone is heard."""

MARGIN_S = 60.0  # for what a process does besides waiting, before one with limits of its own is killed


class FinalError(ExplainedError, ValueError):
    """Raised by a scorer that would fail again: for a prompt without a target, say. It is not asked twice."""


class ScoresError(ExplainedError, ValueError):
    """What a scorer returned is of no use."""


class RewardError(RuntimeError):
    """A reward component gave no usable score. Unless its cause is an `ExplainedError`, it has the traceback as a note.

    `final`: further attempts would not help.
    """

    def __init__(self, component: str, subject: str, cause: str, final: bool = False) -> None:
        super().__init__(component, subject, cause, final)
        self.component = component
        self.final = final

    def __str__(self) -> str:
        component, subject, cause, _ = self.args
        return f"reward component {component!r} failed on {subject}: {cause}"


@runtime_checkable
class SelfTimed(Protocol):
    """A scorer that waits for others, and gives up by itself: the limits of workers are no concern of its user's."""

    @property
    def load_limit_s(self) -> float:
        """By then `load` has ended, one way or the other."""
        ...

    def score_limit_s(self, num_samples: int) -> float:
        """By then scoring so many pictures, videos or latents has."""
        ...


@dataclass(frozen=True)
class Request:
    """All samples of one prompt for one component: pictures, the frames of videos that are to be scored, or latents.

    Whoever takes longer than `timeout_s` for it is killed.
    """

    component: str
    shown: np.ndarray | Latents  # uint8 [K, H, W, 3], of videos [K, n, H, W, 3]; latents for a LatentScorer
    prompt: Prompt
    sample_ids: tuple[str, ...]
    timeout_s: float

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


def num_scored(scorer: AnyScorer, shown: np.ndarray | Latents) -> int:
    """How many pictures, videos or latents `scorer` is asked for at once."""
    if isinstance(shown, Latents):
        return len(shown.samples)
    are_frames = shown.ndim == 5 and not isinstance(scorer, VideoScorer)
    return len(shown) * (shown.shape[1] if are_frames else 1)


def load_limit_s(scorers: Iterable[AnyScorer], load_timeout_s: float) -> float:
    """For all to be loaded: `load_timeout_s`, and what those that are `SelfTimed` take by themselves."""
    own = [scorer.load_limit_s for scorer in scorers if isinstance(scorer, SelfTimed)]
    return min(load_timeout_s + sum(own), threading.TIMEOUT_MAX)


def limit_s(scorer: AnyScorer, num_samples: int, timeout_s: float) -> float:
    """For scoring so many: `timeout_s`, unless the scorer is `SelfTimed`, and then more than it takes by itself."""
    own = scorer.score_limit_s(num_samples) + MARGIN_S if isinstance(scorer, SelfTimed) else timeout_s
    return min(own, threading.TIMEOUT_MAX)


def score(scorers: Mapping[str, AnyScorer], request: Request) -> np.ndarray:
    """The checked scores float64 [K]. Raises RewardError for whatever goes wrong in the scorer or with its scores.

    Of videos, a `VideoScorer` scores each as a whole; the scores that any other gives the frames are averaged.
    """
    scorer, shown, ids = scorers[request.component], request.shown, request.sample_ids
    prompts = [request.prompt] * len(ids)
    try:
        if isinstance(scorer, LatentScorer):
            assert isinstance(shown, Latents)
            return checked(scorer.score_latents(shown.samples, shown.text, prompts), ids)
        assert isinstance(shown, np.ndarray)
        return score_shown(scorer, shown, prompts, ids)
    except FAULTS as error:
        raise failure(request.component, request.subject, error) from error


def score_shown(scorer: Scorer, shown: np.ndarray, prompts: Sequence[Prompt], names: Sequence[object]) -> np.ndarray:
    """The checked scores of pictures or videos, each with its prompt, and a name for errors. Raises what scorers do."""
    if shown.ndim == 4:
        return checked(scorer.score(shown, prompts), names)
    if isinstance(scorer, VideoScorer):
        return checked(scorer.score_videos(shown, prompts), names)
    num = shown.shape[1]
    of_frames = [f"{name} in scored frame {frame}" for name in names for frame in range(num)]
    scores = checked(scorer.score(*as_pictures(shown, prompts)), of_frames)
    means: np.ndarray = scores.reshape(-1, num).mean(axis=1)
    return means


def checked(scores: object, names: Sequence[object]) -> np.ndarray:
    """`scores`, if they are one finite float64 for each of `names`. Raises ScoresError, which may be right the next
    time, or FinalError for another type."""
    if not isinstance(scores, np.ndarray) or scores.dtype != np.float64:
        got = f"an array of {scores.dtype}" if isinstance(scores, np.ndarray) else f"a {type(scores).__name__}"
        raise FinalError(f"it must return a numpy array of float64, got {got}")
    if scores.shape != (len(names),):
        raise ScoresError(f"it must return one score for each of {len(names)} pictures, got shape {list(scores.shape)}")
    bad = [f"{score} for sample {name}" for score, name in zip(scores, names, strict=True) if not np.isfinite(score)]
    if bad:
        raise ScoresError(f"its scores are not finite: {', '.join(bad)}")
    return scores


def failure(component: str, subject: str, error: BaseException) -> RewardError:
    """`error` as a RewardError that survives the way to another process, traceback and all."""
    if isinstance(error, ExplainedError):
        return RewardError(component, subject, str(error), isinstance(error, FinalError))
    wrapped = RewardError(component, subject, f"{type(error).__name__}: {error}")
    wrapped.add_note("".join(traceback.format_exception(error)).rstrip())
    return wrapped
