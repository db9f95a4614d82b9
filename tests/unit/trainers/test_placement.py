"""Which process gets which GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.config import Config
from flowrl.distributed.launch.placement import assign
from flowrl.distributed.launch.ray import arrange
from flowrl.trainers.placement import actor_places, rollout_places, transport
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
