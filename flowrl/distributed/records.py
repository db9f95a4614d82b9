"""Objects on their way to another process: a small header, and the large arrays beside it.

Pickle protocol 5 takes numpy arrays out of the stream without a copy; tensors travel as such arrays, from whatever
device, since a tensor pickled by torch costs several times as much and ties the receiver to the sender's life. This
module does not import torch: workers that have no tensors should not pay for it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Packed:
    """An object, as `pack` leaves it.

    Until they are copied or sent, `buffers` are the memory of the object that was packed.
    """

    header: bytes
    buffers: tuple[np.ndarray, ...]  # uint8, one-dimensional
    aside: tuple[Any, ...] = ()  # objects as they are, for whoever sends this on

    @property
    def nbytes(self) -> int:
        """Of header and buffers together."""
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)

    def copy(self) -> Packed:
        """With buffers of its own: the object may change from now on."""
        return replace(self, buffers=tuple(buffer.copy() for buffer in self.buffers))

    def unpack(self) -> Any:
        """The object, in memory of its own: its arrays and tensors can be written to. Tensors are on the CPU."""
        return restore(self.header, [buffer.copy() for buffer in self.buffers], self.aside)

    def view(self) -> Any:
        """The object around `buffers`, for whoever only reads it: nothing is copied, and it keeps their memory alive.

        Where that is read-only, so are the arrays; tensors cannot be, and must not be written to.
        """
        return restore(self.header, self.buffers, self.aside)


def pack(obj: Any, aside: type | tuple[type, ...] = ()) -> Packed:
    """`obj` and all that it holds; tensors lose their device and their gradient, nothing else.

    Functions and classes go by their qualified name. Raises what pickle raises for something that cannot be pickled.

    Args:
        obj: whatever pickle takes.
        aside: instances of these are kept out of the header: another serialiser has to see them.
    """
    file = io.BytesIO()
    packer = _Packer(file, aside)
    packer.dump(obj)
    buffers = tuple(np.asarray(buffer.raw()) for buffer in packer.buffers)
    return Packed(file.getvalue(), buffers, tuple(packer.kept))


def restore(header: bytes, buffers: Sequence[np.ndarray], aside: Sequence[Any] = ()) -> Any:
    """What was packed, made around `buffers` (uint8), which from now on are its memory."""
    return _Unpacker(io.BytesIO(header), buffers, aside).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, aside: type | tuple[type, ...]) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.kept: list[Any] = []
        self._aside = aside
        # A method of its own as the callback would be a cycle that keeps the object until the next garbage collection.
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, self._aside):
            return None
        self.kept.append(obj)
        return len(self.kept) - 1

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_meta:
            plain = obj.detach().cpu().contiguous()
            return _tensor, (plain.view(-1).view(torch.uint8).numpy(), plain.dtype, tuple(plain.shape))
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[np.ndarray], aside: Sequence[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._aside = aside

    def persistent_load(self, pid: int) -> Any:
        return self._aside[pid]


def _tensor(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    if not data.flags.writeable:
        data = np.asarray(_Unguarded(data))
    return torch.from_numpy(data).view(dtype).view(shape)


class _Unguarded:
    """Read-only memory that does not say so: torch warns of an array that does, as no tensor can be read-only."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array  # with its memory, for as long as there is a view of this
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}
