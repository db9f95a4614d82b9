"""A worker object in its own process, and what answers for it there. Free of torch: the worker decides."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from flowrl.distributed.launch import wire
from flowrl.distributed.launch.failures import FAULTS, Failure, WorkerError
from flowrl.distributed.launch.process import end_group, follow_parent
from flowrl.distributed.launch.shelf import Shelf
from flowrl.distributed.records import Packed, pack

H = TypeVar("H")
HERE = b"here"  # what a spawned process says first


class Servicer:
    """Makes the worker and answers calls. If making it fails, that is the answer to every call.

    Args:
        name: of the worker, for errors.
        read: gives the function that makes it; reading that can fail, too.
    """

    def __init__(self, name: str, read: Callable[[], Callable[[], Any]]) -> None:
        self._name = name
        self._never_made: Failure | None = None
        try:
            self._worker = read()()
        except FAULTS as error:
            self._never_made = Failure.of(name, error)

    def call(self, request: Packed) -> Packed:
        """What the method returns, or a Failure."""
        try:
            return pack(self._invoke(request))
        except FAULTS as error:
            return self._failure(error)

    def stream(self, request: Packed, keep: Callable[[Packed], H]) -> Iterator[tuple[Packed, H | None]]:
        """(light, heavy) for each item, the latter as `keep` has it; at last (None or a Failure, None)."""
        try:
            for light, heavy in self._invoke(request):
                yield pack(light), keep(pack(heavy))
                del light, heavy  # not to be kept while the next ones are made
        except FAULTS as error:
            yield self._failure(error), None
        else:
            yield pack(None), None

    def _invoke(self, request: Packed) -> Any:
        if self._never_made is not None:
            raise WorkerError(self._never_made.summary)
        method, args, kwargs = request.unpack()
        return method(self._worker, *args, **kwargs)

    def _failure(self, error: BaseException) -> Packed:
        return pack(self._never_made or Failure.of(self._name, error))


def serve(connection: Connection, name: str, environment: Mapping[str, str], shelf: Shelf) -> None:
    """The main function of a spawned process: make the worker, answer one call after the other, end with the pipe.

    The first thing to arrive is what makes the worker. A thread reads ahead: a busy worker holds up nobody who calls.
    """
    follow_parent()
    _settle(environment)
    requests: SimpleQueue[tuple[wire.Request, Packed]] = SimpleQueue()
    try:
        connection.send_bytes(HERE)
        _, make = wire.receive(connection)
        threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
        servicer = Servicer(name, make.unpack)
        while True:
            kind, request = requests.get()
            if kind is wire.Request.CALL:
                wire.send(connection, servicer.call(request))
            elif kind is wire.Request.STREAM:
                for light, heavy in servicer.stream(request, shelf.put):
                    wire.send(connection, light, heavy)
            else:
                return
    except (EOFError, OSError):  # nobody listens any more
        end_group()


def _settle(environment: Mapping[str, str]) -> None:
    """Before numerical libraries read it, unless the main script, which is imported first, has brought torch along."""
    os.environ |= environment
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))


def _read(connection: Connection, requests: SimpleQueue[tuple[wire.Request, Packed]]) -> None:
    try:
        while True:
            requests.put(wire.receive(connection))
    except (EOFError, OSError):  # whatever the worker is doing, nobody wants it
        end_group()
