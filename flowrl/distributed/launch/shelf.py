"""Heavy things in shared memory: written by a worker, read by any other, and outliving both.

They are files of /dev/shm, which are written and read like any other: when it is full, that is an error of the writer,
where a mapping would end the process with SIGBUS. Free of torch.
"""

from __future__ import annotations

import os
import tempfile
import uuid
import weakref
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.distributed.records import Packed, restore

SHARED_MEMORY = Path("/dev/shm")
FOLDER = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


@dataclass(frozen=True)
class Shelved:
    """The handle of something on a shelf."""

    path: str
    sizes: tuple[int, ...]  # of the header and of each buffer, in bytes

    def fetch(self) -> Any:
        """A copy. Raises KeyError if it is there no longer."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                parts = [np.fromfile(file, np.uint8, size) for size in self.sizes]
        except FileNotFoundError as error:
            raise KeyError(f"{self.path} is gone: its last handle was dropped, or its run has ended") from error
        return restore(parts[0].tobytes(), parts[1:])


@dataclass(frozen=True)
class Shelf:
    """The shared memory of one run. Pickled copies put things on the same shelf.

    Whatever is left on it after the run was killed is removed by the resource tracker, a process of Python's own which
    all processes of the run share.
    """

    prefix: str = field(default_factory=lambda: f"flowrl-{os.getpid()}-{uuid.uuid4().hex[:8]}-")

    def put(self, packed: Packed) -> Shelved:
        """Raises OSError if there is no room."""
        path = FOLDER / f"{self.prefix}{uuid.uuid4().hex}"
        parts = [np.frombuffer(packed.header, np.uint8), *packed.buffers]
        _track(path)
        try:
            with open(path, "xb", buffering=0, opener=_private) as file:
                for part in parts:
                    _write(file.fileno(), part)
        except OSError as error:
            _remove(path)
            hint = f"{packed.nbytes / 2**20:.0f} MiB do not fit; enlarge {FOLDER} (docker: --shm-size)"
            raise OSError(error.errno, f"{error.strerror}: {hint}", str(path)) from error
        return Shelved(str(path), tuple(part.nbytes for part in parts))

    def own(self, shelved: Shelved) -> Shelved:
        """The same, which goes from the shelf when this very handle, not a copy, is garbage."""
        weakref.finalize(shelved, _remove, Path(shelved.path))
        return shelved

    def clear(self) -> None:
        """Take everything off."""
        for path in FOLDER.glob(f"{self.prefix}*"):
            _remove(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write(descriptor: int, part: np.ndarray) -> None:
    """All of it: one call writes 2 GiB at most."""
    rest = part.data
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _track(path: Path) -> None:
    if FOLDER == SHARED_MEMORY:
        resource_tracker.register(f"/{path.name}", "shared_memory")


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except FileNotFoundError:  # the run has ended meanwhile
        return
    if FOLDER == SHARED_MEMORY:
        resource_tracker.unregister(f"/{path.name}", "shared_memory")
