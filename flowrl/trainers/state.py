"""What a checkpoint holds beside tensors: its documents, and plain values of every rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

STATE = "state.json"  # of all stages
SHOWN = "shown.safetensors"  # evaluations that the report compares
CONTRACT = "contract.json"  # what must be the same when the run goes on


@dataclass(frozen=True)
class Counters:
    """Of the actor; the same on all ranks."""

    version: int  # cycles that changed the weights
    num_updates: int
    num_skips: int
    skips_in_a_row: int
    optimizer_steps: Mapping[str, int]  # of every trained parameter


@dataclass(frozen=True)
class Generators:
    """The states of the global generators, for what strangers' code draws from them; flowrl draws nothing."""

    python: list[Any]
    numpy: list[Any]
    cpu: str  # torch's, hexadecimal, like the next
    cuda: str | None

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """Of the rank that calls."""
        kind, keys, *rest = np.random.get_state()
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(
            python=list(random.getstate()),
            numpy=[kind, np.asarray(keys).tolist(), *rest],
            cpu=_hex(torch.get_rng_state()),
            cuda=None if cuda is None else _hex(cuda),
        )

    def restore(self, device: torch.device) -> None:
        """The rank that calls goes on from here. Raises ValueError or TypeError for what `now` has not made."""
        version, internal, gauss = self.python
        random.setstate((version, tuple(internal), gauss))
        kind, keys, *rest = self.numpy
        np.random.set_state((kind, np.array(keys, np.uint32), *rest))
        torch.set_rng_state(_tensor(self.cpu))
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(self.cuda), device)


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
