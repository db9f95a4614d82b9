"""Whatever becomes of the driver, nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flowrl.distributed.launch.shelf import FOLDER
from tests.unit.distributed.launch.support import SOON, eventually, gone

REPOSITORY = Path(__file__).parents[4]


def shelved(driver: int) -> set[Path]:
    """What a process has in shared memory."""
    return set(FOLDER.glob(f"flowrl-{driver}-*"))


def members(session: int) -> list[str]:
    """Processes of a session, by name."""
    listed = subprocess.run(["ps", "-o", "comm=", "-s", str(session)], capture_output=True, text=True)
    return [name for name in listed.stdout.split("\n") if name and "defunct" not in name]


ENDS = [("spawn", signal.SIGKILL), ("spawn", signal.SIGINT), ("ray", signal.SIGKILL)]


@pytest.fixture(scope="module")
def drivers() -> Iterator[dict[tuple[str, int], subprocess.Popen[str]]]:
    """One for each end, all started at once: most of that is waiting."""
    command = [sys.executable, "-m", "tests.unit.distributed.launch.drivers"]
    with ExitStack() as closing:
        yield {
            (kind, number): closing.enter_context(
                subprocess.Popen(
                    [*command, kind],
                    cwd=REPOSITORY,
                    start_new_session=True,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
            for kind, number in ENDS
        }


@pytest.mark.parametrize(("kind", "number"), ENDS)
def test_nothing_outlives_the_driver(
    kind: str, number: signal.Signals, drivers: dict[tuple[str, int], subprocess.Popen[str]]
) -> None:
    driver = drivers[kind, number]
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.send_signal(signal.SIGTERM)
    assert driver.stdout.readline() == "a handler of its own\n", "which Ray has left in place"
    if number == signal.SIGINT:
        os.killpg(driver.pid, number)  # Ctrl-C goes to all that the terminal runs
    else:
        driver.send_signal(number)
    assert driver.wait(SOON) == -number
    assert gone(*pids)
    assert eventually(lambda: not members(driver.pid)), members(driver.pid)
    assert eventually(lambda: not shelved(driver.pid))
