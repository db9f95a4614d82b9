"""What is trained may be several networks of one pipeline (Wan2.2's two experts): a file holds the tensors of one.

In the module every name begins with its network's, `transformer_2.blocks.0...`; in files it does not, and each network
has a folder. A single network's names and folders are just its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

NETWORKS = ("transformer", "transformer_2")
"""As the pipeline names them."""


def network_of(name: str) -> str:
    """That a tensor's or layer's name begins with; "" if what is trained is a single one."""
    first = name.partition(".")[0]
    return first if first in NETWORKS else ""


def own_name(name: str) -> str:
    """A tensor's or layer's name within its network."""
    return name.removeprefix(f"{network_of(name)}.")


def by_network(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of each network by their names within it; all of them under "" if it is a single one."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(network_of(name), {})[own_name(name)] = tensor
    return found


def joined(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What `by_network` was given."""
    return {
        f"{network}.{name}" if network else name: tensor
        for network, tensors in parts.items()
        for name, tensor in tensors.items()
    }
