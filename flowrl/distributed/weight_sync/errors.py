"""What can go wrong with a publication."""

from __future__ import annotations

from collections.abc import Collection


class PublishError(RuntimeError):
    """Trainer and engine do not fit together; trying again would fail again."""


class TransferError(PublishError):
    """A version did not arrive whole and in time: a peer died or is stuck, or bytes changed on the way."""


class AbortedError(TransferError):
    """Another party gave the publication up; its own error is the reason."""


def some(names: Collection[str], limit: int = 3) -> str:
    """The first few names, and how many there are besides."""
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
