"""Tiny networks with random weights in folders of the published form, and pictures prepared by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

from flowrl.prompts import Prompt

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # published for CLIP
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789!&*,.-"
CLIP_WORDS = [*LETTERS, *(letter + "</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
CLIP_IDS = {word: i for i, word in enumerate(CLIP_WORDS)}
START, END = CLIP_IDS["<|startoftext|>"], CLIP_IDS["<|endoftext|>"]
SIZE, PATCH, CONTEXT = 24, 8, 12  # of the tiny encoders: pixels, pixels, tokens
LONG = "a very long prompt"

RNG = np.random.default_rng(0)
SMOOTH = RNG.integers(0, 256, (5, 6, 4, 3), np.uint8)
PICTURES = np.stack([np.asarray(Image.fromarray(p).resize((40, 60), Image.Resampling.BICUBIC)) for p in SMOOTH])
"""Five of them, 60 high and 40 wide."""
TEXTS = ["a red cat", "a red cat", "Dogs, 2 dogs!", LONG, "x"]
PROMPTS = [Prompt(f"p{i}", text) for i, text in enumerate(TEXTS)]


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Weights large enough for pictures and prompts to matter, biases and norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = 0.3 if parameter.ndim < 2 else 1.5 / parameter[0].numel() ** 0.5
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise + (1 if re.search("norm|ln_", name.lower()) and name.endswith("weight") else 0))
    return module.eval()


def clip_ids(text: str) -> list[int]:
    """The tokens of a text: without merges, one for each letter; words end in a letter of their own. Cut to the end."""
    words = "".join(f" {c} " if not c.isalpha() else c for c in text.lower()).split()
    letters = [CLIP_IDS[c + ("</w>" if i == len(word) - 1 else "")] for word in words for i, c in enumerate(word)]
    return [START, *letters[: CONTEXT - 2], END]


def clip_config() -> CLIPConfig:
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"max_position_embeddings": CONTEXT, "vocab_size": len(CLIP_IDS), "hidden_act": "gelu"}
    text |= {"bos_token_id": START, "eos_token_id": END, "pad_token_id": END}
    vision |= {"image_size": SIZE, "patch_size": PATCH, "hidden_act": "gelu"}
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)


def save_clip_processor(folder: Path) -> None:
    """Tokenizer and image processor as on the Hub."""
    (folder / "vocab.json").write_text(json.dumps(CLIP_IDS))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer"}))
    settings = {"image_processor_type": "CLIPImageProcessor", "size": SIZE, "crop_size": SIZE, "resample": 3}
    settings |= {"do_resize": True, "do_center_crop": True, "do_normalize": True, "image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def save_clip(folder: Path, config: CLIPConfig | None = None) -> CLIPModel:
    """A tiny CLIP, complete. Returns the model."""
    model = randomise(CLIPModel(config or clip_config()))
    with torch.no_grad():
        model.logit_scale.fill_(3.0)
    model.save_pretrained(folder)
    save_clip_processor(folder)
    return model


def prepared(pictures: np.ndarray, resample: int = Image.Resampling.BICUBIC) -> Tensor:
    """[B, 3, SIZE, SIZE]: shorter side to SIZE by Pillow, middle square, CLIP's mean and standard deviation."""
    rows = []
    for picture in pictures:
        height, width = picture.shape[:2]
        short = min(height, width)
        small = Image.fromarray(picture).resize((width * SIZE // short, height * SIZE // short), resample)
        left, top = (small.width - SIZE) // 2, (small.height - SIZE) // 2
        rows.append(np.asarray(small.crop((left, top, left + SIZE, top + SIZE))))
    return normalised(np.stack(rows) / 255)


def normalised(pixels: np.ndarray) -> Tensor:
    """[B, 3, H, W] float32 from [B, H, W, 3] in [0, 1]."""
    return torch.from_numpy((pixels - MEAN) / STD).permute(0, 3, 1, 2).float()


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two vectors."""
    return float(a.double() @ b.double() / (a.double().norm() * b.double().norm()))


def clip_cosines(model: CLIPModel, pixels: Tensor, texts: Sequence[str]) -> np.ndarray:
    """One picture and one text at a time, so that nothing is padded."""
    rows = []
    with torch.no_grad():
        for picture, text in zip(pixels, texts, strict=True):
            output = model(input_ids=torch.tensor([clip_ids(text)]), pixel_values=picture[None])
            rows.append(cosine(output.image_embeds[0], output.text_embeds[0]))
    return np.array(rows)
