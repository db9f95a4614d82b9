"""ImageReward against BLIP written anew with torch's own layers, whose tensors have the published names."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from flowrl.prompts import Prompt
from flowrl.rewards.image_reward import ImageReward, middle_square
from flowrl.rewards.scoring import FinalError
from flowrl.types import LoadError
from tests.unit.rewards.networks import LETTERS, PATCH, PICTURES, PROMPTS, SIZE, TEXTS, prepared, randomise

WIDTH, TEXT_WIDTH, HEADS = 128, 48, 4  # of the image encoder: two heads of 64, as in the published one
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *("##" + letter for letter in LETTERS)]
MED = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 40,
    "vocab_size": len(WORDS) + 2,  # published: two tokens more than the tokenizer has
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Of one sequence on another, [length, width] each."""
    q, k, v = (x.view(len(x), heads, -1).transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).flatten(1)


class VisionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, 1e-6), nn.LayerNorm(WIDTH, 1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(WIDTH, 3 * WIDTH), "proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 200), "fc2": nn.Linear(200, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn["proj"](attention(*self.attn["qkv"](self.norm1(x)).chunk(3, dim=1), heads=2))
        return x + self.mlp["fc2"](gelu(self.mlp["fc1"](self.norm2(x))))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, (SIZE // PATCH) ** 2 + 1, WIDTH))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, WIDTH, PATCH, PATCH)})
        self.blocks = nn.ModuleList(VisionBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, 1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embed["proj"](pixels[None])[0].flatten(1).T
        x = torch.cat([self.cls_token[0], patches]) + self.pos_embed[0]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def after(width: int) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(width, TEXT_WIDTH), "LayerNorm": nn.LayerNorm(TEXT_WIDTH, 1e-12)})


class Attention(nn.Module):
    def __init__(self, other: int) -> None:
        super().__init__()
        parts = {"query": TEXT_WIDTH, "key": other, "value": other}
        self.self = nn.ModuleDict({name: nn.Linear(width, TEXT_WIDTH) for name, width in parts.items()})
        self.output = after(TEXT_WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        mixed = attention(self.self["query"](x), self.self["key"](other), self.self["value"](other), HEADS)
        return self.output["LayerNorm"](x + self.output["dense"](mixed))


class TextLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.crossattention = Attention(TEXT_WIDTH), Attention(WIDTH)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(TEXT_WIDTH, 64)})
        self.output = after(64)

    def forward(self, x: Tensor, picture: Tensor) -> Tensor:
        x = self.crossattention(self.attention(x, x), picture)
        return self.output["LayerNorm"](x + self.output["dense"](gelu(self.intermediate["dense"](x))))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(MED["vocab_size"], TEXT_WIDTH),
                "position_embeddings": nn.Embedding(40, TEXT_WIDTH),
                "LayerNorm": nn.LayerNorm(TEXT_WIDTH, 1e-12),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(TextLayer() for _ in range(2))})

    def forward(self, ids: list[int], picture: Tensor) -> Tensor:
        embeds = self.embeddings["word_embeddings"](torch.tensor(ids))
        x = self.embeddings["LayerNorm"](embeds + self.embeddings["position_embeddings"](torch.arange(len(ids))))
        for layer in self.encoder["layer"]:
            x = layer(x, picture)
        return x


class Reference(nn.Module):
    """The published network; `vision_proj` is in its file and not used."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"visual_encoder": Vision(), "text_encoder": Text(), "vision_proj": nn.Linear(WIDTH, 8)}
        self.blip = nn.ModuleDict(parts)
        widths = [TEXT_WIDTH, 1024, 128, 64, 16, 1]
        linear = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
        drop = nn.Dropout()
        layers = nn.Sequential(linear[0], drop, linear[1], drop, linear[2], drop, linear[3], linear[4])
        self.mlp = nn.ModuleDict({"layers": layers})

    def score(self, pixels: Tensor, text: str) -> float:
        states = self.blip["text_encoder"](bert_ids(text), self.blip["visual_encoder"](pixels))
        return (float(self.mlp["layers"](states[0])) - 0.16717362830052426) / 1.0333394966054072


def bert_ids(text: str) -> list[int]:
    """One token for each letter, at most 35 in all; all but the first of a word begin with ##."""
    words = "".join(f" {c} " if not c.isalnum() else c for c in text.lower()).split()
    ids = [WORDS.index("##" * (i > 0) + c) for word in words for i, c in enumerate(word)]
    return [WORDS.index("[CLS]"), *ids[:33], WORDS.index("[SEP]")]


