"""Draws the pictures that `tiny_sd3` is pre-trained on: one short word on a coloured sign, 32x80 pixels.

Two populations. *Plain* signs are bold, dark on light and upright: any reader gets them right. *Wide* signs add
everything that a reader stumbles over: thin and odd fonts, small letters, low contrast, rotation, strokes through the
word, blur. A model of the mixture spells correctly yet is often illegible, and what it lacks is a *style*, which
is what reinforcement learning can find. Every sign is a function of (seed, index) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

HEIGHT, WIDTH = 32, 80
"""Size of every picture, in pixels."""

PLAIN_FONTS = ("DejaVuSans-Bold", "DejaVuSansMono-Bold")
WIDE_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Oblique",
    "DejaVuSansMono-Oblique",
    "DejaVuSerif",
    "DejaVuSerif-BoldItalic",
    "STIXGeneral",
    "STIXGeneralItalic",
    "cmr10",
    "cmsy10",  # calligraphic capitals
    "cmti10",
    "cmtt10",
)

Colour = tuple[int, int, int]
Line = tuple[float, float, float, float]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one sign looks; `draw` turns it and a word into pixels without further randomness."""

    font: str
    size: int
    background: Colour
    ink: Colour
    offset: tuple[float, float]
    angle: float = 0.0
    strokes: tuple[Line, ...] = ()
    blur: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Looks:
    """The mixture that styles are drawn from: `plain_share` of the signs are plain, the rest as wide as this says."""

    plain_share: float = 1.0
    contrast: tuple[float, float] = (8.0, 120.0)
    size: tuple[int, int] = (11, 20)
    angle: float = 12.0
    max_strokes: int = 6
    max_blur: float = 1.6

    def sample(self, rng: Generator) -> Style:
        """One style."""
        return _plain_style(rng) if rng.random() < self.plain_share else self._wide_style(rng)

    def _wide_style(self, rng: Generator) -> Style:
        background = rng.integers(50, 230, 3)
        low, high = np.log(self.contrast)
        step = np.exp(rng.uniform(low, high)) * rng.choice((-1, 1))
        ink = np.clip(background + step + rng.normal(0, 6, 3), 0, 255)
        num_strokes = int(rng.integers(0, self.max_strokes + 1))
        return Style(
            font=str(rng.choice(WIDE_FONTS)),
            size=int(rng.integers(self.size[0], self.size[1] + 1)),
            background=_colour(background),
            ink=_colour(ink),
            offset=(rng.uniform(-4, 4), rng.uniform(-3, 3)),
            angle=rng.normal(0, self.angle),
            strokes=tuple(_stroke(rng) for _ in range(num_strokes)),
            blur=rng.uniform(0, self.max_blur),
        )


def _plain_style(rng: Generator) -> Style:
    return Style(
        font=str(rng.choice(PLAIN_FONTS)),
        size=int(rng.integers(20, 23)),
        background=_colour(rng.integers(150, 256, 3)),
        ink=_colour(rng.integers(0, 91, 3)),
        offset=(rng.uniform(-2, 2), rng.uniform(-2, 2)),
    )


def _colour(values: NDArray[np.generic]) -> Colour:
    red, green, blue = (int(value) for value in values)
    return red, green, blue


def _stroke(rng: Generator) -> Line:
    """A line from the left half to the right half, so that it crosses letters."""
    return (
        rng.uniform(0, WIDTH / 2),
        rng.uniform(4, HEIGHT - 4),
        rng.uniform(WIDTH / 2, WIDTH),
        rng.uniform(4, HEIGHT - 4),
    )


@lru_cache(maxsize=256)
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"), size)


def _fitting_font(name: str, size: int, word: str) -> ImageFont.FreeTypeFont:
    """The largest font of at most `size` that leaves a margin beside the word."""
    font = _font(name, size)
    while font.getlength(word) > WIDTH - 5 and font.size > 8:
        font = _font(name, int(font.size) - 1)
    return font


def draw(word: str, style: Style) -> Pixels:
    """The sign `[32, 80, 3]`."""
    word = word.upper()
    font = _fitting_font(style.font, style.size, word)
    mask = Image.new("L", (WIDTH, HEIGHT))
    pen = ImageDraw.Draw(mask)
    left, top, right, bottom = pen.textbbox((0, 0), word, font=font)
    corner = ((WIDTH - left - right) / 2 + style.offset[0], (HEIGHT - top - bottom) / 2 + style.offset[1])
    pen.text(corner, word, font=font, fill=255)
    if style.angle:
        mask = mask.rotate(style.angle, resample=Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(mask)
    for stroke in style.strokes:
        pen.line(stroke, fill=255, width=1)
    if style.blur:
        mask = mask.filter(ImageFilter.GaussianBlur(style.blur))
    sign = Image.new("RGB", (WIDTH, HEIGHT), style.background)
    sign.paste(style.ink, (0, 0), mask)
    return np.asarray(sign)


def render(words: Sequence[str], looks: Looks, seed: int, start: int = 0) -> Pixels:
    """Signs `[len(words), 32, 80, 3]`; sign i is keyed by (seed, start + i)."""
    signs = np.empty((len(words), HEIGHT, WIDTH, 3), np.uint8)
    for index, word in enumerate(words):
        rng = np.random.default_rng((seed, start + index))
        signs[index] = draw(word, looks.sample(rng))
    return signs


def render_parallel(words: Sequence[str], looks: Looks, seed: int, workers: int, chunk: int = 2000) -> Pixels:
    """`render` on several processes: the same pictures, whatever `workers`."""
    starts = range(0, len(words), chunk)
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        futures = [pool.submit(render, words[start : start + chunk], looks, seed, start) for start in starts]
        return np.concatenate([future.result() for future in futures])
