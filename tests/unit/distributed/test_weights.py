"""What is trained, its copies, and the learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch import nn

from flowrl.config import LoRA, Optimizer
from flowrl.distributed.lora import add_lora, assert_boundary, save_adapter, train_fully, trainable
from flowrl.distributed.optimizer import learning_rate
from flowrl.distributed.snapshots import Snapshot
from tests.support import tiny


def test_lora_trains_adapters_alone_and_begins_as_the_identity(tiny_folder: Path) -> None:
    policy = tiny.load(tiny_folder)
    inputs = policy.encode([g.prompt for g in tiny.groups(2, 1)]), torch.randn(2, 8, 8, 20), torch.tensor([0.3, 0.9])
    with torch.no_grad():
        before = policy.velocity(inputs[1], inputs[2], inputs[0])
    state = torch.get_rng_state()
    add_lora(policy.module, LoRA(rank=4, alpha=8), policy.lora_targets, seed=1)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is nobody's
    names = trainable(policy.module)
    assert names and all("lora_" in name for name in names)
    with torch.no_grad():
        assert torch.equal(policy.velocity(inputs[1], inputs[2], inputs[0]), before)


@pytest.mark.parametrize("targets", [["attn.to_q", "attn.to_nothing"], ["o_q"], []])
def test_a_target_that_matches_nothing_is_an_error(tiny_folder: Path, targets: list[str]) -> None:
    with pytest.raises(ValueError, match=r"actor\.lora\.targets"):
        add_lora(tiny.load(tiny_folder).module, LoRA(targets=targets), (), seed=0)


def test_saved_adapter_loads_in_diffusers_and_warm_starts(tiny_folder: Path, tmp_path: Path) -> None:
    """`pipe.load_lora_weights` gives the trainer's own output, alpha included; so does `warm_start`."""
    policy = tiny.load(tiny_folder)
    add_lora(policy.module, LoRA(rank=4, alpha=16), policy.lora_targets, seed=1)
    with torch.no_grad():
        for name, parameter in trainable(policy.module).items():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    save_adapter(policy.module, tmp_path)
    conditions = policy.encode([g.prompt for g in tiny.groups(2, 1)])
    sample, sigma = torch.randn(2, 8, 8, 20), torch.tensor([0.3, 0.9])
    with torch.no_grad():
        mine = policy.velocity(sample, sigma, conditions)
        pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_folder, text_encoder_3=None, tokenizer_3=None)
        pipeline.load_lora_weights(tmp_path)
        theirs = pipeline.transformer(
            hidden_states=sample,
            timestep=sigma * 1000,
            encoder_hidden_states=conditions.prompt.embeds,
            pooled_projections=conditions.prompt.pooled,
            return_dict=False,
        )[0]
        warm = tiny.load(tiny_folder)
        add_lora(warm.module, LoRA(rank=4, alpha=16, warm_start=str(tmp_path)), warm.lora_targets, seed=9)
        started = warm.velocity(sample, sigma, conditions)
        plain = tiny.load(tiny_folder).velocity(sample, sigma, conditions)
    assert (mine - plain).abs().max() > 1e-3
    torch.testing.assert_close(theirs, mine, atol=1e-5, rtol=0)
    torch.testing.assert_close(started, mine, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="missing, extra or misshapen"):
        add_lora(tiny.load(tiny_folder).module, LoRA(rank=8, warm_start=str(tmp_path)), policy.lora_targets, seed=0)


def test_full_training_has_float32_masters(tiny_folder: Path) -> None:
    policy = tiny.load(tiny_folder, dtype="bfloat16")
    train_fully(policy.module)
    parameters = trainable(policy.module)
    assert len(parameters) == len(list(policy.module.parameters()))
    assert {p.dtype for p in parameters.values()} == {torch.float32}


def test_other_masters_are_warned_of() -> None:
    layer = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=r"actor\.master_dtype=bfloat16: updates smaller than the rounding"):
        train_fully(layer, torch.bfloat16)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}


def test_the_trainable_boundary_is_checked(tiny_folder: Path) -> None:
    module = tiny.load(tiny_folder).module
    with pytest.raises(RuntimeError, match="holds no adapter"):
        assert_boundary(module, "lora")
    train_fully(module)
    module.proj_out.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"proj_out\.bias is frozen, and full training freezes nothing \(1 such"):
        assert_boundary(module, "full")
    policy = tiny.load(tiny_folder)
    add_lora(policy.module, LoRA(rank=4), policy.lora_targets, seed=0)
    policy.module.proj_out.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"proj_out\.bias is wrong: with LoRA the base is frozen"):
        assert_boundary(policy.module, "lora")
    policy.module.proj_out.bias.requires_grad_(False)
    next(iter(trainable(policy.module).values())).data = torch.zeros(4, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="adapters are trained in float32"):
        assert_boundary(policy.module, "lora")


def test_snapshot_swaps_and_restores_even_after_an_error() -> None:
    layer = nn.Linear(3, 2)
    snapshot = Snapshot(layer)
    saved = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1)
    moved = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="inside"), snapshot.applied():
        assert torch.equal(layer.weight, saved)
        raise RuntimeError("inside")
    assert torch.equal(layer.weight, moved)
    snapshot.blend(0.25)
    torch.testing.assert_close(snapshot.values["weight"], 0.25 * saved + 0.75 * moved)
    snapshot.blend(0.0)
    assert torch.equal(snapshot.values["weight"], moved)


def test_learning_rate_schedules() -> None:
    """Warm-up is linear and ends at lr; decay ends at min_lr and stays."""
    linear = Optimizer(lr=1.0, schedule="linear", warmup_steps=4, min_lr=0.2)
    assert [learning_rate(linear, step, 14) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(linear, 4, 14) == 1.0
    assert learning_rate(linear, 9, 14) == pytest.approx(0.6)
    assert learning_rate(linear, 14, 14) == learning_rate(linear, 99, 14) == pytest.approx(0.2)
    cosine = Optimizer(lr=1.0, schedule="cosine", decay_steps=10)
    assert learning_rate(cosine, 5, 999) == pytest.approx(0.5)
    assert learning_rate(cosine, 10, 999) == pytest.approx(0.0)
    assert learning_rate(Optimizer(lr=0.3), 500, 10) == 0.3
