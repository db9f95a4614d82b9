"""Pictures and videos that rows are about: where they are, and whether they can be decoded."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import subprocess
import warnings
import zlib
from functools import lru_cache
from pathlib import Path

from flowrl.data.rows import LineFault, Row
from flowrl.data.schema import MEDIA, TASKS, content_key

PICTURES = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "TIFF", "BMP", "PPM")
"""Pillow's names of the formats that may be in a data set; it knows others that start programs (EPS) or read on."""
BROKEN = (
    OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, struct.error,
    zlib.error,
)  # fmt: skip
"""What Pillow raises for pictures that are not whole."""
PLACEHOLDERS = {"images": "<image>", "videos": "<video>"}
SECONDS = 600  # for one video
ENDING = 300  # characters of what ffmpeg says
SPEAKER = re.compile(r"^(\[[^]]*\] )+")
"""Which part of ffmpeg says a line, and where in memory that is."""


def relocated(row: Row, file: str, folder: Path) -> Row:
    """The row of a data file with paths that hold from a file in `folder` as they did from that; absolute ones stay."""
    if not any(name in row for name in MEDIA):
        return row
    source, target = _resolved(os.path.dirname(file), os.getcwd()), _resolved(str(folder), os.getcwd())

    def moved(path: str) -> str:
        if os.path.isabs(path):
            return path
        return os.path.normpath(path) if source == target else os.path.relpath(f"{source}/{path}", target)

    return row | {name: [moved(path) for path in row[name]] for name in MEDIA if name in row}


@lru_cache(maxsize=1024)
def _resolved(folder: str, here: str) -> str:
    """Where a folder is, links followed: asking the file system for each row would take most of the time."""
    return os.path.realpath(os.path.join(here, folder))


def asked(row: Row, file: str) -> bytes:
    """The `content_key` of a row of a data file, whose media are told apart by where they are."""
    if not any(name in row for name in MEDIA):
        return content_key(row)
    source = _resolved(os.path.dirname(file), os.getcwd())
    paths = {name: [os.path.normpath(os.path.join(source, p)) for p in row[name]] for name in MEDIA if name in row}
    return content_key(row | paths)


def missing(row: Row, file: str) -> list[str]:
    """Media of a row of a data file that are no files."""
    return [path for name in MEDIA for path in row.get(name, ()) if not Path(file).parent.joinpath(path).is_file()]


def check_task(row: Row, wanted: str | None) -> None:
    """Raises LineFault if the row's task, its media and the placeholders in its prompt do not agree."""
    messages = []
    task = row.get("metadata", {}).get("task")
    if wanted is not None and task != wanted:
        messages.append(f"has the task {task!r}, not {wanted!r}")
    if task is not None and task not in TASKS:
        messages.append(f"has an unknown task {task!r}; tasks: {', '.join(TASKS)}")
    elif task is not None:
        messages += [
            f"has {name!r}, which the task {task!r} does not take"
            for name in MEDIA
            if name in row and name not in TASKS[task]
        ]
        messages += [f"has no {name!r}, which the task {task!r} needs" for name in TASKS[task] if name not in row]
    for name, placeholder in PLACEHOLDERS.items():
        count, paths = row["prompt"].count(placeholder), len(row.get(name, ()))
        if count != paths:
            messages.append(f"has {placeholder} {count} times in its prompt but {paths} {name}")
    if messages:
        raise LineFault(*messages)


def check_media(row: Row, file: str, decode: bool) -> None:
    """Raises LineFault for every file that is not there or, if asked, cannot be decoded to its end."""
    absent, folder = missing(row, file), Path(file).parent
    messages = [f"{path}: no such file" for path in absent]
    if decode:
        for path in [path for path in row.get("images", ()) if path not in absent]:
            messages += image_faults(folder / path)
        for path in [path for path in row.get("videos", ()) if path not in absent]:
            messages += video_faults(folder / path)
    if messages:
        raise LineFault(*messages)


def image_faults(path: Path) -> list[str]:
    """Why Pillow cannot decode all its frames: broken, cut short, or large enough to be meant to fill the memory."""
    from PIL import Image, ImageSequence, UnidentifiedImageError

    try:
        with (
            warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
            Image.open(path, formats=PICTURES) as image,
        ):
            for frame in ImageSequence.Iterator(image):
                frame.load()
            cut = image.format == "GIF" and not path.read_bytes().rstrip(b"\0").endswith(b";")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        return [f"{path}: too large a picture: {error}"]
    except UnidentifiedImageError:
        return [f"{path}: cannot be decoded: it does not begin as a picture of {', '.join(PICTURES)} does"]
    except BROKEN as error:
        return [f"{path}: cannot be decoded: {error}"]
    return [f"{path}: is cut short between two frames"] if cut else []


def video_faults(path: Path) -> list[str]:
    """Why ffmpeg cannot decode it to its end."""
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        return [f"{path}: decoding videos needs the extra `video`: pip install -e '.[video]'"]
    from imageio_ffmpeg import get_ffmpeg_exe

    told = ["-v", "error", "-nostdin", "-xerror", "-i", str(path.resolve()), "-map", "0:v:0", "-f", "framecrc", "-"]
    try:
        done = subprocess.run([get_ffmpeg_exe(), *told], capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return [f"{path}: decoding took more than {SECONDS} s"]
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0 or said:
        lines = [SPEAKER.sub("", line.strip()) for line in said.splitlines()] or [f"ffmpeg ends with {done.returncode}"]
        return [f"{path}: cannot be decoded: {lines[-1][:ENDING]}"]
    if all(line.startswith(b"#") for line in done.stdout.splitlines()):
        return [f"{path}: has no frame"]
    return []
