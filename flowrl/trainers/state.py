"""What a checkpoint holds beside tensors: its documents, and plain values of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """The state of torch's global generators, for what strangers' code draws from them; flowrl draws nothing."""

    cpu: bytes
    cuda: bytes | None

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """Of the rank that calls."""
        cuda = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None
        return cls(torch.get_rng_state().numpy().tobytes(), cuda)

    def restore(self, device: torch.device) -> None:
        """The rank that calls goes on from here."""
        torch.set_rng_state(_bytes(self.cpu))
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(_bytes(self.cuda), device)

    def plain(self) -> dict[str, str | None]:
        """For JSON."""
        return {"cpu": self.cpu.hex(), "cuda": None if self.cuda is None else self.cuda.hex()}

    @classmethod
    def of(cls, plain: Mapping[str, str]) -> Generators:
        """The reverse. Raises KeyError or ValueError for what `plain` has not made."""
        return cls(bytes.fromhex(plain["cpu"]), None if plain["cuda"] is None else bytes.fromhex(plain["cuda"]))


def _bytes(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
