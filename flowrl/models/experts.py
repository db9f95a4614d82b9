"""Two transformers that share the noise levels between them (Wan2.2 A14B), as the one module that is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Experts(nn.Module):
    """Rows of a batch go to the expert of their timestep: `transformer` from `boundary` upwards, `transformer_2` below.

    The two have the names that they have in the pipeline: every parameter's name begins with one of them.
    """

    def __init__(self, transformer: nn.Module, transformer_2: nn.Module, boundary: float) -> None:
        super().__init__()
        self.transformer = transformer
        self.transformer_2 = transformer_2
        self.boundary = boundary

    def forward(self, hidden_states: Tensor, timestep: Tensor, **inputs: Any) -> tuple[Tensor]:
        """The velocities [B, ...] of `hidden_states` [B, ...] at `timestep` [B]; all other tensors have B rows, too.

        It waits for the device once, to learn how many rows each expert gets.
        """
        low = timestep < self.boundary
        order = low.to(torch.uint8).argsort(stable=True)
        num_high = len(low) - int(low.sum())
        velocities = []
        for expert, rows in ((self.transformer, order[:num_high]), (self.transformer_2, order[num_high:])):
            if len(rows):
                velocities.append(_run(expert, rows, hidden_states, timestep, inputs))
            elif self._must_run(expert):
                velocities.append(_run(expert, order[:1], hidden_states, timestep, inputs)[:0])
        return (torch.cat(velocities)[order.argsort()],)

    def _must_run(self, expert: nn.Module) -> bool:
        """Without rows, too: other ranks may have some, and would wait for this one's shards and gradients for ever.

        Not where all weights are gathered already, and no gradient is asked for.
        """
        if not isinstance(self, FSDPModule):
            return False
        return torch.is_grad_enabled() or any(isinstance(parameter, DTensor) for parameter in expert.parameters())


def _run(expert: nn.Module, rows: Tensor, hidden_states: Tensor, timestep: Tensor, inputs: dict[str, Any]) -> Tensor:
    chosen = {name: value[rows] if isinstance(value, Tensor) else value for name, value in inputs.items()}
    velocity: Tensor = expert(hidden_states=hidden_states[rows], timestep=timestep[rows], **chosen)[0]
    return velocity
