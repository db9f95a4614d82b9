"""Wan's own traps: integer timesteps, UniPC, frames, and two experts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor, nn

import flowrl
from flowrl.cli.merging import merge
from flowrl.cli.trained import _final
from flowrl.config import ConfigError, LoRA, Sampler
from flowrl.distributed.fsdp import full_state
from flowrl.distributed.lora import adapter_settings, adapter_tensors, add_lora, save_adapter, trainable
from flowrl.flow.solvers import UniPC
from flowrl.models.policy import PipelinePolicy
from flowrl.models.schedules import unipc_schedule
from flowrl.models.wan import timesteps
from flowrl.preflight import preflight
from flowrl.types import LoadError
from tests.support.families import FAMILIES, PROMPTS, folder, random_policy, saved, start

CPU = torch.device("cpu")
VARIANTS = ("wan", "wan_ti2v", "wan_a14b")
EXPERTS = ("transformer", "transformer_2")
LATENTS = (4, 2, 4, 4)


def scheduler(**changes: object) -> UniPCMultistepScheduler:
    """As published, and changed."""
    settings = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
    return UniPCMultistepScheduler(**(settings | changes))


@torch.no_grad()
def velocity(policy: PipelinePolicy, sigmas: list[float], guidance_scale: float = 1.0) -> Tensor:
    """Of as many rows with one prompt."""
    sample = torch.randn(len(sigmas), *LATENTS, generator=torch.Generator().manual_seed(0))
    conditions = policy.encode([PROMPTS[0]], guidance_scale).rows(torch.zeros(len(sigmas), dtype=torch.int64))
    return policy.velocity(sample, torch.tensor(sigmas), conditions)


# ---------------------------------------------------------------------------------------------- schedule, solver


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 8.0])
def test_timesteps_are_the_pipelines_integers(shift: float) -> None:
    """Also where 1000 sigma is an integer but for the last bits: 333.99999999999994, with a shift of 1 and 9 steps."""
    own = scheduler(flow_shift=shift)
    for num_steps in range(1, 101):
        own.set_timesteps(num_steps)
        sigmas = unipc_schedule(own).sigmas(num_steps)
        assert timesteps(sigmas[:-1]).long().equal(own.timesteps)
        torch.testing.assert_close(sigmas, own.sigmas, atol=6e-8, rtol=0)


@pytest.mark.parametrize(
    ("name", "frames", "guidance_scale"),
    [("wan", 1, 4.0), ("wan", 9, 1.0), ("wan_ti2v", 5, 4.0), ("wan_a14b", 9, 4.0), ("wan_a14b", 1, 1.0)],
)
def test_unipc_is_the_untouched_pipeline(name: str, frames: int, guidance_scale: float) -> None:
    """With its own solver of second order and its corrector; the experts with two guidance scales."""
    config = saved(name)
    if name == "wan_a14b":
        config = replace(config, guidance_scale_2=2.5)
    policy = config.load(CPU)
    side = 32 if name == "wan_ti2v" else 16
    sampler = Sampler(num_steps=5, height=side, width=2 * side, frames=frames, guidance_scale=guidance_scale)
    noise = start(policy, sampler, 2)
    pipeline = config.pipeline_class().from_pretrained(folder(name))
    pipeline.set_progress_bar_config(disable=True)
    arguments = config.arguments(PROMPTS[:2], noise, sampler)
    expected = pipeline(**arguments, output_type="latent", return_dict=False)[0]
    conditions = policy.encode(PROMPTS[:2], guidance_scale)
    with torch.no_grad():
        drawn = UniPC().solve(
            lambda x, sigma: policy.velocity(x, sigma, conditions), noise, policy.schedule().sigmas(5)
        )
    torch.testing.assert_close(drawn, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (FlowMatchEulerDiscreteScheduler(), "a FlowMatchEulerDiscreteScheduler, not a UniPCMultistepScheduler"),
        (scheduler(use_flow_sigmas=False), "use_flow_sigmas"),
        (scheduler(final_sigmas_type="sigma_min"), "final_sigmas_type"),
        (scheduler(prediction_type="epsilon"), "prediction_type"),
        (scheduler(use_karras_sigmas=True), "use_karras_sigmas"),
        (scheduler(use_dynamic_shifting=True), "use_dynamic_shifting"),
        (scheduler(shift_terminal=0.02), "shift_terminal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_scheduler_is_refused_by_name(own: object, words: str) -> None:
    with pytest.raises(LoadError, match=rf"{words}.*sampler\.schedule"):
        unipc_schedule(own)


# ---------------------------------------------------------------------------------------------- sizes, pictures


@pytest.mark.parametrize(("name", "multiple", "factor"), [("wan", 16, 8), ("wan_ti2v", 32, 16)])
def test_sizes(name: str, multiple: int, factor: int) -> None:
    policy = random_policy(name)
    assert policy.latent_shape(64, 96, 9) == (4, 3, 64 // factor, 96 // factor)
    assert policy.latent_shape(64, 96, 1)[1] == 1
    for frames, allowed in ((2, 1), (4, 1), (8, 5), (16, 13)):
        words = rf"sampler\.frames: must be 4 k \+ 1 .*got {frames}\..*Set it to {allowed}"
        with pytest.raises(ConfigError, match=words):
            policy.latent_shape(64, 96, frames)
    with pytest.raises(ConfigError, match=rf"sampler\.height: must be a multiple of {multiple} "):
        policy.latent_shape(multiple + 8, 96, 5)
    with pytest.raises(ConfigError, match=r"sampler\.width: must be at most"):
        policy.latent_shape(64, multiple * 129, 5)


def test_pictures_are_videos_of_one_frame() -> None:
    """The same latents; with `task=t2i` without the axis of frames. Alone or several at a time, they are the same."""
    model = replace(FAMILIES["wan"].model, decode_batch_size=1)
    video, picture = model.load(CPU), replace(model, task="t2i").load(CPU)
    latents = torch.randn(2, *video.latent_shape(16, 32, 1), generator=torch.Generator().manual_seed(0))
    frames = video.decode(latents)
    assert frames.shape == (2, 1, 16, 32, 3)
    np.testing.assert_array_equal(picture.decode(latents), frames[:, 0])
    assert np.abs(random_policy("wan").decode(latents).astype(int) - frames).max() <= 1
    with pytest.raises(ConfigError, match=r"sampler\.frames: must be 1 "):
        picture.latent_shape(16, 32, 5)


def test_what_stays_in_float32() -> None:
    """Timesteps, and the autoencoder; in bfloat16 timestep 913 would be 912."""
    policy = replace(FAMILIES["wan"].model, dtype="bfloat16").load(CPU)
    seen = []
    policy.module.get_submodule("condition_embedder.timesteps_proj").register_forward_pre_hook(
        lambda _, given: seen.append(given[0])
    )
    rough = velocity(policy, [0.9137, 0.9999])
    assert seen[0].dtype == torch.float32 and seen[0].tolist() == [913.0, 999.0]
    assert policy.pipeline.vae.dtype == torch.float32 and policy.module.dtype == torch.bfloat16
    fine = velocity(random_policy("wan"), [0.9137, 0.9999])
    assert rough.dtype == torch.float32 and (rough - fine).square().mean().sqrt() < 0.05 * fine.square().mean().sqrt()


@pytest.mark.parametrize("name", VARIANTS)
def test_timesteps_are_embedded_in_float32(name: str) -> None:
    """To the bit, as the pipeline does it: under autocast the embedder would compute in bfloat16."""
    policy, fine = replace(FAMILIES[name].model, dtype="bfloat16").load(CPU), random_policy(name)
    path = "transformer.condition_embedder" if name == "wan_a14b" else "condition_embedder"
    seen: list[Tensor] = []
    policy.module.get_submodule(f"{path}.time_embedder").register_forward_hook(lambda *given: seen.append(given[2]))
    velocity(policy, [0.9137, 0.9999])
    embedder = fine.module.get_submodule(path)
    with torch.no_grad():
        expected = embedder.time_embedder(embedder.timesteps_proj(torch.tensor([913.0, 999.0])))
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0], expected, atol=0, rtol=1e-6)


# ---------------------------------------------------------------------------------------------- two experts


def test_rows_go_to_the_expert_of_their_timestep() -> None:
    """Boundary 875: mixed batches give what each row gives alone, and what the chosen transformer gives."""
    policy = random_policy("wan_a14b")
    sigmas = [0.3, 0.9, 0.8749, 0.875, 1.0, 0.0]
    mixed = velocity(policy, sigmas)
    sample = torch.randn(len(sigmas), *LATENTS, generator=torch.Generator().manual_seed(0))
    text = policy.encode([PROMPTS[0]]).prompt.embeds
    for i, sigma in enumerate(sigmas):
        expert = policy.module.get_submodule("transformer" if sigma >= 0.875 else "transformer_2")
        with torch.no_grad():
            alone = expert(sample[i : i + 1], torch.tensor([int(1000 * sigma)]), text, return_dict=False)[0]
        torch.testing.assert_close(mixed[i : i + 1], alone, atol=2e-6, rtol=0)


def test_each_expert_has_its_guidance() -> None:
    """Closed form: v_u + g (v_c - v_u), with g = 4 above the boundary and 2 below."""
    model = FAMILIES["wan_a14b"].model
    policy = replace(model, guidance_scale_2=2.0).load(CPU)
    sigmas = [0.9, 0.3]
    zero, one, guided = (velocity(random_policy("wan_a14b"), sigmas, g) for g in (0.0, 1.0, 4.0))
    scales = torch.tensor([4.0, 2.0]).view(-1, 1, 1, 1, 1)
    found = velocity(policy, sigmas, 4.0)
    torch.testing.assert_close(found, zero + scales * (one - zero), atol=1e-5, rtol=0)
    torch.testing.assert_close(found[0], guided[0], atol=1e-6, rtol=0)
    assert (found[1] - guided[1]).abs().max() > 1e-3
    assert velocity(policy, sigmas).equal(velocity(random_policy("wan_a14b"), sigmas)), "1 is off for both"


def test_a_second_scale_needs_guidance_and_a_second_expert() -> None:
    with pytest.raises(ConfigError, match=r"model\.guidance_scale_2: must be null"):
        replace(FAMILIES["wan"].model, guidance_scale_2=3.0).load(CPU)
    for wrong in (-3.0, float("inf")):
        with pytest.raises(ValueError, match=r"guidance_scale_2 must be null or a number >= 0, got"):
            replace(FAMILIES["wan_a14b"].model, guidance_scale_2=wrong)
    options = ["debug=short", "model=wan", "model.init=random", "model.size=tiny_a14b", "model.guidance_scale_2=3.0"]
    with pytest.raises(ConfigError) as caught:
        preflight(flowrl.load_config(options))
    assert "model.guidance_scale_2" in [problem.path for problem in caught.value.problems]
    with pytest.raises(ConfigError) as caught:
        preflight(flowrl.load_config([*options, "sampler.guidance_scale=4.0", "sampler.num_steps=0"]))
    assert "model.guidance_scale_2" not in [problem.path for problem in caught.value.problems]


def test_a_folder_without_its_second_expert_is_refused(tmp_path: Path) -> None:
    half = Path(shutil.copytree(folder("wan_a14b"), tmp_path / "half"))
    shutil.rmtree(half / "transformer_2")
    with pytest.raises(LoadError, match=r"^model\.path=.*transformer_2 is missing"):
        replace(saved("wan_a14b"), path=str(half)).load(CPU)


def trained(policy: PipelinePolicy) -> PipelinePolicy:
    """With an adapter that does something in both experts."""
    add_lora(policy.module, LoRA(rank=2, alpha=4.0), policy.lora_targets, seed=0)
    for i, parameter in enumerate(trainable(policy.module).values()):
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(i))
    return policy


def test_gradients_reach_both_experts() -> None:
    """Each its own rows' only."""
    policy = trained(FAMILIES["wan_a14b"].model.load(CPU))
    conditions = policy.encode([PROMPTS[0]] * 2)
    reached = {}
    for sigmas in ([0.9, 0.9], [0.3, 0.3], [0.9, 0.3]):
        policy.module.zero_grad(set_to_none=True)
        policy.velocity(torch.ones(2, *LATENTS), torch.tensor(sigmas), conditions).square().sum().backward()
        names = [name for name, p in trainable(policy.module).items() if p.grad is not None and p.grad.any()]
        reached[tuple(sigmas)] = {name.partition(".")[0] for name in names}
    assert reached == {(0.9, 0.9): {"transformer"}, (0.3, 0.3): {"transformer_2"}, (0.9, 0.3): set(EXPERTS)}


