"""Which weights may be rounded, and what a rollout worker computes in."""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from flowrl.config import LoRA
from flowrl.distributed.lora import add_lora
from flowrl.distributed.precision import compute_as_trained, matrices
from tests.support.families import FAMILIES, random_policy

CPU = torch.device("cpu")


def test_matrices_are_nearly_all_of_a_model_but_not_norms_tables_and_what_is_outside_of_blocks() -> None:
    policy = random_policy("wan")
    found = matrices(policy.module, policy.blocks)
    assert {"blocks.0.attn1.to_q.weight", "blocks.0.attn1.to_q.bias", "blocks.0.ffn.net.2.weight"} <= found.keys()
    others = dict(policy.module.named_parameters()).keys() - found.keys()
    assert {"scale_shift_table", "blocks.0.scale_shift_table", "blocks.0.attn1.norm_q.weight"} <= others
    assert {name for name in others if name.startswith("condition_embedder.time_embedder.")}
    assert all(policy.module.get_parameter(name) is parameter for name, parameter in found.items())


def test_an_adapters_matrices_are_among_them() -> None:
    policy = FAMILIES["wan"].model.load(CPU)
    add_lora(policy.module, LoRA(rank=2), policy.lora_targets, seed=0)
    found = matrices(policy.module, policy.blocks)
    layer = "blocks.0.attn1.to_q"
    assert {f"{layer}.base_layer.weight", f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight"} <= set(
        found
    )


def test_a_worker_holds_matrices_as_loaded_and_the_rest_as_masters_are() -> None:
    block = WanTransformerBlock(dim=8, ffn_dim=8, num_heads=2).bfloat16()
    module = torch.nn.ModuleList([block, torch.nn.Linear(2, 2, dtype=torch.bfloat16)])
    compute_as_trained(module, (WanTransformerBlock,), torch.float32)
    inside = matrices(module, (WanTransformerBlock,))
    for name, parameter in module.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if name in inside else torch.float32), name
