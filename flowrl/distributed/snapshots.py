"""Copies of the trainable weights: the evaluation average, the old policy, the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flowrl.distributed.fsdp import assert_writable, local_tensor
from flowrl.distributed.lora import trainable


class Snapshot:
    """One value for every trainable parameter of a module, by name.

    It works for LoRA and for full training alike, and needs no second adapter: `applied` puts it into the module
    for the length of a block. Memory: one copy of the trainable weights; of a sharded module, of this rank's slices.
    Everything here raises RuntimeError while the module is gathered.
    """

    def __init__(self, module: nn.Module) -> None:
        assert_writable(module)
        self.module = module
        self.parameters = trainable(module)
        self.values: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def zero(self) -> None:
        """All zeros: for LoRA, the base model."""
        torch._foreach_zero_(self._mine())

    @torch.no_grad()
    def blend(self, decay: float) -> None:
        """values <- decay * values + (1 - decay) * parameters; 0 copies."""
        assert_writable(self.module)
        torch._foreach_lerp_(self._mine(), self._theirs(), 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The module with this snapshot's weights; its own come back at the end, whatever happens inside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        assert_writable(self.module)
        for mine, theirs in zip(self._mine(), self._theirs(), strict=True):
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)

    def _mine(self) -> list[Tensor]:
        return [local_tensor(value) for value in self.values.values()]

    def _theirs(self) -> list[Tensor]:
        return [local_tensor(parameter) for parameter in self.parameters.values()]
