"""Exceptions on their way from one process to another."""

from __future__ import annotations

import pickle
import traceback

import pytest

from flowrl.config import ConfigError, Problem
from flowrl.distributed.launch.failures import Failure, WorkerDied, WorkerError, is_consequence, root
from flowrl.rewards.scoring import RewardError
from tests.unit.distributed.launch.workers import Unpicklable


def arrived(error: BaseException) -> BaseException:
    """`error` after its way through a pipe."""
    try:
        raise error
    except BaseException as caught:
        failure: Failure = pickle.loads(pickle.dumps(Failure.of("actor-1", caught)))
        return failure.error()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad", 3),
        OSError(28, "No space left on device", "/dev/shm/x"),
        RewardError("ocr", "prompt 'p'", "no"),
        ConfigError(Problem("a.b", "is wrong.", "Set it.")),
        WorkerDied("rollout-0", "ended with exit code 3"),
    ],
)
def test_errors_keep_their_type_and_their_parts(error: Exception) -> None:
    copy = arrived(error)
    assert type(copy) is type(error) and str(copy) == str(error) and copy.args == error.args
    told = str(copy.__cause__)
    assert told.startswith("in worker actor-1:\nTraceback") and "in arrived" in told


@pytest.mark.parametrize("error", [Unpicklable("it", "is"), SystemExit(2), ValueError(lambda: 1)])
def test_errors_that_cannot_travel_are_told(error: BaseException) -> None:
    copy = arrived(error)
    assert type(copy) is WorkerError
    assert str(copy).startswith("worker actor-1 failed: ") and type(error).__name__ in str(copy)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:23"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (BrokenPipeError(32, "Broken pipe"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection must be a number"), False),
        (WorkerDied("actor-0", "was killed by SIGKILL"), False),
    ],
)
def test_complaints_about_lost_peers_are_told_from_errors(error: Exception, expected: bool) -> None:
    assert is_consequence(error) is expected


def test_what_happened_in_the_worker_is_shown_first() -> None:
    shown = "".join(traceback.format_exception(arrived(ValueError("bad"))))
    there, here = shown.index("in worker actor-1:\nTraceback"), shown.rindex("ValueError: bad")
    assert there < shown.index("direct cause of the following exception") < here


def test_the_root_is_the_first_that_is_no_consequence() -> None:
    lost, death, late = ConnectionResetError(104, "reset by peer"), WorkerDied("a", "died"), ValueError("late")
    assert root([lost, death, late]) is death
    assert death.__notes__ == [
        "Then other workers failed, too:\n  ConnectionResetError: [Errno 104] reset by peer\n  ValueError: late"
    ]
    assert root([lost]) is lost and not hasattr(lost, "__notes__")
