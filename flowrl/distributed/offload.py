"""Taking tensors off a device for a while, and putting them back.

What is freed is the storage itself (`resize_(0)`), not a reference to it: views, optimiser state and FSDP's own
pointers stay valid, and see the values again after `reload`. In between nobody may touch the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flowrl.distributed.fsdp import assert_writable, local_tensor
from flowrl.distributed.snapshots import Snapshot

CHUNK_BYTES = 2**28
"""A power of two: torch's allocator of pinned memory rounds up to the next one."""

ALIGNMENT = 256


class OffloadError(RuntimeError):
    """A tensor cannot leave the device, or cannot come back to it; training cannot go on."""


def training_state(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None, snapshots: Mapping[str, Snapshot] | None = None
) -> dict[str, Tensor]:
    """Everything that lives as long as the training, by name: parameters, buffers, optimiser state, snapshots.

    Gradients are not among it: drop them first (`zero_grad(set_to_none=True)`).
    """
    assert_writable(module)
    state: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    if optimizer is not None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        for parameter, slots in optimizer.state.items():
            state |= {f"optimizer.{names[parameter]}.{slot}": v for slot, v in slots.items() if isinstance(v, Tensor)}
    for kind, snapshot in (snapshots or {}).items():
        state |= {f"snapshots.{kind}.{name}": value for name, value in snapshot.values.items()}
    return state


@dataclass
class HostMemory:
    """Room on the host, in chunks that stay: pinning memory takes seconds, and is done once."""

    pinned: bool
    chunk_bytes: int = CHUNK_BYTES
    chunks: list[Tensor] = field(default_factory=list, repr=False)
    used: int = 0

    def reserve(self, nbytes: int) -> None:
        """Allocate so many bytes in all."""
        while len(self.chunks) * self.chunk_bytes < nbytes:
            self._grow()

    def take(self, nbytes: int) -> list[Tensor]:
        """uint8 tensors of `nbytes` in all, which no one else has until `used` is set back to 0."""
        pieces = []
        while nbytes > 0:
            chunk, start = divmod(self.used, self.chunk_bytes)
            if chunk == len(self.chunks):
                self._grow()
            pieces.append(self.chunks[chunk][start : start + nbytes])
            nbytes -= len(pieces[-1])
            self.used += -(-len(pieces[-1]) // ALIGNMENT) * ALIGNMENT
        return pieces

    def _grow(self) -> None:
        self.chunks.append(torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self.pinned))


@dataclass(frozen=True)
class Stored:
    """A storage that is empty on the device, and its bytes on the host."""

    name: str
    storage: torch.UntypedStorage
    nbytes: int
    pieces: list[Tensor]


class Offloader:
    """Frees the device of named tensors, and fills it with them again.

    Args:
        device: tensors on other devices stay as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = HostMemory(pinned=device.type == "cuda")
        self._away: list[Stored] = []

    @torch.no_grad()
    def offload(self, tensors: Mapping[str, Tensor]) -> int:
        """Copy the tensors to the host and free their storages, those that several share once.

        Returns the bytes freed. Raises OffloadError, naming the tensor, if one is away already or cannot be copied.
        """
        if self._away:
            raise OffloadError(f"{self._away[0].name} and others are off the device already.")
        self._synchronize()  # whoever computed them, on whatever stream
        self.host.used = 0
        away = [self._copy_out(name, tensor) for name, tensor in self._unique(tensors)]
        self._synchronize()
        for stored in away:
            stored.storage.resize_(0)
        self._away = away
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # to other processes on the same card
        return sum(stored.nbytes for stored in away)

    @torch.no_grad()
    def reload(self) -> int:
        """Fill the storages again, with the bytes that were there. Returns how many.

        Raises OffloadError, naming the tensor for which the device has no room.
        """
        for stored in self._away:
            try:
                stored.storage.resize_(stored.nbytes)
            except RuntimeError as error:
                raise OffloadError(
                    f"{stored.name} cannot come back to {self.device}: no room for its {stored.nbytes:,} bytes "
                    f"({_first_line(error)}). Does another process still hold the device's memory?"
                ) from error
            _copy(_bytes_of(stored.storage).split([len(piece) for piece in stored.pieces]), stored.pieces)
        self._synchronize()
        nbytes = sum(stored.nbytes for stored in self._away)
        self._away = []
        return nbytes

    def _unique(self, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """The first tensor of every storage on the device that holds anything."""
        seen: set[int] = set()
        for name, tensor in tensors.items():
            local = local_tensor(tensor)
            if local.device.type != self.device.type or local.untyped_storage().nbytes() == 0:
                continue
            if not local.untyped_storage().resizable():  # a file mapped into host memory, as loading leaves it
                tensor.data = local = tensor.detach().clone()
            if local.untyped_storage().data_ptr() not in seen:
                seen.add(local.untyped_storage().data_ptr())
                yield name, local

    def _copy_out(self, name: str, tensor: Tensor) -> Stored:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        try:
            pieces = self.host.take(nbytes)
            _copy(pieces, _bytes_of(storage).split([len(piece) for piece in pieces]))
        except RuntimeError as error:
            raise OffloadError(
                f"{name} cannot leave {self.device}: its {nbytes:,} bytes cannot be copied to "
                f"{'pinned ' if self.host.pinned else ''}host memory ({_first_line(error)})."
            ) from error
        return Stored(name, storage, nbytes, pieces)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0]
