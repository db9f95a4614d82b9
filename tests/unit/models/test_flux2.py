"""FLUX.2-klein's own traps: distilled models, the encoder's layers, the autoencoder's statistics."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.config import ConfigError, LoRA
from flowrl.distributed.lora import add_lora, trainable
from flowrl.flow.schedule import Flux2Empirical, StaticShift
from flowrl.models.flux2 import Flux2, Flux2Policy
from flowrl.models.policy import PipelinePolicy
from flowrl.types import LoadError
from tests.support.families import FAMILIES, PROMPTS, folder, random_policy, saved, start
from tests.unit.models.test_families import solved

CPU = torch.device("cpu")


def variant(**changes: Any) -> PipelinePolicy:
    """The tiny policy with other settings."""
    return replace(FAMILIES["flux2"].model, **changes).policy(copy.copy(random_policy("flux2").pipeline), CPU)


def test_negative_prompts_are_those_of_the_prompts() -> None:
    """The pipeline takes them as embeddings only."""
    policy, sampler = random_policy("flux2"), FAMILIES["flux2"].sampler(guidance_scale=4.0)
    noise, pipeline = start(policy, sampler, len(PROMPTS)), copy.copy(policy.pipeline)
    pipeline.set_progress_bar_config(disable=True)
    arguments = saved("flux2").arguments(PROMPTS, noise, sampler)
    with torch.no_grad():
        negative = torch.cat([policy.embed(prompt.negative).embeds for prompt in PROMPTS])
        latents = pipeline(**arguments, negative_prompt_embeds=negative, output_type="latent", return_dict=False)[0]
    expected = saved("flux2").drawn(latents, sampler, pipeline)
    drawn = solved(policy, policy.encode(PROMPTS, 4.0), noise, sampler)
    torch.testing.assert_close(drawn, expected, atol=1e-5, rtol=0)
    others = solved(policy, policy.encode([replace(prompt, negative="") for prompt in PROMPTS], 4.0), noise, sampler)
    assert (drawn - others)[:2].abs().amax(dim=(1, 2, 3)).min() > 1e-3


def test_a_distilled_model_takes_no_guidance(tmp_path: Path) -> None:
    config, sampler = replace(FAMILIES["flux2"].model, size="tiny_distilled"), FAMILIES["flux2"].sampler()
    policy = config.load(CPU)
    with pytest.raises(ConfigError, match=r"^sampler\.guidance_scale: must be 1 .*distilled.* got 4\.0\.$"):
        policy.encode(PROMPTS, 4.0)
    policy.pipeline.save_pretrained(tmp_path)
    noise = start(policy, sampler, 2)
    drawn = solved(policy, policy.encode(PROMPTS[:2]), noise, sampler)
    torch.testing.assert_close(drawn, config.draw(tmp_path, None, PROMPTS[:2], noise, sampler), atol=1e-5, rtol=0)


def test_the_encoders_layers() -> None:
    policy, sampler = variant(text_encoder_layers=[1, 28, 5]), FAMILIES["flux2"].sampler()
    noise = start(policy, sampler, 1)
    drawn = solved(policy, policy.encode(PROMPTS[:1]), noise, sampler)
    expected = policy.config.draw(folder("flux2"), None, PROMPTS[:1], noise, sampler)
    torch.testing.assert_close(drawn, expected, atol=1e-5, rtol=0)
    usual = random_policy("flux2")
    assert (drawn - solved(usual, usual.encode(PROMPTS[:1]), noise, sampler)).abs().max() > 1e-3


@pytest.mark.parametrize("layers", [(9, 18), (9, 18, 29), (-1, 9, 18)])
def test_layers_that_the_encoder_does_not_have(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^model\.text_encoder_layers: must be 3 numbers from 0 to 28 "):
        variant(text_encoder_layers=layers)


def with_scheduler(config: Mapping[str, Any]) -> Flux2Policy:
    policy = copy.copy(random_policy("flux2"))
    scheduler = policy.pipeline.scheduler
    policy.pipeline = SimpleNamespace(scheduler=type(scheduler).from_config(scheduler.config, **config))
    assert isinstance(policy, Flux2Policy)
    return policy


def test_schedules() -> None:
    """The shift depends on tokens and steps, whatever its bounds in the folder are; a static one is a static one."""
    assert random_policy("flux2").schedule() == with_scheduler({"max_shift": 9.0}).schedule() == Flux2Empirical()
    assert with_scheduler({"use_dynamic_shifting": False, "shift": 3.0}).schedule() == StaticShift(3.0, "linspace")
    with pytest.raises(LoadError, match="shift_terminal"):
        with_scheduler({"shift_terminal": 0.02}).schedule()


def test_the_pipelines_last_latents_become_the_ones_that_it_denoises() -> None:
    """Its own order of patches: the statistics differ from channel to channel."""
    policy, sampler = random_policy("flux2"), FAMILIES["flux2"].sampler()
    vae, noise = policy.pipeline.vae, start(policy, sampler, 2)
    std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
    assert std.min() < 0.9 and std.max() > 1.1
    scaled = noise * std[:, None, None] + vae.bn.running_mean[:, None, None]
    latents = policy.pipeline._unpatchify_latents(scaled)
    torch.testing.assert_close(saved("flux2").drawn(latents, sampler, policy.pipeline), noise)


def test_an_autoencoder_without_its_statistics_is_refused(tmp_path: Path) -> None:
    shutil.copytree(folder("flux2"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    del state["bn.running_var"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"^model\.path=[^\n]*1 tensors of vae are missing, among them bn\.running_var"):
        replace(saved("flux2"), path=str(tmp_path)).load(CPU)


def test_bfloat16_rounds_no_timestep() -> None:
    policy = replace(FAMILIES["flux2"].model, dtype="bfloat16").load(CPU)
    seen: list[Tensor] = []

    def look(embedding: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0])

    sigma = torch.tensor([0.9137])
    noise = start(policy, FAMILIES["flux2"].sampler(), 1)
    with policy.module.time_guidance_embed.register_forward_pre_hook(look), torch.no_grad():
        rounded = policy.velocity(noise, sigma, policy.encode(PROMPTS[:1]))
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0], sigma * 1000, rtol=3e-7, atol=0)
    exact = random_policy("flux2")
    with torch.no_grad():
        difference = rounded - exact.velocity(noise, sigma, exact.encode(PROMPTS[:1]))
    assert 0 < difference.norm() / rounded.norm() < 0.05


def test_sizes() -> None:
    policy = random_policy("flux2")
    assert policy.latent_shape(64, 32) == (16, 4, 2) and policy.image_seq_len(1024, 512) == 64 * 32
    with pytest.raises(ConfigError, match=r"sampler\.width: must be a multiple of 16 for a random Flux2, got 40"):
        policy.latent_shape(32, 40)
    with pytest.raises(ValueError, match="max_sequence_length must be at least 1"):
        Flux2(max_sequence_length=0)


def test_adapters_reach_the_fused_layers() -> None:
    module = copy.deepcopy(random_policy("flux2").module)
    add_lora(module, LoRA(rank=2, alpha=4.0), random_policy("flux2").lora_targets, seed=0)
    layers = {name.split(".lora_")[0] for name in trainable(module)}
    assert sum(name.startswith("transformer_blocks.") for name in layers) == 2 * 8
    assert sum(name.startswith("single_transformer_blocks.") for name in layers) == 2 * 2
    assert len(layers) == 20
