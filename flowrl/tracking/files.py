"""Files and folders that are either whole or not there, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a reader sees the old file or the new one, never a part."""
    partial = _hidden(path, "partial")
    partial.write_bytes(data)
    _sync(partial)
    os.replace(partial, path)
    _sync(path.parent)


@contextmanager
def atomic_folder(path: Path, mark: str = "") -> Iterator[Path]:
    """Yields an empty folder to fill; when the block ends it takes the place of `path`, files synced to the disk.

    If the block raises, or the process dies in it, `path` is as before and a hidden `.partial` folder is left, which
    the next attempt at the same path begins by removing. Where several processes may try at once, each has its `mark`.
    """
    partial, old = _hidden(path, f"{mark}partial"), _hidden(path, f"{mark}old")
    for leftover in (partial, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    yield partial
    for item in [*partial.rglob("*"), partial]:
        _sync(item)
    if path.exists():
        path.rename(old)  # a folder cannot be replaced in one move
    partial.rename(path)
    _sync(path.parent)
    if old.exists():
        shutil.rmtree(old)


def remove_folder(path: Path) -> None:
    """Remove a folder without its ever being seen half removed."""
    old = path if path.name.startswith(".") else path.rename(_hidden(path, "old"))
    shutil.rmtree(old)


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _sync(path: Path) -> None:
    """Wait until the disk has the file's bytes, or the folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
