"""flowrl's deterministic rollout, engine and all, against the family's own pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.models.sd3 import SD3Policy
from flowrl.prompts import Prompt
from flowrl.rollout.denoise import denoise
from flowrl.types import Conditions, Group
from tests.support import tiny

PROMPTS = ['A sign that says "FLOW"', 'A sign that says "OK"', "A sign", 'A sign that says "MILKY"']


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("negative", ["", "blurry letters"])
@pytest.mark.parametrize("size", [(32, 80), (24, 64)])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_ode_rollout_equals_the_pipeline(
    tiny_folder: Path, guidance_scale: float, negative: str, size: tuple[int, int], shift: float
) -> None:
    """Final latents and pixels, same noise, with and without guidance: <= 1e-5 in float32."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_folder, text_encoder_3=None, tokenizer_3=None)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    pipeline.set_progress_bar_config(disable=True)
    policy = tiny.load(tiny_folder)
    policy.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    sampler = tiny.sampler(num_steps=7, height=size[0], width=size[1], guidance_scale=guidance_scale)
    engine = tiny.engine(policy, sampler=sampler, deterministic=True)
    groups = [Group(i, Prompt(str(i), text, negative=negative), 0, 1) for i, text in enumerate(PROMPTS)]
    drawn = list(engine.generate(groups, 0))

    start = engine.noise.child("x_T").normal(policy.latent_shape(*size), [(i, 0, 0) for i in range(len(PROMPTS))])
    common = {
        "prompt": PROMPTS,
        "negative_prompt": [negative] * len(PROMPTS),
        "height": size[0],
        "width": size[1],
        "num_inference_steps": 7,
        "guidance_scale": guidance_scale,
        "max_sequence_length": 0,
    }
    theirs = pipeline(**common, latents=start.clone(), output_type="latent").images
    pixels = pipeline(**common, latents=start.clone(), output_type="np").images
    assert theirs.abs().max() > 0.5
    final = torch.cat([group.drawn.fetch().trajectory.final_latents for group in drawn])
    torch.testing.assert_close(final, theirs, atol=1e-5, rtol=0)
    images = np.concatenate([group.images for group in drawn if group.images is not None])
    assert np.abs(images / 255 - pixels).max() <= 0.5 / 255 + 1e-5

    # The stochastic loop takes the same steps where it adds no noise.
    conditions = policy.encode([group.prompt for group in groups], guidance_scale)
    velocity = partial(policy_velocity, policy, conditions)
    done = denoise(velocity, start, engine.sigmas, FlowSDE(), (), lambda i: start)
    torch.testing.assert_close(done.final_latents, theirs, atol=1e-5, rtol=0)


@torch.no_grad()
def policy_velocity(
    policy: SD3Policy, conditions: Conditions, sample: torch.Tensor, sigma: torch.Tensor
) -> torch.Tensor:
    return policy.velocity(sample, sigma, conditions)


def test_embeddings_do_not_depend_on_company(tiny_folder: Path) -> None:
    """Encoded alone, in a batch, or from the cache: the same rows."""
    policy = tiny.load(tiny_folder)
    prompts = [Prompt(str(i), text) for i, text in enumerate(PROMPTS)]
    batch = policy.encode(prompts)
    again = policy.encode(prompts[::-1])
    torch.testing.assert_close(again.prompt.embeds.flip(0), batch.prompt.embeds, atol=0, rtol=0)
    alone = tiny.load(tiny_folder).encode(prompts[1:2])
    torch.testing.assert_close(alone.prompt.embeds[0], batch.prompt.embeds[1], atol=1e-5, rtol=0)
