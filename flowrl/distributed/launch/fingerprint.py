"""Whether two processes run the same flowrl, wherever its files lie. Free of torch."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fingerprint:
    """What has to be the same in the driver and in its workers."""

    flowrl: str  # of the contents of all its modules
    python: str
    torch: str

    def differences(self, other: Fingerprint) -> Iterator[str]:
        """`torch 2.12.0 instead of 2.13.0`, for each thing in which `other` differs."""
        for name, mine in vars(self).items():
            theirs = vars(other)[name]
            if theirs != mine:
                yield f"{name} {theirs} instead of {mine}"


def own_fingerprint() -> Fingerprint:
    """Of this process."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return Fingerprint(digest.hexdigest()[:12], platform.python_version(), metadata.version("torch"))
