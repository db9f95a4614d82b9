"""Keyed randomness: every draw has its own generator, made from a key that says what the draw is for.

A draw therefore depends on its key alone: not on the batch that it is made in, on the number or the order of workers,
on what was drawn before, or on anything global.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Key = int | str


@dataclass(frozen=True)
class Noise:
    """A source of random numbers, narrowed by its key.

    For one row of noise per sample: `Noise.of(seed, "rollout").normal(shape, [(group, slot, step), ...])`. Keys are
    sequences of integers and strings, hashed with their types and lengths: ("ab", "c") differs from ("a", "bc"), and
    (1,) from ("1",). Draws come from numpy's Philox keyed with all 128 bits of the hash; torch's CPU generator keeps
    32 bits of its seed, so that among 10^5 draws two would probably be equal.
    """

    key: tuple[Key, ...]

    @classmethod
    def of(cls, seed: int, *key: Key) -> Noise:
        """The root of a run's randomness, or the part of it that is for the purpose `key`."""
        return cls((seed, *key))

    def child(self, *key: Key) -> Noise:
        """A narrower source; `noise.child(a).child(b)` is `noise.child(a, b)`."""
        return Noise((*self.key, *key))

    def generator(self, *key: Key) -> torch.Generator:
        """A CPU generator for library calls that want one. Of its 64-bit seed torch keeps the low 32 bits."""
        return torch.Generator().manual_seed(int.from_bytes(self._digest(key)[:8], "little"))

    def normal(self, shape: Sequence[int], keys: Sequence[Sequence[Key]]) -> Tensor:
        """Standard normal float32 [len(keys), *shape] on the CPU; row i depends on keys[i] and `shape` alone."""
        return self._rows(keys, lambda generator: generator.standard_normal(tuple(shape), dtype=np.float32), shape)

    def uniform(self, shape: Sequence[int], keys: Sequence[Sequence[Key]]) -> Tensor:
        """Uniform on [0, 1) float32 [len(keys), *shape] on the CPU; row i depends on keys[i] and `shape` alone."""
        return self._rows(keys, lambda generator: generator.random(tuple(shape), dtype=np.float32), shape)

    def permutation(self, n: int, *key: Key) -> Tensor:
        """A random order of 0..n-1, int64 [n]."""
        return torch.from_numpy(self._numpy(key).permutation(n).astype(np.int64))

    def _rows(
        self, keys: Sequence[Sequence[Key]], draw: Callable[[np.random.Generator], np.ndarray], shape: Sequence[int]
    ) -> Tensor:
        out = np.empty((len(keys), *shape), dtype=np.float32)
        for row, key in enumerate(keys):
            out[row] = draw(self._numpy(key))
        return torch.from_numpy(out)

    def _numpy(self, key: Sequence[Key]) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self._digest(key), "little")))

    def _digest(self, key: Sequence[Key]) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for part in (*self.key, *key):
            data = str(part).encode()
            kind = "s" if isinstance(part, str) else "i"
            digest.update(f"{kind}{len(data)}:".encode() + data)
        return digest.digest()
