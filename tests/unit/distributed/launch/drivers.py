"""Programs that start workers, to be killed: `python -m tests.unit.distributed.launch.drivers spawn|ray`."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from flowrl.distributed.launch.base import Place
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.launch.spawn import Spawn
from tests.unit.distributed.launch.workers import Clerk


def tell(signum: int, frame: FrameType | None) -> None:
    """That the signal has come."""
    print("a handler of its own", flush=True)


def main(kind: str) -> None:
    """Write down the processes of a worker and of its child, then wait for it without end."""
    signal.signal(signal.SIGTERM, tell)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell has set
    launcher = Spawn(num_threads=1) if kind == "spawn" else Ray(num_threads=1)
    with launcher.open([Place("clerk")]) as cluster:
        clerk = cluster.start("clerk", Clerk)
        kept = next(clerk.stream(Clerk.items, [1]))
        print(clerk.call(Clerk.pid).result(), clerk.call(Clerk.child).result(), flush=True)
        clerk.call(Clerk.sleep, 600).result()
        del kept


if __name__ == "__main__":
    main(sys.argv[1])
