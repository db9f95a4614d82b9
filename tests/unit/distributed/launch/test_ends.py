"""Whatever becomes of the driver, nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.distributed.launch.shelf import FOLDER
from tests.unit.distributed.launch.support import eventually, gone

REPOSITORY = Path(__file__).parents[4]


def shelved() -> set[Path]:
    """What is in shared memory."""
    return set(FOLDER.glob("flowrl-*"))


def members(session: int) -> list[str]:
    """Processes of a session, by name."""
    listed = subprocess.run(["ps", "-o", "comm=", "-s", str(session)], capture_output=True, text=True)
    return [name for name in listed.stdout.split("\n") if name and "defunct" not in name]


@pytest.mark.parametrize(
    ("kind", "number"),
    [("spawn", signal.SIGKILL), ("spawn", signal.SIGINT), ("ray", signal.SIGKILL), ("ray", signal.SIGTERM)],
)
def test_no_process_and_no_shared_memory_outlives_the_driver(kind: str, number: signal.Signals) -> None:
    before = shelved()
    command = [sys.executable, "-m", "tests.unit.distributed.launch.drivers", kind]
    with subprocess.Popen(
        command, cwd=REPOSITORY, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 4
        if number == signal.SIGINT:
            os.killpg(driver.pid, number)  # Ctrl-C goes to all that the terminal runs
        else:
            driver.send_signal(number)
    assert gone(*pids)
    assert eventually(lambda: not members(driver.pid)), members(driver.pid)
    assert eventually(lambda: shelved() <= before)
    assert driver.returncode == -(signal.SIGKILL if number == signal.SIGKILL else signal.SIGINT), "Ray leaves SIGTERM"
