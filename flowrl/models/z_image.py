"""Z-Image and Z-Image-Turbo (arXiv 2511.22699)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.config import ConfigError, Problem, Sampler
from flowrl.flow.schedule import Schedule
from flowrl.models.embeddings import Text
from flowrl.models.pipeline import PipelineModel
from flowrl.models.policy import PipelinePolicy
from flowrl.models.published.z_image import SIZES
from flowrl.models.schedules import euler_schedule
from flowrl.prompts import Prompt

MULTIPLE = 32  # tokens: the transformer fills up each sample's text, and its picture, with learnt tokens


@dataclass(frozen=True)
class ZImage(PipelineModel):
    """A `ZImagePipeline`: the text and the picture are one sequence, each of its own length."""

    max_sequence_length: int = 512

    family: ClassVar[str] = "diffusers.ZImagePipeline"
    sizes: ClassVar = SIZES

    def policy(self, pipeline: Any, device: torch.device) -> ZImagePolicy:
        """See `PipelineModel`."""
        return ZImagePolicy(self, pipeline, device)

    def arguments(self, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler) -> dict[str, Any]:
        """See `PipelineModel`; the pipeline's own scale g' is that of v_c + g' (v_c - v_u), 0 = off."""
        return {
            "prompt": [prompt.text for prompt in prompts],
            "negative_prompt": [prompt.negative for prompt in prompts],
            "height": sampler.height,
            "width": sampler.width,
            "num_inference_steps": sampler.num_steps,
            "guidance_scale": sampler.guidance_scale - 1,
            "max_sequence_length": self.max_sequence_length,
            "latents": start,
        }


class ZImagePolicy(PipelinePolicy):
    """Z-Image as flowrl sees it (`types.Policy`)."""

    # The attention projections, as in diffusers' LoRA example for this model.
    lora_targets: Sequence[str] = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")

    def __init__(self, config: ZImage, pipeline: Any, device: torch.device) -> None:
        from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock

        super().__init__(config, pipeline, device)
        self.blocks = (ZImageTransformerBlock,)  # the layers and both kinds of refiners
        # Positions in the sequence: 0 of padding, then the text, then the picture at a single one.
        longest = (pipeline.transformer.config.axes_lens[0] - 2) // MULTIPLE * MULTIPLE
        if not 1 <= config.max_sequence_length <= longest:
            message = f"must be from 1 to {longest} for {self}, got {config.max_sequence_length}."
            raise ConfigError(Problem("model.max_sequence_length", message))

    def read_schedule(self, scheduler: Any) -> Schedule:
        """The shift that `scheduler/scheduler_config.json` says, of 1, ..., 1/N in float32."""
        return euler_schedule(scheduler, grid="linspace_float32")

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """[C, H / f, W / f]; raises ConfigError unless both sizes are multiples of VAE factor times patch."""
        factor, transformer = self.pipeline.vae_scale_factor, self.pipeline.transformer.config
        largest = self.token_side * min(transformer.axes_lens[1:])
        self.check_sizes(height, width, frames, multiple=self.token_side, largest=largest)
        return (transformer.in_channels, height // factor, width // factor)

    def embed(self, text: str) -> Text:
        """The next to last hidden states of Qwen3 over the chat template, as long as the text is."""
        (embeds,), _ = self.pipeline.encode_prompt(
            prompt=text,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_sequence_length,
        )
        return Text(embeds[None], mask=torch.ones(1, len(embeds), dtype=torch.bool, device=embeds.device))

    def num_tokens(self, text: str) -> int:
        """See `PipelinePolicy`; those of the chat template count."""
        messages = [{"role": "user", "content": text}]
        whole = self.pipeline.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return len(self.pipeline.tokenizer(whole).input_ids)

    def forward(self, sample: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """See `PipelinePolicy`. The transformer's time runs from noise, 0, to picture, 1, and so does its velocity."""
        velocities = self.module(
            list(sample.unsqueeze(2)),  # of one frame
            (1000 - 1000 * sigma) / 1000,  # 1 - sigma, rounded as the pipeline rounds it
            text.unpadded(),
            return_dict=False,
        )[0]
        return -torch.stack(velocities).squeeze(2)
