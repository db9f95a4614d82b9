"""Components that fail in the pool, when they are tried again, and the limits of their time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.config import Reward
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.rewards import scoring
from flowrl.rewards.combine import Component
from flowrl.rewards.http import HTTP
from flowrl.rewards.pool import RewardPool, Subject
from flowrl.rewards.scoring import RewardError
from flowrl.rewards.worker import InlineWorker, OnHost
from flowrl.types import Drawn, SampledGroup
from tests.unit.rewards.scorers import (
    Brightness,
    CannotLoad,
    Energy,
    NeverLoads,
    Obeys,
    Patient,
    Raises,
    Refused,
    Returns,
)  # fmt: skip
from tests.unit.rewards.support import SOON, one, sampled_group

# ------------------------------------------------------------------------------------------ failures


def test_a_required_component_that_raises_stops_the_run(obedient: RewardPool) -> None:
    with pytest.raises(RewardError, match=r"'style' failed on prompt 'p3' .*: ZeroDivisionError") as caught:
        list(obedient.stream([sampled_group(3, then="raise")]))
    assert "in a_function_of_the_scorer" in caught.value.__notes__[0]


def test_a_score_that_is_no_number_names_the_sample(obedient: RewardPool) -> None:
    with pytest.raises(RewardError, match="not finite: nan for sample p3:0:0, nan for sample p3:0:1"):
        obedient.submit(sampled_group(3, then="nan")).result(timeout=SOON)


def test_failures_in_the_calling_process_are_the_same() -> None:
    with RewardPool(one(Obeys()), num_workers=0, retries=2) as pool:
        with pytest.raises(RewardError, match="ZeroDivisionError") as caught:
            pool.submit(sampled_group(then="raise")).result()
        with pytest.raises(RewardError, match="not finite"):
            pool.submit(sampled_group(then="nan")).result()
        assert pool.totals()["retries"] == 4
    assert "in a_function_of_the_scorer" in caught.value.__notes__[0]


def test_an_optional_component_that_fails_is_left_out_and_counted() -> None:
    components = one(Brightness()) | {"luxury": Component(scorer=Raises(), required=False)}
    with RewardPool(components, num_workers=0, retries=1) as pool:
        scored = list(pool.stream([sampled_group(0), sampled_group(1)]))
        totals = pool.totals()
    assert [set(group.rewards) for group in scored] == [{"style"}, {"style"}]
    assert totals["dropped/luxury"] == 2 and totals["retries"] == 2 and totals["samples"] == 4


def test_a_group_without_any_score_is_an_error() -> None:
    with (
        RewardPool(one(Raises(), required=False), num_workers=0, retries=0) as pool,
        pytest.raises(RewardError, match="no component that counts gave a score"),
    ):
        pool.submit(sampled_group()).result()


def test_what_is_only_logged_does_not_stand_in_for_what_counts() -> None:
    """All advantages would be 0, and the group would train as noise."""
    failing, logged = Component(scorer=Raises(), weight=1.0, required=False), Component(scorer=Brightness(), weight=0.0)
    with (
        RewardPool({"pick": failing, "style": logged}, num_workers=0, retries=0) as pool,
        pytest.raises(RewardError, match="'pick' failed on prompt 'p0': no component that counts gave a score"),
    ):
        pool.submit(sampled_group()).result()
    third = {"third": Component(scorer=Obeys(), weight=-0.5)}
    with RewardPool({"pick": failing, "style": logged} | third, num_workers=0, retries=0) as pool:
        assert pool.submit(sampled_group()).result().rewards.keys() == {"style", "third"}
    with RewardPool({"style": logged}, num_workers=0) as pool:  # of an evaluation, which has no weights
        assert pool.submit(sampled_group()).result().rewards.keys() == {"style"}


def test_pictures_that_are_not_there_cannot_be_scored() -> None:
    with (
        RewardPool(one(Brightness()), num_workers=0) as pool,
        pytest.raises(RewardError, match="the rollout kept no pictures"),
    ):
        pool.submit(replace(sampled_group(), images=None)).result()


@dataclass(frozen=True)
class Policy:
    """Of frames; it does not choose any."""

    error: BaseException

    def choose(self, num_frames: int) -> list[int]:
        raise self.error


@dataclass(frozen=True)
class Lost:
    """What a drawing process kept, and it has died."""

    def fetch(self) -> Drawn:
        raise WorkerDied("rollout-1", "was killed")


def unfit(kind: str) -> tuple[SampledGroup, Component]:
    """A group, and a component that cannot be shown it."""
    videos = replace(sampled_group(), images=np.zeros((2, 9, 6, 5, 3), np.uint8))
    match kind:
        case "pictures":
            return replace(sampled_group(), images=None), Component(scorer=Brightness())
        case "latents":
            return replace(sampled_group(), drawn=Lost()), Component(scorer=Energy())
        case "index":
            return videos, Component(scorer=Brightness(), frames=Policy(IndexError("short video")))
        case "silent":
            return videos, Component(scorer=Brightness(), frames=Policy(ValueError()))
        case _:
            return videos, Component(scorer=Brightness(), frames=Policy(SystemExit(1)))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("pictures", "the rollout kept no pictures"),
        ("latents", "WorkerDied: worker rollout-1 was killed"),
        ("index", "IndexError: short video"),
        ("silent", "ValueError: "),
        ("exit", "SystemExit: 1"),
    ],
)
def test_what_cannot_be_shown_fails_as_its_component_does(kind: str, cause: str, num_workers: int) -> None:
    group, unlucky = unfit(kind)
    with RewardPool({"unlucky": unlucky}, num_workers, retries=1) as pool:
        with pytest.raises(RewardError, match=f"'unlucky' failed on prompt 'p0': {cause}"):
            pool.submit(group).result(timeout=SOON)
        assert pool.totals()["retries"] == (0 if kind == "pictures" else 1)
    if kind in ("pictures", "latents"):
        return
    components = {"unlucky": replace(unlucky, weight=1.0, required=False), "sound": Component(scorer=Brightness())}
    with RewardPool(components, num_workers, retries=0) as pool:
        assert pool.submit(group).result(timeout=SOON).rewards.keys() == {"sound"}
        assert pool.totals()["dropped/unlucky"] == 1


def test_latents_that_are_lost_are_the_loss_of_an_optional_component() -> None:
    components = one(Brightness()) | {"energy": Component(scorer=Energy(), required=False)}
    with RewardPool(components, num_workers=0) as pool:
        assert pool.submit(replace(sampled_group(), drawn=Lost())).result().rewards.keys() == {"style"}
        assert pool.totals()["dropped/energy"] == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_component_that_cannot_be_loaded(num_workers: int) -> None:
    with RewardPool(one(Brightness()) | {"big": Component(scorer=CannotLoad())}, num_workers) as pool:
        for _ in range(2):
            with pytest.raises(RewardError, match="'big' failed on loading: FileNotFoundError: no model"):
                pool.warm()


def test_a_component_that_cannot_be_sent() -> None:
    with pytest.raises(RewardError, match="'style' failed on its way to a worker"):
        RewardPool(one(Returns(value=lambda: 1)), num_workers=1)


@pytest.mark.parametrize(("index", "num"), [(0, 1), (1, 0)])
def test_one_of_the_workers_says_what_all_wait_for(index: int, num: int, capfd: pytest.CaptureFixture[str]) -> None:
    """And in the end the error is one sentence."""
    url = "http://127.0.0.1:1"
    worker = OnHost()(index, {"judge": HTTP(url=url, start_timeout_s=0.5)}, SOON)
    with pytest.raises(RewardError, match=f"'judge' failed on loading: the server at {url} was not ready") as caught:
        worker.wait()
    worker.close()
    assert not hasattr(caught.value, "__notes__")
    said = f"waits for {url} (at most 0.5 s, start_timeout_s): GET {url}/healthz: ConnectError"
    assert capfd.readouterr().err.count(said) == num


def test_what_cannot_be_sent_to_a_worker_is_an_error_and_the_worker_stays() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    worker = OnHost()(0, {"style": Brightness()}, SOON)
    request = Subject(sampled_group()).request("style", Component(scorer=Brightness()), SOON)
    worker.wait()
    pid = worker.pid
    with pytest.raises(RewardError, match=r"'style' failed on prompt 'p0' .*: RecursionError"):
        worker.score(replace(request, prompt=replace(request.prompt, metadata={"n": nested})))
    assert worker.score(request).shape == (2,) and worker.pid == pid
    worker.close()


def test_warming_while_a_group_is_being_scored(obedient: RewardPool) -> None:
    future = obedient.submit(sampled_group(sleep=0.3))
    obedient.warm()
    assert future.result(timeout=SOON).rewards["style"].tolist() == [1.0, 1.0]


# ------------------------------------------------------------------------------------------ limits


def test_a_scorer_may_have_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pool allows others."""
    monkeypatch.setattr(scoring, "MARGIN_S", 0.3)
    with RewardPool(one(Patient(sample_s=2.0)), num_workers=1, timeout_s=0.3, retries=0) as pool:
        assert pool.submit(sampled_group(sleep=0.9)).result(timeout=SOON).rewards["style"].tolist() == [1.0, 1.0]
    with (
        RewardPool(one(Patient(sample_s=0.4)), num_workers=1, timeout_s=600.0, retries=0) as pool,
        pytest.raises(RewardError, match=r"did not answer within 1\.1 s and was stopped"),
    ):
        pool.submit(sampled_group(sleep=600)).result(timeout=SOON)


