"""Buckets through a process group of trainer rank 0 and all engines: gloo on CPUs, NCCL between GPUs.

The group is its own, not the default one that ranks train with. It is made for one publication: an engine that died and
was replaced is simply in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work

from flowrl.distributed.weight_sync.errors import AbortedError, TransferError
from flowrl.distributed.weight_sync.manifest import Manifest
from flowrl.distributed.weight_sync.transports.base import Link, Meeting, Signals

if TYPE_CHECKING:  # builds of torch for CPUs have no NCCL
    from torch.distributed import ProcessGroupNCCL

    Backend = ProcessGroupNCCL | ProcessGroupGloo

NUM_BUFFERS = 2  # one is on its way while the next is filled
MARGIN_S = 0.2  # by which our own clock, which says more, is ahead of gloo's


@dataclass(frozen=True)
class Broadcast(Link):
    """From trainer rank 0 to `num_engines` engines; NCCL needs a GPU of its own for each of them."""

    meeting: Meeting
    num_engines: int

    def outlet(self, rank: int, manifest: Manifest, device: torch.device) -> BroadcastOutlet | None:
        """Rank 0 alone sends."""
        return BroadcastOutlet(self._group(0, device), manifest) if rank == 0 else None

    def inlet(self, engine: int, manifest: Manifest, device: torch.device) -> BroadcastInlet:
        """Engines are the group's ranks from 1 on."""
        return BroadcastInlet(self._group(engine + 1, device), f"engine {engine}")

    def _group(self, rank: int, device: torch.device) -> Group:
        return Group(self.meeting.join(), rank, self.num_engines + 1, device)


class Group:
    """A process group that ends with the first failure or when time is up."""

    def __init__(self, signals: Signals, rank: int, size: int, device: torch.device) -> None:
        self.signals = signals
        self.device = device
        self.rank = rank
        self.size = size
        self._made: list[tuple[ProcessGroup, Backend]] = []

    def open(self) -> None:
        """All parties together."""
        self.signals.bump("joined")
        try:
            self.signals.reach("joined", self.size, f"not all {self.size} parties of the publication came together")
        except TransferError:
            if self.signals.settle("meeting", "off") == "off":
                raise
        if self.signals.settle("meeting", "on") == "off":  # backends wait for everybody, without looking at signals
            raise AbortedError("given up, because another party did so while all came together")
        with lost_peer():
            self._made.append(make_group(self.signals, self.rank, self.size, self.device))

    def broadcast(self, tensor: Tensor) -> Work:
        """From rank 0. Not begun once a party has failed: gloo cannot be left before it has ended."""
        self.signals.check()
        group, _ = self._made[0]
        options = BroadcastOptions()
        options.rootRank = 0
        if self.device.type == "cpu":  # gloo cannot be aborted: leaving it takes until its last operation has ended
            options.timeout = timedelta(seconds=self.signals.left_s + MARGIN_S)
        with lost_peer():
            return group.broadcast([tensor], options)

    def complete(self, work: Work, what: str) -> None:
        """Wait for it without blocking in the library, which would sit out its own time if a peer is dead."""
        with lost_peer():
            self.signals.wait(work.is_completed, what)
            work.wait()

    def close(self, reason: str | None) -> None:
        """Leave; with a reason, nobody waits for what is still on its way."""
        if reason is not None:
            self.signals.fail(reason)  # before NCCL, whose abort can block
        while self._made:  # gloo hangs up when the last reference goes, and a traceback would keep it
            _, backend = self._made.pop()
            if reason is not None:
                backend.abort()
            backend.shutdown()


class BroadcastOutlet:
    """`base.Outlet`."""

    def __init__(self, group: Group, manifest: Manifest) -> None:
        self._group = group
        self._manifest = manifest
        self._buffers: list[Tensor] = []
        self._works: dict[int, Work] = {}

    def open(self) -> None:
        self._group.open()
        size, count = self._manifest.bucket_size(0), min(NUM_BUFFERS, self._manifest.num_buckets)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._group.device) for _ in range(count)]

    def buffer(self, bucket: int) -> Tensor:
        self._complete(bucket - NUM_BUFFERS)
        return self._buffers[bucket % NUM_BUFFERS][: self._manifest.bucket_size(bucket)]

    def send(self, bucket: int) -> None:
        self._works[bucket] = self._group.broadcast(self.buffer(bucket))

    def finish(self) -> None:
        for bucket in sorted(self._works):
            self._complete(bucket)

    def close(self, reason: str | None) -> None:
        self._works.clear()  # they keep connections open, for which engines would wait
        self._group.close(reason)

    def _complete(self, bucket: int) -> None:
        if bucket in self._works:
            what = f"bucket {bucket + 1} of {self._manifest.num_buckets} was not taken by all engines"
            self._group.complete(self._works.pop(bucket), what)


class BroadcastInlet:
    """`base.Inlet`."""

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._name = name

    def open(self) -> None:
        self._group.open()

    def receive(self, bucket: int, into: Tensor) -> None:
        self._group.complete(self._group.broadcast(into), f"{self._name} did not get bucket {bucket + 1}")

    def finish(self) -> None: ...

    def close(self, reason: str | None) -> None:
        self._group.close(reason)


@contextmanager
def lost_peer() -> Iterator[None]:
    """Backends raise plain RuntimeErrors when a peer closes its connection."""
    try:
        yield
    except TransferError:
        raise
    except RuntimeError as error:
        raise TransferError(f"the process group of the publication failed: {error}") from error


def make_group(signals: Signals, rank: int, size: int, device: torch.device) -> tuple[ProcessGroup, Backend]:
    """A group outside of torch's own list: `new_group` could only take ranks of the default group."""
    # The signals end a wait in time. NCCL's own clock would end the process, so it comes long after them.
    limit = timedelta(seconds=10 * signals.timeout_s if device.type == "cuda" else signals.left_s + MARGIN_S)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        backend: Backend = ProcessGroupNCCL(signals.store, rank, size, options)
        kind = ProcessGroup.BackendType.NCCL
    else:
        backend = ProcessGroupGloo(signals.store, rank, size, limit)
        kind = ProcessGroup.BackendType.GLOO
    group = ProcessGroup(signals.store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group, backend
