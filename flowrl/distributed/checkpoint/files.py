"""Files that are on the disk when a function returns, and their hashes."""

from __future__ import annotations

import hashlib
import os
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


def replace_synced(path: Path, data: bytes) -> None:
    """A reader sees the old file or the new one, whenever the process is killed."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    write_synced(partial, data)
    partial.replace(path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
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
