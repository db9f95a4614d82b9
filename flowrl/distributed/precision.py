"""Which weights may be rounded before the forward pass does it: alike on one rank, on many, and in rollout workers.

Under autocast a matrix is multiplied in bfloat16 whatever it is kept in, so nothing changes if it is rounded sooner: to
be gathered, to travel, or for good in a worker. Matrices are nearly all of a model. Everything else (the scales of
norms, tables of modulation, learnt tokens) is computed in the dtype that it is in, and must be the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def matrices(module: nn.Module, blocks: Sequence[type[nn.Module]]) -> dict[str, nn.Parameter]:
    """Parameters of the linear layers inside the blocks, by name.

    Not of those outside, which are few: families compute some in float32, such as an embedder of timesteps.
    """
    found: dict[str, nn.Parameter] = {}
    kinds: tuple[type[nn.Module], ...] = tuple(blocks)
    for prefix, block in module.named_modules():
        if not isinstance(block, kinds):
            continue
        for path, layer in block.named_modules(prefix=prefix):
            if isinstance(layer, nn.Linear):
                found |= {f"{path}.{name}": parameter for name, parameter in layer.named_parameters(recurse=False)}
    return found


def compute_as_trained(module: nn.Module, blocks: Sequence[type[nn.Module]], master_dtype: torch.dtype) -> None:
    """Give a module that was loaded to sample the dtypes of full training: all but matrices in that of the masters."""
    rounded = matrices(module, blocks)
    for name, parameter in module.named_parameters():
        if name not in rounded:
            parameter.data = parameter.data.to(master_dtype)
