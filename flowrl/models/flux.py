"""FLUX.1: dev, which has its guidance as an input, and schnell, which has none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.config import ConfigError, Problem, Sampler
from flowrl.flow.schedule import Schedule
from flowrl.models.embeddings import Text
from flowrl.models.latents import pack, positions, unpack, unscaled
from flowrl.models.pipeline import PipelineModel
from flowrl.models.policy import PipelinePolicy
from flowrl.models.published.flux import SIZES
from flowrl.models.schedules import euler_schedule
from flowrl.models.timesteps import exact_timestep
from flowrl.prompts import Prompt

EMBEDDED_GUIDANCE = 3.5  # the pipeline's own


@dataclass(frozen=True)
class Flux(PipelineModel):
    """A `FluxPipeline`.

    `embedded_guidance` is the number that dev takes beside the timestep, and costs nothing. `sampler.guidance_scale` is
    another thing: guidance by a negative prompt, which doubles the work, and which neither model needs.
    """

    max_sequence_length: int = 512  # T5 tokens, all of them attended to: 512 for dev, 256 for schnell
    embedded_guidance: float | None = None  # null: 3.5 if the transformer takes one, as dev does

    family: ClassVar[str] = "diffusers.FluxPipeline"
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")
    sizes: ClassVar = SIZES

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_sequence_length <= 512:
            raise ValueError(f"max_sequence_length must be from 1 to 512, got {self.max_sequence_length}.")
        guidance = self.embedded_guidance
        if guidance is not None and not (math.isfinite(guidance) and guidance >= 0):
            raise ValueError(f"embedded_guidance must be null or a number >= 0, got {guidance}.")

    def policy(self, pipeline: Any, device: torch.device) -> FluxPolicy:
        """See `PipelineModel`."""
        return FluxPolicy(self, pipeline, device)

    def arguments(self, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler) -> dict[str, Any]:
        """See `PipelineModel`; `guidance_scale` is the pipeline's word for what is embedded."""
        return {
            "prompt": [prompt.text for prompt in prompts],
            "negative_prompt": [prompt.negative for prompt in prompts],
            "height": sampler.height,
            "width": sampler.width,
            "num_inference_steps": sampler.num_steps,
            "true_cfg_scale": sampler.guidance_scale,
            "guidance_scale": self.guidance,
            "max_sequence_length": self.max_sequence_length,
            "latents": pack(start),
        }

    def drawn(self, latents: Tensor, sampler: Sampler, pipeline: Any) -> Tensor:
        """See `PipelineModel`."""
        factor = pipeline.vae_scale_factor
        return unpack(latents, sampler.height // factor, sampler.width // factor)

    @property
    def guidance(self) -> float:
        """What a transformer that takes one is given."""
        return EMBEDDED_GUIDANCE if self.embedded_guidance is None else self.embedded_guidance


class FluxPolicy(PipelinePolicy):
    """FLUX.1 as flowrl sees it (`types.Policy`)."""

    config: Flux

    # Attention projections of both kinds of blocks, and the two-stream blocks' feed-forward layers: what flow_grpo's
    # recipes for FLUX.1 and diffusers' LoRA example for it adapt.
    lora_targets: Sequence[str] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )

    def __init__(self, config: Flux, pipeline: Any, device: torch.device) -> None:
        from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock

        super().__init__(config, pipeline, device)
        self.blocks = (FluxTransformerBlock, FluxSingleTransformerBlock)
        self.takes_guidance: bool = pipeline.transformer.config.guidance_embeds
        if config.embedded_guidance is not None and not self.takes_guidance:
            message = f"must be null for {self}, whose transformer takes none, got {config.embedded_guidance}."
            hint = "For guidance by a negative prompt set sampler.guidance_scale."
            raise ConfigError(Problem("model.embedded_guidance", message, hint))

    def schedule(self) -> Schedule:
        """1, ..., 1/N with the shift that `scheduler/scheduler_config.json` says: dynamic for dev, none for schnell."""
        return euler_schedule(self.pipeline.scheduler.config, own_grid=False)

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """[C, H / 8, W / 8]; raises ConfigError unless both sizes are multiples of 16: VAE factor times patch."""
        factor = self.pipeline.vae_scale_factor
        self.check_sizes(height, width, frames, multiple=2 * factor)
        return (self.pipeline.transformer.config.in_channels // 4, height // factor, width // factor)

    def image_seq_len(self, height: int, width: int) -> int:
        """Patches of 2 x 2 latents in one picture."""
        multiple: int = 2 * self.pipeline.vae_scale_factor
        return (height // multiple) * (width // multiple)

    def embed(self, text: str) -> Text:
        """T5's embeddings, of fixed length, and CLIP's pooled ones."""
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=text, device=self.device, max_sequence_length=self.config.max_sequence_length
        )
        return Text(embeds, pooled)

    def forward(self, sample: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """See `PipelinePolicy`. Text lies at the origin, patches at (0, row, column)."""
        height, width = sample.shape[-2:]
        timestep = sigma * 1000 / 1000  # which is not always sigma: bit for bit what the pipeline passes
        guidance = torch.full_like(sigma, self.config.guidance) if self.takes_guidance else None
        exact = [timestep * 1000] if guidance is None else [timestep * 1000, guidance * 1000]
        with exact_timestep(self.module.get_submodule("time_text_embed"), *exact):
            tokens = self.module(
                hidden_states=pack(sample),
                timestep=timestep,
                guidance=guidance,
                pooled_projections=text.pooled,
                encoder_hidden_states=text.embeds,
                txt_ids=sigma.new_zeros(text.embeds.shape[1], 3),
                img_ids=positions(1, height // 2, width // 2, device=sample.device),
                return_dict=False,
            )[0]
        return unpack(tokens, height, width)

    def decoded(self, latents: Tensor) -> Tensor:
        """See `PipelinePolicy`."""
        vae = self.pipeline.vae
        pixels: Tensor = vae.decode(unscaled(latents, vae).to(vae.dtype), return_dict=False)[0]
        return pixels
