"""Contact sheets show every picture where it belongs, pixel for pixel when enlarged."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from flowrl.tracking import pictures
from flowrl.tracking.pictures import before_after_sheet, contact_sheet, gallery


def flat(*values: int, height: int = 32, width: int = 80) -> np.ndarray:
    """One picture of one red value each."""
    images = np.zeros((len(values), height, width, 3), np.uint8)
    images[..., 0] = np.array(values)[:, None, None]
    return images


def reds(sheet: Image.Image) -> np.ndarray:
    """int [rows, columns] of the pictures' red values, in reading order, from the pure reds of the sheet."""
    pixels = np.asarray(sheet).astype(int)
    is_red = (pixels[..., 1] == 0) & (pixels[..., 2] == 0)
    columns = np.flatnonzero(np.diff(is_red.any(0).astype(int), prepend=0) == 1)
    rows = np.flatnonzero(np.diff(is_red.any(1).astype(int), prepend=0) == 1)
    return np.array([[pixels[y + 2, x + 2, 0] if is_red[y + 2, x + 2] else -1 for x in columns] for y in rows])


def test_rows_are_rows_and_may_differ_in_length() -> None:
    sheet = contact_sheet([flat(10, 20, 30), flat(40, 50)], [["a", "b", "c"], ["d", "e"]])
    assert reds(sheet).tolist() == [[10, 20, 30], [40, 50, -1]]


def test_small_pictures_are_enlarged_without_smoothing() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (32, 80, 3), dtype=np.uint8)
    pixels = np.asarray(contact_sheet([picture[None]], [[""]]))
    enlarged = pixels[pictures.MARGIN :][: 3 * 32, pictures.MARGIN :][:, : 3 * 80]
    assert np.array_equal(enlarged, picture.repeat(3, 0).repeat(3, 1))


def test_large_pictures_are_reduced() -> None:
    sheet = contact_sheet([flat(9, height=1024, width=2048)], [["a"]])
    assert sheet.width == pictures.LARGEST + 2 * pictures.MARGIN and sheet.height < sheet.width


def test_before_and_after_stand_side_by_side() -> None:
    count = 7
    before, after = flat(*range(10, 10 + count)), flat(*range(110, 110 + count))
    grid = reds(before_after_sheet(before, after, ["FLOW"] * count, [0.5] * count, [1.0] * count))
    assert grid.tolist() == [[10, 110, 11, 111, 12, 112], [13, 113, 14, 114, 15, 115], [16, 116, -1, -1, -1, -1]]


@pytest.mark.parametrize(("after", "colour"), [(1.0, pictures.BETTER), (0.1, pictures.WORSE), (0.5, None)])
def test_a_score_that_rose_is_green_and_one_that_fell_is_red(after: float, colour: str | None) -> None:
    sheet = before_after_sheet(flat(0), flat(0), ["FLOW"], [0.5], [after])
    found = {f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in sheet.getcolors(1 << 20) or []}
    assert found & {pictures.BETTER, pictures.WORSE} == ({colour} if colour else set())


def test_a_long_prompt_is_cut_and_does_not_reach_its_neighbour() -> None:
    prompt = "A very long prompt\nwith two lines and " + "many words " * 20
    assert contact_sheet([flat(1, 2)], [[prompt, ""]]).size == contact_sheet([flat(1, 2)], [["", ""]]).size
    pixels = np.asarray(contact_sheet([flat(1, 2)], [[prompt, ""]]).convert("L"))
    gap = slice(pictures.MARGIN + 240 + 1, pictures.MARGIN + 240 + pictures.GAP - 1)
    assert (pixels[:, gap] == 255).all()


def test_a_gallery_fills_lines_and_keeps_the_order() -> None:
    grid = reds(gallery(flat(*range(1, 9)), [""] * 8))
    assert grid.flatten()[:8].tolist() == list(range(1, 9)) and grid.shape[1] == 5


def test_pictures_and_labels_must_match() -> None:
    with pytest.raises(ValueError):
        contact_sheet([flat(1, 2)], [["one"]])
    with pytest.raises(ValueError, match="at least one picture"):
        contact_sheet([], [])
