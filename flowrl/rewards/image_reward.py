"""ImageReward (arXiv 2304.05977): BLIP reads the prompt while it looks at the picture, a head says how good it is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flowrl.hub import in_one_sentence
from flowrl.rewards.networks import (
    NetworkScorer,
    dtype_of,
    filled,
    linear_head,
    part_of,
    plain,
    pretrained,
    renamed,
    small_files,
    tokenizer,
    weights,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.prompts import Prompt

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the head's outputs; published scores are normalised with them."""

NUM_TOKENS = 35
HEAD_WIDTH = 64  # of the attention heads of BLIP's image encoders
TEXT_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "layer_norm_eps",
)
TO_TRANSFORMERS = (  # from BLIP's names
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^blocks\.", "encoder.layers."),
    (r"^norm\.", "post_layernorm."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
)


@dataclass(kw_only=True, eq=False)
class ImageReward(NetworkScorer):
    """The published score: over all pictures and prompts its mean was 0 and its standard deviation 1.

    The first 35 tokens of a prompt are read, as published. The `image-reward` package needs libraries of 2023; the same
    network is computed here with transformers' BLIP.

    Args:
        path: a folder or Hub id with the weights and `med_config.json`, the architecture of the text encoder.
        file: the weights in it.
        vocabulary: a folder or Hub id with the tokenizer, BERT's.
    """

    path: str = "THUDM/ImageReward"
    file: str = "ImageReward.pt"
    vocabulary: str = "google-bert/bert-base-uncased"

    _vision: Any = field(init=False, repr=False)
    _text: Any = field(init=False, repr=False)
    _head: Any = field(init=False, repr=False)
    _tokenizer: Any = field(init=False, repr=False)
    _image_processor: Any = field(init=False, repr=False)
    _side: int = field(init=False, repr=False)

    def load(self) -> None:
        """Read the weights, the architecture and the vocabulary. Raises LoadError."""
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionModel, CLIPImageProcessorPil

        self._tokenizer = tokenizer(small_files(self.vocabulary))
        text_settings = _text_settings(small_files(self.path, self.revision))
        state = weights(self.path, self.file, self.revision)
        image = renamed(part_of(state, "blip.visual_encoder."), TO_TRANSFORMERS)
        vision_config = _vision_config(image, self.path)
        text_config = BlipTextConfig(**text_settings, encoder_hidden_size=vision_config.hidden_size)

        dtype = dtype_of(self.dtype)
        vision = pretrained(BlipVisionModel, self.path, config=vision_config, state_dict=image, dtype=dtype)
        text = pretrained(
            BlipTextModel,
            self.path,
            config=text_config,
            state_dict=part_of(state, "blip.text_encoder."),
            add_pooling_layer=False,
            dtype=dtype,
        )
        head = filled(linear_head(text_config.hidden_size), part_of(state, "mlp.layers."), f"{self.path}, {self.file}")
        self._vision, self._text, self._head = self.settled(vision), self.settled(text), self.settled(head, "float32")
        self._side = vision_config.image_size
        self._image_processor = CLIPImageProcessorPil(do_resize=False, do_center_crop=False)

    def score_batch(self, images: Sequence[np.ndarray], prompts: Sequence[Prompt]) -> Tensor:
        """[b]."""
        squares = [middle_square(image, self._side) for image in images]
        prepared = self._image_processor(squares, input_data_format="channels_last", return_tensors="pt")
        pixels = prepared.pixel_values.to(self._vision.device, self._vision.dtype)
        texts = plain(self._tokenizer, [prompt.text for prompt in prompts])
        tokens = self._tokenizer(
            texts, padding="max_length", truncation=True, max_length=NUM_TOKENS, return_tensors="pt"
        ).to(self._text.device)
        states = self._text(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            encoder_hidden_states=self._vision(pixels).last_hidden_state,
        ).last_hidden_state
        scores: Tensor = self._head(states[:, 0].float())[:, 0]  # of the first token, [CLS]
        return (scores - MEAN) / STD


def middle_square(image: np.ndarray, side: int) -> np.ndarray:
    """uint8 [side, side, 3]: the shorter side fits, the middle is left; rounded as torchvision does, as published."""
    picture = Image.fromarray(image)
    short = min(picture.size)
    picture = picture.resize((side * picture.width // short, side * picture.height // short), Image.Resampling.BICUBIC)
    left, top = round((picture.width - side) / 2), round((picture.height - side) / 2)
    return np.asarray(picture.crop((left, top, left + side, top + side)))


def _text_settings(folder: Path) -> dict[str, Any]:
    from flowrl.types import LoadError

    file = folder / "med_config.json"
    with in_one_sentence(str(file)):
        settings = json.loads(file.read_text(encoding="utf-8"))
    missing = [name for name in TEXT_SETTINGS if name not in settings]
    if missing:
        raise LoadError(f"{file} does not say {missing[0]}.")
    return {name: settings[name] for name in TEXT_SETTINGS}


def _vision_config(state: Mapping[str, Tensor], path: str) -> Any:
    """What the shapes say; the rest is the same for all of BLIP's image encoders."""
    from transformers import BlipVisionConfig

    from flowrl.types import LoadError

    position, patch = "embeddings.position_embedding", "embeddings.patch_embedding.weight"
    fc1 = "encoder.layers.0.mlp.fc1.weight"
    for name in (position, patch, fc1):
        if name not in state:
            raise LoadError(f"{path}: tensors of the image encoder are missing, among them {name}.")
    width, num_patches, patch_size = state[position].shape[2], state[position].shape[1] - 1, state[patch].shape[-1]
    return BlipVisionConfig(
        hidden_size=width,
        intermediate_size=state[fc1].shape[0],
        num_hidden_layers=len({name.split(".")[2] for name in state if name.startswith("encoder.layers.")}),
        num_attention_heads=width // HEAD_WIDTH,
        image_size=math.isqrt(num_patches) * patch_size,
        patch_size=patch_size,
        layer_norm_eps=1e-6,
    )
