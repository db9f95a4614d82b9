"""Videos are written as they were drawn, and stand on pages as four of their frames."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowrl.tracking import video
from flowrl.tracking.video import encoded, file_name, frames_shown, save, still, stills, storyboard
from tests.unit.tracking.conftest import flat_video

PICTURE = np.random.default_rng(0).integers(0, 256, (32, 80, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("num_frames", "num", "expected"), [(33, 4, [0, 11, 21, 32]), (4, 4, [0, 1, 2, 3]), (2, 4, [0, 1]), (1, 4, [0])]
)
def test_frames_shown(num_frames: int, num: int, expected: list[int]) -> None:
    assert frames_shown(num_frames, num) == expected


def test_a_storyboard_is_read_from_left_to_right_and_down() -> None:
    page = storyboard(flat_video(10, 20, 30, 40, 50, 60, 70))
    assert page.shape == (2 * 32 + video.GAP, 2 * 80 + video.GAP, 3)
    assert [page[y, x, 0] for y in (0, -1) for x in (0, -1)] == [10, 30, 50, 70]
    assert (page[32 : 32 + video.GAP] == 255).all() and (page[:, 80 : 80 + video.GAP] == 255).all()


@pytest.mark.parametrize(("num_frames", "rows", "columns"), [(1, 1, 1), (2, 1, 2), (3, 2, 2)])
def test_a_storyboard_of_few_frames(num_frames: int, rows: int, columns: int) -> None:
    height, width, _ = storyboard(flat_video(*range(num_frames))).shape
    assert (height, width) == (rows * (32 + video.GAP) - video.GAP, columns * (80 + video.GAP) - video.GAP)


def test_small_frames_stay_as_they_are_and_large_ones_are_reduced() -> None:
    assert np.array_equal(storyboard(PICTURE[None]), PICTURE)
    assert storyboard(np.zeros((1, 480, 832, 3), np.uint8)).shape == (148, video.FRAME_SIDE, 3)


def test_a_picture_is_its_own_still() -> None:
    assert still(PICTURE) is PICTURE and stills(PICTURE[None]).shape == (1, 32, 80, 3)
    assert stills(flat_video(1, 2)[None]).shape == (1, 32, 160 + video.GAP, 3)


def read(path: Path) -> list[float]:
    """Every frame's mean grey value."""
    if path.suffix == ".gif":
        film = Image.open(path)
        return [np.asarray(film.convert("RGB")).mean() for place in range(film.n_frames) if film.seek(place) is None]
    import imageio.v3 as imageio

    frames: np.ndarray = imageio.imread(path, plugin="FFMPEG")
    return frames.mean(axis=(1, 2, 3)).tolist()


def test_a_film_has_every_frame_in_order(tmp_path: Path, film_suffix: str) -> None:
    shades = [10, 200, 90, 40, 160]
    frames = flat_video(*shades)
    assert file_name("0", frames) == f"0{film_suffix}"
    save(frames, tmp_path / file_name("0", frames), fps=16.0)
    assert read(tmp_path / f"0{film_suffix}") == pytest.approx(shades, abs=2)


def test_colours_and_time_of_a_gif() -> None:
    film = Image.open(io.BytesIO(encoded(np.stack([PICTURE, PICTURE[::-1]]), 16.0, ".gif")))
    assert (film.n_frames, film.info["duration"], film.info["loop"], film.size) == (2, 60, 0, (80, 32))
    smooth = np.stack([np.stack([np.arange(80) * 3] * 32)] * 3, axis=-1).astype(np.uint8)
    shown = np.asarray(Image.open(io.BytesIO(encoded(smooth[None], 16.0, ".gif"))).convert("RGB"))
    assert np.abs(shown.astype(int) - smooth).max() <= 8


def test_speed_and_odd_sizes_of_an_mp4() -> None:
    imageio = pytest.importorskip("imageio.v3", reason='pip install -e ".[video]"')
    film = encoded(flat_video(50, 100, 150)[:, :31, :77], 24.0, ".mp4")
    assert imageio.immeta(film, extension=".mp4", plugin="FFMPEG")["fps"] == 24.0
    frames = imageio.imread(film, extension=".mp4", plugin="FFMPEG")
    assert frames.shape == (3, 32, 78, 3)
    assert np.abs(frames[1].astype(int) - 100).max() <= 2  # the border has the colour of its neighbour


def test_pictures_are_saved_as_they_are(tmp_path: Path) -> None:
    save(PICTURE, tmp_path / file_name("0", PICTURE), fps=16.0)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "0.png")), PICTURE)
    with pytest.raises(ValueError, match=r"written as \.mp4 or \.gif, not as \.avi"):
        encoded(PICTURE[None], 16.0, ".avi")


def test_the_way_out_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    video.video_suffix.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [file_name("0", PICTURE[None]), file_name("1", PICTURE[None])] == ["0.gif", "1.gif"]
    assert len(caplog.messages) == 1 and 'pip install -e ".[video]"' in caplog.messages[0]
    video.video_suffix.cache_clear()
