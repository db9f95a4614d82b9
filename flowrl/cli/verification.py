"""Does an export draw what the trainer draws?"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flowrl.cli.trained import Trained, check_base, install, settle
from flowrl.config import Config, Sampler
from flowrl.device import choose_device, torch_settings
from flowrl.flow.noise import Noise
from flowrl.flow.solvers import Euler
from flowrl.prompts import Prompt
from flowrl.types import Exportable, Policy

PROMPTS = (Prompt("0", 'A sign that says "FLOW"'), Prompt("1", "a red cube"))
NUM_STEPS = 4


@dataclass(frozen=True)
class Differences:
    """Of an export's final latents: the largest of any element."""

    to_trainer: float
    to_base: float  # what training has changed


def compare(run: Config, model: Exportable, trained: Trained, folder: Path, adapter: Path | None) -> Differences:
    """Draw the same noise with the base, with the trainer's own policy, and with diffusers from the export's files.

    All in float32 and without guidance, which is no part of the weights.

    Args:
        run: whose sizes are drawn.
        model: the base.
        trained: what was exported.
        folder: of the pipeline that diffusers reads.
        adapter: the exported adapter for it, if it is not merged.

    Raises LoadError if the base is not the one that was trained.
    """
    exact, device = model.in_float32(), choose_device(run)
    sampler = replace(run.sampler, num_steps=NUM_STEPS, guidance_scale=1.0)
    with torch_settings(run):  # of models as large as a host's memory there is one at a time
        if exact != run.model:
            check_base(run.model.load(torch.device("cpu")), trained)
            release()
        start, base, trainers = _of_trainer(run, exact.load(device), exact == run.model, trained, sampler)
        release()
        exported = model.draw(folder, adapter, PROMPTS, start, sampler)
    return Differences(largest(exported - trainers), largest(exported - base))


def _of_trainer(
    run: Config, policy: Policy, is_base: bool, trained: Trained, sampler: Sampler
) -> tuple[Tensor, Tensor, Tensor]:
    """x_T, and x_0 of it by the base and by the trained weights."""
    if is_base:
        check_base(policy, trained)
    start = noise(policy, sampler, len(PROMPTS))
    settle(policy)
    base = drawn(policy, PROMPTS, start, sampler)
    install(policy, run.actor, trained)
    return start, base, drawn(policy, PROMPTS, start, sampler)


def release() -> None:
    """Give the memory back of models that nobody holds any longer; their parts refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()


def noise(policy: Policy, sampler: Sampler, count: int) -> Tensor:
    """x_T of as many samples, on the policy's device."""
    shape = policy.latent_shape(sampler.height, sampler.width, sampler.frames)
    return Noise.of(0, "verification").normal(shape, [(i,) for i in range(count)]).to(policy.device)


@torch.no_grad()
def drawn(policy: Policy, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler) -> Tensor:
    """x_0 of `start` by Euler's steps on the model's own schedule."""
    sigmas = policy.schedule().sigmas(sampler.num_steps, policy.image_seq_len(sampler.height, sampler.width))
    conditions = policy.encode(prompts, sampler.guidance_scale)

    def velocity(sample: Tensor, sigma: Tensor) -> Tensor:
        return policy.velocity(sample, sigma.expand(len(sample)), conditions)

    return Euler().solve(velocity, start, sigmas.to(start.device))


def largest(difference: Tensor) -> float:
    """Of any element."""
    return float(difference.abs().max())
