"""Copies of the trainable weights: the evaluation average, the old policy, the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Snapshot:
    """One value for every trainable parameter, by name.

    It works for LoRA and for full training alike, and needs no second adapter: `applied` puts it into the module
    for the length of a block. Memory: one copy of the trainable weights.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.values: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def zero(self) -> None:
        """All zeros: for LoRA, the base model."""
        torch._foreach_zero_(list(self.values.values()))

    @torch.no_grad()
    def blend(self, decay: float) -> None:
        """values <- decay * values + (1 - decay) * parameters; 0 copies."""
        live = [p.detach() for p in self.parameters.values()]
        torch._foreach_lerp_(list(self.values.values()), live, 1.0 - decay)

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
        for name, parameter in self.parameters.items():
            mine = self.values[name].clone()
            self.values[name].copy_(parameter)
            parameter.copy_(mine)
