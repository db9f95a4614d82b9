"""Programs that start workers, to be killed: `python -m tests.unit.distributed.launch.drivers spawn|ray`."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from flowrl.distributed.launch.base import Place, gather
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.launch.spawn import Spawn
from tests.unit.distributed.launch.workers import Clerk


def tell(signum: int, frame: FrameType | None) -> None:
    """That the signal has come."""
    print("a handler of its own", flush=True)


def main(kind: str) -> None:
    """Write down the processes of two workers and of a child of each, then wait for one that has no end."""
    signal.signal(signal.SIGTERM, tell)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell has set
    launcher = Spawn(num_threads=1) if kind == "spawn" else Ray(num_threads=1)
    with launcher.open([Place("clerk-0"), Place("clerk-1")]) as cluster:
        clerks = [cluster.start(f"clerk-{index}", Clerk) for index in range(2)]
        kept = next(clerks[0].stream(Clerk.items, [1]))
        pids = gather(clerks, Clerk.pid, [(), ()]) + gather(clerks, Clerk.child, [(), ()])
        print(*pids, flush=True)
        clerks[0].call(Clerk.sleep, 600).result()
        del kept


if __name__ == "__main__":
    main(sys.argv[1])
