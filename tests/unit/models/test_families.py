"""What every family must do: each adapter against its own pipeline of diffusers, and against itself."""

from __future__ import annotations

import copy
import inspect
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ModelMixin
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.config import LoRA, Sampler
from flowrl.distributed.lora import add_lora, save_adapter, trainable
from flowrl.flow.dynamics.base import Dynamics
from flowrl.flow.dynamics.cps import CPS
from flowrl.flow.dynamics.dance_sde import DanceSDE
from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.flow.dynamics.wan_linear import WanLinear
from flowrl.flow.noise import Noise
from flowrl.flow.solvers import Euler
from flowrl.models.policy import PipelinePolicy
from flowrl.prompts import Prompt
from flowrl.rollout.native import NativeEngine
from flowrl.types import Conditions, DivergedError, Group, LoadError, PolicyConfig
from tests.support.families import FAMILIES, PROMPTS, folder, random_policy, saved, start

pytestmark = pytest.mark.parametrize("name", FAMILIES)
CPU = torch.device("cpu")
DYNAMICS = (FlowSDE(0.7), DanceSDE(0.3), CPS(0.8), WanLinear())


@torch.no_grad()
def solved(policy: PipelinePolicy, conditions: Conditions, noise: Tensor, sampler: Sampler) -> Tensor:
    """x_0 by Euler's steps on the model's own schedule."""
    sigmas = policy.schedule().sigmas(sampler.num_steps, policy.image_seq_len(sampler.height, sampler.width))
    return Euler().solve(lambda x, sigma: policy.velocity(x, sigma, conditions), noise, sigmas.to(noise.device))


@pytest.mark.parametrize(("guidance_scale", "size"), [(1.0, 0), (1.0, 1), (4.0, 0), (4.0, 1)])
def test_it_draws_what_its_pipeline_draws(name: str, guidance_scale: float, size: int) -> None:
    """Latents, from the same noise by the same steps; prompts of different lengths in one batch, with negative ones."""
    family, policy = FAMILIES[name], random_policy(name)
    height, width = family.sizes[size]
    sampler = family.sampler(height=height, width=width, guidance_scale=guidance_scale)
    noise = start(policy, sampler, len(family.prompts))
    drawn = solved(policy, policy.encode(family.prompts, guidance_scale), noise, sampler)
    expected = saved(name).draw(folder(name), None, family.prompts, noise, sampler)
    assert (expected - noise).abs().mean() > 0.1, "a model that moves nothing would prove nothing"
    torch.testing.assert_close(drawn, expected, atol=1e-5, rtol=0)


def test_pixels_are_the_pipelines(name: str) -> None:
    family, policy, config = FAMILIES[name], random_policy(name), saved(name)
    sampler = family.sampler(guidance_scale=3.0)
    noise = start(policy, sampler, len(family.prompts))
    drawn = solved(policy, policy.encode(family.prompts, 3.0), noise, sampler)
    pipeline = config.pipeline_class().from_pretrained(folder(name))
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = config.first_order(pipeline)
    expected = pipeline(**config.arguments(family.prompts, noise, sampler), output_type="np", return_dict=False)[0]
    with torch.no_grad():
        pixels = (policy.decoded(drawn) * 0.5 + 0.5).clamp(0, 1).movedim(1, -1).numpy()
    if family.model.task == "t2i":
        expected = np.reshape(expected, pixels.shape)
    np.testing.assert_allclose(pixels, expected, atol=1e-5, rtol=0)
    assert pixels.std() > 0.02, "grey pictures would prove nothing"
    pictures = policy.decode(drawn)
    assert pictures.dtype == np.uint8 and pictures.shape == pixels.shape
    np.testing.assert_array_equal(pictures, (pixels * 255).round().astype(np.uint8))


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=lambda dynamics: type(dynamics).__name__)
def test_a_replay_is_the_rollout(name: str, dynamics: Dynamics) -> None:
    """Invariant 1: bit for bit in the same batch, and within 1e-6 when all steps go through one forward."""
    family, policy = FAMILIES[name], random_policy(name)
    sampler = family.sampler(dynamics=dynamics, guidance_scale=2.5)
    groups = [Group(i, prompt, 0, 1) for i, prompt in enumerate(PROMPTS)]
    engine = NativeEngine(policy, sampler, Noise.of(0, "rollout"), batch_size=len(groups), decode=False)
    drawn = [sampled.drawn.fetch() for sampled in engine.generate(groups, 0)]
    trajectory = type(drawn[0].trajectory).concat([one.trajectory for one in drawn])
    conditions = type(drawn[0].conditions).concat([one.conditions for one in drawn])
    by_step = []
    for s in range(2):
        step = trajectory.step_index[:, s]
        with torch.no_grad():
            velocity = policy.velocity(trajectory.latents[:, s], trajectory.sigmas[step], conditions)
        transition = dynamics.transition(trajectory.latents[:, s], velocity, trajectory.sigmas, step)
        assert dynamics.log_prob(trajectory.next_latents[:, s], transition).equal(trajectory.log_probs[:, s])
        by_step.append(velocity)
    rows = torch.arange(len(groups)).repeat(2)
    samples = torch.cat([trajectory.latents[:, 0], trajectory.latents[:, 1]])
    sigma = trajectory.sigmas[torch.cat([trajectory.step_index[:, 0], trajectory.step_index[:, 1]])]
    with torch.no_grad():
        together = policy.velocity(samples, sigma, conditions.rows(rows))
    error = (together - torch.cat(by_step)).square().mean().sqrt()
    assert error <= 1e-6 * sampler.guidance_scale  # which scales up what either half is rounded by


