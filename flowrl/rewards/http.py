"""A scorer somewhere else: pictures are sent to a reward server, `python -m flowrl.cli.serve_reward` or its like.

The server may have an environment, a machine and GPUs of its own. What travels: `flowrl.rewards.wire`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flowrl.rewards import wire
from flowrl.rewards.transport import AnswerError, Connection, Server

if TYPE_CHECKING:
    from flowrl.prompts import Prompt

HEADERS = {"content-type": wire.CONTENT_TYPE, wire.VERSION_HEADER: wire.VERSION}


@dataclass(frozen=True, kw_only=True)
class HTTP(Server):
    """The scores of a reward server, whatever it scores with. See `transport.Server` for the other fields.

    Args:
        format: safetensors sends pixels as they are; png, which is lossless too, sends less and costs time to write.
        batch_size: pictures in one request; the server may join requests to larger batches.
    """

    format: str = "safetensors"
    batch_size: int = 32
    _connection: Connection = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in wire.FORMATS:
            raise ValueError(f"format must be {' or '.join(wire.FORMATS)}, got {self.format!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")

    def load(self) -> None:
        """Wait until the server is ready. Raises UnreachableError if it takes longer than `start_timeout_s`."""
        connection = self.connect()
        connection.wait("/healthz")
        object.__setattr__(self, "_connection", connection)

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B]. Raises UnreachableError for a server that is away, AnswerError for one that refuses."""
        starts = range(0, len(images), self.batch_size)
        batches = [slice(start, start + self.batch_size) for start in starts]
        return np.concatenate(self._connection.map(lambda part: self._scored(images[part], prompts[part]), batches))

    def _scored(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Of one request."""
        answer = self._connection.post(wire.PATH, wire.encode(images, prompts, self.format), HEADERS)
        try:
            return wire.read_scores(answer, len(images))
        except wire.WireError as error:
            raise AnswerError(f"{self.url}{wire.PATH} answered, but {error}") from error


@dataclass(frozen=True, kw_only=True)
class VideoHTTP(HTTP):
    """The same for a server whose scorer looks at videos as a whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format != "safetensors":
            raise ValueError(f"format must be safetensors for videos, got {self.format!r}")

    def score_videos(self, videos: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [K] for the chosen frames of each video, uint8 [K, n, H, W, 3]."""
        return self.score(videos, prompts)
