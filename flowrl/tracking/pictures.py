"""Contact sheets: many pictures on one page, readable at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

PAPER, INK, MUTED, BETTER, WORSE, FRAME = "#ffffff", "#1f2328", "#6b7280", "#1a7f37", "#b42318", "#d0d7de"
SMALLEST, LARGEST = 200, 360  # pixels of a picture's longer side on the page
PAGE_WIDTH = 1600  # pixels that a before/after sheet tries to fill
MARGIN, GAP, PAIR_GAP, FONT_SIZE = 28, 28, 10, 16
LINE = FONT_SIZE + 12


@dataclass(frozen=True)
class Tile:
    """A picture with a label at its lower left and a note at its lower right."""

    picture: np.ndarray  # uint8 [H, W, 3]
    label: str
    note: str = ""
    colour: str = MUTED  # of the note


def contact_sheet(rows: Sequence[np.ndarray], labels: Sequence[Sequence[str]]) -> Image.Image:
    """Pictures uint8 [B, H, W, 3] by row, each over its label [B]; all of one size.

    Small pictures are enlarged by a whole factor without smoothing, so that one sees the pixels that the model drew;
    large ones are reduced. A label wider than its picture is cut. Raises ValueError for a picture without a label.
    """
    lines = [
        [Tile(picture, label) for picture, label in zip(pictures, texts, strict=True)]
        for pictures, texts in zip(rows, labels, strict=True)
    ]
    return _page(lines, per_group=1, headers=())


def gallery(images: np.ndarray, captions: Sequence[str]) -> Image.Image:
    """A contact sheet of uint8 [B, H, W, 3], as many in a line as a page holds."""
    width, _ = _displayed(images.shape[2], images.shape[1])
    starts = range(0, len(images), max(1, (PAGE_WIDTH - 2 * MARGIN + GAP) // (width + GAP)))
    return contact_sheet([images[i : i + starts.step] for i in starts], [captions[i : i + starts.step] for i in starts])


def before_after_sheet(
    before: np.ndarray,
    after: np.ndarray,
    targets: Sequence[str],
    scores_before: Sequence[float],
    scores_after: Sequence[float],
) -> Image.Image:
    """The same prompts and seeds before and after training, side by side: target and score beneath each picture.

    `before` and `after` are uint8 [B, H, W, 3]. A score that rose is green, one that fell is red.
    """
    pairs = [
        (Tile(old, target, _score(low)), Tile(new, target, _score(high), _trend(low, high)))
        for old, new, target, low, high in zip(before, after, targets, scores_before, scores_after, strict=True)
    ]
    width, _ = _displayed(before.shape[2], before.shape[1])
    per_line = max(1, min(len(pairs), (PAGE_WIDTH - 2 * MARGIN + GAP) // (2 * width + PAIR_GAP + GAP)))
    lines = [[tile for pair in pairs[i : i + per_line] for tile in pair] for i in range(0, len(pairs), per_line)]
    return _page(lines, per_group=2, headers=("before", "after"))


def _score(value: float) -> str:
    return f"{value:.2f}"


def _trend(before: float, after: float) -> str:
    return MUTED if after == before else BETTER if after > before else WORSE


def _page(lines: Sequence[Sequence[Tile]], per_group: int, headers: Sequence[str]) -> Image.Image:
    """Lines of tiles; each `per_group` neighbours stand close together and repeat the `headers` above them."""
    if not lines or not lines[0]:
        raise ValueError("a contact sheet needs at least one picture")
    height, width, _ = lines[0][0].picture.shape
    size = _displayed(width, height)
    columns = max(len(line) for line in lines)
    lefts = [MARGIN + column * size[0] + _gaps(column, per_group) for column in range(columns)]
    top = MARGIN + (LINE if headers else 0)
    pitch = size[1] + LINE + GAP // 2
    page = Image.new("RGB", (lefts[-1] + size[0] + MARGIN, top + len(lines) * pitch - GAP // 2 + MARGIN), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(FONT_SIZE)
    for column, left in enumerate(lefts if headers else []):
        draw.text((left, MARGIN), headers[column % per_group], INK, font, anchor="lm")
    for row, line in enumerate(lines):
        for left, tile in zip(lefts, line, strict=False):
            _paste(page, draw, font, tile, (left, top + row * pitch), size)
    return page


def _gaps(column: int, per_group: int) -> int:
    """The space to the left of a column that is not pictures."""
    between = column // per_group
    return between * GAP + (column - between) * PAIR_GAP


def _paste(
    page: Image.Image,
    draw: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    tile: Tile,
    corner: tuple[int, int],
    size: tuple[int, int],
) -> None:
    (left, top), (width, height) = corner, size
    enlarged = width >= tile.picture.shape[1]
    picture = Image.fromarray(tile.picture)
    page.paste(picture.resize(size, Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS), corner)
    draw.rectangle((left - 1, top - 1, left + width, top + height), outline=FRAME)
    middle = top + height + LINE // 2
    note_width = draw.textlength(tile.note, font)
    draw.text((left + width, middle), tile.note, tile.colour, font, anchor="rm")
    label = _shortened(tile.label, width - note_width - 8 * bool(tile.note), draw, font)
    draw.text((left, middle), label, INK, font, anchor="lm")


def _displayed(width: int, height: int) -> tuple[int, int]:
    """Width and height on the page."""
    side = max(width, height)
    scale = LARGEST / side if side > LARGEST else math.ceil(SMALLEST / side)
    return round(width * scale), round(height * scale)


def _shortened(
    text: str, width: float, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> str:
    """The longest beginning of the text's first line that fits, with dots if it is not all."""
    line = " ".join(text.split())
    if draw.textlength(line, font) <= width:
        return line
    while line and draw.textlength(line + "...", font) > width:
        line = line[:-1]
    return line + "..."
