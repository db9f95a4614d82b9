"""What a transport offers to the two sides of one publication, and how the parties signal each other.

A `Link` is a picklable value that the driver makes afresh for every attempt and hands to all parties. Nothing of an
attempt outlives it, so an engine can be replaced, and a failed transfer repeated, without repairing anything.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from flowrl.distributed.rendezvous import CONNECT_S, Address, connect
from flowrl.distributed.weight_sync.errors import AbortedError, TransferError
from flowrl.distributed.weight_sync.manifest import Manifest

FAILED = "failed"
POLL_S = (0.0002, 0.005)  # the first pause between two looks at the store, and the longest


class Outlet(Protocol):
    """A trainer rank's side of one publication. Buckets go in order."""

    def open(self) -> None:
        """Take the memory, and meet the engines."""
        ...

    def buffer(self, bucket: int) -> Tensor:
        """uint8 [size of the bucket] to be filled, on the trainer's device. Waits until nobody reads it any more."""
        ...

    def send(self, bucket: int) -> None:
        """The buffer is full and may go."""
        ...

    def finish(self) -> None:
        """Wait until everything has arrived."""
        ...

    def close(self, reason: str | None) -> None:
        """Give everything back. With a reason for failing, the other parties are told first: the rest can block."""
        ...


class Inlet(Protocol):
    """An engine's side of one publication."""

    def open(self) -> None:
        """Meet the trainer."""
        ...

    def receive(self, bucket: int, into: Tensor) -> None:
        """Fill `into`, uint8 [size of the bucket] on the engine's device. Buckets come in order."""
        ...

    def finish(self) -> None:
        """Everything has been read."""
        ...

    def close(self, reason: str | None) -> None:
        """Give everything back. With a reason for failing, the other parties are told first: the rest can block."""
        ...


class Link(ABC):
    """One attempt at one publication, as a value. All errors of a transfer are `TransferError`, within its time."""

    @abstractmethod
    def outlet(self, rank: int, manifest: Manifest, device: torch.device) -> Outlet | None:
        """The side of trainer rank `rank`, not yet open; None if it sends nothing and only helps to gather."""

    @abstractmethod
    def inlet(self, engine: int, manifest: Manifest, device: torch.device) -> Inlet:
        """The side of engine number `engine`, not yet open."""


@dataclass(frozen=True)
class Meeting:
    """Where the parties of one attempt find each other: a key of the driver's `TCPStore`, and the time they have."""

    host: str
    port: int
    key: str
    timeout_s: float

    def join(self) -> Signals:
        """Raises TransferError if the store does not answer."""
        try:
            store = connection(self.host, self.port)
        except ConnectionError as error:
            raise TransferError(f"the driver's store does not answer: {error}") from error
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return Signals(PrefixStore(self.key, store), self.timeout_s)


@lru_cache(maxsize=1)
def connection(host: str, port: int) -> TCPStore:
    """To the store of this run, once in a process: torch looks up a name for every connection, which can be slow."""
    return connect(Address(host, port), CONNECT_S)


class Signals:
    """Counters and small values in the store, every wait ending at the first failure of any party or in time."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self.store = store
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Until time is up."""
        return max(0.0, self._deadline - time.monotonic())

    def put(self, key: str, value: bytes) -> None:
        """Leave a value for others."""
        with lost_store():
            self.store.set(key, value)  # type: ignore[arg-type]  # bytes are what it keeps

    def take(self, key: str, what: str) -> bytes:
        """The value that another party leaves; waits for it."""
        with lost_store():
            self.wait(lambda: self.store.check([key]), what)
            return bytes(self.store.get(key))

    def bump(self, key: str) -> None:
        """Count one more."""
        with lost_store():
            self.store.add(key, 1)

    def reach(self, key: str, count: int, what: str) -> None:
        """Wait until others have counted up to `count`."""
        with lost_store():
            self.wait(lambda: self.store.add(key, 0) >= count, what)

    def settle(self, key: str, wish: str) -> str:
        """What all parties take for settled: the first one's wish."""
        with lost_store():
            return bytes(self.store.compare_set(key, "", wish)).decode()

    def fail(self, reason: str) -> None:
        """Tell everybody that waits, or will; the first reason stays.

        If the store is gone, so are they: that must not hide the error that is being told.
        """
        with suppress(DistError):
            self.store.compare_set(FAILED, "", reason)

    def check(self) -> None:
        """Raises AbortedError once a party has failed."""
        with lost_store():
            if self.store.check([FAILED]):
                raise AbortedError(f"given up, because elsewhere: {self.store.get(FAILED).decode()}")

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Look until it is done. Raises AbortedError once a party has failed, TransferError when time is up."""
        pause, longest = POLL_S
        while not done():
            self.check()
            if self.left_s == 0:
                hint = "Is a process stuck? Is weight_sync.timeout_s too short?"
                raise TransferError(f"{what} for {self.timeout_s:g} s (weight_sync.timeout_s). {hint}")
            time.sleep(pause)
            pause = min(2 * pause, longest)


@contextmanager
def lost_store() -> Iterator[None]:
    """The store's own errors mean that the driver has gone."""
    try:
        yield
    except DistError as error:
        raise TransferError(f"the driver's store does not answer any more: {error}") from error
