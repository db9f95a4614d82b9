"""What a publication holds: the list of its tensors, and where each lies in the stream of bytes.

A version is one stream. Its tensors follow one another, each at a multiple of 16 bytes; buckets are the stream's equal
windows. So a bucket's size never depends on the tensors, and a tensor may begin in one bucket and end in another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flowrl.distributed.weight_sync.errors import PublishError, some

Mode = Literal["lora", "merged", "full"]

ALIGNMENT = 16  # bytes: a whole number of elements of any dtype, and of the checksum's words
WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "base_layer"}


@dataclass(frozen=True)
class Spec:
    """A tensor to be published, before it has a place. `dtype` is what travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Entry:
    """A tensor and its place: `nbytes` from `offset` of bucket `bucket` on, and through the next ones if need be."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bucket: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Piece:
    """The part of tensor `entry` (its index) that lies in one bucket.

    It takes up the bytes from `start` to `stop`, padding included; the first is byte `skip` of the tensor.
    """

    entry: int
    start: int
    stop: int
    skip: int


@dataclass(frozen=True)
class Manifest:
    """A version as trainer and engines agree on it before any byte moves.

    `scalings` are LoRA's alpha / rank by layer: no tensor holds them, and an engine with another one would be wrong.
    """

    version: int
    mode: Mode
    entries: tuple[Entry, ...]
    bucket_bytes: int
    scalings: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Length of the stream, padding included."""
        return _end(self.entries[-1], self.bucket_bytes)

    @property
    def num_buckets(self) -> int:
        """Windows of `bucket_bytes`; the last may be shorter."""
        return math.ceil(self.total_bytes / self.bucket_bytes)

    def bucket_size(self, bucket: int) -> int:
        """Bytes of one bucket."""
        return min(self.bucket_bytes, self.total_bytes - bucket * self.bucket_bytes)

    def pieces(self) -> Iterator[list[Piece]]:
        """The tensors and parts of tensors in each bucket, in order."""
        found: list[Piece] = []
        bucket = 0
        for index, entry in enumerate(self.entries):
            start, end = entry.bucket * self.bucket_bytes + entry.offset, _end(entry, self.bucket_bytes)
            position = start
            while position < end:
                window = position // self.bucket_bytes
                if window > bucket:
                    yield found
                    found, bucket = [], window
                base = window * self.bucket_bytes
                stop = min(end - base, self.bucket_bytes)
                found.append(Piece(index, position - base, stop, position - start))
                position = base + stop
        yield found


def plan(
    specs: Mapping[str, Spec], version: int, mode: Mode, bucket_bytes: int, scalings: Mapping[str, float] | None = None
) -> Manifest:
    """Lay the tensors out, in their order. Raises PublishError for names that no engine could have."""
    check_names(specs, mode)
    if bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT:
        raise ValueError(f"a bucket must be a multiple of {ALIGNMENT} bytes, got {bucket_bytes}.")
    entries, position = [], 0
    for name, spec in specs.items():
        nbytes = math.prod(spec.shape) * spec.dtype.itemsize
        if nbytes == 0:
            raise PublishError(f"{name} is empty: its shape is {spec.shape}.")
        bucket, offset = divmod(position, bucket_bytes)
        entries.append(Entry(name, spec.shape, spec.dtype, bucket, offset, nbytes))
        position += padded(nbytes)
    return Manifest(version, mode, tuple(entries), bucket_bytes, dict(scalings or {}))


def check_names(names: Mapping[str, object], mode: Mode) -> None:
    """Raises PublishError for no names at all, for traces of wrappers, and for an A without a B or the reverse."""
    if not names:
        raise PublishError(f"nothing to publish: the trainer's module has no tensor for mode {mode!r}.")
    for name in names:
        parts = name.split(".")
        left = WRAPPERS.intersection(parts) or {"base_model"}.intersection(parts[:1])
        if left:
            raise PublishError(f"{name} still has a wrapper in its name, {some(left)}; no engine knows it by that.")
        if any(part.startswith("lora_") for part in parts) and parts[-2:] not in (
            ["lora_A", "weight"],
            ["lora_B", "weight"],
        ):
            raise PublishError(
                f"{name} is of an adapter that cannot be published: only lora_A.weight and lora_B.weight of one "
                "adapter are."
            )
    for name in names:
        for a, b in (("lora_A", "lora_B"), ("lora_B", "lora_A")):
            if name.endswith(f".{a}.weight") and name.replace(f".{a}.", f".{b}.") not in names:
                raise PublishError(f"{name} has no {b} beside it.")


def view(buffer: Tensor, entry: Entry, start: int = 0) -> Tensor:
    """The tensor whose bytes begin at `start` of the uint8 `buffer`, without a copy."""
    return buffer[start : start + entry.nbytes].view(entry.dtype).view(entry.shape)


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _end(entry: Entry, bucket_bytes: int) -> int:
    return entry.bucket * bucket_bytes + entry.offset + padded(entry.nbytes)
