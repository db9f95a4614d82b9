"""What is Z-Image's own: its time runs the other way, and every sample is a sequence of its own length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.config import ConfigError
from flowrl.flow.schedule import DynamicShift, StaticShift
from flowrl.models.embeddings import Text
from flowrl.models.policy import PipelinePolicy
from flowrl.models.schedules import euler_schedule
from flowrl.models.z_image import MULTIPLE
from flowrl.prompts import Prompt
from tests.support.families import FAMILIES, random_policy, start

CPU = torch.device("cpu")
GRID = "linspace_float32"
MODEL = FAMILIES["z_image"].model


@pytest.fixture(scope="module")
def policy() -> PipelinePolicy:
    return random_policy("z_image")


def of_length(policy: PipelinePolicy, length: int) -> Prompt:
    """A prompt of so many tokens, template included."""
    for letters in range(length):
        prompt = Prompt(str(length), "x" * letters)
        if int(policy.encode([prompt]).prompt.mask.sum()) == length:
            return prompt
    raise AssertionError(length)


def noise_of(policy: PipelinePolicy, count: int, height: int = 32, width: int = 64) -> Tensor:
    return start(policy, FAMILIES["z_image"].sampler(height=height, width=width), count)


@torch.no_grad()
def test_texts_on_both_sides_of_the_padding_do_not_disturb_each_other(policy: PipelinePolicy) -> None:
    """The transformer fills up to 32 tokens, and the picture's position comes after the filling: the sample's own."""
    prompts = [of_length(policy, MULTIPLE + more) for more in (-1, 0, 1, 33)]
    noise, sigma = noise_of(policy, 4), torch.tensor([0.9, 0.7, 0.4, 0.1])
    together = policy.velocity(noise, sigma, policy.encode(prompts))
    for i, prompt in enumerate(prompts):
        alone = policy.velocity(noise[i : i + 1], sigma[i : i + 1], policy.encode([prompt]))
        torch.testing.assert_close(alone[0], together[i], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 128)], ids=["filled up", "exactly 32 tokens"])
@torch.no_grad()
def test_rows_of_conditions_do_not_bring_padding_along(policy: PipelinePolicy, height: int, width: int) -> None:
    """Bit for bit: what was joined with longer texts and taken apart again is what it was."""
    prompts = [Prompt("0", "x"), Prompt("1", "a much longer text than the other, and longer")]
    rows = policy.encode(prompts).rows(torch.tensor([0]))
    assert rows.prompt.embeds.shape[1] > int(rows.prompt.mask.sum())
    noise, sigma = noise_of(policy, 1, height, width), torch.tensor([0.5])
    assert policy.velocity(noise, sigma, rows).equal(policy.velocity(noise, sigma, policy.encode(prompts[:1])))


@torch.no_grad()
def test_guidance_is_from_the_negative_prompt_to_the_prompt(policy: PipelinePolicy) -> None:
    prompt = Prompt("0", "a cat", negative="blurry")
    noise, sigma = noise_of(policy, 1), torch.tensor([0.6])
    guided = policy.velocity(noise, sigma, policy.encode([prompt], 3.0))
    conditional = policy.velocity(noise, sigma, policy.encode([prompt]))
    unconditional = policy.velocity(noise, sigma, policy.encode([Prompt("1", "blurry")]))
    torch.testing.assert_close(guided, unconditional + 3.0 * (conditional - unconditional), atol=1e-5, rtol=0)


@torch.no_grad()
def test_in_bfloat16_the_time_is_not_rounded() -> None:
    """Neither sigma nor 1 - sigma: at 0.9137 bfloat16 would be off by up to 2 of 1000 steps."""
    policy = replace(MODEL, dtype="bfloat16").load(CPU)
    seen: list[Tensor] = []
    policy.module.t_embedder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    conditions = policy.encode([Prompt("0", "x")] * 2)
    velocity = policy.velocity(noise_of(policy, 2), torch.tensor([0.9137, 0.0613]), conditions)
    assert velocity.dtype == torch.float32 and seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0], torch.tensor([86.3, 938.7]), atol=1e-3, rtol=0)


def test_schedules_of_folders() -> None:
    """Z-Image has a static shift of 6, Turbo of 3; the pipeline passes 1, ..., 1/N, so nothing is shifted twice."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    for shift in (3.0, 6.0):
        schedule = euler_schedule(FlowMatchEulerDiscreteScheduler(shift=shift), grid=GRID)
        assert schedule == StaticShift(shift=shift, grid=GRID)
    dynamic = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    assert euler_schedule(dynamic, grid=GRID) == DynamicShift(grid=GRID)


@pytest.mark.parametrize(
    "settings",
    [{"shift": 3.0}, {"shift": 6.0}, {"use_dynamic_shifting": True, "shift_terminal": 0.1}],
    ids=["turbo", "base", "dynamic"],
)
def test_sigmas_are_the_pipelines_bit_for_bit(policy: PipelinePolicy, settings: dict[str, Any]) -> None:
    """It computes its grid in float32: at 28 and 50 steps, among others, another than in float64."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas

    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    schedule = policy.read_schedule(scheduler)
    mu = schedule.mu(1024) if isinstance(schedule, DynamicShift) else None
    for num_steps in (4, 6, 8, 9, 28, 50, 77):
        scheduler.set_timesteps(sigmas=get_default_z_image_sigmas(num_steps), mu=mu)
        assert schedule.sigmas(num_steps, 1024).equal(scheduler.sigmas), num_steps


def test_what_has_no_position_is_refused(policy: PipelinePolicy) -> None:
    """On a GPU a position past the table would be an assertion of a kernel."""
    longest, *sides = policy.pipeline.transformer.config.axes_lens
    largest = 16 * min(sides)
    with pytest.raises(ConfigError, match=r"^model\.max_sequence_length: must be from 1 to"):
        replace(MODEL, max_sequence_length=longest).load(CPU)
    with pytest.raises(ConfigError, match=r"^model\.max_sequence_length: must be from 1 to"):
        replace(MODEL, max_sequence_length=0).load(CPU)
    assert policy.latent_shape(largest, 16)[1:] == (largest // 8, 2)
    with pytest.raises(ConfigError, match=r"sampler\.width: must be at most"):
        policy.latent_shape(16, largest + 16)
    with pytest.raises(
        ConfigError, match=r"sampler\.height: must be a multiple of 16 [^\n]*\n[^\n]*sampler\.frames: must be 1"
    ):
        policy.latent_shape(40, 32, frames=5)


@torch.no_grad()
def test_the_largest_positions_exist(policy: PipelinePolicy) -> None:
    """The longest text that is allowed leaves one for the picture."""
    longest = (policy.pipeline.transformer.config.axes_lens[0] - 2) // MULTIPLE * MULTIPLE
    dim = policy.pipeline.transformer.config.cap_feat_dim
    text = Text(torch.ones(1, longest, dim), mask=torch.ones(1, longest, dtype=torch.bool))
    assert policy.forward(noise_of(policy, 1), torch.tensor([0.5]), text).isfinite().all()
