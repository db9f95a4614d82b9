"""How well a picture compresses: rewards that need no model (DDPO, arXiv 2305.13301, section 5.1)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from flowrl.prompts import Prompt


def jpeg_kilobytes(image: np.ndarray, quality: int = 95) -> float:
    """Size of uint8 [H, W, 3] as a JPEG file, in units of 1000 bytes."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=quality)
    return buffer.tell() / 1000


@dataclass(frozen=True, kw_only=True)
class JPEG:
    """What both directions have in common. `quality` is Pillow's, 1 to 95."""

    quality: int = 95

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 95:
            raise ValueError(f"quality must be in [1, 95], got {self.quality}")

    def load(self) -> None:
        """There is nothing to load."""

    def kilobytes(self, images: np.ndarray) -> np.ndarray:
        """float64 [B] for uint8 [B, H, W, 3]."""
        return np.array([jpeg_kilobytes(image, self.quality) for image in images], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class JPEGCompressibility(JPEG):
    """-kB / `scale`: smooth pictures win. Flow-GRPO divides by 500, DDPO by 1."""

    scale: float = 500.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be greater than 0, and finite, got {self.scale}")

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B], below 0."""
        return -self.kilobytes(images) / self.scale


@dataclass(frozen=True, kw_only=True)
class JPEGIncompressibility(JPEG):
    """The size in kB: detail and noise win."""

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B], above 0."""
        return self.kilobytes(images)
