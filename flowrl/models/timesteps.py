"""Timesteps as transformers take them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def exact_timestep(embedding: nn.Module, *exact: Tensor) -> RemovableHandle:
    """Within `with`, the embedding's first arguments are `exact`, [B] each, not what its transformer has made of them.

    FLUX and Qwen-Image cast timesteps (and FLUX its guidance) to the dtype of their first layer's output: under
    autocast that is bfloat16 even for float32 latents, and 0.9137 would become 0.914.
    """
    return embedding.register_forward_pre_hook(lambda _, given: (*exact, *given[len(exact) :]))


def without_autocast(module: nn.Module) -> None:
    """Make a module compute in the dtype of its weights, in place: in float32 if its family keeps it so."""
    module.forward = partial(_uncast, module.forward)


def _uncast(forward: Callable[..., Tensor], sample: Tensor) -> Tensor:
    with torch.autocast(sample.device.type, enabled=False):
        return forward(sample)
