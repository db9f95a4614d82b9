"""Videos as rewards see them: which frames are scored, and by whom.

A scorer of pictures gets the frames one by one and its scores are averaged. One that looks at a video as a whole is a
`VideoScorer`. Free of torch, like everything that a worker imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from flowrl.prompts import Prompt


@runtime_checkable
class VideoScorer(Protocol):
    """A `types.Scorer` that also scores whole videos. Its `score` is for models that draw pictures, and may refuse."""

    def score_videos(self, videos: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [K] for the chosen frames of each video, uint8 [K, n, H, W, 3]. Raises on failure."""
        ...


@runtime_checkable
class Frames(Protocol):
    """Which frames of a video are scored."""

    def choose(self, num_frames: int) -> Sequence[int]:
        """Indices below `num_frames`, rising, at least one."""
        ...


@dataclass(frozen=True)
class AllFrames:
    """Every frame."""

    def choose(self, num_frames: int) -> Sequence[int]:
        """0, 1, 2 ..."""
        return range(num_frames)


@dataclass(frozen=True)
class EveryKth:
    """The first frame and every `k`-th after it."""

    k: int = 4

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")

    def choose(self, num_frames: int) -> Sequence[int]:
        """0, k, 2k ..."""
        return range(0, num_frames, self.k)


@dataclass(frozen=True)
class UniformFrames:
    """The middle frames of `num` equal parts, so that each stands for as much of the video; all frames if it has fewer.

    The cost of a reward does not depend on the length of the videos.
    """

    num: int = 8

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ValueError(f"num must be at least 1, got {self.num}")

    def choose(self, num_frames: int) -> Sequence[int]:
        """floor((i + 1/2) F / num)."""
        num = min(self.num, num_frames)
        return [(2 * part + 1) * num_frames // (2 * num) for part in range(num)]


def chosen(videos: np.ndarray, frames: Frames) -> np.ndarray:
    """uint8 [K, n, H, W, 3]: the frames of [K, F, H, W, 3] that are scored.

    Raises ValueError for a policy that does not choose some of them, in order.
    """
    num_frames = videos.shape[1]
    indices = list(frames.choose(num_frames))
    if not indices or indices != sorted(set(indices) & set(range(num_frames))):
        raise ValueError(f"{frames} must choose some of {num_frames} frames, in order, got {indices}")
    return videos if len(indices) == num_frames else videos[:, indices]


def as_pictures(videos: np.ndarray, prompts: Sequence[Prompt]) -> tuple[np.ndarray, list[Prompt]]:
    """The frames of [K, n, H, W, 3] as pictures [K * n, H, W, 3], those of a video in a row, each with its prompt."""
    num = videos.shape[1]
    return videos.reshape(-1, *videos.shape[2:]), [prompt for prompt in prompts for _ in range(num)]
