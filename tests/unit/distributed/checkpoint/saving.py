"""A process that saves and is killed: by itself at one chosen operation on the file system, or by someone else."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

from flowrl.distributed.checkpoint.folders import Folders
from tests.unit.distributed.checkpoint.support import save, state_of

OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def killed_at_every_operation(prepared: Path, scratch: Path, stride: int) -> None:
    """Leave `scratch/killed-<n>` for each `stride`th n: `prepared` as `save_until_killed` left it; `ended` at last."""
    for number in itertools.count(1, stride):
        root = scratch / f"killed-{number}"
        shutil.copytree(prepared, root)
        child = os.fork()
        if child == 0:
            save_until_killed(root, number)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            root.rename(scratch / "ended")
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status


def save_until_killed(root: Path, num_operations: int) -> None:
    """Two saves with what goes with them, both of step 2: the first is new, the second takes its place.

    SIGKILL comes before the operation of that number, if there are so many. Opening a file in any way counts as one.
    """
    os.fsync = lambda _: None  # SIGKILL takes nothing that was written, and waiting for the disk takes most of the time
    remaining = num_operations

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal remaining
        if event in OPERATIONS:
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    for value in (2.0, 3.0):
        save(root, 2, state_of(value), str(value))
        Folders(root).rotate([2])


def save_in_a_loop(root: Path) -> None:
    """Until someone else ends this process: steps 2, 3, ..., each with its number in it; the last two are kept."""
    for step in itertools.count(2):
        save(root, step, state_of(float(step), size=100_000), str(float(step)))
        Folders(root).rotate([step - 1, step])
