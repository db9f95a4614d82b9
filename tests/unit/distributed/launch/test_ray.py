"""What only Ray has: room that must be found, other hosts' code, and an object store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flowrl.distributed.launch import fingerprint
from flowrl.distributed.launch.base import Cluster, Place
from flowrl.distributed.launch.failures import PlacementError
from flowrl.distributed.launch.ray import Ray
from flowrl.prompts import Prompt
from flowrl.rewards.remote import OnCluster
from flowrl.rewards.scoring import Request
from tests.unit.distributed.launch.support import SOON, Clerks
from tests.unit.distributed.launch.workers import Clerk
from tests.unit.rewards.scorers import Surroundings


def test_handles_in_arguments_and_results_stay_handles(staff: Callable[[str], Clerks]) -> None:
    clerks = staff("ray")
    ((_, handle),) = clerks[0].stream(Clerk.items, [7], size=200_000)
    (again,) = clerks[1].call(Clerk.echo, [handle]).result(SOON)
    assert (again.fetch() == 7).all()


def test_a_worker_finds_its_environment(staff: Callable[[str], Clerks]) -> None:
    environment, _ = staff("ray")[0].call(Clerk.surroundings).result(SOON)
    assert environment["OMP_NUM_THREADS"] == "1" and environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_reward_workers_score_without_torch(ray_cluster: Cluster) -> None:
    worker = OnCluster(ray_cluster, "reward")(0, {"style": Surroundings()}, SOON, SOON)
    request = Request("style", np.zeros((2, 4, 4, 3), np.uint8), Prompt("p", "text"), ("p:0:0", "p:0:1"))
    torch_was_there, num_threads = worker.score(request)
    assert not torch_was_there and num_threads == 1
    worker.close()


def test_room_that_is_not_there_is_named(ray_cluster: Cluster) -> None:
    places = [Place("large", num_cpus=3), Place("gpu", num_gpus=1)]
    with (
        pytest.raises(PlacementError, match=r"no room for 2 workers within 0.2 s .*4 CPU \(there are 8, 2 .*1 GPU \("),
        Ray(start_timeout_s=0.2).open(places),
    ):
        pass


def test_workers_with_other_code_are_refused(
    ray_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "PACKAGE", tmp_path)  # here, not there
    with (
        pytest.raises(PlacementError, match=r"do not run the driver's code: flowrl \w+ instead of \w+\. .*`ray stop`"),
        Ray().open([Place("guest")]),
    ):
        pass


def test_the_fingerprint_is_of_contents_not_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(folder: str, text: str) -> fingerprint.Fingerprint:
        (tmp_path / folder / "part").mkdir(parents=True)
        (tmp_path / folder / "part" / "module.py").write_text(text)
        monkeypatch.setattr(fingerprint, "PACKAGE", tmp_path / folder)
        return fingerprint.own_fingerprint()

    assert of("a", "x = 1") == of("b", "x = 1")
    (difference,) = of("c", "x = 1").differences(of("d", "x = 2"))
    assert difference.startswith("flowrl ")


def test_nobody_at_the_address() -> None:
    with pytest.raises(ValueError, match="Ray Client"):
        Ray(address="ray://somewhere:10001")
