"""FLUX.2-klein: the base models, and the ones distilled to few steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from flowrl.config import ConfigError, Problem, Sampler
from flowrl.flow.schedule import DynamicShift, Flux2Empirical, Schedule
from flowrl.models.embeddings import Text
from flowrl.models.latents import positions
from flowrl.models.pipeline import PipelineModel
from flowrl.models.policy import JOINT_ATTENTION, PipelinePolicy
from flowrl.models.published.flux2 import SIZES
from flowrl.models.schedules import OWN_SCHEDULE, euler_schedule
from flowrl.prompts import Prompt
from flowrl.types import LoadError


@dataclass(frozen=True)
class Flux2(PipelineModel):
    """A `Flux2KleinPipeline`.

    Latents are what it denoises: patches of 2 x 2 of the autoencoder's, normalised, [4 C, H / 16, W / 16].
    """

    max_sequence_length: int = 512
    text_encoder_layers: Sequence[int] = (9, 18, 27)  # whose hidden states are the embedding, side by side

    family: ClassVar[str] = "diffusers.Flux2KleinPipeline"
    text_settings: ClassVar[tuple[str, ...]] = ("max_sequence_length", "text_encoder_layers")
    sizes: ClassVar = SIZES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_sequence_length < 1:
            raise ValueError(f"max_sequence_length must be at least 1, got {self.max_sequence_length}.")

    def policy(self, pipeline: Any, device: torch.device) -> Flux2Policy:
        """See `PipelineModel`."""
        return Flux2Policy(self, pipeline, device)

    def arguments(self, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler) -> dict[str, Any]:
        """See `PipelineModel`. With guidance the pipeline's negative prompt is always "", whatever the prompts say."""
        return {
            "prompt": [prompt.text for prompt in prompts],
            "height": sampler.height,
            "width": sampler.width,
            "num_inference_steps": sampler.num_steps,
            "guidance_scale": sampler.guidance_scale,
            "max_sequence_length": self.max_sequence_length,
            "text_encoder_out_layers": self.text_encoder_layers,
            "latents": start,
        }

    def drawn(self, latents: Tensor, sampler: Sampler, pipeline: Any) -> Tensor:
        """See `PipelineModel`: back from the autoencoder's latents, which is what this pipeline gives."""
        mean, std = statistics(pipeline.vae, latents)
        return (pixel_unshuffle(latents, 2) - mean) / std


class Flux2Policy(PipelinePolicy):
    """FLUX.2-klein as flowrl sees it (`types.Policy`)."""

    config: Flux2

    def __init__(self, config: Flux2, pipeline: Any, device: torch.device) -> None:
        from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock

        super().__init__(config, pipeline, device)
        self.blocks = (Flux2TransformerBlock, Flux2SingleTransformerBlock)
        # Attention projections of both streams and both kinds of blocks, as in diffusers' LoRA example for klein, which
        # leaves out the text's. Single-stream blocks have theirs fused with the feed-forward ones, and a bare
        # "attn.to_out" would also mean a list of the others.
        self.lora_targets: Sequence[str] = (
            *JOINT_ATTENTION,
            "attn.to_qkv_mlp_proj",
            *(
                f"single_transformer_blocks.{i}.attn.to_out"
                for i in range(pipeline.transformer.config.num_single_layers)
            ),
        )
        self._check_layers()

    def _check_layers(self) -> None:
        encoder, layers = self.pipeline.text_encoder.config, self.config.text_encoder_layers
        width = self.pipeline.transformer.config.joint_attention_dim
        num, rest = divmod(width, encoder.hidden_size)
        if rest or len(layers) != num or not all(0 <= layer <= encoder.num_hidden_layers for layer in layers):
            message = f"must be {num} numbers from 0 to {encoder.num_hidden_layers} for {self}, got {list(layers)}."
            raise ConfigError(Problem("model.text_encoder_layers", message))

    def read_schedule(self, scheduler: Any) -> Schedule:
        """1, ..., 1/N, shifted by how many tokens and steps there are; a folder's own bounds of the shift mean nothing.

        A folder that says `use_dynamic_shifting: false` has its static shift.
        """
        schedule = euler_schedule(scheduler, grid="linspace")
        if not isinstance(schedule, DynamicShift):
            return schedule
        if schedule.terminal is not None:
            raise LoadError(f"scheduler_config.json has shift_terminal={schedule.terminal}: {OWN_SCHEDULE}.")
        return Flux2Empirical()

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """[4 C, H / 16, W / 16]; raises ConfigError unless both sizes are multiples of 16: VAE factor times patch."""
        self.check_sizes(height, width, frames, multiple=self.token_side)
        side = self.token_side
        return (self.pipeline.transformer.config.in_channels, height // side, width // side)

    def guided(self, scale: float) -> bool:
        """See `PipelinePolicy`. Raises ConfigError for a distilled model, whose pipeline would ignore the scale."""
        if scale != 1.0 and self.pipeline.config.is_distilled:
            message = f"must be 1 for {self}, which is distilled and takes no guidance, got {scale}."
            raise ConfigError(Problem("sampler.guidance_scale", message))
        return super().guided(scale)

    def embed(self, text: str) -> Text:
        """Hidden states of some of Qwen3's layers over the chat template, of fixed length."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt=text,
            device=self.device,
            max_sequence_length=self.config.max_sequence_length,
            text_encoder_out_layers=self.config.text_encoder_layers,
        )
        return Text(embeds)

    def num_tokens(self, text: str) -> int:
        """See `PipelinePolicy`; those of the chat template count."""
        messages = [{"role": "user", "content": text}]
        whole = self.pipeline.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return len(self.pipeline.tokenizer(whole).input_ids)

    def forward(self, sample: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """See `PipelinePolicy`. Positions are (0, row, column, 0) in the picture and (0, 0, 0, token) in the text."""
        height, width = sample.shape[-2:]
        tokens = self.module(
            hidden_states=sample.flatten(2).mT,
            timestep=sigma * 1000 / 1000,  # which is not always sigma: bit for bit what the pipeline passes
            encoder_hidden_states=text.embeds,
            txt_ids=positions(1, 1, 1, text.embeds.shape[1], device=sample.device),
            img_ids=positions(1, height, width, 1, device=sample.device),
            return_dict=False,
        )[0]
        velocity: Tensor = tokens.mT.unflatten(2, (height, width))
        return velocity

    def for_vae(self, latents: Tensor) -> Tensor:
        """See `PipelinePolicy`."""
        mean, std = statistics(self.pipeline.vae, latents)
        return pixel_shuffle(latents * std + mean, 2)


def statistics(vae: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the autoencoder's patches, [4 C, 1, 1], on the device and in the dtype of `latents`."""
    norm = vae.bn
    std = (norm.running_var + vae.config.batch_norm_eps).sqrt()
    return norm.running_mean.to(latents)[:, None, None], std.to(latents)[:, None, None]
