"""One rank's part of the tensors, on its way to files: which parts are its own, their copy on the host, the writing.

The files are what torch's `HuggingFaceStorageWriter(save_distributed=True)` writes: safetensors, with the offset of
every shard in the header, and torch's reader puts them together for any number of ranks. The writing itself is done
here, since torch's writer holds a whole file in memory three times and stops Python meanwhile; bytes go straight from
the staged copy to the file and into its hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from flowrl.distributed.checkpoint.manifest import TENSORS, CheckpointError, FileRecord, TensorSpec
from flowrl.distributed.fsdp import local_tensor
from flowrl.distributed.offload import HostMemory
from flowrl.files import new_file

FILE_BYTES = 2**32
"""About the most of one file, so that several threads write, hash and verify."""

WRITERS = 4
"""Files of one rank that are written at the same time."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names in safetensors of what can be stored."""


def spec_of(key: str, tensor: Tensor) -> TensorSpec:
    """Of the whole tensor. Raises CheckpointError for what cannot be stored."""
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise CheckpointError(f"{key} cannot be stored: its dtype is {tensor.dtype}, its layout {tensor.layout}.")
    if isinstance(tensor, DTensor) and not all(_is_known(placement) for placement in tensor.placements):
        raise CheckpointError(f"{key} cannot be stored: it is laid out as {tensor.placements}, not by its first dim.")
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _is_known(placement: Placement) -> bool:
    """FSDP2's layouts; strided shards, which are a kind of `Shard`, would need more than an offset."""
    return placement.is_replicate() or (type(placement) is Shard and placement.dim == 0)


# ---------------------------------------------------------------------------------------------- what a rank owns


@dataclass(frozen=True)
class Part:
    """A piece of a tensor that one rank writes."""

    key: str
    offsets: tuple[int, ...]  # of its first element in the whole tensor
    local: Tensor


def own_parts(tensors: Mapping[str, Tensor], holders: Mapping[str, int], rank: int) -> list[Part]:
    """What `rank` writes, so that all ranks together write everything once.

    Of a `DTensor` its shard, of replicas the first; of an ordinary tensor, which is equal wherever it is, the whole on
    the first rank that has it (`holders`).
    """
    begins: dict[object, tuple[int, ...] | None] = {}  # by layout: there are few, and each takes torch a while
    parts = []
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            layout = (tensor.shape, tensor.device_mesh, tensor.placements)
            if layout not in begins:
                begins[layout] = _own_begin(tensor)
            begin = begins[layout]
            if begin is not None:
                parts.append(Part(key, begin, local_tensor(tensor)))
        elif holders[key] == rank:
            parts.append(Part(key, (0,) * tensor.dim(), tensor.detach()))
    return parts


def _own_begin(tensor: DTensor) -> tuple[int, ...] | None:
    """Where this rank's shard begins in the whole tensor; None if there is nothing for it to write."""
    place = tensor.device_mesh.get_coordinate()
    if place is None or any(p.is_replicate() and at > 0 for p, at in zip(tensor.placements, place, strict=True)):
        return None
    if tensor.dim() > 0 and len(local_tensor(tensor)) == 0 < len(tensor):
        return None  # fewer rows than ranks
    [chunk] = tensor.__create_chunk_list__()  # the protocol by which torch's checkpoints know a DTensor
    return tuple(chunk.offsets)


# ---------------------------------------------------------------------------------------------- the copy on the host


@dataclass(frozen=True)
class Staged:
    """A part whose bytes are on the host."""

    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Tensor]  # uint8, one after the other

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return sum(len(piece) for piece in self.pieces)


@torch.no_grad()
def stage(parts: Sequence[Part], host: HostMemory) -> list[Staged]:
    """Copy the parts to the host: asynchronously from a GPU, so synchronise before the copy is read."""
    host.used = 0
    staged = []
    for part in parts:
        data = part.local.reshape(-1).view(torch.uint8)
        pieces = host.take(len(data))
        for piece, source in zip(pieces, data.split([len(piece) for piece in pieces]) if pieces else (), strict=True):
            piece.copy_(source, non_blocking=True)
        staged.append(Staged(part.key, part.offsets, tuple(part.local.shape), part.local.dtype, pieces))
    return staged


# ---------------------------------------------------------------------------------------------- writing


def write_shards(staged: Sequence[Staged], folder: Path, rank: int) -> list[FileRecord]:
    """Write this rank's files into `folder` and wait until the disk has them. Raises OSError, naming the file."""
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(staged, key=lambda part: (-part.dtype.itemsize, part.key))  # everything stays aligned
    files = [
        (folder / f"rank_{rank:05d}_{number:03d}.safetensors", parts) for number, parts in enumerate(_filled(ordered))
    ]
    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(lambda file: _write(*file), files))


def _filled(staged: Sequence[Staged]) -> Iterator[list[Staged]]:
    """In order, so many that they fill a file."""
    parts: list[Staged] = []
    filled = 0
    for part in staged:
        if parts and filled + part.num_bytes > FILE_BYTES:
            yield parts
            parts, filled = [], 0
        parts.append(part)
        filled += part.num_bytes
    if parts:
        yield parts


def _write(path: Path, staged: Sequence[Staged]) -> FileRecord:
    digest, num_bytes = hashlib.sha256(), 0
    with new_file(path) as file:
        for data in _content(staged):
            digest.update(data)
            file.write(data)
            num_bytes += len(data)
    return FileRecord(f"{TENSORS}/{path.name}", num_bytes, digest.hexdigest())


def _content(staged: Sequence[Staged]) -> Iterator[bytes | memoryview]:
    yield _header(staged)
    for part in staged:
        for piece in part.pieces:
            yield piece.numpy().data


def _header(staged: Sequence[Staged]) -> bytes:
    """The length, then JSON padded to eight bytes, so that the data begins aligned."""
    offsets = {part.key: {"saved_offsets": list(part.offsets)} for part in staged}
    entries: dict[str, object] = {
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    }
    end = 0
    for part in staged:
        begin, end = end, end + part.num_bytes
        entries[part.key] = {"dtype": DTYPES[part.dtype], "shape": list(part.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
