"""Transport `object_store`: buckets wait behind handles, which the driver hands to the engines.

The whole version is held at once, in the launcher's store on the host or, in one process, on the device. It takes no
group, no signals and no common device; the launcher moves the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.distributed.weight_sync.errors import TransferError
from flowrl.distributed.weight_sync.manifest import Manifest
from flowrl.distributed.weight_sync.transports.base import Link
from flowrl.types import Handle


@dataclass(frozen=True)
class Parcels(Link):
    """What trainer rank 0 has left (`Sender.stream`), bucket by bucket."""

    handles: tuple[Handle, ...]

    def outlet(self, rank: int, manifest: Manifest, device: torch.device) -> None:
        """Everything has been sent before there is a link."""
        return None

    def inlet(self, engine: int, manifest: Manifest, device: torch.device) -> ParcelsInlet:
        """Raises TransferError if there are too few handles."""
        if len(self.handles) != manifest.num_buckets:
            raise TransferError(f"{len(self.handles)} of {manifest.num_buckets} buckets were sent.")
        return ParcelsInlet(self.handles)


@dataclass(frozen=True)
class ParcelsInlet:
    """`base.Inlet`."""

    handles: tuple[Handle, ...]

    def open(self) -> None: ...

    def receive(self, bucket: int, into: Tensor) -> None:
        try:
            value = self.handles[bucket].fetch()
        except KeyError as error:
            raise TransferError(f"bucket {bucket + 1} is no longer where it was left: {error}") from error
        into.copy_(torch.as_tensor(value))

    def finish(self) -> None: ...

    def close(self, reason: str | None) -> None: ...
