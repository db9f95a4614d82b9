"""Integer checksums of buckets, computed where the bytes lie and compared between trainer and engines.

The digest of a tensor is the sum of its 32-bit words, each times an odd 64-bit weight of its place, modulo 2^64
(multilinear hashing, Carter & Wegman 1979). An odd factor keeps a difference alive, so one changed word, and one
flipped bit above all, always changes the digest; two different changes cancel with probability about 2^-32 or less.
Integer sums do not depend on the order of addition: the same on a CPU and on any GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowrl.distributed.weight_sync.errors import TransferError, some
from flowrl.distributed.weight_sync.manifest import Manifest, Piece

CHUNK = 1 << 20  # words at a time: bounds the memory, and fits a cache
WORD = 4  # bytes
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Checksums:
    """int64 [number of entries] digests, in the manifest's order. Those of buckets add up to those of the version."""

    digests: np.ndarray

    @classmethod
    def none(cls, manifest: Manifest) -> Checksums:
        """Of nothing yet."""
        return cls(np.zeros(len(manifest.entries), np.int64))

    def __add__(self, other: Checksums) -> Checksums:
        return Checksums(self.digests + other.digests)


class Checksum:
    """Digests of one bucket after another; every wait for the device is the one copy at a bucket's end."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._num_entries = len(manifest.entries)
        self._device = device
        self._weights = _weights(min(CHUNK, manifest.bucket_size(0) // WORD), device)

    @torch.no_grad()
    def of(self, bucket: int, pieces: Sequence[Piece], data: Tensor) -> Checksums:
        """The bucket's share of the digests; `data` is uint8, on any device."""
        words = data.view(torch.int32)
        cuts = list(_cuts(pieces, words.numel()))
        sums = torch.empty(len(cuts), dtype=torch.int64, device=self._device)
        chunk, terms = -1, words
        for place, cut in zip(sums, cuts, strict=True):
            if cut.chunk != chunk:
                chunk = cut.chunk
                part = words[chunk * CHUNK : (chunk + 1) * CHUNK].to(self._device, non_blocking=True)
                terms = part * self._weights[: part.numel()]
            torch.sum(terms[cut.start : cut.stop], 0, out=place)
        factors = np.array([_odd(bucket << 32 | cut.chunk) for cut in cuts], np.uint64).view(np.int64)
        digests = np.zeros(self._num_entries, np.int64)
        np.add.at(digests, [cut.entry for cut in cuts], sums.cpu().numpy() * factors)
        return Checksums(digests)


def verify(manifest: Manifest, sent: Sequence[Checksums], received: Mapping[str, Checksums]) -> None:
    """Raises TransferError, with the tensors' names, unless all senders and all engines (by name) have one version."""
    for checksums in sent[1:]:
        wrong = _differing(manifest, sent[0], checksums)
        if wrong:
            raise TransferError(f"version {manifest.version}: the trainer's ranks disagree about {some(wrong)}.")
    faults = {engine: _differing(manifest, sent[0], checksums) for engine, checksums in received.items()}
    bad = [f"{engine} received {some(wrong)} not as they were sent" for engine, wrong in faults.items() if wrong]
    if bad:
        raise TransferError(f"version {manifest.version}: {'; '.join(bad)}.")


def _differing(manifest: Manifest, a: Checksums, b: Checksums) -> list[str]:
    return [manifest.entries[i].name for i in np.flatnonzero(a.digests != b.digests)]


@dataclass(frozen=True)
class _Cut:
    """What one tensor has in one chunk, in words of the chunk."""

    entry: int
    chunk: int
    start: int
    stop: int


def _cuts(pieces: Sequence[Piece], num_words: int) -> Iterable[_Cut]:
    for piece in pieces:
        start, stop = piece.start // WORD, min(piece.stop // WORD, num_words)
        while start < stop:
            chunk = start // CHUNK
            end = min(stop, (chunk + 1) * CHUNK)
            yield _Cut(piece.entry, chunk, start - chunk * CHUNK, end - chunk * CHUNK)
            start = end


def _weights(count: int, device: torch.device) -> Tensor:
    """int64 [count], odd, without pattern: a multiplicative hash of the place."""
    x = (torch.arange(1, count + 1, device=device)) * -0x61C8864680B583EB  # 2^64 / golden ratio, as int64
    x = (x ^ (x >> 29)) * -0x40A7B892E31B1A47
    return (x ^ (x >> 32)) | 1


def _odd(number: int) -> int:
    """The same for one Python integer (splitmix64, Steele et al. 2014): sets chunks and buckets apart."""
    x = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) | 1
