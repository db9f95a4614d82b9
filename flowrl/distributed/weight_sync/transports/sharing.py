"""Buffers that a process shares with another one on its device, and the text by which the other finds them.

The text travels through a store that listens on the network and asks nobody who they are. So it is no pickle, which
could run whatever it likes, but names and numbers, of which nothing but a view of shared memory is made.
"""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from flowrl.distributed.weight_sync.errors import PublishError

NUMBERS = ("storage_size_bytes", "storage_offset_bytes", "ref_counter_offset", "event_sync_required")
HANDLES = ("storage_handle", "ref_counter_handle", "event_handle")  # of CUDA: bytes without meaning to us
HINT = (
    "Processes share GPU memory if they run on one host, on the same GPU, as one user, and without "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments. weight_sync.transport=object_store does without it."
)


class SharedBuffers:
    """Buffers of one size on `device`: `tensors`, uint8 [size] each."""

    def __init__(self, device: torch.device) -> None:
        self.tensors: list[Tensor] = []
        self._device = device
        self._descriptors: list[int] = []

    def take(self, count: int, size: int) -> None:
        """Take memory for `count` of them. Raises torch's OutOfMemoryError, or OSError."""
        if self._device.type == "cuda":
            self.tensors = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count)]
        else:
            self._descriptors = [os.memfd_create("flowrl") for _ in range(count)]
            self.tensors = [_mapped(os.getpid(), descriptor, size) for descriptor in self._descriptors]

    def handles(self) -> bytes:
        """For one other process: CUDA counts how often memory was handed over. Raises PublishError."""
        if self._device.type != "cuda":
            pairs = zip(self._descriptors, self.tensors, strict=True)
            return json.dumps([(os.getpid(), descriptor, tensor.numel()) for descriptor, tensor in pairs]).encode()
        try:
            return json.dumps([_exported(tensor) for tensor in self.tensors]).encode()
        except RuntimeError as error:
            raise PublishError(f"cannot share the buffers with another process: {error}. {HINT}") from error

    def release(self) -> None:
        """Forget the buffers. What the other process still uses stays allocated until it forgets it, too."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        forget(self.tensors, self._device)


def adopt(handles: bytes, device: torch.device) -> list[Tensor]:
    """The buffers of another process; on a GPU, `device` must be theirs, but may have another index there.

    Raises PublishError if they cannot be had, or if `handles` is not what `SharedBuffers.handles` gives.
    """
    try:
        found = json.loads(handles)
        if device.type == "cuda":
            return [_imported(fields, device) for fields in found]
        return [_mapped(int(pid), int(descriptor), int(size)) for pid, descriptor, size in found]
    except (RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
        raise PublishError(f"cannot take over the trainer's buffers: {error}. {HINT}") from error


def forget(buffers: list[Tensor], device: torch.device) -> None:
    """Let go of shared buffers, one's own or another process's."""
    buffers.clear()
    if device.type == "cuda":
        torch.cuda.ipc_collect()


def _mapped(pid: int, descriptor: int, size: int) -> Tensor:
    """Memory of a process on the host: a file without a name, which cannot outlive the processes that map it."""
    return torch.from_file(f"/proc/{pid}/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)


def _exported(buffer: Tensor) -> dict[str, Any]:
    """What torch would pickle, by name, and only what differs from buffer to buffer."""
    _, arguments = reduce_tensor(buffer)
    known = inspect.signature(rebuild_cuda_tensor).bind(*arguments).arguments
    return {name: int(known[name]) for name in NUMBERS} | {name: known[name].hex() for name in HANDLES}


def _imported(fields: dict[str, Any], device: torch.device) -> Tensor:
    numbers = {name: int(fields[name]) for name in NUMBERS}
    tensor: Tensor = rebuild_cuda_tensor(
        tensor_cls=Tensor,
        tensor_size=(numbers["storage_size_bytes"],),
        tensor_stride=(1,),
        tensor_offset=0,
        storage_cls=torch.storage.TypedStorage,
        dtype=torch.uint8,
        storage_device=torch.cuda.current_device() if device.index is None else device.index,
        requires_grad=False,
        **{**numbers, "event_sync_required": bool(numbers["event_sync_required"])},
        **{name: bytes.fromhex(fields[name]) for name in HANDLES},
    )
    return tensor
