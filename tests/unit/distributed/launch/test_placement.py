"""GPUs and bundles, by arithmetic."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.distributed.launch import placement
from flowrl.distributed.launch.base import Place
from flowrl.distributed.launch.failures import PlacementError
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.placement import Seat, arrange, assign
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.launch.spawn import Spawn


def test_each_place_has_its_own_gpu_and_those_beside_it_the_same() -> None:
    places = [
        Place("actor-0", num_gpus=1),
        Place("actor-1", num_gpus=1),
        Place("rollout-0", num_gpus=1, beside="actor-0"),
        Place("rollout-1", num_gpus=1, beside="actor-1"),
        Place("reward-0"),
    ]
    assert assign(places, ["4", "GPU-5"]) == {
        "actor-0": ["4"],
        "actor-1": ["GPU-5"],
        "rollout-0": ["4"],
        "rollout-1": ["GPU-5"],
        "reward-0": [],
    }


def test_too_few_gpus_are_an_error_that_names_the_place() -> None:
    with pytest.raises(PlacementError, match=r"actor-1 needs 1 GPU, .* \(1\) are taken: .* 2 in all"):
        assign([Place("actor-0", num_gpus=1), Place("actor-1", num_gpus=1)], ["0"])


@given(st.lists(st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 1.0, 2.0]), max_size=8), st.integers(0, 6))
def test_no_gpu_is_given_away_twice(amounts: list[float], count: int) -> None:
    places = [Place(f"p{index}", num_gpus=amount) for index, amount in enumerate(amounts)]
    try:
        assigned = assign(places, [str(index) for index in range(count)])
    except PlacementError:
        assert sum(amounts) > count - 1 or max(amounts) > count or 1.0 in amounts or 2.0 in amounts
        return
    load = Counter[str]()
    for place in places:
        gpus = assigned[place.name]
        assert len(set(gpus)) == len(gpus) == (0 if not place.num_gpus else max(1, int(place.num_gpus)))
        for gpu in gpus:
            load[gpu] += min(place.num_gpus, 1)  # type: ignore[assignment]
    assert all(amount <= 1 + 1e-6 for amount in load.values())


def test_a_bundle_is_shared_by_those_beside_each_other() -> None:
    places = [
        Place("actor-0", num_cpus=2, num_gpus=1),
        Place("reward-0"),
        Place("rollout-0", num_gpus=1, beside="actor-0"),
        Place("judge-0", beside="rollout-0"),
    ]
    bundles, seats = arrange(places)
    assert bundles == [{"CPU": 4, "GPU": 1}, {"CPU": 1}]
    assert seats["actor-0"] == Seat(0, 2, 0.3333)
    assert seats["rollout-0"] == seats["judge-0"] == Seat(0, 1, 0.3333)
    assert seats["reward-0"] == Seat(1, 1, 0)


def test_several_gpus_cannot_be_shared() -> None:
    with pytest.raises(PlacementError, match="b is to be beside a, which has more than one GPU"):
        arrange([Place("a", num_gpus=2), Place("b", beside="a")])


# ------------------------------------------------------------------------------------------ preflight


def run(ranks: int = 1, layout: str = "shared", workers: int = 1, device: str = "auto") -> Any:
    """What launchers read of a configuration."""
    return SimpleNamespace(
        device=device,
        actor=SimpleNamespace(num_ranks=ranks),
        rollout=SimpleNamespace(num_workers=workers, num_gpus_per_worker=1.0),
        trainer=SimpleNamespace(layout=layout),
    )


def test_ranks_need_processes() -> None:
    assert Inline().problems(run()) == []
    (problem,) = Inline().problems(run(ranks=2))
    assert problem.path == "actor.num_ranks" and "launcher=spawn" in problem.hint


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "visible_gpus", lambda: ["0", "1"])
    for own in (Spawn(), Ray()):
        assert own.problems(run(ranks=2)) == []
        assert own.problems(run(ranks=1, layout="standalone", workers=1)) == []
        assert own.problems(run(ranks=4, device="cpu")) == []
        (problem,) = own.problems(run(ranks=2, layout="standalone", workers=2))
        assert "2 ranks and 2 GPUs for rollout workers" in problem.message and "(2)" in problem.message
    assert Ray(address="auto").problems(run(ranks=8)) == []


def test_without_gpus_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "visible_gpus", list)
    assert Spawn().problems(run(ranks=8)) == []