def test_a_sample_does_not_depend_on_its_company(name: str) -> None:
    """Whatever the others' prompts are, and however long."""
    family, policy = FAMILIES[name], random_policy(name)
    sampler = family.sampler(guidance_scale=4.0)
    noise = start(policy, sampler, len(PROMPTS))
    together = solved(policy, policy.encode(PROMPTS, 4.0), noise, sampler)
    for i, prompt in enumerate(PROMPTS):
        alone = solved(policy, policy.encode([prompt], 4.0), noise[i : i + 1], sampler)
        torch.testing.assert_close(alone[0], together[i], atol=1e-5, rtol=0)


def test_prompts_and_guidance_matter(name: str) -> None:
    """v(g) = v_u + g (v_c - v_u) or a rescaling of it: with other words, or another g, other velocities."""
    policy, sampler = random_policy(name), FAMILIES[name].sampler()
    noise, sigma = start(policy, sampler, 1), torch.tensor([0.7])
    first, second = (policy.encode([prompt], 4.0) for prompt in PROMPTS[:2])
    unguided = policy.encode([PROMPTS[0]])
    with torch.no_grad():
        v = [policy.velocity(noise, sigma, conditions) for conditions in (first, second, unguided)]
    assert (v[0] - v[1]).abs().max() > 1e-3 and (v[0] - v[2]).abs().max() > 1e-3


