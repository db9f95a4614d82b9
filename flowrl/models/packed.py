"""Families whose transformers take tokens of 2 x 2 latents, already packed: FLUX.1 and Qwen-Image."""

from __future__ import annotations

from abc import ABC
from typing import Any

from torch import Tensor

from flowrl.config import Sampler
from flowrl.models.latents import unpack
from flowrl.models.pipeline import PipelineModel
from flowrl.models.policy import PipelinePolicy


class PackedModel(PipelineModel, ABC):
    """Its pipeline gives tokens."""

    def drawn(self, latents: Tensor, sampler: Sampler, pipeline: Any) -> Tensor:
        """See `PipelineModel`."""
        factor = pipeline.vae_scale_factor
        return unpack(latents, sampler.height // factor, sampler.width // factor)


class PackedPolicy(PipelinePolicy, ABC):
    """Its latents are the autoencoder's; a token has the channels of four."""

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """[C, H / 8, W / 8]; raises ConfigError unless both sizes are multiples of 16: VAE factor times patch."""
        self.check_sizes(height, width, frames, multiple=self.token_side)
        factor = self.pipeline.vae_scale_factor
        return (self.pipeline.transformer.config.in_channels // 4, height // factor, width // factor)