def test_the_time_for_loading_is_that_of_all_components() -> None:
    limits: list[float] = []

    def make(index: int, scorers: Mapping[str, Any], load_timeout_s: float) -> InlineWorker:
        limits.append(load_timeout_s)
        return InlineWorker(scorers)

    components = {name: Component(scorer=Patient(), weight=1.0) for name in "ab"} | one(Brightness(), weight=1.0)
    for section in (Reward(components, num_workers=1, load_timeout_s=5.0), Reward(one(Brightness()), num_workers=1)):
        RewardPool.from_config(section, make).close()
    assert limits == [5.0 + 20.0 + 20.0, 600.0]


def test_a_worker_that_loads_for_too_long_is_stopped() -> None:
    with (
        RewardPool(one(NeverLoads()), num_workers=1, load_timeout_s=3.0) as pool,
        pytest.raises(RewardError, match="'style' failed on loading: the worker did not answer within 3 s"),
    ):
        pool.warm()


@pytest.mark.parametrize(
    ("value", "num_retries"), [(np.ones(3), 3), (np.full(2, np.nan), 3), ([1.0, 1.0], 0), (np.ones(2, np.float32), 0)]
)
def test_scores_of_another_type_will_not_get_better(value: object, num_retries: int) -> None:
    with RewardPool(one(Returns(value=value)), num_workers=0, retries=3) as pool:
        with pytest.raises(RewardError):
            pool.submit(sampled_group()).result()
        assert pool.totals()["retries"] == num_retries


def test_an_optional_component_that_would_fail_again_is_asked_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    components = one(Brightness()) | {"judge": Component(scorer=Refused(log=str(log)), required=False)}
    with RewardPool(components, num_workers=0, retries=3) as pool:
        assert pool.submit(sampled_group()).result().rewards.keys() == {"style"}
        totals = pool.totals()
    assert log.read_text().splitlines() == ["asked"]
    assert totals["dropped/judge"] == 1 and totals["retries"] == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_would_fail_again_is_not_tried_again(tmp_path: Path, num_workers: int) -> None:
    log = tmp_path / "log"
    component = Component(scorer=Refused(log=str(log)))
    with (
        RewardPool({"judge": component}, num_workers=num_workers, retries=3) as pool,
        pytest.raises(RewardError, match=r"'judge' failed on prompt 'p0' \(.*\): 400 Bad Request$"),
    ):
        pool.submit(sampled_group()).result(timeout=SOON)
    assert log.read_text().splitlines() == ["asked"]
