"""FLUX.1's own traps: two guidances, timesteps that its transformer rounds, CLIP's older names."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.config import Config, ConfigError, LoRA
from flowrl.distributed.lora import add_lora, trainable
from flowrl.flow.schedule import DynamicShift, StaticShift
from flowrl.models.flux import Flux
from flowrl.models.policy import PipelinePolicy
from flowrl.types import LoadError
from tests.support.families import FAMILIES, PROMPTS, folder, random_policy, saved, start
from tests.unit.models.test_families import solved

CPU = torch.device("cpu")
SCHNELL = Flux(init="random", size="tiny_schnell", max_sequence_length=32)


@cache
def schnell() -> PipelinePolicy:
    return SCHNELL.load(CPU)


@cache
def bfloat16() -> PipelinePolicy:
    return replace(FAMILIES["flux"].model, dtype="bfloat16").load(CPU)


@torch.no_grad()
def velocity(policy: PipelinePolicy, guidance_scale: float = 1.0, sigma: float = 0.7) -> Tensor:
    """Of one sample, wherever the policy came from."""
    noise = start(policy, FAMILIES["flux"].sampler(), 1)
    return policy.velocity(noise, torch.tensor([sigma]), policy.encode(PROMPTS[:1], guidance_scale))


def embedded(policy: PipelinePolicy, sigma: Tensor) -> list[Tensor]:
    """What the time embedding is given for `sigma` [B]."""
    seen: list[Tensor] = []

    class Stop(Exception):
        pass

    def look(projection: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0])
        if len(seen) == 2:
            raise Stop

    hook = policy.module.time_text_embed.time_proj.register_forward_pre_hook(look)
    noise = start(policy, FAMILIES["flux"].sampler(), len(sigma))
    with hook, torch.no_grad(), pytest.raises(Stop):
        policy.velocity(noise, sigma, policy.encode(PROMPTS[:1]).rows(torch.zeros(len(sigma), dtype=torch.int64)))
    return seen


def test_timestep_and_guidance_are_not_rounded() -> None:
    """bfloat16 has 8 bits: 913.7 would be 912, and 3500 would be 3504."""
    sigma = torch.tensor([0.9137, 0.123456, 1.0])
    assert not torch.equal((sigma.bfloat16() * 1000).float(), sigma * 1000)
    timestep, guidance = embedded(bfloat16(), sigma)
    assert timestep.dtype == guidance.dtype == torch.float32
    torch.testing.assert_close(timestep, sigma * 1000, rtol=3e-7, atol=0)
    assert guidance.tolist() == [3500.0] * 3
    assert not bfloat16().module.time_text_embed._forward_pre_hooks, "hooks last as long as the forward"


def test_bfloat16_is_float32_but_for_its_rounding() -> None:
    exact, rounded = velocity(random_policy("flux")), velocity(bfloat16())
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.05


def test_embedded_guidance_is_the_pipelines_guidance_scale() -> None:
    sampler, noise = FAMILIES["flux"].sampler(), start(random_policy("flux"), FAMILIES["flux"].sampler(), 1)
    seen = {}
    for guidance in (None, 3.5, 1.5):
        config = replace(saved("flux"), embedded_guidance=guidance)
        policy = config.policy(copy.copy(random_policy("flux").pipeline), CPU)
        seen[guidance] = solved(policy, policy.encode(PROMPTS[:1]), noise, sampler)
        expected = config.draw(folder("flux"), None, PROMPTS[:1], noise, sampler)
        torch.testing.assert_close(seen[guidance], expected, atol=1e-5, rtol=0)
    assert seen[None].equal(seen[3.5]) and (seen[1.5] - seen[3.5]).abs().max() > 1e-3


def test_guidance_by_a_negative_prompt_is_linear_in_its_scale() -> None:
    v = {g: velocity(random_policy("flux"), g) for g in (0.0, 1.0, 3.0)}
    torch.testing.assert_close(v[3.0], v[0.0] + 3 * (v[1.0] - v[0.0]), atol=1e-5, rtol=0)
    assert (v[1.0] - v[0.0]).abs().max() > 1e-3


def test_schnell_has_no_guidance_and_no_shift(tmp_path: Path) -> None:
    policy, sampler = schnell(), FAMILIES["flux"].sampler()
    assert policy.schedule() == StaticShift(shift=1.0, grid="linspace")
    assert policy.schedule().sigmas(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    policy.pipeline.save_pretrained(tmp_path)
    noise = start(policy, sampler, 2)
    expected = replace(SCHNELL, path=str(tmp_path)).draw(tmp_path, None, PROMPTS[:2], noise, sampler)
    torch.testing.assert_close(solved(policy, policy.encode(PROMPTS[:2]), noise, sampler), expected, atol=1e-5, rtol=0)


def test_a_guidance_that_nothing_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model\.embedded_guidance: must be null .* got 3\.0\. .*guidance_scale"):
        replace(SCHNELL, embedded_guidance=3.0).policy(copy.copy(schnell().pipeline), CPU)


def test_a_scale_that_was_meant_for_another_family_is_refused() -> None:
    """`model=flux` under a recipe with guidance; `true_cfg` says that it is meant, for dev and for schnell."""
    guided = Config(sampler=FAMILIES["flux"].sampler(guidance_scale=4.0))
    for model in (FAMILIES["flux"].model, SCHNELL):
        (problem,) = model.problems(guided)
        assert problem.path == "sampler.guidance_scale" and "got 4.0" in problem.message
        assert "model.true_cfg=true" in problem.hint
        assert replace(model, true_cfg=True).problems(guided) == []
        assert model.problems(Config(sampler=FAMILIES["flux"].sampler())) == []


def test_each_model_has_a_length_of_its_own() -> None:
    lengths = {}
    for name, policy in (("dev", random_policy("flux")), ("schnell", schnell())):
        config = replace(policy.config, max_sequence_length=None).resolved(policy.pipeline)
        lengths[name] = config.max_sequence_length
        assert config == replace(config).resolved(policy.pipeline)
        assert config.encoding() == replace(config, embedded_guidance=2.0, true_cfg=True).encoding()
    assert lengths == {"dev": 512, "schnell": 256}
    with pytest.raises(ConfigError, match=r"^model\.max_sequence_length: must be null or at most 256 .* got 257\."):
        replace(SCHNELL, max_sequence_length=257).resolved(schnell().pipeline)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_sequence_length", 0),
        ("max_sequence_length", 513),
        ("embedded_guidance", -1.0),
        ("embedded_guidance", float("nan")),
    ],
)
def test_values_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .* got {value}"):
        Flux(**{name: value})


def test_sizes() -> None:
    policy = random_policy("flux")
    assert policy.schedule() == DynamicShift() and policy.image_seq_len(1024, 512) == 64 * 32
    assert policy.latent_shape(64, 32) == (4, 8, 4)
    with pytest.raises(ConfigError, match=r"sampler\.height: must be a multiple of 16 for a random Flux, got 24"):
        policy.latent_shape(24, 32)


def test_adapters_are_where_the_recipes_have_them() -> None:
    module = copy.deepcopy(random_policy("flux").module)
    add_lora(module, LoRA(rank=2, alpha=4.0), random_policy("flux").lora_targets, seed=0)
    layers = {name.split(".lora_")[0] for name in trainable(module)}
    assert sum(name.startswith("transformer_blocks.") for name in layers) == 2 * 12
    assert sum(name.startswith("single_transformer_blocks.") for name in layers) == 2 * 3
    assert len(layers) == 30


def test_clip_is_read_by_its_older_names(tmp_path: Path) -> None:
    """Published folders say `text_model.`, what transformers writes does not; half of either is refused."""
    shutil.copytree(folder("flux"), tmp_path, dirs_exist_ok=True)
    config, file = replace(saved("flux"), path=str(tmp_path)), tmp_path / "text_encoder" / "model.safetensors"
    older = {f"text_model.{name}": value for name, value in load_file(file).items()}
    save_file(older, file, metadata={"format": "pt"})
    assert config.load(CPU).fingerprint() == random_policy("flux").fingerprint()
    del older["text_model.final_layer_norm.weight"]
    save_file(older, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match="1 tensors of text_encoder are missing"):
        config.load(CPU)
