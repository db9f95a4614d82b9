"""Which process gets which GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import Config, Evaluation, Reward
from flowrl.distributed.launch.failures import PlacementError
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.placement import assign
from flowrl.distributed.launch.ray import Ray, arrange
from flowrl.rewards.clip_score import CLIPScore
from flowrl.rewards.combine import Component
from flowrl.rewards.jpeg import JPEGCompressibility
from flowrl.rewards.worker import OnHost
from flowrl.trainers import placement
from flowrl.trainers.placement import actor_places, on_host, pool_places, rollout_places, trainer_places, transport
from tests.support.ranks import configure

GPUS = ["0", "1", "2", "3"]


def on_cuda(folder: Path, *overrides: str) -> Config:
    return replace(configure(folder, "actor=full", *overrides), device="cuda")


def assigned(run: Config) -> dict[str, list[str]]:
    return assign([*actor_places(run), *rollout_places(run)], GPUS)


def test_each_rank_has_a_gpu(tiny_folder: Path) -> None:
    assert assigned(on_cuda(tiny_folder, "actor.num_ranks=4")) == {f"actor-{i}": [str(i)] for i in range(4)}


def test_a_colocated_worker_has_the_gpu_of_its_rank_and_no_other_rank_has_it(tiny_folder: Path) -> None:
    run = on_cuda(tiny_folder, "actor.num_ranks=2", "trainer.layout=colocated")
    expected = {"actor-0": ["0"], "actor-1": ["1"], "rollout-0": ["0"], "rollout-1": ["1"]}
    assert assigned(run) == expected
    bundles, seats = arrange([*actor_places(run), *rollout_places(run)])
    assert [bundle["GPU"] for bundle in bundles] == [1.0, 1.0]
    for rank in range(2):
        assert seats[f"actor-{rank}"].bundle == seats[f"rollout-{rank}"].bundle == rank
        assert seats[f"actor-{rank}"].num_gpus + seats[f"rollout-{rank}"].num_gpus <= 1.0
    assert transport(run) == "cuda_ipc"


def test_standalone_workers_have_gpus_of_their_own_or_share_them(tiny_folder: Path) -> None:
    run = on_cuda(tiny_folder, "actor.num_ranks=2", "trainer.layout=standalone", "rollout.num_workers=2")
    assert assigned(run) == {"actor-0": ["0"], "actor-1": ["1"], "rollout-0": ["2"], "rollout-1": ["3"]}
    assert transport(run) == "broadcast"
    shared = replace(run, rollout=replace(run.rollout, num_gpus_per_worker=0.5))
    assert assigned(shared)["rollout-0"] == assigned(shared)["rollout-1"] == ["2"]
    assert transport(shared) == "object_store"  # NCCL wants a GPU for each process


@pytest.mark.parametrize("layout", ["shared", "colocated", "standalone"])
def test_without_gpus_nobody_asks_for_one(tiny_folder: Path, layout: str) -> None:
    run = configure(tiny_folder, "actor=full", "actor.num_ranks=2", f"trainer.layout={layout}")
    assert {place.num_gpus for place in [*actor_places(run), *rollout_places(run)]} == {0.0}


# ------------------------------------------------------------------------------------------ rewards


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> Config:
    """`launcher=spawn`, one rank, on the CPU."""
    return configure(tiny_folder)


def scoring(
    run: Config, runtime: str, num_workers: int = 2, share: float = 1.0, judges: Reward | None = None
) -> Config:
    reward = replace(run.reward, runtime=runtime, num_workers=num_workers, num_gpus_per_worker=share)
    return replace(run, reward=reward, trainer=replace(run.trainer, eval=Evaluation(rewards=judges)))


def seen(run: Config, monkeypatch: pytest.MonkeyPatch, gpus: list[str] = GPUS) -> list[str]:
    """`CUDA_VISIBLE_DEVICES` of the processes that score, on a machine with these GPUs."""
    monkeypatch.setattr(placement, "visible_gpus", lambda: gpus)
    return list(on_host(pool_places(run)["reward"], trainer_places(run)).gpus)


LAYOUTS = {
    "shared": ("actor.num_ranks=2",),
    "colocated": ("actor.num_ranks=2", "trainer.layout=colocated"),
    "standalone": ("actor.num_ranks=1", "trainer.layout=standalone", "rollout.num_workers=1"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpus_of_reward_workers(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """None, in turn those of whoever draws, or the next ones that are free."""
    run = on_cuda(tiny_folder, *LAYOUTS[layout])
    assert seen(scoring(run, "cpu"), monkeypatch) == ["", ""]
    drawing = ["1"] if layout == "standalone" else ["0", "1"]
    assert seen(scoring(run, "colocated", 3), monkeypatch) == (drawing * 3)[:3]
    assert seen(scoring(run, "remote"), monkeypatch) == ["2", "3"]
    assert seen(scoring(run, "remote", 3, share=0.5), monkeypatch) == ["2", "2", "3"]
    assert seen(scoring(run, "remote", 1, share=2), monkeypatch) == ["2,3"]
    with pytest.raises(PlacementError, match="reward-2 needs 1 GPU"):
        seen(scoring(run, "remote", 3), monkeypatch)


def test_in_one_process_everything_but_rewards_is_on_one_gpu(plain: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in ("shared", "standalone"):
        run = replace(plain, device="cuda", launcher=Inline(), trainer=replace(plain.trainer, layout=layout))
        assert seen(scoring(run, "colocated"), monkeypatch) == ["0", "0"]
        assert seen(scoring(run, "remote", 3), monkeypatch) == ["1", "2", "3"]


def test_without_a_gpu_that_draws_colocated_is_cpu(plain: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(scoring(plain, "colocated"), monkeypatch) == ["", ""]
    assert pool_places(scoring(plain, "colocated")) == pool_places(scoring(plain, "cpu"))


def test_places_of_ray(tiny_folder: Path) -> None:
    """The bundle of whoever draws is shared; workers with their own GPUs have their own bundles."""
    run = replace(on_cuda(tiny_folder, "trainer.layout=standalone"), launcher=Ray())
    run = scoring(run, "colocated", judges=Reward(runtime="remote", num_workers=1, num_gpus_per_worker=0.5))
    places = [*trainer_places(run), *(place for places in pool_places(run).values() for place in places)]
    bundles, seats = arrange(places)
    assert [bundle.get("GPU", 0) for bundle in bundles] == [1.0, 1.0, 0.5]
    assert [seats[name].bundle for name in ("actor-0", "rollout-0", "reward-0", "reward-1", "judge-0")] == [
        0,
        1,
        1,
        1,
        2,
    ]


def test_evaluations_rewards_come_after_trainings(plain: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    run = scoring(replace(plain, device="cuda"), "remote", judges=Reward(runtime="remote", num_workers=1))
    pools = pool_places(run)
    monkeypatch.setattr(placement, "visible_gpus", lambda: GPUS)
    assert on_host(pools["judge"], [*trainer_places(run), *pools["reward"]]) == OnHost(["3"])


@pytest.mark.parametrize(
    ("gpus", "changes", "path"),
    [
        ([], {}, "reward.runtime"),
        (["0"], {}, "reward.runtime"),
        (["0", "1"], {}, None),
        (["0", "1"], {"num_workers": 2}, "reward.runtime"),
        (["0", "1"], {"num_workers": 2, "num_gpus_per_worker": 0.5}, None),
        (["0", "1"], {"num_workers": 0}, "reward.num_workers"),
        (["0", "1"], {"num_gpus_per_worker": 0.0}, "reward.num_gpus_per_worker"),
        (["0", "1", "2"], {"num_gpus_per_worker": 1.5}, "reward.num_gpus_per_worker"),
        (["0", "1"], {"runtime": "cpu", "num_gpus_per_worker": 0.5}, "reward.num_gpus_per_worker"),
        (["0"], {"runtime": "colocated"}, None),
        (["0"], {"runtime": "colocated", "num_workers": 0}, "reward.num_workers"),
        ([], {"runtime": "colocated", "num_workers": 0}, None),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    plain: Config, monkeypatch: pytest.MonkeyPatch, gpus: list[str], changes: dict[str, object], path: str | None
) -> None:
    """Before anything starts; `launcher=spawn`, one rank."""
    monkeypatch.setattr(placement, "visible_gpus", lambda: gpus)
    settings: dict[str, Any] = {"runtime": "remote", "num_workers": 1, **changes}
    run = replace(plain, device="cuda" if gpus else "cpu", reward=replace(plain.reward, **settings))
    assert [problem.path for problem in placement.problems(run)] == ([] if path is None else [path])


@pytest.mark.parametrize(
    ("device", "runtime", "on_gpus", "path"),
    [
        ("auto", "cpu", True, "runtime"),
        ("cuda", "cpu", True, "components.clip.scorer.device"),
        ("cpu", "cpu", True, None),
        ("auto", "colocated", True, None),
        ("cuda", "remote", True, None),
        ("auto", "cpu", False, None),
        ("auto", "colocated", False, None),
        ("cuda", "colocated", False, "components.clip.scorer.device"),
    ],
)
def test_a_network_needs_a_worker_with_a_gpu_unless_the_cpu_is_meant(
    plain: Config, monkeypatch: pytest.MonkeyPatch, device: str, runtime: str, on_gpus: bool, path: str | None
) -> None:
    """In a run on GPUs; of evaluation's own rewards, too. Others do not mind."""
    monkeypatch.setattr(placement, "visible_gpus", lambda: GPUS)
    clip = {"clip": Component(scorer=CLIPScore(device=device)), "size": Component(scorer=JPEGCompressibility())}
    reward = Reward(components=clip, runtime=runtime, num_workers=1)
    for section, run in {
        "reward": replace(plain, reward=reward),
        "trainer.eval.rewards": scoring(plain, "cpu", judges=reward),
    }.items():
        found = list(placement.problems(replace(run, device="cuda" if on_gpus else "cpu")))
        assert [problem.path for problem in found] == ([] if path is None else [f"{section}.{path}"])
        for problem in found:
            assert f"Set {section}.runtime=colocated" in problem.hint
            assert f"{section}.components.clip.scorer.device=cpu" in problem.hint


def test_without_workers_a_network_is_where_the_trainer_is(plain: Config) -> None:
    reward = Reward(components={"clip": Component(scorer=CLIPScore())}, num_workers=0)
    assert list(placement.problems(replace(plain, reward=reward, device="cuda", launcher=Inline()))) == []


def test_a_cluster_that_is_there_already_may_have_gpus(plain: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "visible_gpus", lambda: [])
    for launcher, paths in ((Ray(), ["reward.runtime"]), (Ray(address="auto"), [])):
        run = replace(scoring(plain, "remote"), launcher=launcher, device="cuda")
        assert [problem.path for problem in placement.problems(run)] == paths
