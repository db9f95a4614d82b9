"""flowrl's loop with `ODE()` against the family's own pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from flowrl.flow.dynamics.ode import ODE
from flowrl.prompts import Prompt
from flowrl.rollout.denoise import denoise
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
    shape = policy.latent_shape(*size)
    start = torch.randn(len(PROMPTS), *shape, generator=torch.Generator().manual_seed(3))
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

    prompts = [Prompt(str(i), text, negative=negative) for i, text in enumerate(PROMPTS)]
    conditions = policy.encode(prompts, guidance_scale)
    sigmas = policy.schedule().sigmas(7)
    done = denoise(lambda x, s: policy.velocity(x, s, conditions), start, sigmas, ODE(), (), lambda i: start)
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(done.final_latents, theirs, atol=1e-5, rtol=0)
    assert np.abs(policy.decode(done.final_latents) / 255 - pixels).max() <= 0.5 / 255 + 1e-5


def test_embeddings_do_not_depend_on_company(tiny_folder: Path) -> None:
    """Encoded alone, in a batch, or from the cache: the same rows."""
    policy = tiny.load(tiny_folder)
    prompts = [Prompt(str(i), text) for i, text in enumerate(PROMPTS)]
    batch = policy.encode(prompts)
    again = policy.encode(prompts[::-1])
    torch.testing.assert_close(again.prompt_embeds.flip(0), batch.prompt_embeds, atol=0, rtol=0)
    alone = tiny.load(tiny_folder).encode(prompts[1:2])
    torch.testing.assert_close(alone.prompt_embeds[0], batch.prompt_embeds[1], atol=1e-5, rtol=0)
