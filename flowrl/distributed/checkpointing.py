"""Activation checkpointing, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(module: nn.Module, blocks: Sequence[type[nn.Module]]) -> None:
    """Recompute every block of these classes in the backward pass instead of keeping its activations.

    The forward is replaced in place, so that parameter names stay as they are. Call it before sharding: FSDP then
    gathers around the recomputation. Raises ValueError if no block is found.
    """
    found = [part for part in module.modules() if isinstance(part, tuple(blocks))]
    if not found:
        names = ", ".join(block.__name__ for block in blocks)
        raise ValueError(f"actor.gradient_checkpointing: the model has no block of its classes ({names}).")
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
