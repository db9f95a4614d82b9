"""Files and folders that are either whole or not there, whenever the process is killed; and their hashes."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def sha256(data: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_of(path: Path) -> str:
    """Of a file's content, without holding it in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to fill, on the disk when the block ends; its folder must be synced too before its name is safe.

    Raises OSError that names the file, whatever in the block raised it: a full disk does not say where.
    """
    try:
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_synced(path: Path, data: bytes) -> None:
    """A new file with this content."""
    with new_file(path) as file:
        file.write(data)


def write_atomic(path: Path, data: bytes, mark: str = "", *, durable: bool = True) -> None:
    """Replace `path` by `data`: a reader sees the old file or the new one, never a part.

    Where several processes may write the same file at once, each has its `mark`. Without `durable` nobody waits for the
    disk: that is for files that can be made again, whose reader notices what a power failure has left of them.
    """
    partial = _hidden(path, f"{mark}partial")
    partial.unlink(missing_ok=True)
    try:
        if durable:
            write_synced(partial, data)
        else:
            partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # it would keep a full disk full
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the disk has a file's bytes, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_of(path: Path) -> int | None:
    """Bytes of an ordinary file; None for a link, a folder, a pipe, or nothing at all."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def is_folder(path: Path) -> bool:
    """A folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


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
        sync(item)
    if path.exists():
        path.rename(old)  # a folder cannot be replaced in one move
    partial.rename(path)
    sync(path.parent)
    if old.exists():
        shutil.rmtree(old)


def remove_folder(path: Path) -> None:
    """Remove a folder without its ever being seen half removed."""
    old = path if path.name.startswith(".") else path.rename(_hidden(path, "old"))
    shutil.rmtree(old)


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")
