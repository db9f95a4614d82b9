"""The aesthetic predictor against a calculation of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flowrl.rewards.aesthetic import Aesthetic
from flowrl.types import LoadError
from tests.unit.rewards.networks import PICTURES, PROMPTS, prepared, randomise, save_clip

SHAPES = [(24, 1024), (1024, 128), (128, 64), (64, 16), (16, 1)]
NAMES = [0, 2, 4, 6, 7]  # dropout stands between


@pytest.fixture(scope="module")
def layers() -> nn.ModuleList:
    return randomise(nn.ModuleList(nn.Linear(*shape) for shape in SHAPES))


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_is_the_head_of_the_unit_embedding(tmp_path: Path, layers: nn.ModuleList, suffix: str) -> None:
    clip = save_clip(tmp_path / "clip")
    head = tmp_path / f"head.{suffix}"
    state = {
        f"layers.{name}.{k}": t for name, at in zip(NAMES, layers, strict=True) for k, t in at.state_dict().items()
    }
    torch.save(state, head) if suffix == "pth" else save_file(state, head)
    scorer = Aesthetic(path=str(tmp_path / "clip"), head=str(tmp_path), head_file=head.name, batch_size=2, device="cpu")
    scorer.load()
    with torch.no_grad():
        embeds = clip.visual_projection(clip.vision_model(prepared(PICTURES)).pooler_output).double()
        x = embeds / embeds.norm(dim=1, keepdim=True)
        for layer in layers:
            x = x @ layer.weight.double().T + layer.bias.double()
    scores = scorer.score(PICTURES, PROMPTS)
    assert np.ptp(scores) > 0.1
    np.testing.assert_allclose(scores, x[:, 0], atol=1e-5)


def test_a_head_for_another_encoder_or_of_another_kind(tmp_path: Path) -> None:
    save_clip(tmp_path / "clip")
    state = nn.Sequential(nn.Linear(768, 1024)).state_dict()
    save_file(state, tmp_path / "head.safetensors")
    scorer = Aesthetic(path=str(tmp_path / "clip"), head=str(tmp_path / "head.safetensors"))
    with pytest.raises(LoadError, match=r"8 tensors are missing, among them 2\.weight"):
        scorer.load()
    missing = {f"{name}.{k}": torch.zeros(1) for name in NAMES[1:] for k in ("weight", "bias")}
    save_file(state | missing, tmp_path / "head.safetensors")
    with pytest.raises(LoadError, match=r"0\.weight has shape \[1024, 768\] instead of \[1024, 24\]"):
        scorer.load()
