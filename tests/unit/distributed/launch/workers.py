"""Workers that do as they are told. A module of its own and free of torch, for the processes that import it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.distributed.launch.fingerprint import Fingerprint, own_fingerprint


class Unpicklable(Exception):
    """An exception whose constructor wants more than it passes on."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class Clerk:
    """Counts, yields, fails and dies."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, amount: int, *, times: int = 1) -> int:
        self.count += amount * times
        return self.count

    def echo(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()

    def surroundings(self) -> tuple[dict[str, str], bool]:
        return dict(os.environ), "torch" in sys.modules

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    # -- streams

    def items(self, numbers: Sequence[int], size: int = 1000, pause: float = 0.0) -> Iterator[tuple[int, np.ndarray]]:
        for number in numbers:
            time.sleep(pause)
            yield number, np.full(size, number)

    def touch_and_yield(self, path: Path) -> Iterator[tuple[int, int]]:
        path.touch()
        yield 0, 0

    def items_then_fail(self) -> Iterator[tuple[int, int]]:
        yield 1, 10
        raise ZeroDivisionError("after one")

    def items_then_die(self) -> Iterator[tuple[int, int]]:
        yield 1, 10
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    def total(self, handle: Any) -> int:
        return int(handle.fetch().sum())

    def totals(self, handles: Sequence[Any]) -> list[int]:
        return [self.total(handle) for handle in handles]

    def write_at_most(self, num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    # -- ends

    def fail(self, message: str) -> None:
        raise ValueError(message)

    def sleep_or_fail(self, seconds: float, message: str) -> None:
        time.sleep(seconds)
        self.fail(message)

    def fail_badly(self) -> None:
        raise Unpicklable("a thing", "a reason")

    def quit(self) -> None:
        sys.exit("enough")

    def die(self, after: float = 0.0) -> None:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    def end(self, code: int) -> None:
        os._exit(code)

    def lose_peer(self, then: str) -> None:
        """What a rank says, or does, in a collective."""
        if then == "die":
            self.die(after=0.3)
        raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234")


def slow_fingerprint() -> Fingerprint:
    """But not in the driver, which has no parent in Ray."""
    if "RAY_RAYLET_PID" in os.environ:
        time.sleep(600)
    return own_fingerprint()


def fail_to_make() -> Clerk:
    raise FileNotFoundError("no model here")
