"""The pool with real processes, and everything that can happen to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.config import Reward
from flowrl.rewards.combine import Component
from flowrl.rewards.pool import RewardPool
from flowrl.rewards.scoring import RewardError
from tests.unit.rewards.scorers import Brightness, CannotLoad, FailsOnce, Raises, Returns, Sleeps, Surroundings
from tests.unit.rewards.support import sampled_group

SOON = 20.0  # seconds, for what should take none: the machine may be busy


def one(scorer: Any, **options: Any) -> dict[str, Component]:
    return {"style": Component(scorer=scorer, **options)}


def wait_for(path: Path) -> int:
    """The process id that a `Sleeps` writes when it begins."""
    end = time.monotonic() + SOON
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end, "the worker did not begin"
        time.sleep(0.01)
    return int(path.read_text())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pid: int) -> None:
    end = time.monotonic() + SOON
    while is_running(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_groups_come_back_in_order_with_every_component(num_workers: int) -> None:
    components = {"style": Component(scorer=Brightness()), "constant": Component(scorer=Returns(value=np.ones(2)))}
    groups = [sampled_group(ordinal, sleep=0.2 if ordinal == 0 else 0) for ordinal in range(6)]
    with RewardPool(components, num_workers) as pool:
        pool.warm()
        scored = list(pool.stream(iter(groups)))
        assert pool.totals() == {"samples": 24, "seconds": pool.totals()["seconds"], "retries": 0}
    for group, result in zip(groups, scored, strict=True):
        assert result.sampled is group
        expected = {"style": group.images.mean(axis=(1, 2, 3)) / 255, "constant": np.ones(2)}
        assert result.rewards.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(result.rewards[name], values)


def test_scores_while_groups_are_still_being_drawn() -> None:
    with RewardPool(one(Brightness()), num_workers=1) as pool:
        pool.warm()
        first = pool.submit(sampled_group(0))

        def drawn() -> Iterator[Any]:
            for ordinal in (1, 2):
                yield sampled_group(ordinal)
            first.result(timeout=SOON)  # scored although this generator is not at its end

        assert len(list(pool.stream(drawn()))) == 2


def test_scorers_of_the_configuration_stay_unloaded() -> None:
    scorer = Surroundings()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    with RewardPool(one(scorer), num_workers=0) as pool:
        pool.submit(sampled_group()).result()
    assert "seen" not in vars(scorer)


def test_a_worker_has_one_thread_and_loads_without_torch() -> None:
    with RewardPool(one(Surroundings()), num_workers=1) as pool:
        torch_was_there, num_threads = pool.submit(sampled_group()).result().rewards["style"]
    assert num_threads == 1
    assert not torch_was_there


def test_reads_its_section() -> None:
    with RewardPool.from_config(Reward(components=one(Brightness()), num_workers=0)) as pool:
        assert pool.submit(sampled_group()).result().rewards.keys() == {"style"}


# ------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_required_component_that_raises_stops_the_run(num_workers: int) -> None:
    with RewardPool(one(Raises()), num_workers, retries=2) as pool:
        with pytest.raises(RewardError, match="'style' failed on prompt 'p3' .*: ZeroDivisionError") as caught:
            list(pool.stream([sampled_group(3)]))
        assert pool.totals()["retries"] == 2
    assert "in a_function_of_the_scorer" in caught.value.__notes__[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_nan_in_a_worker_names_the_sample(num_workers: int) -> None:
    with (
        RewardPool(one(Returns(value=np.array([0.0, np.nan]))), num_workers, retries=0) as pool,
        pytest.raises(RewardError, match="not finite: nan for sample p3:0:1"),
    ):
        pool.submit(sampled_group(3)).result()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_optional_component_that_fails_is_left_out_and_counted(num_workers: int) -> None:
    components = one(Brightness()) | {"luxury": Component(scorer=Raises(), required=False)}
    with RewardPool(components, num_workers, retries=1) as pool:
        scored = list(pool.stream([sampled_group(0), sampled_group(1)]))
        totals = pool.totals()
    assert [set(group.rewards) for group in scored] == [{"style"}, {"style"}]
    assert totals["dropped/luxury"] == 2 and totals["retries"] == 2 and totals["samples"] == 4


def test_a_group_without_any_score_is_an_error() -> None:
    with (
        RewardPool(one(Raises(), required=False), num_workers=0, retries=0) as pool,
        pytest.raises(RewardError, match="no component gave a score"),
    ):
        pool.submit(sampled_group()).result()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_component_that_cannot_be_loaded(num_workers: int) -> None:
    with RewardPool(one(Brightness()) | {"big": Component(scorer=CannotLoad())}, num_workers) as pool:
        for _ in range(2):
            with pytest.raises(RewardError, match="'big' failed on loading: FileNotFoundError: no model.onnx"):
                pool.warm()


# ------------------------------------------------------------------------------------------ lost workers


def test_a_killed_worker_is_an_error_without_retries(tmp_path: Path) -> None:
    log = tmp_path / "pid"
    with RewardPool(one(Sleeps(log=str(log))), num_workers=1, retries=0) as pool:
        future = pool.submit(sampled_group(sleep=60))
        os.kill(wait_for(log), signal.SIGKILL)
        with pytest.raises(RewardError, match="'style' failed on prompt 'p0' .*killed by SIGKILL"):
            future.result(timeout=SOON)
        assert pool.submit(sampled_group(1)).result(timeout=SOON).rewards["style"].tolist() == [1.0, 1.0]


def test_a_worker_that_ends_is_replaced_and_the_group_scored_again(tmp_path: Path) -> None:
    with RewardPool(one(FailsOnce(log=str(tmp_path / "failed"))), num_workers=1, retries=1) as pool:
        assert pool.submit(sampled_group()).result(timeout=SOON).rewards["style"].tolist() == [1.0, 1.0]
        assert pool.totals()["retries"] == 1


def test_a_worker_that_hangs_is_killed_in_time(tmp_path: Path) -> None:
    log = tmp_path / "pid"
    with RewardPool(one(Sleeps(log=str(log))), num_workers=1, timeout_s=0.5, retries=0) as pool:
        pool.warm()
        started = time.monotonic()
        with pytest.raises(RewardError, match=r"did not answer within 0\.5 s and was stopped"):
            pool.submit(sampled_group(sleep=600)).result(timeout=SOON)
        assert 0.5 <= time.monotonic() - started < SOON
        assert_gone(wait_for(log))


def test_a_stopped_worker_does_not_block_sending(tmp_path: Path) -> None:
    """Pictures larger than a pipe's buffer, to a process that reads nothing."""
    log = tmp_path / "pid"
    with RewardPool(one(Sleeps(log=str(log))), num_workers=1, timeout_s=0.5, retries=0) as pool:
        pool.submit(sampled_group()).result(timeout=SOON)
        os.kill(wait_for(log), signal.SIGSTOP)
        with pytest.raises(RewardError, match="did not answer within"):
            pool.submit(sampled_group(size=2048)).result(timeout=SOON)


def test_closing_ends_workers_that_are_busy(tmp_path: Path) -> None:
    log = tmp_path / "pid"
    with RewardPool(one(Sleeps(log=str(log))), num_workers=1) as pool:
        future = pool.submit(sampled_group(sleep=600))
        pid = wait_for(log)
        waiting = pool.submit(sampled_group(sleep=600))
        started = time.monotonic()
        pool.close()
        assert time.monotonic() - started < SOON
    assert_gone(pid)
    assert waiting.cancelled()
    with pytest.raises(RewardError):
        future.result(timeout=0)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(sampled_group())


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    log = tmp_path / "pid"
    code = (
        "from tests.unit.rewards.test_pool import *\n"
        f"pool = RewardPool(one(Sleeps(log={str(log)!r})), num_workers=1)\n"
        "pool.submit(sampled_group(sleep=600)).result()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3]) as parent:
        pid = wait_for(log)
        parent.kill()
    assert_gone(pid)
