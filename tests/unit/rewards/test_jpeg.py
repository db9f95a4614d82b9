"""JPEG sizes as rewards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowrl.prompts import Prompt
from flowrl.rewards.jpeg import JPEGCompressibility, JPEGIncompressibility

RNG = np.random.default_rng(0)
FLAT = np.full((64, 48, 3), 90, np.uint8)
NOISE = RNG.integers(0, 256, (64, 48, 3), dtype=np.uint8)
PICTURES = np.stack([FLAT, NOISE])
PROMPTS = [Prompt("p", "")] * 2


@pytest.mark.parametrize("quality", [95, 50])
def test_is_the_size_of_the_file_that_pillow_writes(tmp_path: Path, quality: int) -> None:
    sizes = JPEGIncompressibility(quality=quality).score(PICTURES, PROMPTS)
    for picture, size in zip(PICTURES, sizes, strict=True):
        path = tmp_path / "picture.jpg"
        Image.fromarray(picture).save(path, quality=quality)
        assert size == path.stat().st_size / 1000


def test_directions_and_scales() -> None:
    kilobytes = JPEGIncompressibility().score(PICTURES, PROMPTS)
    assert kilobytes.dtype == np.float64 and kilobytes[0] < kilobytes[1]
    np.testing.assert_array_equal(JPEGCompressibility().score(PICTURES, PROMPTS), -kilobytes / 500)  # Flow-GRPO
    np.testing.assert_array_equal(JPEGCompressibility(scale=1.0).score(PICTURES, PROMPTS), -kilobytes)  # DDPO


def test_impossible_settings() -> None:
    with pytest.raises(ValueError, match=r"quality must be in \[1, 95\], got 0"):
        JPEGIncompressibility(quality=0)
    with pytest.raises(ValueError, match="scale must be greater than 0"):
        JPEGCompressibility(scale=0.0)
    with pytest.raises(ValueError, match="quality must be"):
        JPEGCompressibility(quality=100)
