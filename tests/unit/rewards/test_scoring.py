"""No fault of a scorer becomes a number."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from flowrl.prompts import Prompt
from flowrl.rewards.http import VideoHTTP
from flowrl.rewards.latents import Latents
from flowrl.rewards.scoring import (
    MARGIN_S,
    FinalError,
    Request,
    RewardError,
    limit_s,
    load,
    load_limit_s,
    num_scored,
    score,
)
from flowrl.rewards.transport import AnswerError, UnreachableError
from flowrl.types import LoadError
from tests.unit.rewards.scorers import Brightness, CannotLoad, Energy, Patient, Raises, Returns, ReturnsForLatents

IDS = ("p5:0:0", "p5:0:1", "p5:0:2")
REQUEST = Request("style", np.zeros((3, 4, 4, 3), np.uint8), Prompt("p5", "a red fox"), IDS, timeout_s=1.0)


def test_good_scores_pass_as_they_are() -> None:
    assert score({"style": Brightness()}, REQUEST).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("value", "cause", "final"),
    [
        (np.array([1.0, np.nan, np.inf]), "not finite: nan for sample p5:0:1, inf for sample p5:0:2", False),
        (np.ones(2), "one score for each of 3 pictures, got shape [2]", False),
        (np.ones((3, 1)), "one score for each of 3 pictures, got shape [3, 1]", False),
        (np.float64(1), "numpy array of float64, got a float64", True),
        (np.ones(3, np.float32), "numpy array of float64, got an array of float32", True),
        (np.ones(3, np.int64), "numpy array of float64, got an array of int64", True),
        ([1.0, 1.0, 1.0], "numpy array of float64, got a list", True),
        (None, "numpy array of float64, got a NoneType", True),
    ],
)
def test_unusable_scores(value: object, cause: str, final: bool) -> None:
    """Code that returns another type will do so the next time, too."""
    with pytest.raises(RewardError) as caught:
        score({"style": Returns(value=value)}, REQUEST)
    message = str(caught.value)
    assert message.startswith("reward component 'style' failed on prompt 'p5' (a red fox): ")
    assert cause in message and caught.value.final == final


@pytest.mark.parametrize(
    ("value", "cause"),
    [(np.array([1.0, np.nan, 0.0]), "nan for sample p5:0:1"), (np.ones(1), "shape [1]"), (None, "got a NoneType")],
)
def test_unusable_scores_of_latents(value: object, cause: str) -> None:
    request = replace(REQUEST, shown=Latents(np.zeros((3, 4, 2, 2), np.float32), {}))
    with pytest.raises(RewardError) as caught:
        score({"style": ReturnsForLatents(value=value)}, request)
    assert "'style' failed on prompt 'p5'" in str(caught.value) and cause in str(caught.value)


def test_an_exception_keeps_its_traceback_on_the_way_to_another_process() -> None:
    with pytest.raises(RewardError, match=r"'style' failed on prompt 'p5' .*: ZeroDivisionError") as caught:
        score({"style": Raises()}, REQUEST)
    arrived = pickle.loads(pickle.dumps(caught.value))
    assert str(arrived) == str(caught.value) and arrived.component == "style"
    assert "a_function_of_the_scorer" in arrived.__notes__[0]


@dataclass(frozen=True)
class Fails:
    """At once."""

    error: Exception

    def load(self) -> None:
        raise self.error

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        raise self.error


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (FinalError("no target"), True),
        (AnswerError("answered 400: no"), True),
        (UnreachableError("answered 502"), False),
        (LoadError("no weights"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_says_all_comes_without_a_traceback(error: Exception, final: bool) -> None:
    for attempt, subject in (
        (lambda: load("style", Fails(error)), "loading"),
        (lambda: score({"style": Fails(error)}, REQUEST), "prompt 'p5' (a red fox)"),
    ):
        with pytest.raises(RewardError) as caught:
            attempt()
        arrived = pickle.loads(pickle.dumps(caught.value))
        assert str(arrived) == f"reward component 'style' failed on {subject}: {error}" and arrived.final == final
        assert not hasattr(arrived, "__notes__")


def test_limits_are_the_scorers_own_if_it_has_any() -> None:
    assert limit_s(Brightness(), 5, 7.0) == 7.0
    assert limit_s(Patient(sample_s=3.0), 5, 7.0) == 15.0 + MARGIN_S
    assert limit_s(Patient(sample_s=1e300), 5, 7.0) == threading.TIMEOUT_MAX
    assert load_limit_s([Brightness(), Patient(load_limit_s=3.0)], 7.0) == 10.0


def test_how_much_a_scorer_is_asked_for_at_once() -> None:
    """What those that have a limit of their own count by."""
    videos = np.zeros((3, 5, 4, 4, 3), np.uint8)
    assert num_scored(Brightness(), REQUEST.shown) == 3
    assert num_scored(Brightness(), videos) == 15
    assert num_scored(VideoHTTP(url="http://host"), videos) == 3
    assert num_scored(Energy(), Latents(np.zeros((4, 2, 2, 2), np.float32), {})) == 4


def test_a_component_that_cannot_be_loaded() -> None:
    with pytest.raises(RewardError, match="reward component 'style' failed on loading: FileNotFoundError: no model"):
        load("style", CannotLoad())
