"""Qwen-Image's own traps: its guidance, its text, its timesteps."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowrl.config import ConfigError
from flowrl.models.latents import pack
from flowrl.models.qwen_image import QwenImage, QwenImagePolicy
from flowrl.prompts import Prompt
from flowrl.types import LoadError
from tests.support.families import FAMILIES, PROMPTS, folder, random_policy, saved, start

CPU = torch.device("cpu")
SAMPLER = FAMILIES["qwen_image"].sampler()


def velocity(policy: QwenImagePolicy, prompts: tuple[Prompt, ...], scale: float, sigma: float = 0.7) -> Tensor:
    with torch.no_grad():
        return policy.velocity(
            start(policy, SAMPLER, len(prompts)),
            torch.full((len(prompts),), sigma),
            policy.encode(prompts, scale),
        )


def test_guidance_turns_every_token_and_keeps_its_length() -> None:
    """Towards v_u + g (v_c - v_u), with the length of v_c; over tokens, not over channels or the whole picture."""
    policy = random_policy("qwen_image")
    conditional = velocity(policy, PROMPTS, 1.0)
    unconditional = velocity(policy, tuple(Prompt(p.id, p.negative) for p in PROMPTS), 1.0)
    guided = velocity(policy, PROMPTS, 4.0)
    lengths = pack(guided).norm(dim=-1), pack(conditional).norm(dim=-1)
    torch.testing.assert_close(*lengths, rtol=1e-5, atol=0)
    towards = pack(unconditional + 4.0 * (conditional - unconditional))
    cosine = torch.cosine_similarity(pack(guided), towards, dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=0, atol=1e-6)
    assert (towards.norm(dim=-1) / lengths[1] - 1).abs().max() > 0.05, "a rescaling by 1 would prove nothing"


@pytest.mark.parametrize(("prompts", "masked"), [((PROMPTS[0],) * 2, False), (PROMPTS[:2], True)])
def test_texts_of_one_length_need_no_mask(prompts: tuple[Prompt, ...], masked: bool) -> None:
    """With one, attention cannot take its fastest kernel."""
    policy, seen = random_policy("qwen_image"), []
    handle = policy.module.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    with handle:
        found = velocity(policy, prompts, 1.0)
    assert (seen[0]["encoder_hidden_states_mask"] is not None) == masked
    alone = velocity(policy, (PROMPTS[0],), 1.0)
    torch.testing.assert_close(found[:1], alone, atol=1e-5, rtol=0)


def test_the_rescaling_has_its_gradient() -> None:
    """A replay differentiates the velocity that was sampled with, length and all."""
    halves = torch.randn(
        2, 1, 4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    policy, sigma = random_policy("qwen_image"), torch.ones(1)
    assert torch.autograd.gradcheck(lambda both: policy.guide(both[0], both[1], 3.0, sigma), halves)


@pytest.mark.parametrize("sigma", [0.9137, 0.0203])
def test_the_timestep_is_embedded_unrounded(sigma: float) -> None:
    """Under autocast the first layer gives bfloat16, to which the transformer casts it: 0.9137 would be 0.9141."""
    policy = replace(FAMILIES["qwen_image"].model, dtype="bfloat16").load(CPU)
    seen: list[Tensor] = []
    embedding = policy.module.get_submodule("time_text_embed.time_proj")
    embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    assert velocity(policy, PROMPTS[:1], 1.0, sigma).isfinite().all()
    assert seen[0].dtype == torch.float32 and seen[0].equal(torch.tensor([sigma]) * 1000 / 1000)
    assert not policy.module.get_submodule("time_text_embed")._forward_pre_hooks, "nothing stays behind"


def test_an_embedding_does_not_depend_on_what_was_encoded_before() -> None:
    """Bit for bit: the encoder keeps state between calls, which no text may see."""
    policy = random_policy("qwen_image")
    forwards = [policy.embed(prompt.text) for prompt in PROMPTS]
    backwards = [policy.embed(prompt.text) for prompt in PROMPTS[::-1]][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        assert one.embeds.equal(other.embeds) and one.mask is not None and one.mask.all()
    assert len({one.embeds.shape[1] for one in forwards}) == len(PROMPTS), "texts of different lengths"


def test_long_texts_are_cut() -> None:
    """To the first tokens after the template's beginning."""
    policy = random_policy("qwen_image")
    short = QwenImagePolicy(replace(policy.config, max_sequence_length=40), policy.pipeline, CPU)
    whole, cut = (one.encode(PROMPTS[1:2]).prompt.embeds for one in (policy, short))
    assert whole.shape[1] > 40 and cut.equal(whole[:, :40])


@pytest.mark.parametrize("length", [0, 1025])
def test_lengths_that_the_pipeline_cannot_have(length: int) -> None:
    with pytest.raises(ValueError, match="max_sequence_length must be between 1 and 1024"):
        QwenImage("anywhere", max_sequence_length=length)


@pytest.mark.parametrize(("height", "width", "frames"), [(40, 64, 1), (64, 40, 1), (64, 64, 5)])
def test_sizes_that_cannot_be_drawn(height: int, width: int, frames: int) -> None:
    """A token is 16 x 16 pixels."""
    with pytest.raises(ConfigError, match=r"sampler\.(height|width|frames)"):
        random_policy("qwen_image").latent_shape(height, width, frames)


def test_the_schedule_is_the_schedulers() -> None:
    """Shifted by the number of tokens and stretched to end at 0.02, bit for bit."""
    policy = random_policy("qwen_image")
    scheduler = type(policy.pipeline.scheduler).from_config(policy.pipeline.scheduler.config)
    for height, width, num_steps in ((512, 512, 10), (384, 640, 12), (1024, 1024, 50)):
        sigmas = policy.schedule().sigmas(num_steps, policy.image_seq_len(height, width))
        mu = policy.schedule().mu((height // 16) * (width // 16))  # type: ignore[attr-defined]
        scheduler.set_timesteps(sigmas=[1 - i / num_steps for i in range(num_steps)], mu=mu)
        torch.testing.assert_close(sigmas, scheduler.sigmas, rtol=0, atol=1e-7)
        assert sigmas[-2].item() == pytest.approx(0.02, abs=1e-6)


def test_a_transformer_that_edits_pictures_is_refused(tmp_path: Path) -> None:
    edits = Path(shutil.copytree(folder("qwen_image"), tmp_path / "model"))
    config = edits / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"zero_cond_t": True}))
    with pytest.raises(LoadError, match=r"^model\.path=.*zero_cond_t"):
        replace(saved("qwen_image"), path=str(edits)).load(CPU)


def test_half_an_encoder_is_refused(tmp_path: Path) -> None:
    """Its tensors lie in the file under other names than in the module."""
    from safetensors.torch import load_file, save_file

    half = Path(shutil.copytree(folder("qwen_image"), tmp_path / "model"))
    weights = half / "text_encoder" / "model.safetensors"
    state = load_file(weights)
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, weights, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"1 tensors of text_encoder are missing.*layers\.1\.mlp\.up_proj\.weight"):
        replace(saved("qwen_image"), path=str(half)).load(CPU)
