"""`launcher=spawn`: one spawned process for each worker, on this host."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from flowrl.config import Config, Problem
from flowrl.distributed.launch import wire
from flowrl.distributed.launch.answers import Arrivals, Pending, Reply
from flowrl.distributed.launch.base import GRACE_S, Cluster, Launcher, Place, Remote, Stream
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.distributed.launch.placement import assign, share_of_cores, too_many_gpus, total, visible_gpus
from flowrl.distributed.launch.process import MAIN_SCRIPT, WORKER, epitaph, interrupts_blocked, kill_group
from flowrl.distributed.launch.servicer import HERE, serve
from flowrl.distributed.launch.shelf import Shelf
from flowrl.distributed.records import Packed, pack

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")

NOTHING = Packed(b"", ())


@dataclass(frozen=True)
class Spawn(Launcher):
    """Processes of this host, one GPU each where a place asks for one.

    A process is gone with the driver, however that went, together with all that it has started. Heavy results wait in
    shared memory.

    Args:
        num_threads: of torch in each process; 0 is `OMP_NUM_THREADS`, or else an equal share of the cores.
        start_timeout_s: for a process to come up; what its worker then loads is not counted.
    """

    num_threads: int = 0
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.start_timeout_s > 0:
            raise ValueError(f"start_timeout_s must be greater than 0, got {self.start_timeout_s}")

    @contextmanager
    def open(self, places: Sequence[Place]) -> Iterator[Cluster]:
        """GPUs are handed out in the order of the places."""
        threads = str(self.num_threads or os.environ.get("OMP_NUM_THREADS") or share_of_cores(len(places)))
        environments = {
            name: {
                "CUDA_VISIBLE_DEVICES": ",".join(gpus),
                "OMP_NUM_THREADS": threads,
                "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),  # spinning threads slow the others
            }
            for name, gpus in assign(places, visible_gpus() if total(places) else []).items()
        }
        cluster = SpawnCluster(environments, self.start_timeout_s)
        try:
            yield cluster
        finally:
            cluster.close()

    def problems(self, run: Config) -> list[Problem]:
        """More GPUs than there are."""
        return too_many_gpus(run)


class SpawnCluster(Cluster):
    """Environments by place, and one shelf."""

    def __init__(self, environments: Mapping[str, Mapping[str, str]], start_timeout_s: float) -> None:
        super().__init__()
        self._environments = environments
        self._start_timeout_s = start_timeout_s
        self._shelf = Shelf()
        self._workers: dict[str, SpawnedWorker[Any]] = {}

    def _start(self, place: str, make: Callable[[], W]) -> Remote[W]:
        environment = self._environments[place]
        worker: SpawnedWorker[W] = SpawnedWorker(place, make, environment, self._shelf, self._start_timeout_s)
        self._workers[place] = worker
        return worker

    def _end(self) -> None:
        workers = list(self._workers.values())
        deadline = time.monotonic() + GRACE_S
        try:
            for worker in workers:
                worker.ask_to_end()
            for worker in workers:
                worker.wait(max(0.0, deadline - time.monotonic()))
        finally:  # another Ctrl-C does not save them
            for worker in workers:
                worker.close(grace_s=0)
            self._shelf.clear()


class SpawnedWorker(Remote[W]):
    """A process and its pipe. One thread sends calls, another takes the answers, which come in the same order."""

    def __init__(
        self, name: str, make: Callable[[], W], environment: Mapping[str, str], shelf: Shelf, start_timeout_s: float
    ) -> None:
        self.name = name
        self._shelf = shelf
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()  # what is sent and what is pending have the same order
        self._unsent: SimpleQueue[tuple[wire.Request, Packed]] = SimpleQueue()
        self._pending: deque[tuple[Pending, object]] = deque()  # with arguments: handles among them must not go
        self._closing = False
        self._unheard: str | None = None  # why it is listened to no longer, though it lives
        self._end: str | None = None  # how the process ended
        self._unsent.put((wire.Request.CALL, pack(make)))
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, name, environment, shelf)
        self._process = context.Process(target=serve, args=arguments, name=f"{WORKER}-{name}", daemon=True)
        with interrupts_blocked():
            self._process.start()
        theirs.close()  # the process has its own; ours would hide its death
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for run in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        reply: Reply[R] = Reply()
        self._ask(wire.Request.CALL, reply, (method, args, kwargs))
        return reply.future

    def stream(
        self, method: Callable[Concatenate[W, P], Iterator[tuple[T, Any]]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[T]:
        arrivals: Arrivals[T] = Arrivals()
        self._ask(wire.Request.STREAM, arrivals, (method, args, kwargs))
        return arrivals

    def close(self, grace_s: float = GRACE_S) -> None:
        if grace_s > 0:
            self.ask_to_end()
            self.wait(grace_s)
        self._closing = True
        kill_group(self._process)
        for thread in self._threads:
            thread.join()

    def ask_to_end(self) -> None:
        """When it has done what it was asked before; does not wait."""
        self._closing = True
        self._unsent.put((wire.Request.STOP, NOTHING))

    def wait(self, timeout_s: float) -> None:
        """Until the process has ended."""
        wait([self._process.sentinel], timeout_s)

    def _ask(self, kind: wire.Request, pending: Pending, request: tuple[Any, ...]) -> None:
        packed = pack(request).copy()
        with self._lock:
            if self._end is None:
                self._pending.append((pending, request))
                self._unsent.put((kind, packed))
                return
        pending.fail(WorkerDied(self.name, self._end))

    # -- threads --------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        with suppress(OSError):  # it has ended; `_receive` says how
            while True:
                kind, packed = self._unsent.get()
                wire.send(self._connection, packed, kind)
                if kind is wire.Request.STOP:
                    return

    def _receive(self) -> None:
        here = False
        try:
            if here := self._has_come():
                while True:
                    self._receive_one()
        except (EOFError, OSError):
            pass
        except Exception as error:  # no memory for its answer, say: what follows in the pipe makes no sense any more
            self._unheard = f"was stopped: what it answered could not be received ({type(error).__name__}: {error})"
        finally:
            self._bury(here)

    def _has_come(self) -> bool:
        """Whether the process greets in time."""
        return self._connection.poll(self._start_timeout_s) and self._connection.recv_bytes() == HERE

    def _receive_one(self) -> None:
        """A method of its own: a variable that outlives it would keep the last handle."""
        if self._connection not in wait([self._connection, self._process.sentinel]):
            raise EOFError  # something that the process has started still holds the pipe
        heavy, answer = wire.receive(self._connection)
        pending, _ = self._pending[0] if heavy is not None else self._pending.popleft()
        pending.take(answer, None if heavy is None else self._shelf.own(heavy))

    def _bury(self, had_come: bool) -> None:
        """Whoever waits for an answer is told, and whoever asks from now on."""
        if self._unheard is None:
            self._process.join(timeout=1)  # its own exit code, if it is about to have one
        exitcode = self._process.exitcode
        kill_group(self._process)  # and whatever it has started
        self._process.join()
        with self._lock:
            self._end = self._cause(exitcode, had_come)
            lost, self._pending = self._pending, deque()
        self._unsent.put((wire.Request.STOP, NOTHING))  # `_send` ends, too
        for pending, _ in lost:
            pending.fail(WorkerDied(self.name, self._end))

    def _cause(self, exitcode: int | None, had_come: bool) -> str:
        if self._closing:
            return "was closed"
        if self._unheard is not None:
            return self._unheard
        if exitcode is None and not had_come:
            return f"did not come up within {self._start_timeout_s:g} s (launcher.start_timeout_s) and was stopped"
        hint = f". {MAIN_SCRIPT}" if exitcode == 1 and not had_come else ""
        return epitaph(exitcode) + hint
