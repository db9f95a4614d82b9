"""The SD3 adapter: what it refuses, and what it caches."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowrl.config import ConfigError
from flowrl.models.sd3 import SD3
from flowrl.types import LoadError
from tests.support import tiny
from tests.support.families import FAMILIES


def copy_without(folder: Path, target: Path, *parts: str) -> Path:
    shutil.copytree(folder, target)
    for part in parts:
        path = target / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return target


@pytest.mark.parametrize(
    "missing",
    [
        "transformer/diffusion_pytorch_model.safetensors",
        "vae",
        "tokenizer",
        "model_index.json",
        "text_encoder_2/config.json",
    ],
)
def test_an_incomplete_folder_is_one_sentence(tiny_folder: Path, tmp_path: Path, missing: str) -> None:
    folder = copy_without(tiny_folder, tmp_path / "model", missing)
    with pytest.raises(LoadError, match=r"^model\.path=") as caught:
        tiny.load(folder)
    assert "\n" not in str(caught.value)


def test_half_a_checkpoint_never_trains_on_random_weights(tiny_folder: Path, tmp_path: Path) -> None:
    """A transformer folder whose tensors are incomplete, or belong to another architecture."""
    from safetensors.torch import load_file, save_file

    folder = copy_without(tiny_folder, tmp_path / "model")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    save_file({name: state[name] for name in list(state)[::2]}, weights, metadata={"format": "pt"})
    with pytest.raises(LoadError, match="missing"):
        tiny.load(folder)
    shutil.copytree(tiny_folder / "transformer", folder / "transformer", dirs_exist_ok=True)
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 3}))
    with pytest.raises(LoadError):
        tiny.load(folder)


def test_absent_folder() -> None:
    with pytest.raises(LoadError, match=r"model\.path=/nowhere/at-all"):
        SD3("/nowhere/at-all").load(torch.device("cpu"))


@pytest.mark.parametrize(("height", "width", "frames"), [(30, 80, 1), (32, 84, 1), (32, 80, 5), (2048, 80, 1)])
def test_sizes_that_cannot_be_drawn(tiny_folder: Path, height: int, width: int, frames: int) -> None:
    with pytest.raises(ConfigError, match=r"sampler\.(height|width|frames)"):
        tiny.load(tiny_folder).latent_shape(height, width, frames)


def test_guidance_changes_the_velocity_linearly(tiny_folder: Path) -> None:
    """v(g) = v_u + g (v_c - v_u): three scales are collinear, and 1 is the conditional velocity alone."""
    policy = tiny.load(tiny_folder)
    prompts = [group.prompt for group in tiny.groups(2, 1)]
    sample, sigma = torch.randn(2, 8, 8, 20, generator=torch.Generator().manual_seed(0)), torch.tensor([0.4, 0.8])
    with torch.no_grad():
        v = {g: policy.velocity(sample, sigma, policy.encode(prompts, g)) for g in (0.0, 1.0, 2.0, 4.0)}
    torch.testing.assert_close(v[2.0], v[0.0] + 2 * (v[1.0] - v[0.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(v[4.0], v[0.0] + 4 * (v[1.0] - v[0.0]), atol=1e-5, rtol=0)
    assert (v[1.0] - v[0.0]).abs().max() > 1e-4


def test_timesteps_reach_the_transformer_unrounded(tiny_folder: Path) -> None:
    """In bfloat16, 913.7 would become 912."""
    policy = tiny.load(tiny_folder, dtype="bfloat16")
    seen = []
    policy.module.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["timestep"]), with_kwargs=True)
    conditions = policy.encode([tiny.groups(1, 1)[0].prompt])
    with torch.no_grad():
        policy.velocity(torch.randn(1, 8, 8, 20), torch.tensor([0.9137]), conditions)
    assert seen[0].dtype == torch.float32 and seen[0].item() == pytest.approx(913.7)


def test_encoders_run_once_per_text(tiny_folder: Path) -> None:
    policy = tiny.load(tiny_folder)
    calls = []
    policy.pipeline.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    prompts = [group.prompt for group in tiny.groups(3, 1)]
    policy.encode(prompts + prompts)
    policy.encode(prompts[::-1])
    assert len(calls) == 3


def test_an_embedding_does_not_depend_on_what_else_is_encoded(tiny_folder: Path) -> None:
    """Bit for bit: a run that goes on encodes again what an earlier process had in its cache, in other company."""
    prompts = [group.prompt for group in tiny.groups(6, num_samples=1)]
    together = tiny.load(tiny_folder).encode(prompts)
    policy = tiny.load(tiny_folder)
    pair, one = policy.encode(prompts[3:5]), policy.encode(prompts[5:])
    assert together.rows(torch.tensor([3, 4])).prompt.embeds.equal(pair.prompt.embeds)
    assert together.rows(torch.tensor([3, 4])).prompt.pooled.equal(pair.prompt.pooled)
    assert together.rows(torch.tensor([5])).prompt.pooled.equal(one.prompt.pooled)


def test_float16_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="loss scaling"):
        SD3("anywhere", dtype="float16")


def test_no_more_tokens_than_the_pipeline_takes() -> None:
    """What was trained with more could not be exported."""
    assert SD3("anywhere", max_sequence_length=512).max_sequence_length == 512
    with pytest.raises(ValueError, match="max_sequence_length must be at most 512 for SD3, got 513"):
        SD3("anywhere", max_sequence_length=513)


def test_without_t5_it_is_clip_that_reads_a_text() -> None:
    """`max_sequence_length=0` leaves T5 out, whether the folder has it or not."""
    policy = replace(FAMILIES["sd3"].model, max_sequence_length=0).load(torch.device("cpu"))
    assert policy.max_tokens == 77 and not policy.is_cut("a cat") and policy.is_cut("cat " * 90)
    assert policy.embed("a cat").embeds.shape[1] == 77
