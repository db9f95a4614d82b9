"""Names of tensors in the module and in files."""

from __future__ import annotations

import torch

from flowrl.distributed.networks import by_network, joined, network_of, own_name


def test_two_networks_are_parted_and_joined() -> None:
    """Blocks that are called much like a network are none."""
    tensors = {"transformer.a.weight": torch.zeros(1), "transformer_2.a.weight": torch.ones(1)}
    parts = by_network(tensors)
    assert parts == {"transformer": {"a.weight": torch.zeros(1)}, "transformer_2": {"a.weight": torch.ones(1)}}
    assert joined(parts) == tensors
    single = {"transformer_blocks.0.weight": torch.zeros(1), "proj.bias": torch.ones(1)}
    assert by_network(single) == {"": single} and joined({"": single}) == single
    assert [network_of(name) for name in (*tensors, *single)] == ["transformer", "transformer_2", "", ""]
    assert [own_name(name) for name in (*tensors, *single)] == ["a.weight", "a.weight", *single]
