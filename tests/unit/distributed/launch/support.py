"""Processes that should be gone, and soon."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from flowrl.distributed.launch.base import Remote
from tests.unit.distributed.launch.workers import Clerk

Clerks = list[Remote[Clerk]]
SOON = 20.0  # seconds, for what should take none: the machine may be busy


def is_running(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(happens: Callable[[], bool]) -> bool:
    """Whether it happens soon."""
    end = time.monotonic() + SOON
    while not happens():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def gone(*pids: int) -> bool:
    """Whether all these processes end soon."""
    return eventually(lambda: not any(is_running(pid) for pid in pids))
