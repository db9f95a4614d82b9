"""Every family on a GPU, whose kernels are others than a CPU's: `pytest -m gpu tests/gpu/test_families.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from flowrl.config import LoRA
from flowrl.device import torch_settings
from flowrl.distributed.lora import add_lora, trainable
from flowrl.flow.noise import Noise
from flowrl.models.policy import PipelinePolicy
from flowrl.rollout.native import NativeEngine
from flowrl.types import Group
from tests.support.families import FAMILIES, PROMPTS, folder, random_policy, saved, start
from tests.support.ranks import configure
from tests.unit.models.test_families import solved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.parametrize("name", FAMILIES),
]


@pytest.fixture(autouse=True)
def as_in_runs(tiny_folder: Path) -> Iterator[None]:
    """The kernels that a run computes with."""
    with torch_settings(configure(tiny_folder)):
        yield


def loaded(name: str, dtype: str = "float32", device: str = "cuda") -> PipelinePolicy:
    """With its transformer there, too, which in runs an actor or an engine places."""
    policy = replace(saved(name), dtype=dtype).load(torch.device(device))
    policy.module.to(device)
    return policy


shared = cache(loaded)  # of what tests do not change


def test_it_draws_what_its_pipeline_draws(name: str) -> None:
    """And what it draws on a CPU; the pipeline's networks take turns on the device."""
    family, policy = FAMILIES[name], shared(name)
    sampler = family.sampler(guidance_scale=4.0)
    noise = start(policy, sampler, len(family.prompts))
    drawn = solved(policy, policy.encode(family.prompts, 4.0), noise.cuda(), sampler).cpu()
    expected = saved(name).draw(folder(name), None, family.prompts, noise.cuda(), sampler).cpu()
    torch.testing.assert_close(drawn, expected, atol=1e-4, rtol=0)
    here = random_policy(name)
    on_cpu = solved(here, here.encode(family.prompts, 4.0), noise, sampler)
    torch.testing.assert_close(drawn, on_cpu, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replay_is_the_rollout(name: str, dtype: str) -> None:
    """Invariant 1: bit for bit in the same batch."""
    family, policy = FAMILIES[name], shared(name, dtype)
    sampler = family.sampler(guidance_scale=2.5)
    groups = [Group(i, prompt, 0, 1) for i, prompt in enumerate(PROMPTS)]
    engine = NativeEngine(policy, sampler, Noise.of(0, "rollout"), batch_size=len(groups), decode=True)
    drawn = [sampled.drawn.fetch() for sampled in engine.generate(groups, 0)]
    trajectory = type(drawn[0].trajectory).concat([one.trajectory for one in drawn]).to(policy.device)
    conditions = type(drawn[0].conditions).concat([one.conditions for one in drawn]).to(policy.device)
    for s in range(2):
        step, sample = trajectory.step_index[:, s], trajectory.latents[:, s]
        with torch.no_grad():
            velocity = policy.velocity(sample, trajectory.sigmas[step], conditions)
        transition = sampler.dynamics.transition(sample, velocity, trajectory.sigmas, step)
        log_prob = sampler.dynamics.log_prob(trajectory.next_latents[:, s], transition)
        assert log_prob.equal(trajectory.log_probs[:, s])


def test_gradients_are_the_cpus(name: str) -> None:
    """Through attention's backward kernels, with prompts of different lengths in the batch."""
    family = FAMILIES[name]
    sampler, found = family.sampler(), {}
    for device in ("cpu", "cuda"):
        policy = loaded(name, device=device)
        add_lora(policy.module, LoRA(rank=2, alpha=4.0), policy.lora_targets, seed=0)
        noise = start(policy, sampler, len(PROMPTS)).to(device)
        sigma = torch.tensor([0.9, 0.6, 0.3], device=device)
        policy.velocity(noise, sigma, policy.encode(PROMPTS)).square().mean().backward()
        gradients = {key: value.grad for key, value in trainable(policy.module).items()}
        found[device] = {key: value.cpu() for key, value in gradients.items() if value is not None}
    assert found["cpu"].keys() == found["cuda"].keys()
    for key, expected in found["cpu"].items():
        assert (found["cuda"][key] - expected).norm() <= 5e-3 * expected.norm() + 1e-8, key


def test_encoders_wait_in_host_memory(name: str) -> None:
    """They visit the device while there is something to encode."""
    policy = shared(name)
    encoders = [getattr(policy.pipeline, part) for part in policy.config.encoders]
    policy.encode([PROMPTS[0]])
    before = torch.cuda.memory_allocated()
    row = policy.encode([replace(PROMPTS[0], text=f"another of {name}")])
    size = sum(part.nbytes for part in row.embeddings().values())
    assert all(parameter.device.type == "cpu" for encoder in encoders for parameter in encoder.parameters())
    assert torch.cuda.memory_allocated() <= before + 4 * size + 2**20
