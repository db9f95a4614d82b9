"""The pool with real processes: what they score, and everything that can happen to them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import pytest

from flowrl.config import Reward
from flowrl.rewards.combine import Component
from flowrl.rewards.pool import RewardPool
from flowrl.rewards.scoring import RewardError
from flowrl.rewards.worker import OnHost, ProcessWorker
from flowrl.types import SampledGroup
from tests.unit.rewards.scorers import Brightness, FailsOnce, Obeys, Surroundings, VisibleGPUs
from tests.unit.rewards.support import SOON, one, sampled_group


def wait_for(path: Path) -> int:
    """The process id that an `Obeys` writes when it begins."""
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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_groups_come_back_in_order_with_every_component(num_workers: int) -> None:
    components = {"style": Component(scorer=Brightness()), "obedience": Component(scorer=Obeys())}
    groups = [sampled_group(ordinal, sleep=0.2 if ordinal == 0 else 0.0) for ordinal in range(6)]
    with RewardPool(components, num_workers) as pool:
        pool.warm()
        scored = list(pool.stream(iter(groups)))
        totals = pool.totals()
    for group, result in zip(groups, scored, strict=True):
        assert result.sampled is group
        expected = {"style": group.images.mean(axis=(1, 2, 3)) / 255, "obedience": np.ones(2)}
        assert result.rewards.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(result.rewards[name], values)
    assert totals.pop("seconds") > 0.2
    hidden, exposed = totals.pop("hidden"), totals.pop("exposed")
    assert exposed > 0.19 and (hidden == 0 if num_workers == 0 else hidden >= 0), "the groups took no time to be drawn"
    assert totals == {"samples": 24, "retries": 0}


def test_scores_while_groups_are_still_being_drawn(obedient: RewardPool) -> None:
    first = obedient.submit(sampled_group(0))

    def drawn() -> Iterator[SampledGroup]:
        yield sampled_group(1)
        first.result(timeout=SOON)  # scored although this generator is not at its end

    assert len(list(obedient.stream(drawn()))) == 1


def test_what_is_hidden_and_what_is_exposed(obedient: RewardPool) -> None:
    """The wall clock of scoring, before and after the last group is drawn; what does not count is not in it."""
    before = obedient.totals()
    list(obedient.stream([sampled_group(sleep=0.1)], counted=False))
    assert obedient.totals() == before

    def drawn() -> Iterator[SampledGroup]:
        yield sampled_group(0, sleep=0.3)
        time.sleep(0.6)
        yield sampled_group(1, sleep=0.4)

    list(obedient.stream(drawn()))
    spent = {name: total - before[name] for name, total in obedient.totals().items()}
    assert 0.3 <= spent["hidden"] < 0.6 and 0.4 <= spent["exposed"] < 0.9
    assert spent["hidden"] + spent["exposed"] == pytest.approx(spent["seconds"], abs=0.1)


def test_scorers_of_the_configuration_stay_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    scorer = Surroundings()
    with RewardPool(one(scorer), num_workers=0) as pool:
        assert pool.submit(sampled_group()).result().rewards["style"][1] == 2
    assert "seen" not in vars(scorer)


def test_a_worker_has_one_thread_and_loads_scorers_without_torch() -> None:
    with RewardPool(one(Surroundings()), num_workers=1) as pool:
        torch_was_there, num_threads = pool.submit(sampled_group()).result(timeout=SOON).rewards["style"]
    assert num_threads == 1
    assert not torch_was_there


@pytest.mark.parametrize(("gpus", "number"), [((), 0), (("2",), 1), (("2,5",), 2)])
def test_a_worker_sees_its_gpus_and_no_others(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], number: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    with RewardPool(one(VisibleGPUs()), num_workers=1, make_worker=OnHost(gpus) if gpus else None) as pool:
        assert pool.submit(sampled_group()).result(timeout=SOON).rewards["style"].tolist() == [number] * 2


def test_reads_its_section() -> None:
    with RewardPool.from_config(Reward(components=one(Brightness()), num_workers=0)) as pool:
        assert pool.submit(sampled_group()).result().rewards.keys() == {"style"}


# ------------------------------------------------------------------------------------------ lost workers


def test_a_killed_worker_is_an_error_without_retries(obedient: RewardPool, tmp_path: Path) -> None:
    log = tmp_path / "pid"
    future = obedient.submit(sampled_group(sleep=0.9, log=str(log)))
    os.kill(wait_for(log), signal.SIGKILL)
    with pytest.raises(RewardError, match=r"'style' failed on prompt 'p0' .*killed by SIGKILL"):
        future.result(timeout=SOON)


def test_a_worker_that_ends_is_an_error_and_then_replaced(obedient: RewardPool) -> None:
    with pytest.raises(RewardError, match="the worker ended with exit code 3"):
        obedient.submit(sampled_group(then="exit")).result(timeout=SOON)
    assert obedient.submit(sampled_group()).result(timeout=SOON).rewards["style"].tolist() == [1.0, 1.0]


def test_a_worker_that_hangs_is_reported_and_killed_in_time(
    obedient: RewardPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "pid"
    obedient.warm()
    caplog.clear()
    started = time.monotonic()
    with pytest.raises(RewardError, match="did not answer within 1 s and was stopped"):
        obedient.submit(sampled_group(sleep=600, log=str(log))).result(timeout=SOON)
    assert 1 <= time.monotonic() - started < SOON
    doing = "reward worker 0 scores style on prompt 'p0' (a sign that says \"FLOW\"); it is killed after 1 s"
    assert caplog.messages[0] == f"stuck? For 0.4 s now {doing}"
    assert_gone(wait_for(log))


def test_what_a_scorer_started_goes_with_its_worker(obedient: RewardPool, tmp_path: Path) -> None:
    log = tmp_path / "pid"
    with pytest.raises(RewardError, match="did not answer"):
        obedient.submit(sampled_group(sleep=600, child=str(log))).result(timeout=SOON)
    assert_gone(wait_for(log))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_scorer_that_would_end_the_process(num_workers: int) -> None:
    with (
        RewardPool(one(Obeys()), num_workers, retries=0) as pool,
        pytest.raises(RewardError, match=r"failed on prompt 'p0' .*: SystemExit"),
    ):
        pool.submit(sampled_group(then="quit")).result(timeout=SOON)


def test_only_a_killed_worker_may_have_run_out_of_memory(obedient: RewardPool, tmp_path: Path) -> None:
    log = tmp_path / "pid"
    future = obedient.submit(sampled_group(sleep=0.9, log=str(log)))
    os.kill(wait_for(log), signal.SIGTERM)
    with pytest.raises(RewardError, match=r"killed by SIGTERM$"):
        future.result(timeout=SOON)


def test_interrupts_reach_no_worker_from_its_first_moment() -> None:
    worker = ProcessWorker({"style": Brightness()}, SOON)
    worker.start()
    assert worker.pid is not None
    status = Path(f"/proc/{worker.pid}/status").read_text()  # of an interpreter that has only begun
    (blocked,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk")]
    assert blocked & 1 << signal.SIGINT - 1
    worker.wait()
    assert os.getsid(worker.pid) == worker.pid, "Ctrl-C in the terminal goes elsewhere"
    worker.close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_that_reads_nothing_does_not_block_sending(obedient: RewardPool, tmp_path: Path) -> None:
    """Pictures larger than a pipe's buffer, to a process that is stopped."""
    log = tmp_path / "pid"
    obedient.submit(sampled_group(log=str(log))).result(timeout=SOON)
    os.kill(wait_for(log), signal.SIGSTOP)
    with pytest.raises(RewardError, match="did not answer within"):
        obedient.submit(sampled_group(size=1024)).result(timeout=SOON)


