"""What becomes of groups that could not be drawn."""

from __future__ import annotations

import pickle

import pytest

from flowrl.distributed.launch.failures import WorkerDied
from flowrl.rollout.checks import EngineError
from flowrl.trainers.chunks import Chunk, FailedGroup, Listed, settle
from tests.support import tiny

GROUPS = tiny.groups(4, 2)


def settled(chunk: Chunk, error: Exception, left: int, *, tolerant: bool = True) -> tuple[list[Chunk], list[int]]:
    """Chunks that are to be drawn again, and ordinals of groups that are given up, with their reasons."""
    failed: list[FailedGroup] = []
    source = Listed([], failed.append if tolerant else None)
    num_back = settle(source, chunk, chunk.groups[-left:], error)
    back = list(iter(source.next, None))
    assert num_back == len(back)
    assert all(each.error is error for each in failed)
    assert {each.reason for each in failed} <= {"rollout_died" if isinstance(error, WorkerDied) else "rollout_failed"}
    return back, [each.group.ordinal for each in failed]


def single(ordinal: int, num_deaths: int = 0) -> Chunk:
    return Chunk([GROUPS[ordinal]], 7, num_deaths)


def test_neighbours_of_an_unknown_culprit_are_drawn_again_alone() -> None:
    chunk = Chunk(GROUPS, 7)
    assert settled(chunk, KeyError("x"), left=3) == ([single(1), single(2), single(3)], [])
    assert settled(chunk, KeyError("x"), left=1) == ([], [3])
    assert settled(single(2), KeyError("x"), left=1) == ([], [2])


def test_a_group_that_was_refused_fails_and_its_neighbours_do_not() -> None:
    assert settled(Chunk(GROUPS, 7), EngineError("no", 1), left=3) == ([single(2), single(3)], [1])
    assert settled(Chunk(GROUPS, 7), EngineError("fewer"), left=2) == ([single(2), single(3)], [])
    assert settled(single(2), EngineError("fewer"), left=1) == ([], [2])


@pytest.mark.parametrize("tolerant", [True, False])
def test_one_death_may_be_chance_and_two_are_not(tolerant: bool) -> None:
    death = WorkerDied("rollout-0", "was killed")
    assert settled(Chunk(GROUPS, 7), death, 2, tolerant=tolerant) == ([single(2, 1), single(3, 1)], [])
    assert settled(single(2), death, 1, tolerant=tolerant) == ([single(2, 1)], [])
    if tolerant:
        assert settled(single(2, 1), death, left=1) == ([], [2])
    else:
        with pytest.raises(WorkerDied):
            settled(single(2, 1), death, left=1, tolerant=False)


def test_what_is_not_about_a_group_is_raised() -> None:
    with pytest.raises(EngineError, match="more"):
        settle(Listed([], [].append), Chunk(GROUPS, 7), [], EngineError("more groups"))
    with pytest.raises(KeyError):
        settle(Listed([]), Chunk(GROUPS, 7), GROUPS, KeyError("x"))


def test_an_engine_error_knows_its_group_wherever_it_goes() -> None:
    error = pickle.loads(pickle.dumps(EngineError("bad", 3)))
    assert (str(error), error.ordinal) == ("bad", 3)
    assert str(Chunk(GROUPS, 7)) == "groups 0-3 of rollout 7" and str(single(2)) == "group 2 of rollout 7"
