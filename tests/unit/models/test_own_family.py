"""The family of docs/models.md, as somebody else would add it: from outside the package, by what is written there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AuraFlowPipeline

from flowrl.build import build
from flowrl.cli.compose import choices
from flowrl.config import LoRA, Sampler
from flowrl.distributed.lora import add_lora, trainable
from flowrl.flow.dynamics.ode import ODE
from flowrl.flow.solvers import Euler
from flowrl.models.pipeline import PipelineModel
from flowrl.models.published.shared import TINY_IMAGE_VAE, euler, image_vae
from flowrl.models.published.wan import TINY
from flowrl.models.untrained import Part, Published, assemble
from flowrl.types import Exportable, PolicyConfig
from tests.support.families import PROMPTS, start
from tests.unit.models.test_families import solved

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[3] / "docs/models.md"
BLOCK = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TRANSFORMER = {
    "sample_size": 16,
    "num_mmdit_layers": 1,
    "num_single_dit_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": TINY.parts["text_encoder"].config["d_model"],
    "caption_projection_dim": 32,
    "pos_embed_max_size": 256,
}
AURA_FLOW = Published(
    parts={
        "transformer": Part("diffusers.AuraFlowTransformer2DModel", TRANSFORMER),
        "vae": image_vae(TINY_IMAGE_VAE, scaling_factor=0.13025),
        "text_encoder": TINY.parts["text_encoder"],
    },
    scheduler=euler(shift=1.73),
    tokenizers={"tokenizer": "t5"},
)
SAMPLER = Sampler(num_steps=4, height=32, width=64, dynamics=ODE(), solver=Euler())


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's blocks under the paths that their first lines name, importable."""
    root = tmp_path_factory.mktemp("outside")
    for name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(root))
    yield root
    patch.undo()


@pytest.fixture(scope="module")
def model(extras: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("aura_flow")
    assemble(AURA_FLOW, AuraFlowPipeline, dtype=torch.float32, device=CPU, seed=0).save_pretrained(folder)
    return build({"_target_": "extras.aura_flow.AuraFlow", "path": str(folder), "max_sequence_length": 90}, "model")


def test_it_is_an_option_and_a_model(extras: Path, model: PipelineModel) -> None:
    assert ("model", "aura_flow") in {(choice.group, choice.name) for choice in choices(extras / "options")}
    assert isinstance(model, PolicyConfig) and isinstance(model, Exportable)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_it_draws_what_its_pipeline_draws(model: PipelineModel, guidance_scale: float) -> None:
    policy, sampler = model.load(CPU), replace(SAMPLER, guidance_scale=guidance_scale)
    noise = start(policy, sampler, len(PROMPTS))
    drawn = solved(policy, policy.encode(PROMPTS, guidance_scale), noise, sampler)
    expected = model.draw(model.folder(), None, PROMPTS, noise, sampler)
    assert (expected - noise).abs().mean() > 0.1
    torch.testing.assert_close(drawn, expected, atol=1e-5, rtol=0)
    assert policy.decode(drawn).shape == (3, 32, 64, 3)
    add_lora(policy.module, LoRA(rank=2, alpha=4.0), policy.lora_targets, seed=0)
    assert len(trainable(policy.module)) == 2 * (8 + 2 * 4)


def test_it_has_no_random_build(model: PipelineModel) -> None:
    with pytest.raises(ValueError, match=r"^init must be pretrained for AuraFlow, which has no random build\.$"):
        replace(model, init="random")
