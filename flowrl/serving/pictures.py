"""Serving any reward component of pictures or videos, in the protocol of `rewards.wire`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowrl.rewards import wire
from flowrl.rewards.scoring import SelfTimed, limit_s, load_limit_s, num_scored, score_shown
from flowrl.serving.batching import Item

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
        return score_shown(self.scorer, images, prompts, range(len(images)))


@dataclass(frozen=True)
class PatientScorer(PictureScorer):
    """The same of a scorer that is `scoring.SelfTimed`: a client of yet another server."""

    def load_limit_s(self, load_timeout_s: float) -> float:
        """See `host.SelfTimed`."""
        return load_limit_s([self.scorer], load_timeout_s)

    def score_limit_s(self, payloads: Sequence[wire.Pictures]) -> float:
        """See `host.SelfTimed`."""
        return limit_s(self.scorer, sum(num_scored(self.scorer, payload.images) for payload in payloads), 0.0)


@dataclass(frozen=True)
class PackedPictures:
    """A request as it came; see `app.Packed`."""

    packed: wire.Packed
    component: Component

    @property
    def num_bytes(self) -> int:
        """Unpacked."""
        return self.packed.num_bytes

    def unpacked(self) -> Item:
        """Of videos, the component's `frames` are kept. Raises WireError."""
        received = self.packed.unpacked()
        try:
            images = self.component.scored_part(received.images)
        except ValueError as error:
            raise wire.WireError(str(error)) from error
        return Item(images.shape[1:], len(images), received.images.nbytes, wire.Pictures(images, received.prompts))


@dataclass(frozen=True)
class Pictures:
    """The general protocol; a request has at most `max_samples` pictures or videos."""

    component: Component
    max_samples: int = 1024
    version_header: str = wire.VERSION_HEADER
    scores_key: str = "scores"

    @property
    def served(self) -> PictureScorer:
        """The component's scorer."""
        kind = PatientScorer if isinstance(self.component.scorer, SelfTimed) else PictureScorer
        return kind(self.component.scorer)

    def read(self, body: bytes, max_bytes: int) -> PackedPictures:
        """Raises WireError."""
        return PackedPictures(wire.read(body, max_bytes, self.max_samples), self.component)
