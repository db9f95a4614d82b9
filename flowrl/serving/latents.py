"""Serving a reward model of latents, in the protocol of `rewards.latent_wire`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from flowrl.rewards import latent_wire
from flowrl.rewards.scoring import checked
from flowrl.serving.batching import Item


@runtime_checkable
class LatentModel(Protocol):
    """A reward model that sees latents and text as the policy does: a frozen dataclass, cheap to pickle."""

    def load(self) -> None:
        """Read the weights; called once, in the process that scores."""
        ...

    def score(
        self, latents: np.ndarray, text: Mapping[str, np.ndarray], u: np.ndarray, seeds: Sequence[int | None]
    ) -> np.ndarray:
        """float64 [B], raw scores. Raises on failure, never a stand-in: FinalError (of `rewards.scoring`) for samples
        that it will never score, anything else for what may be better the next time.

        Args:
            latents: float32 [B, C, (F,) h, w], clean.
            text: float32 `prompt_embeds` [B, L, D] and, of some families, `pooled_prompt_embeds` [B, P] and
                `prompt_embeds_mask` bool [B, L].
            u: float32 [B], the noise level at which to judge.
            seeds: of the noise, B of them; None leaves it to the model.
        """
        ...


@dataclass(frozen=True)
class LatentScorerProcess:
    """What lives in the scorer's process."""

    model: LatentModel

    def load(self) -> None:
        """Load the model."""
        self.model.load()

    def score(self, payloads: Sequence[latent_wire.LatentSample]) -> np.ndarray:
        """float64 [B]; all payloads have the same shapes."""
        latents = np.concatenate([sample.latents for sample in payloads])
        text = {name: np.concatenate([sample.text[name] for sample in payloads]) for name in payloads[0].text}
        u = np.array([sample.u for sample in payloads], np.float32)
        scores = self.model.score(latents, text, u, [sample.seed for sample in payloads])
        return checked(scores, range(len(payloads)))


@dataclass(frozen=True)
class PackedLatents:
    """A request as it came; see `app.Packed`."""

    packed: latent_wire.Packed

    @property
    def num_bytes(self) -> int:
        """Unpacked."""
        return self.packed.num_bytes

    def unpacked(self) -> Item:
        """One sample. Raises WireError."""
        sample = self.packed.unpacked()
        shapes = (sample.latents.shape, *((name, part.shape) for name, part in sample.text.items()))
        return Item(shapes, 1, sample.latents.nbytes + sum(part.nbytes for part in sample.text.values()), sample)


@dataclass(frozen=True)
class Latents:
    """The protocol of latent reward models."""

    model: LatentModel
    version_header: str = latent_wire.VERSION_HEADER
    scores_key: str = "raw_scores"

    @property
    def served(self) -> LatentScorerProcess:
        """The model."""
        return LatentScorerProcess(self.model)

    def read(self, body: bytes, max_bytes: int) -> PackedLatents:
        """Raises WireError."""
        return PackedLatents(latent_wire.read(body))
