"""A process that saves is killed with SIGKILL; what it leaves is always a whole checkpoint, and one can go on."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from flowrl.distributed.checkpoint.folders import Folders
from tests.unit.distributed.checkpoint import saving
from tests.unit.distributed.checkpoint.support import PRELOADED, save, state_of, value_in


def started(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """A process of its own."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    process.start()
    return process


def newest_value(root: Path) -> float:
    """Of the newest checkpoint, verified."""
    newest = Folders(root).newest()
    assert newest is not None
    return value_in(newest.path)


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.campaign)])
def test_at_every_operation_on_the_file_system(tmp_path: Path, stride: int) -> None:
    """Never less than the last checkpoint that was there; and the next save cleans up."""
    prepared = tmp_path / "prepared"
    save(prepared, 1, state_of(1.0), "1.0")
    process = started(saving.killed_at_every_operation, prepared, tmp_path, stride)
    process.join(120)
    assert process.exitcode == 0
    seen = []
    for number in itertools.count(1, stride):
        root = tmp_path / f"killed-{number}"
        if not root.exists():
            break
        seen.append(newest_value(root))
        assert save(root, 3, state_of(4.0), "4.0") == Folders(root).newest()
        assert not [path.name for path in root.iterdir() if path.name.startswith(".step_")]
    assert seen == sorted(seen), "nothing that was committed is lost again"
    assert {1.0, 2.0, 3.0} == set(seen) and len(seen) > 40 // stride
    assert newest_value(tmp_path / "ended") == 3.0 and Folders(tmp_path / "ended").steps() == [2]


@pytest.mark.parametrize("seconds", [0.02, 0.05, 0.11])
def test_at_any_moment(tmp_path: Path, seconds: float) -> None:
    """Also in the middle of writing; the loop goes on after its first checkpoint until it is killed."""
    process = started(saving.save_in_a_loop, tmp_path)
    while not Folders(tmp_path).steps():
        assert process.is_alive()
        process.join(0.001)
    process.join(seconds)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    newest = Folders(tmp_path).newest()
    assert newest is not None and newest_value(tmp_path) == newest.step
    for older in Folders(tmp_path).committed():
        assert value_in(older.path) == older.step
