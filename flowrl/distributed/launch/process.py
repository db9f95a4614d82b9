"""Child processes that cannot be left behind. Nothing but the standard library: it is imported before all else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NoReturn

RAYLET_EVERY_S = 0.5
RAYLET_AGENTS = ("ray::DashboardA", "ray::RuntimeEnv")  # as the kernel has their names
WORKER = "flowrl-worker"
"""How the names of spawned worker processes begin. A main script that starts a run on being imported would do so in
each of them, too: `multiprocessing.current_process().name` tells."""

MAIN_SCRIPT = 'A worker imports the main script anew: put what that runs under `if __name__ == "__main__":`.'


def follow_parent() -> None:
    """In the child: lead a group of processes, and end with all of it when the parent does, however it went.

    Ctrl-C in the terminal is then the parent's alone; a busy child would not notice the end of a pipe.
    """
    os.setsid()
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    end_group()


def end_group() -> NoReturn:
    """End this process, which leads a group, with all that it has started: nobody else is left to do it."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise AssertionError("killed")


def follow_raylet() -> None:
    """The same in a worker of Ray, whose parent is the raylet of its host.

    With the raylet go its agents, which otherwise last for another minute.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    raylet = os.getppid()
    agents = [pid for pid, name, parent in _processes() if parent == raylet and name in RAYLET_AGENTS]
    threading.Thread(target=_follow_raylet, args=(raylet, agents), daemon=True).start()


def _follow_raylet(raylet: int, agents: Sequence[int]) -> None:
    while os.getppid() == raylet:
        time.sleep(RAYLET_EVERY_S)
    for pid in agents:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    end_group()


def _processes() -> Iterator[tuple[int, str, int]]:
    """(pid, name, pid of the parent), as far as the system tells."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            pid, _, rest = file.read_text().partition(" (")
            name, _, values = rest.rpartition(") ")
            yield int(pid), name, int(values.split()[1])


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """What is started here never sees SIGINT: until a worker has a session of its own, Ctrl-C would reach it, too."""
    resource_tracker.ensure_running()  # else starting the process starts that first, which ends the blocking
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_group(process: SpawnProcess) -> None:
    """Kill the worker and whatever it has started; before it leads a group, the worker alone."""
    if process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):  # the latter where a group holds only a zombie (macOS)
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def epitaph(exitcode: int | None) -> str:
    """How a process ended that was not told to: `was killed by SIGKILL (out of memory?)`."""
    if exitcode is not None and exitcode < 0:
        guess = " (out of memory?)" if exitcode == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-exitcode).name}{guess}"
    return f"ended with exit code {exitcode}"
