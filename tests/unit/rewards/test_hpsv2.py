"""HPSv2 against CLIP written anew with torch's own layers, whose tensors have open_clip's names."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flowrl.config import Config
from flowrl.prompts import Prompt
from flowrl.rewards.hpsv2 import HPSv2, cleaned, letterboxed
from flowrl.rewards.scoring import FinalError
from flowrl.types import LoadError
from tests.unit.rewards.networks import (
    CLIP_IDS,
    CONTEXT,
    PATCH,
    PICTURES,
    PROMPTS,
    SIZE,
    TEXTS,
    clip_config,
    clip_ids,
    cosine,
    normalised,
    randomise,
    save_clip_processor,
)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        layers = {"c_fc": nn.Linear(width, hidden), "gelu": nn.GELU(), "c_proj": nn.Linear(hidden, width)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width, hidden) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(40))
        self.positional_embedding = nn.Parameter(torch.zeros((SIZE // PATCH) ** 2 + 1, 40))
        self.conv1 = nn.Conv2d(3, 40, PATCH, PATCH, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(40), nn.LayerNorm(40)
        self.transformer = Transformer(40, 56)
        self.proj = nn.Parameter(torch.zeros(40, 24))

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.conv1(pixels).flatten(2).mT
        first = self.class_embedding.expand(len(pixels), 1, -1)
        x = self.ln_pre(torch.cat([first, patches], dim=1) + self.positional_embedding)
        return self.ln_post(self.transformer(x)[:, 0]) @ self.proj


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = Visual()
        self.transformer = Transformer(32, 48)
        self.token_embedding = nn.Embedding(len(CLIP_IDS), 32)
        self.positional_embedding = nn.Parameter(torch.zeros(CONTEXT, 32))
        self.ln_final = nn.LayerNorm(32)
        self.text_projection = nn.Parameter(torch.zeros(32, 24))
        self.logit_scale = nn.Parameter(torch.zeros([]))

    def words(self, text: str) -> Tensor:
        ids = torch.tensor(clip_ids(text))
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
        x = self.token_embedding(ids) + self.positional_embedding[: len(ids)]
        return self.ln_final(self.transformer(x[None], mask)[0, -1]) @ self.text_projection


@pytest.fixture(scope="module")
def reference() -> CLIP:
    return randomise(CLIP())


@pytest.fixture
def folders(tmp_path: Path, reference: CLIP) -> dict[str, str]:
    weights, processor = tmp_path / "weights", tmp_path / "processor"
    weights.mkdir()
    processor.mkdir()
    torch.save({"epoch": 1, "state_dict": reference.state_dict()}, weights / "HPS_v2.1_compressed.pt")
    clip_config().save_pretrained(processor)
    save_clip_processor(processor)
    return {"path": str(weights), "processor": str(processor)}


def test_is_the_cosine(folders: dict[str, str], reference: CLIP) -> None:
    scorer = HPSv2(**folders, device="cpu", batch_size=2)
    scorer.load()
    scores = scorer.score(PICTURES, PROMPTS)
    with torch.no_grad():
        pictures = reference.visual(letterboxed(PICTURES, SIZE))  # below: what this is
        expected = [cosine(row, reference.words(text)) for row, text in zip(pictures, TEXTS, strict=True)]
    assert np.ptp(scores) > 0.02
    np.testing.assert_allclose(scores, expected, atol=1e-5)


# What ftfy 6.3.1 and html.unescape, twice, make of each, as open_clip's tokenizer calls them.
MENDED = {
    "a &amp; b": "a & b",
    "a &amp;amp; b": "a & b",
    "the cat\u2019s \u201chat\u201d": 'the cat\'s "hat"',
    "a \ufb01ne \ufb02at": "a fine flat",
    "\uff26\uff2c\uff2f\uff37 \uff12": "FLOW 2",
    "a cafÃ© in itâ€™s street": "a café in it's street",
    "cafe\u0301": "café",
    "it's 2 &lt; 3": "it's 2 < 3",
}


@pytest.mark.parametrize("text", MENDED)
def test_texts_are_mended(text: str) -> None:
    assert cleaned(text) == MENDED[text]


def test_what_is_scored_is_the_mended_text(folders: dict[str, str]) -> None:
    scorer = HPSv2(**folders, device="cpu")
    scorer.load()
    odd, plain = ([Prompt("p", text)] for text in ("a \ufb01ne &amp; flat", "a fine & flat"))
    assert scorer.score(PICTURES[:1], odd) == scorer.score(PICTURES[:1], plain)
    with pytest.raises(FinalError, match=r"must not contain <\|endoftext\|>"):
        scorer.score(PICTURES[:1], [Prompt("p", "a &lt;|endoftext|&gt; cat")])


def test_without_its_package(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert HPSv2(**folders).problems(Config()) == []
    monkeypatch.setitem(sys.modules, "ftfy", None)
    (problem,) = HPSv2(**folders).problems(Config())
    assert "ftfy" in problem.message and ".[hpsv2]" in problem.hint
    with pytest.raises(LoadError, match=r'HPSv2 needs ftfy.* Run pip install -e "\.\[hpsv2\]"\.'):
        HPSv2(**folders).load()


def keys(distance: np.ndarray) -> np.ndarray:
    """The cubic convolution kernel with a = -1/2, which Pillow and torch use when they blur first."""
    d = np.abs(distance)
    near, far = 1.5 * d**3 - 2.5 * d**2 + 1, -0.5 * d**3 + 2.5 * d**2 - 4 * d + 2
    return np.where(d < 1, near, np.where(d < 2, far, 0))


def resizing(old: int, new: int) -> np.ndarray:
    """[new, old]: each row has the weights of one new pixel."""
    ratio = old / new
    centres = (np.arange(new) + 0.5) * ratio
    weights = keys((np.arange(old) + 0.5 - centres[:, None]) / max(ratio, 1))
    return weights / weights.sum(axis=1, keepdims=True)


def test_pictures_are_fitted_into_the_square() -> None:
    width = 40 * SIZE // 60
    small = np.einsum("yh,xw,bhwc->byxc", resizing(60, SIZE), resizing(40, width), PICTURES / 255)
    left = (SIZE - width) // 2
    square = np.zeros((len(PICTURES), SIZE, SIZE, 3))
    square[:, :, left : left + width] = small
    np.testing.assert_allclose(letterboxed(PICTURES, SIZE), normalised(square), atol=1e-5)
    exact = PICTURES[:, :SIZE, :SIZE]
    np.testing.assert_allclose(letterboxed(exact, SIZE), normalised(exact / 255), atol=1e-6)


def test_files_that_are_not_its_own(folders: dict[str, str], tmp_path: Path, reference: CLIP) -> None:
    with pytest.raises(LoadError, match=r"weights holds no HPS_v2_compressed\.pt"):
        HPSv2(**folders, file="HPS_v2_compressed.pt").load()
    file = Path(folders["path"]) / "HPS_v2.1_compressed.pt"
    state = reference.state_dict()
    del state["visual.transformer.resblocks.1.attn.in_proj_weight"]
    torch.save(state, file)
    with pytest.raises(LoadError, match=r"3 tensors of CLIPModel are missing, among them .*k_proj\.weight"):
        HPSv2(**folders).load()
    torch.save({"state_dict": reference}, file)  # a pickled module
    with pytest.raises(LoadError, match="is no file of tensors alone"):
        HPSv2(**folders).load()
    (Path(folders["processor"]) / "config.json").unlink()
    with pytest.raises(LoadError, match=r"processor holds no config\.json"):
        HPSv2(**folders).load()
