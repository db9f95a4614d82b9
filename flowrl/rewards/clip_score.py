"""CLIP score: how well the picture fits the prompt, as a contrastive model sees it (CLIP, arXiv 2103.00020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flowrl.rewards.networks import NetworkScorer, dtype_of, image_processor, plain, pretrained, small_files, tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.prompts import Prompt

RESAMPLINGS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(kw_only=True, eq=False)
class CLIPScore(NetworkScorer):
    """exp(logit_scale) cos(picture, prompt) / scale; about 0.7 to 1.1 with the published weights.

    Prompts longer than the text encoder (77 tokens) are cut; their end does not count.

    Args:
        processor: where tokenizer and image processor lie, a folder or Hub id; None = `path`.
        scale: 30 as in Flow-GRPO; 1 gives CLIP's logits.
        resample: how pictures are made smaller: bilinear as in Flow-GRPO, or bicubic as CLIP was trained.
    """

    path: str = "openai/clip-vit-large-patch14"
    processor: str | None = None
    scale: float = 30.0
    resample: str = "bilinear"

    _model: Any = field(init=False, repr=False)
    _tokenizer: Any = field(init=False, repr=False)
    _image_processor: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be greater than 0, and finite, got {self.scale}")
        if self.resample not in RESAMPLINGS:
            raise ValueError(f"resample must be {' or '.join(RESAMPLINGS)}, got {self.resample!r}")

    def load(self) -> None:
        """Read model, tokenizer and image processor. Raises LoadError."""
        from transformers import CLIPModel

        files = small_files(self.processor or self.path, None if self.processor else self.revision)
        self._tokenizer = tokenizer(files)
        self._image_processor = image_processor(files)
        model = pretrained(CLIPModel, self.path, self.revision, dtype=dtype_of(self.dtype))
        self._model = self.settled(model)

    def score_batch(self, images: Sequence[np.ndarray], prompts: Sequence[Prompt]) -> Tensor:
        """[b]."""
        texts = [prompt.text for prompt in prompts]
        prepared = self._image_processor(
            images, resample=RESAMPLINGS[self.resample], input_data_format="channels_last", return_tensors="pt"
        )
        logit_scale: Tensor = self._model.logit_scale.float().exp()
        return logit_scale * cosines(self._model, self._tokenizer, prepared.pixel_values, texts) / self.scale


def cosines(model: Any, tokenizer: Any, pixel_values: Tensor, texts: list[str]) -> Tensor:
    """float32 [b]: between each picture, [b, 3, H, W] as prepared for `model`, and its text. Equal texts cost one.

    Raises FinalError for a text that holds a special token.
    """
    import torch
    from torch.nn.functional import cosine_similarity

    rows = {text: row for row, text in enumerate(dict.fromkeys(plain(tokenizer, texts)))}
    limit = model.config.text_config.max_position_embeddings
    tokens = tokenizer(list(rows), padding=True, truncation=True, max_length=limit, return_tensors="pt")
    pictures = model.get_image_features(pixel_values.to(model.device, model.dtype)).pooler_output
    words = model.get_text_features(**tokens.to(model.device)).pooler_output
    index = torch.tensor([rows[text] for text in texts], device=model.device)
    return cosine_similarity(pictures.float(), words.float()[index])
