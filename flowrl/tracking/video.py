"""Videos where pictures are kept and shown: files to be watched, and a still that stands for one on a page.

A picture is uint8 [H, W, 3], a video [F, H, W, 3]; several of them have one more axis in front.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import math
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

FRAMES_SHOWN = 4  # of a video on a page
FRAME_SIDE = 256  # pixels that the longer side of such a frame has at most
GAP = 2  # between them
PICTURE, VIDEO = 3, 4  # axes

log = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------- on a page


def still(picture: np.ndarray) -> np.ndarray:
    """A picture as it is; of a video its `storyboard`."""
    return picture if picture.ndim == PICTURE else storyboard(picture)


def stills(images: np.ndarray) -> np.ndarray:
    """uint8 [B, H, W, 3] of B pictures or videos."""
    return images if images.ndim == 1 + PICTURE else np.stack([still(video) for video in images])


def frames_shown(num_frames: int, num: int) -> list[int]:
    """Evenly spaced indices from the first frame to the last; all of them if there are no more than `num`."""
    return [round(place) for place in np.linspace(0, num_frames - 1, min(num, num_frames))]


def storyboard(video: np.ndarray) -> np.ndarray:
    """Four frames from the first to the last, in reading order: two above two; large ones reduced."""
    frames = [_reduced(video[index]) for index in frames_shown(len(video), FRAMES_SHOWN)]
    columns = math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    height, width, _ = frames[0].shape
    page = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), 255, np.uint8)
    for index, frame in enumerate(frames):
        top, left = (index // columns) * (height + GAP), (index % columns) * (width + GAP)
        page[top : top + height, left : left + width] = frame
    return page


def _reduced(frame: np.ndarray) -> np.ndarray:
    picture = Image.fromarray(frame)
    picture.thumbnail((FRAME_SIDE, FRAME_SIDE), Image.Resampling.LANCZOS)  # leaves small ones alone
    return np.asarray(picture)


# ---------------------------------------------------------------------------------------------- in a file


def file_name(stem: str, picture: np.ndarray) -> str:
    """`stem` with .png for a picture; of a video .mp4, or .gif where that cannot be written."""
    return stem + (".png" if picture.ndim == PICTURE else video_suffix())


def save(picture: np.ndarray, path: Path, fps: float) -> None:
    """Write a picture or a video, in the format of the path's suffix."""
    if picture.ndim == PICTURE:
        Image.fromarray(picture).save(path)
    else:
        path.write_bytes(encoded(picture, fps, path.suffix))


@cache
def video_suffix() -> str:
    """.mp4 where imageio and its ffmpeg are installed, else .gif; that is said when it is first asked for."""
    if importlib.util.find_spec("imageio") and importlib.util.find_spec("imageio_ffmpeg"):
        return ".mp4"
    log.warning('videos are written as GIFs, in 256 colours: for .mp4 files run pip install -e ".[video]"')
    return ".gif"


def encoded(video: np.ndarray, fps: float, suffix: str) -> bytes:
    """The video as a file of the format `suffix`, .mp4 or .gif. Raises ValueError for any other."""
    if suffix == ".mp4":
        return _mp4(video, fps)
    if suffix == ".gif":
        return _gif(video, fps)
    raise ValueError(f"a video is written as .mp4 or .gif, not as {suffix}")


def _mp4(video: np.ndarray, fps: float) -> bytes:
    """H.264 as every browser plays it, which wants even sizes: the last row or column is drawn twice if need be."""
    import imageio.v3 as imageio

    _, height, width, _ = video.shape
    even = np.pad(video, [(0, 0), (0, height % 2), (0, width % 2), (0, 0)], mode="edge")
    written: bytes = imageio.imwrite(
        "<bytes>", even, extension=".mp4", plugin="FFMPEG", fps=fps, codec="libx264", quality=8, macro_block_size=1
    )
    if not written:  # ffmpeg says why on the terminal, and to nobody else
        raise OSError(f"ffmpeg has written nothing of {len(video)} frames of {height} x {width} at fps={fps}")
    return written


def _gif(video: np.ndarray, fps: float) -> bytes:
    """Frame times are rounded to 1/100 s."""
    # Pillow's own choice of 256 colours takes forty times as long: 5 s for 33 frames of 240x416.
    first, *others = (Image.fromarray(frame).quantize(256, Image.Quantize.FASTOCTREE) for frame in video)
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=1000 / fps, loop=0)
    return buffer.getvalue()
