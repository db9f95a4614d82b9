"""Human Preference Score v2 (arXiv 2306.09341): a CLIP ViT-H/14 trained on rankings of pictures."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.config import Problem
from flowrl.rewards.clip_score import cosines
from flowrl.rewards.networks import (
    NetworkScorer,
    configuration,
    dtype_of,
    pretrained,
    renamed,
    small_files,
    tokenizer,
    weights,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.config import Config
    from flowrl.prompts import Prompt

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's training pictures, red, green and blue."""

NO_FTFY = "needs ftfy, to mend texts as open_clip does, and it is not installed."
INSTALL = 'Run pip install -e ".[hpsv2]".'

TO_TRANSFORMERS = (  # from open_clip's names
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^text_projection$", "text_projection.weight"),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.attn\.", ".self_attn."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)


@dataclass(kw_only=True, eq=False)
class HPSv2(NetworkScorer):
    """cos(picture, prompt), about 0.2 to 0.35.

    The published checkpoint is one file with open_clip's names; it is computed with transformers' CLIP. Pictures are
    resized to fit into the square that the encoder sees, and what is left of it is black. Prompts longer than the text
    encoder (77 tokens) are cut; their end does not count.

    Args:
        file: in `path`: HPS_v2.1_compressed.pt, or HPS_v2_compressed.pt for version 2.0.
        processor: a folder or Hub id with the architecture (`config.json`) and the tokenizer.
    """

    path: str = "xswu/HPSv2"
    file: str = "HPS_v2.1_compressed.pt"
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

    _model: Any = field(init=False, repr=False)
    _tokenizer: Any = field(init=False, repr=False)

    def problems(self, run: Config) -> list[Problem]:
        """The package that mends prompts may be missing."""
        return [] if importlib.util.find_spec("ftfy") else [Problem("reward", f"hpsv2 {NO_FTFY}", INSTALL)]

    def load(self) -> None:
        """Read the checkpoint and the tokenizer. Raises LoadError."""
        from transformers import CLIPConfig, CLIPModel

        from flowrl.types import LoadError

        if not importlib.util.find_spec("ftfy"):
            raise LoadError(f"HPSv2 {NO_FTFY} {INSTALL}")
        files = small_files(self.processor)
        self._tokenizer = tokenizer(files)
        config = configuration(CLIPConfig, files)
        state = from_open_clip(weights(self.path, self.file, self.revision))
        model = pretrained(CLIPModel, self.path, config=config, state_dict=state, dtype=dtype_of(self.dtype))
        self._model = self.settled(model)

    def score_batch(self, images: Sequence[np.ndarray], prompts: Sequence[Prompt]) -> Tensor:
        """[b]."""
        pixels = letterboxed(np.stack(images), self._model.config.vision_config.image_size)
        texts = [cleaned(prompt.text) for prompt in prompts]
        return cosines(self._model, self._tokenizer, pixels, texts)


def cleaned(text: str) -> str:
    """As open_clip's tokenizer reads a text: straight quotes, letters for ligatures and HTML's entities, and so on."""
    from ftfy import fix_text

    return html.unescape(html.unescape(fix_text(text)))


def from_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of open_clip's CLIP as transformers has them: q, k and v apart, the final projections transposed."""
    converted: dict[str, Tensor] = {}
    for name, tensor in renamed(state, TO_TRANSFORMERS).items():
        if ".in_proj_" in name:
            for letter, third in zip("qkv", tensor.chunk(3), strict=True):
                converted[name.replace("in_proj_", f"{letter}_proj.")] = third
        else:
            converted[name] = tensor.T if name.endswith("_projection.weight") else tensor
    return converted


def letterboxed(images: np.ndarray, size: int) -> Tensor:
    """float32 [B, 3, size, size] for uint8 [B, H, W, 3]: the longer side fits, black around, then normalised."""
    import torch
    from torch.nn.functional import interpolate, pad

    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    scale = size / max(pixels.shape[2:])
    height, width = (round(side * scale) for side in pixels.shape[2:])
    if scale != 1:
        pixels = interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    top, left = (size - height) // 2, (size - width) // 2
    pixels = pad(pixels, (left, size - width - left, top, size - height - top))
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