@pytest.fixture(scope="module")
def reference() -> Reference:
    reference = randomise(Reference())
    with torch.no_grad():
        reference.mlp["layers"][-1].weight.mul_(0.1)  # scores near 1, where float32 has its digits
    return reference


@pytest.fixture
def folders(tmp_path: Path, reference: Reference) -> dict[str, str]:
    path, vocabulary = tmp_path / "weights", tmp_path / "bert"
    path.mkdir()
    vocabulary.mkdir()
    torch.save(reference.state_dict(), path / "ImageReward.pt")
    (path / "med_config.json").write_text(json.dumps(MED | {"encoder_width": 768, "model_type": "bert"}))
    (vocabulary / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    described = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (vocabulary / "tokenizer_config.json").write_text(json.dumps(described))
    return {"path": str(path), "vocabulary": str(vocabulary)}


def test_is_the_normalised_output_of_the_head(folders: dict[str, str], reference: Reference) -> None:
    long = "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9"
    prompts = [*PROMPTS[:3], Prompt("long", long), Prompt("longer", f"{long} and more")]
    scorer = ImageReward(**folders, device="cpu", batch_size=2)
    scorer.load()
    scores = scorer.score(PICTURES, prompts)
    with torch.no_grad():
        texts = [prompt.text for prompt in prompts]
        expected = [reference.score(row, text) for row, text in zip(prepared(PICTURES), texts, strict=True)]
    assert texts[:3] == TEXTS[:3] and np.ptp(scores) > 0.1
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert math.isclose(*scorer.score(PICTURES[[3, 3]], prompts[3:]), abs_tol=1e-6)  # its first 35 tokens are equal


def test_the_middle_is_torchvisions(folders: dict[str, str]) -> None:
    """Its first row is round(rest / 2): Python's, halves to even numbers."""
    for rest, first in {0: 0, 1: 0, 2: 1, 3: 2, 5: 2, 7: 4}.items():
        tall = PICTURES[0, : SIZE + rest, :SIZE]
        np.testing.assert_array_equal(middle_square(tall, SIZE), tall[first : first + SIZE])
        wide = np.ascontiguousarray(tall.swapaxes(0, 1))
        np.testing.assert_array_equal(middle_square(wide, SIZE), wide[:, first : first + SIZE])
    scorer = ImageReward(**folders, device="cpu")
    scorer.load()
    whole, middle = PICTURES[:1, : SIZE + 3, :SIZE], PICTURES[:1, 2 : SIZE + 2, :SIZE]
    assert scorer.score(whole, PROMPTS[:1]) == scorer.score(middle, PROMPTS[:1])


def test_special_tokens_are_refused(folders: dict[str, str]) -> None:
    scorer = ImageReward(**folders, device="cpu")
    scorer.load()
    with pytest.raises(FinalError, match=r"the prompt must not contain \[SEP\]"):
        scorer.score(PICTURES[:1], [Prompt("p", "a cat [SEP] a dog")])
    assert scorer.score(PICTURES[:1], [Prompt("p", "a cat [sep] a dog")]).shape == (1,)


def test_incomplete_folders(folders: dict[str, str], reference: Reference) -> None:
    path = Path(folders["path"])
    state = reference.state_dict()
    for name, message in {
        "blip.visual_encoder.pos_embed": "tensors of the image encoder are missing",
        "blip.visual_encoder.blocks.1.attn.qkv.bias": r"1 tensors of BlipVisionModel are missing",
        "blip.text_encoder.encoder.layer.0.crossattention.self.key.weight": "BlipTextModel are missing.*key",
        "mlp.layers.7.bias": r"1 tensors are missing, among them 7\.bias",
    }.items():
        torch.save({key: tensor for key, tensor in state.items() if key != name}, path / "ImageReward.pt")
        with pytest.raises(LoadError, match=message):
            ImageReward(**folders).load()
    (path / "med_config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"med_config\.json does not say vocab_size"):
        ImageReward(**folders).load()
    (path / "med_config.json").unlink()
    with pytest.raises(LoadError, match=r"med_config\.json"):
        ImageReward(**folders).load()
