"""A scorer somewhere else: pictures are sent to a reward server, `python -m flowrl.cli.serve_reward` or its like.

The server may have an environment, a machine and GPUs of its own. What travels: `flowrl.rewards.wire`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowrl.rewards import wire
from flowrl.rewards.transport import PAGE_BYTES, AnswerError, Server, check_whole

if TYPE_CHECKING:
    from flowrl.prompts import Prompt

SCORE_BYTES = 64  # of an answer, for each score
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in wire.FORMATS:
            raise ValueError(f"format must be {' or '.join(wire.FORMATS)}, got {self.format!r}")
        check_whole("batch_size", self.batch_size, 1)

    def load(self) -> None:
        """Wait until the server is ready. Raises UnreachableError if it takes longer than `start_timeout_s`."""
        self.connection.wait("/healthz")

    def score_limit_s(self, num_samples: int) -> float:
        """See `scoring.SelfTimed`."""
        return super().score_limit_s(math.ceil(num_samples / self.batch_size))

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B]. Raises UnreachableError for a server that is away, AnswerError for one that refuses."""
        starts = range(0, len(images), self.batch_size)
        batches = [slice(start, start + self.batch_size) for start in starts]
        return np.concatenate(self.connection.map(lambda part: self._scored(images[part], prompts[part]), batches))

    def _scored(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Of one request."""
        body, max_bytes = wire.encode(images, prompts, self.format), PAGE_BYTES + SCORE_BYTES * len(images)
        answer = self.connection.post(wire.PATH, body, HEADERS, max_bytes)
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
