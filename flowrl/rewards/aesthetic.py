"""LAION's aesthetic predictor: what people call beautiful, whatever the prompt (improved-aesthetic-predictor)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.rewards.networks import (
    NetworkScorer,
    configuration,
    dtype_of,
    filled,
    image_processor,
    linear_head,
    pretrained,
    renamed,
    small_files,
    weights,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.prompts import Prompt


@dataclass(kw_only=True, eq=False)
class Aesthetic(NetworkScorer):
    """A linear function of the normalised CLIP embedding of the picture, on a scale from 1 to 10.

    Args:
        path: the CLIP whose embedding `head` was trained on: ViT-L/14.
        head: a folder, file or Hub id with the predictor's weights, safetensors or as `torch.save` writes them.
        head_file: its name in `head`. The original is called sac+logos+ava1-l14-linearMSE.pth.
    """

    path: str = "openai/clip-vit-large-patch14"
    head: str = "trl-lib/ddpo-aesthetic-predictor"
    head_file: str = "aesthetic-model.pth"

    _model: Any = field(init=False, repr=False)
    _head: Any = field(init=False, repr=False)
    _image_processor: Any = field(init=False, repr=False)

    def load(self) -> None:
        """Read the image encoder and the head. Raises LoadError."""
        from transformers import CLIPConfig, CLIPVisionModelWithProjection

        files = small_files(self.path, self.revision)
        self._image_processor = image_processor(files)
        whole = configuration(CLIPConfig, files)
        config = whole.vision_config
        config.projection_dim = whole.projection_dim  # the vision part does not always know it
        model = pretrained(
            CLIPVisionModelWithProjection, self.path, self.revision, config=config, dtype=dtype_of(self.dtype)
        )
        state = renamed(weights(self.head, self.head_file), [(r"^layers\.", "")])
        head = filled(linear_head(model.config.projection_dim), state, f"{self.head}, {self.head_file}")
        self._model, self._head = self.settled(model), self.settled(head, "float32")

    def score_batch(self, images: Sequence[np.ndarray], prompts: Sequence[Prompt]) -> Tensor:
        """[b]."""
        from torch.nn.functional import normalize

        prepared = self._image_processor(images, input_data_format="channels_last", return_tensors="pt")
        embeds = self._model(prepared.pixel_values.to(self._model.device, self._model.dtype)).image_embeds
        scores: Tensor = self._head(normalize(embeds.float(), dim=-1))[:, 0]
        return scores
