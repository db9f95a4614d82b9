"""Buckets through memory that a trainer rank and an engine on the same device both see.

On a GPU that is CUDA IPC: the rank exports two buffers once, and then only fills them in turn; no byte leaves the GPU.
On a CPU it is shared memory. Signals go through the store: "bucket 5 is in its buffer", "I have read it". There are no
CUDA events between the processes: each side waits for its own device before it signals.

Rank and engine are matched by the device's UUID, since indices differ between processes that see different GPUs.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.distributed.weight_sync.errors import PublishError
from flowrl.distributed.weight_sync.manifest import Manifest
from flowrl.distributed.weight_sync.transports.base import Link, Meeting, Signals
from flowrl.distributed.weight_sync.transports.sharing import SharedBuffers, adopt, forget

NUM_BUFFERS = 2  # one is read while the other is filled


@dataclass(frozen=True)
class CudaIPC(Link):
    """From every trainer rank to the engines on its device; `routes` (see `match`) names each engine's rank."""

    meeting: Meeting
    routes: tuple[int, ...]

    def outlet(self, rank: int, manifest: Manifest, device: torch.device) -> CudaIPCOutlet | None:
        """A rank without an engine on its device sends nothing."""
        engines = [engine for engine, server in enumerate(self.routes) if server == rank]
        return CudaIPCOutlet(self.meeting.join(), rank, engines, manifest, device) if engines else None

    def inlet(self, engine: int, manifest: Manifest, device: torch.device) -> CudaIPCInlet:
        """Takes over the buffers that the rank has exported."""
        return CudaIPCInlet(self.meeting.join(), self.routes[engine], engine, device)


class CudaIPCOutlet:
    """`base.Outlet`."""

    def __init__(
        self, signals: Signals, rank: int, engines: Sequence[int], manifest: Manifest, device: torch.device
    ) -> None:
        self._signals = signals
        self._rank = rank
        self._engines = engines
        self._manifest = manifest
        self._device = device
        self._shared = SharedBuffers(device)

    def open(self) -> None:
        size, count = self._manifest.bucket_size(0), min(NUM_BUFFERS, self._manifest.num_buckets)
        self._shared.take(count, size)
        for engine in self._engines:
            self._signals.put(f"handles/{engine}", self._shared.handles())

    def buffer(self, bucket: int) -> Tensor:
        self._read(bucket - NUM_BUFFERS)
        return self._shared.tensors[bucket % NUM_BUFFERS][: self._manifest.bucket_size(bucket)]

    def send(self, bucket: int) -> None:
        synchronize(self._device)
        self._signals.bump(f"filled/{self._rank}")

    def finish(self) -> None:
        for engine in self._engines:
            self._signals.reach(f"released/{engine}", 1, f"engine {engine} did not give the buffers back")

    def close(self, reason: str | None) -> None:
        if reason is not None:
            self._signals.fail(reason)
        self._shared.release()

    def _read(self, bucket: int) -> None:
        for engine in self._engines:
            what = f"engine {engine} did not read bucket {bucket + 1} of {self._manifest.num_buckets}"
            self._signals.reach(f"read/{engine}", bucket + 1, what)


class CudaIPCInlet:
    """`base.Inlet`."""

    def __init__(self, signals: Signals, rank: int, engine: int, device: torch.device) -> None:
        self._signals = signals
        self._rank = rank
        self._engine = engine
        self._device = device
        self._buffers: list[Tensor] = []

    def open(self) -> None:
        what = f"trainer rank {self._rank} did not offer its buffers to engine {self._engine}"
        self._buffers = adopt(self._signals.take(f"handles/{self._engine}", what), self._device)

    def receive(self, bucket: int, into: Tensor) -> None:
        what = f"trainer rank {self._rank} did not send bucket {bucket + 1} to engine {self._engine}"
        self._signals.reach(f"filled/{self._rank}", bucket + 1, what)
        into.copy_(self._buffers[bucket % NUM_BUFFERS][: into.numel()])
        synchronize(self._device)
        self._signals.bump(f"read/{self._engine}")

    def finish(self) -> None:
        forget(self._buffers, self._device)
        self._signals.bump(f"released/{self._engine}")

    def close(self, reason: str | None) -> None:
        if reason is not None:
            self._signals.fail(reason)
        forget(self._buffers, self._device)


def identity(device: torch.device) -> str:
    """What two processes call the same device: a GPU's UUID, or the host's name for its memory."""
    if device.type == "cuda":
        return f"GPU {torch.cuda.get_device_properties(device).uuid}"
    return f"memory of host {platform.node()}"


def match(trainers: Sequence[str], engines: Sequence[str]) -> tuple[int, ...]:
    """For every engine the trainer rank on its device (both as `identity` says), spread evenly if there are several.

    Raises PublishError for an engine on a device without trainer rank.
    """
    served = [0] * len(trainers)
    routes = []
    for engine, device in enumerate(engines):
        ranks = [rank for rank, other in enumerate(trainers) if other == device]
        if not ranks:
            raise PublishError(
                f"engine {engine} is on {device}, where no trainer rank is (they are on {', '.join(trainers)}). "
                "weight_sync.transport=cuda_ipc is for trainer.layout=colocated; set it to broadcast or auto."
            )
        chosen = min(ranks, key=served.__getitem__)
        served[chosen] += 1
        routes.append(chosen)
    return tuple(routes)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
