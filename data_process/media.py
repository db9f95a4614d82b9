"""Pictures and videos that rows are about: where they are, and whether they can be decoded."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import warnings
from pathlib import Path

from flowrl.data.rows import LineFault, Row
from flowrl.data.schema import MEDIA, TASKS

PLACEHOLDERS = {"images": "<image>", "videos": "<video>"}
SECONDS = 600  # for one video
ENDING = 300  # characters of what ffmpeg says


def relocated(row: Row, file: str, folder: Path) -> Row:
    """The row of a data file with paths that hold from a file in `folder` as they did from that; absolute ones stay."""
    if not any(name in row for name in MEDIA):
        return row
    source, target = Path(file).parent.resolve(), folder.resolve()
    return row | {
        name: [path if os.path.isabs(path) else os.path.relpath(source / path, target) for path in row[name]]
        for name in MEDIA
        if name in row
    }


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
    """Why Pillow cannot decode it: broken, cut short, or so large that it may be meant to fill the memory."""
    from PIL import Image

    try:
        with (
            warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
            Image.open(path) as image,
        ):
            image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        return [f"{path}: too large a picture: {error}"]
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        return [f"{path}: cannot be decoded: {error}"]
    return []


def video_faults(path: Path) -> list[str]:
    """Why ffmpeg cannot decode it to its end."""
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        return [f"{path}: decoding videos needs the extra `video`: pip install 'flowrl[video]'"]
    from imageio_ffmpeg import get_ffmpeg_exe

    told = ["-v", "error", "-nostdin", "-xerror", "-i", str(path.resolve()), "-map", "0:v:0", "-f", "framecrc", "-"]
    try:
        done = subprocess.run([get_ffmpeg_exe(), *told], capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return [f"{path}: decoding took more than {SECONDS} s"]
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0 or said:
        return [f"{path}: cannot be decoded: {said[-ENDING:]}"]
    if all(line.startswith(b"#") for line in done.stdout.splitlines()):
        return [f"{path}: has no frame"]
    return []