def test_a_lost_group_is_scored_again_by_a_new_worker(tmp_path: Path) -> None:
    with RewardPool(one(FailsOnce(log=str(tmp_path / "failed"))), num_workers=1, retries=1) as pool:
        assert pool.submit(sampled_group()).result(timeout=2 * SOON).rewards["style"].tolist() == [1.0, 1.0]
        assert pool.totals()["retries"] == 1


def test_a_system_without_a_process_to_spare_fails_the_component(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: SpawnProcess) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with RewardPool(one(Brightness()), num_workers=1, retries=1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(SpawnProcess, "start", full)
            message = r"'style' failed .*: the worker cannot be started: \[Errno 12\] Cannot allocate memory"
            with pytest.raises(RewardError, match=message):
                pool.submit(sampled_group()).result(timeout=SOON)
        assert pool.totals()["retries"] == 1
        assert pool.submit(sampled_group()).result(timeout=SOON).rewards.keys() == {"style"}


def test_closing_ends_workers_that_are_busy(tmp_path: Path) -> None:
    log = tmp_path / "pid"
    with RewardPool(one(Obeys()), num_workers=1) as pool:
        future = pool.submit(sampled_group(sleep=600, log=str(log)))
        waiting = [pool.submit(sampled_group(sleep=600)) for _ in range(3)]
        pid = wait_for(log)
        started = time.monotonic()
        pool.close()
        assert time.monotonic() - started < SOON
    assert_gone(pid)
    for lost in (future, *waiting):
        assert lost.cancelled() or isinstance(lost.exception(timeout=0), RewardError)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(sampled_group())


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    log, child = tmp_path / "pid", tmp_path / "child"
    code = (
        "from tests.unit.rewards.test_pool import *\n"
        "pool = RewardPool(one(Obeys()), num_workers=1)\n"
        f"pool.submit(sampled_group(sleep=600, log={str(log)!r}, child={str(child)!r})).result()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3]) as parent:
        pids = wait_for(log), wait_for(child)
        parent.kill()
    for pid in pids:
        assert_gone(pid)