def test_all_repeated_blocks_are_named(name: str) -> None:
    """A block class that is missed is neither wrapped nor checkpointed: tens of gigabytes."""
    policy = random_policy(name)
    outermost = [child for child in _children(policy.module) if isinstance(child, nn.ModuleList)]
    repeated = {type(block) for blocks in outermost for block in blocks if any(True for _ in block.parameters())}
    assert repeated == set(policy.blocks)


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Of a transformer, or of each of two."""
    for child in module.children():
        yield child
        if isinstance(child, ModelMixin):
            yield from child.children()


def test_every_block_gets_an_adapter_that_the_pipeline_reads(name: str, tmp_path: Path) -> None:
    family, config = FAMILIES[name], saved(name)
    policy = config.load(CPU)
    add_lora(policy.module, LoRA(rank=2, alpha=4.0), policy.lora_targets, seed=0)
    for block in (module for module in policy.module.modules() if type(module) in policy.blocks):
        assert any(parameter.requires_grad for parameter in block.parameters())
    sampler = family.sampler()
    noise = start(policy, sampler, 1)
    before = solved(policy, policy.encode(PROMPTS[:1]), noise, sampler)
    for i, parameter in enumerate(trainable(policy.module).values()):
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(i))
    save_adapter(policy.module, tmp_path)
    with torch.no_grad():
        after = solved(policy, policy.encode(PROMPTS[:1]), noise, sampler)
    assert (after - before).abs().max() > 1e-2
    drawn = config.draw(folder(name), tmp_path, PROMPTS[:1], noise, sampler)
    torch.testing.assert_close(drawn, after, atol=2e-5, rtol=0)


def test_saved_weights_are_read_by_the_familys_class(name: str, tmp_path: Path) -> None:
    """What full training leaves are the folders of a pipeline's transformers, every tensor in its place."""
    policy = random_policy(name)
    state = {key: value + 1 + i for i, (key, value) in enumerate(policy.module.state_dict().items())}
    policy.save(tmp_path, state)
    networks = {
        part: getattr(policy.pipeline, part) for part in ("transformer", "transformer_2")[: 1 + (name == "wan_a14b")]
    }
    assert {path.name for path in tmp_path.iterdir()} == networks.keys()
    found = {}
    for part, network in networks.items():
        prefix = f"{part}." if len(networks) > 1 else ""
        again = type(network).from_pretrained(tmp_path / part)
        found |= {f"{prefix}{key}": value for key, value in again.state_dict().items()}
    assert found.keys() == state.keys() and all(found[key].equal(value) for key, value in state.items())


def test_random_weights_are_the_same_everywhere(name: str) -> None:
    model = FAMILIES[name].model
    assert model.load(CPU).fingerprint() == random_policy(name).fingerprint() == saved(name).load(CPU).fingerprint()
    assert isinstance(model, PolicyConfig)


def test_the_fingerprint_is_of_everything_that_a_folder_says(name: str, tmp_path: Path) -> None:
    """A run goes on with no other model: settings of networks and tokenizers are part of it, where they lie is not."""
    path = Path(shutil.copytree(folder(name), tmp_path / "model"))
    model = replace(saved(name), path=str(path))
    prints = [model.load(CPU).fingerprint()]
    assert prints == [random_policy(name).fingerprint()]
    for file in ("vae/config.json", "transformer/config.json", "text_encoder/config.json", "tokenizer/tokenizer.json"):
        content = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(content | changed_settings(content)))
        prints.append(model.load(CPU).fingerprint())
    assert len(set(prints)) == len(prints)


