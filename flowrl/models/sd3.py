"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206), and `tiny_sd3`, which has the same architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flowrl.config import Sampler
from flowrl.flow.schedule import Schedule
from flowrl.models.embeddings import Text
from flowrl.models.pipeline import PipelineModel
from flowrl.models.policy import JOINT_ATTENTION, PipelinePolicy
from flowrl.models.published.sd3 import SIZES
from flowrl.models.schedules import euler_schedule
from flowrl.prompts import Prompt

MAX_SEQUENCE_LENGTH = 512  # the pipeline takes no more


@dataclass(frozen=True)
class SD3(PipelineModel):
    """A `StableDiffusion3Pipeline`; the T5 encoder may be left out."""

    max_sequence_length: int = 256  # T5 tokens; 0 leaves T5 out; without a T5 that many zero rows
    decode_batch_size: int = 32

    family: ClassVar[str] = "diffusers.StableDiffusion3Pipeline"
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2", "text_encoder_3")
    optional: ClassVar[tuple[str, ...]] = ("text_encoder_3", "tokenizer_3")
    sizes: ClassVar = SIZES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_sequence_length > MAX_SEQUENCE_LENGTH:
            allowed = f"at most {MAX_SEQUENCE_LENGTH} for SD3"
            raise ValueError(f"max_sequence_length must be {allowed}, got {self.max_sequence_length}.")

    def resolved(self, pipeline: Any) -> Self:
        """See `PipelineModel`. Of no token T5 would make rows of any length: it is left out."""
        if self.max_sequence_length == 0:
            pipeline.register_modules(text_encoder_3=None, tokenizer_3=None)
        return self

    def policy(self, pipeline: Any, device: torch.device) -> SD3Policy:
        """See `PipelineModel`."""
        return SD3Policy(self, pipeline, device)

    def arguments(self, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler) -> dict[str, Any]:
        """See `PipelineModel`."""
        return {
            "prompt": [prompt.text for prompt in prompts],
            "negative_prompt": [prompt.negative for prompt in prompts],
            "height": sampler.height,
            "width": sampler.width,
            "num_inference_steps": sampler.num_steps,
            "guidance_scale": sampler.guidance_scale,
            "max_sequence_length": self.max_sequence_length,
            "latents": start,
        }


class SD3Policy(PipelinePolicy):
    """SD3 as flowrl sees it (`types.Policy`)."""

    # What SD3 recipes of the literature adapt.
    lora_targets: Sequence[str] = JOINT_ATTENTION

    def __init__(self, config: SD3, pipeline: Any, device: torch.device) -> None:
        from diffusers.models.attention import JointTransformerBlock

        super().__init__(config, pipeline, device)
        self.blocks = (JointTransformerBlock,)

    def read_schedule(self, scheduler: Any) -> Schedule:
        """Static shift on diffusers' own grid, as `scheduler/scheduler_config.json` says."""
        return euler_schedule(scheduler, grid="diffusers")

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """[C, H / f, W / f]; raises ConfigError unless both sizes are multiples of VAE factor times patch."""
        factor, transformer = self.pipeline.vae_scale_factor, self.pipeline.transformer.config
        side = self.token_side
        self.check_sizes(height, width, frames, multiple=side, largest=side * transformer.pos_embed_max_size)
        return (transformer.in_channels, height // factor, width // factor)

    @property
    def token_side(self) -> int:
        """See `PipelinePolicy`."""
        return int(self.pipeline.vae_scale_factor * self.pipeline.transformer.config.patch_size)

    def embed(self, text: str) -> Text:
        """CLIP's and T5's embeddings, and CLIP's pooled ones."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=text,
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_sequence_length,
        )
        return Text(embeds, pooled)

    def num_tokens(self, text: str) -> int:
        """See `PipelinePolicy`: T5's, which sees more of a text than CLIP does, if there is one."""
        return len((self.pipeline.tokenizer_3 or self.pipeline.tokenizer)(text).input_ids)

    @property
    def max_tokens(self) -> int:
        """See `PipelinePolicy`."""
        return super().max_tokens if self.pipeline.tokenizer_3 else int(self.pipeline.tokenizer_max_length)

    def forward(self, sample: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """See `PipelinePolicy`."""
        velocity: Tensor = self.module(
            hidden_states=sample,
            timestep=sigma * 1000,
            encoder_hidden_states=text.embeds,
            pooled_projections=text.pooled,
            return_dict=False,
        )[0]
        return velocity
