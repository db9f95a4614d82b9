"""No fault of a scorer becomes a number."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from flowrl.prompts import Prompt
from flowrl.rewards.latents import Latents
from flowrl.rewards.scoring import Request, RewardError, load, score
from tests.unit.rewards.scorers import Brightness, CannotLoad, Raises, Returns, ReturnsForLatents

REQUEST = Request("style", np.zeros((3, 4, 4, 3), np.uint8), Prompt("p5", "a red fox"), ("p5:0:0", "p5:0:1", "p5:0:2"))


def test_good_scores_pass_as_they_are() -> None:
    assert score({"style": Brightness()}, REQUEST).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (np.array([1.0, np.nan, np.inf]), "not finite: nan for sample p5:0:1, inf for sample p5:0:2"),
        (np.ones(2), "one score for each of 3 pictures, got shape [2]"),
        (np.ones((3, 1)), "one score for each of 3 pictures, got shape [3, 1]"),
        (np.float64(1), "numpy array, got float64"),
        (np.ones(3, np.float32), "must be float64, got float32"),
        (np.ones(3, np.int64), "must be float64, got int64"),
        ([1.0, 1.0, 1.0], "numpy array, got list"),
        (None, "numpy array, got NoneType"),
    ],
)
def test_unusable_scores(value: object, cause: str) -> None:
    with pytest.raises(RewardError) as caught:
        score({"style": Returns(value=value)}, REQUEST)
    message = str(caught.value)
    assert message.startswith("reward component 'style' failed on prompt 'p5' (a red fox): ")
    assert cause in message


@pytest.mark.parametrize(
    ("value", "cause"),
    [(np.array([1.0, np.nan, 0.0]), "nan for sample p5:0:1"), (np.ones(1), "shape [1]"), (None, "got NoneType")],
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


def test_a_component_that_cannot_be_loaded() -> None:
    with pytest.raises(RewardError, match="reward component 'style' failed on loading: FileNotFoundError: no model"):
        load("style", CannotLoad())