def test_a_librarys_next_version_knows_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has settings that this one lacks, by default off, and writes tokenizers in its own way."""
    policy = saved(name).load(CPU)
    before = policy.fingerprint()
    for part in [policy.pipeline.transformer, policy.pipeline.vae, policy.pipeline.scheduler]:
        kind = type(part)
        known = inspect.signature(kind.__init__)
        new = inspect.Parameter("a_new_setting", inspect.Parameter.KEYWORD_ONLY, default=(1, None))
        parameters = [each for each in known.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        monkeypatch.setattr(kind.__init__, "__signature__", known.replace(parameters=[*parameters, new]), raising=False)
        part.register_to_config(a_new_setting=(1, None))
    tokenizer = policy.pipeline.tokenizer
    tokenizer.init_kwargs["a_new_setting"] = True
    assert policy.fingerprint() == before


def changed_settings(content: dict[str, Any]) -> dict[str, Any]:
    """Others that no tensor tells of."""
    if "added_tokens" in content:  # of tokenizers
        model = content["model"]
        if not isinstance(model["vocab"], dict):
            return {"normalizer": {"type": "Lowercase"}}
        swapped = {"y": model["vocab"]["z"], "z": model["vocab"]["y"]}
        return {"model": model | {"vocab": model["vocab"] | swapped}}
    if content.get("latents_mean"):
        return {"latents_mean": [value + 0.5 for value in content["latents_mean"]]}
    found = next((name for name in content if name == "scaling_factor" or name.endswith(("eps", "epsilon"))), None)
    if found is not None:
        return {found: 3 * content[found]}
    if "text_config" in content:
        return {"text_config": content["text_config"] | {"rms_norm_eps": 0.3}}
    return {"sample_size": 2 * content["sample_size"]} if "sample_size" in content else {"axes_dims_rope": [4, 2, 2]}


@torch.no_grad()
def test_pixels_that_are_not_finite_are_no_pictures(name: str) -> None:
    """They would be black, and be rewarded."""
    policy, sampler = random_policy(name), FAMILIES[name].sampler()
    with pytest.raises(DivergedError, match=r"the autoencoder of .* pixels that are not finite"):
        policy.decode(start(policy, sampler, 1) * torch.nan)


def test_half_a_folder_is_one_sentence(name: str, tmp_path: Path) -> None:
    """Never random weights in silence."""
    whole = folder(name)

    def refused(path: Path, words: str) -> None:
        with pytest.raises(LoadError, match=rf"^model\.path=[^\n]*{words}[^\n]*$"):
            replace(saved(name), path=str(path)).load(CPU)

    def linked(target: Path) -> Path:
        return Path(shutil.copytree(whole, target))

    half = linked(tmp_path / "half")
    weights = next((half / "transformer").glob("*.safetensors"))
    state = load_file(weights)
    save_file({key: state[key] for key in list(state)[::2]}, weights, metadata={"format": "pt"})
    refused(half, rf"{len(state) // 2} tensors of transformer are missing")
    weights.unlink()
    refused(half, "no file named diffusion_pytorch_model.safetensors")
    no_vae = linked(tmp_path / "vae")
    shutil.rmtree(no_vae / "vae")
    refused(no_vae, "the folder vae is missing, which model_index.json lists")
    other = linked(tmp_path / "other")
    index = json.loads((other / "model_index.json").read_text())
    (other / "model_index.json").write_text(json.dumps(index | {"_class_name": "AnotherPipeline"}))
    refused(other, "holds a AnotherPipeline, not a ")
    wider = linked(tmp_path / "wider")
    config = wider / "transformer" / "config.json"
    layers = next(key for key in ("num_layers", "n_layers") if key in json.loads(config.read_text()))
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {layers: settings[layers] + 1}))
    refused(wider, rf"(tensors of transformer are missing, among them \S*{settings[layers]}\.|expected shape)")
    config.write_text(json.dumps(settings | {layers: settings[layers] - 1}))
    refused(wider, r"(tensors of transformer are not of its config\.json, among them \S|expected shape)")
    more = linked(tmp_path / "more")
    weights = next((more / "vae").glob("*.safetensors"))
    save_file(load_file(weights) | {"other.weight": torch.zeros(2)}, weights, metadata={"format": "pt"})
    refused(more, r"1 tensors of vae are not of its config\.json, among them other\.weight")


def test_what_is_cut_is_known_and_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """To the token, by the family's own template; without what the pipeline says of each text, or CLIP's 77 tokens."""
    policy = FAMILIES[name].model.policy(random_policy(name).pipeline, CPU)
    longest = "z" * (policy.max_tokens - policy.num_tokens(""))
    assert not policy.is_cut(longest) and policy.is_cut(f"{longest}z")
    with torch.no_grad():
        seen = [policy.embed(longest[:-1] + end).embeds for end in "ab"]
        unseen = [policy.embed("z" * (77 + policy.max_tokens) + end).embeds for end in "ab"]
    assert not seen[0].equal(seen[1]) and unseen[0].equal(unseen[1])
    caplog.clear()
    policy.encode([Prompt("fits", longest)])
    assert not caplog.records
    for _ in range(2):
        policy.encode(
            [Prompt("fits", longest), Prompt("long", f"{longest} and more"), Prompt("long", f"{longest} and more")]
        )
    (said,) = caplog.records
    assert said.name == "flowrl.models.policy" and said.levelname == "WARNING"
    assert f"1 of 2 prompts are longer than the {policy.max_tokens} tokens" in said.message
    assert (
        "(model.max_sequence_length)" in said.message
        and f'the first of them "{f"{longest} and more"[:200]}".' in said.message
    )


def test_no_dropout_and_no_gradient_but_the_actors(name: str) -> None:
    policy = copy.copy(random_policy(name))
    assert not any(part.training for part in policy._parts().values())
    assert not any(parameter.requires_grad for part in policy._parts().values() for parameter in part.parameters())
