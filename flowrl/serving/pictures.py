"""Serving any reward component of pictures or videos, in the protocol of `rewards.wire`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowrl.rewards import wire
from flowrl.rewards.frames import VideoScorer, as_pictures
from flowrl.serving.batching import Item
from flowrl.serving.checks import checked_scores

if TYPE_CHECKING:
    from flowrl.rewards.combine import Component
    from flowrl.types import Scorer


@dataclass(frozen=True)
class PictureScorer:
    """What lives in the scorer's process."""

    scorer: Scorer

    def load(self) -> None:
        """Load the scorer."""
        self.scorer.load()

    def score(self, payloads: Sequence[wire.Pictures]) -> np.ndarray:
        """float64, as in a training run: of videos, the scores that a scorer of pictures gives frames are averaged."""
        images = np.concatenate([payload.images for payload in payloads])
        prompts = [prompt for payload in payloads for prompt in payload.prompts]
        if images.ndim == 4:
            return checked_scores(self.scorer.score(images, prompts), len(images))
        if isinstance(self.scorer, VideoScorer):
            return checked_scores(self.scorer.score_videos(images, prompts), len(images))
        frames, prompts = as_pictures(images, prompts)
        scores = checked_scores(self.scorer.score(frames, prompts), len(frames))
        means: np.ndarray = scores.reshape(len(images), -1).mean(axis=1)
        return means


@dataclass(frozen=True)
class Pictures:
    """The general protocol."""

    component: Component
    version_header: str = wire.VERSION_HEADER
    scores_key: str = "scores"

    @property
    def served(self) -> PictureScorer:
        """The component's scorer."""
        return PictureScorer(self.component.scorer)

    def read(self, body: bytes, max_bytes: int) -> Item:
        """Of videos, the component's `frames` are kept. Raises WireError."""
        received = wire.decode(body, max_bytes)
        try:
            images = self.component.scored_part(received.images)
        except ValueError as error:
            raise wire.WireError(str(error)) from error
        return Item(images.shape[1:], len(images), wire.Pictures(images, received.prompts))