def test_adapters_of_two_experts_come_back(tmp_path: Path) -> None:
    """As a run's end, and as a warm start; in peft's form each expert's folder is an adapter of its own."""
    policy = trained(FAMILIES["wan_a14b"].model.load(CPU))
    tensors = {name: value.detach() for name, value in adapter_tensors(policy.module).items()}
    save_adapter(policy.module, tmp_path)
    found = _final(tmp_path)
    assert found.keys() == tensors.keys() and all(found[name].equal(tensors[name]) for name in tensors)
    warm = FAMILIES["wan_a14b"].model.load(CPU)
    add_lora(warm.module, adapter_settings(tmp_path), (), seed=9)
    assert velocity(warm, [0.9, 0.3]).equal(velocity(policy, [0.9, 0.3]))
    with pytest.raises(ConfigError, match=r"actor\.lora\.alpha=4\.0"):
        settings = replace(adapter_settings(tmp_path), alpha=8.0)
        add_lora(FAMILIES["wan_a14b"].model.load(CPU).module, settings, (), seed=0)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_two_experts_merge_into_a_pipeline(tmp_path: Path, mode: str) -> None:
    """What diffusers draws from the merged folder is what the trainer's own policy draws."""
    config, sampler = saved("wan_a14b"), Sampler(num_steps=4, height=16, width=32, frames=5)
    policy = config.load(CPU)
    if mode == "lora":
        trained(policy)
        tensors = {name: value.detach() for name, value in adapter_tensors(policy.module).items()}
    else:
        for parameter in policy.module.parameters():
            parameter.mul_(1.01)
        policy.save(tmp_path / "final", full_state(policy.module))
        tensors = _final(tmp_path / "final")
        assert tensors.keys() == policy.module.state_dict().keys()
    out = tmp_path / "merged"
    out.mkdir()
    merge(folder("wan_a14b"), out, tensors, LoRA(rank=2, alpha=4.0) if mode == "lora" else None, torch.float32)
    noise, conditions = start(policy, sampler, 1), policy.encode(PROMPTS[:1])
    with torch.no_grad():
        drawn = UniPC().solve(lambda x, s: policy.velocity(x, s, conditions), noise, policy.schedule().sigmas(4))
    pipeline = config.pipeline_class().from_pretrained(out)
    pipeline.set_progress_bar_config(disable=True)
    arguments = config.arguments(PROMPTS[:1], noise, sampler)
    expected = pipeline(**arguments, output_type="latent", return_dict=False)[0]
    torch.testing.assert_close(drawn, expected, atol=2e-5, rtol=0)
