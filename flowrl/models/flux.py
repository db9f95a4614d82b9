"""FLUX.1: dev, which has its guidance as an input, and schnell, which has none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flowrl.config import Config, ConfigError, Problem, Sampler
from flowrl.flow.schedule import Schedule
from flowrl.models.embeddings import Text
from flowrl.models.latents import pack, positions, unpack
from flowrl.models.packed import PackedModel, PackedPolicy
from flowrl.models.policy import JOINT_ATTENTION
from flowrl.models.published.flux import SIZES
from flowrl.models.schedules import euler_schedule
from flowrl.models.timesteps import exact_timestep
from flowrl.prompts import Prompt

EMBEDDED_GUIDANCE = 3.5  # the pipeline's own
LONGEST = {
    True: 512,
    False: 256,
}  # tokens of a text, by whether the transformer takes a guidance, as dev does


@dataclass(frozen=True)
class Flux(PackedModel):
    """A `FluxPipeline`.

    `embedded_guidance` is the number that dev takes beside the timestep, and costs nothing. `sampler.guidance_scale` is
    another thing: guidance by a negative prompt, which doubles the work, and which neither model needs: `true_cfg` says
    that it is meant.
    """

    max_sequence_length: int | None = None  # T5 tokens, all of them attended to; null: 512 for dev, 256 for schnell
    embedded_guidance: float | None = None  # null: 3.5 if the transformer takes one, as dev does
    true_cfg: bool = False  # may sampler.guidance_scale be other than 1, beside what is embedded?

    family: ClassVar[str] = "diffusers.FluxPipeline"
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")
    sizes: ClassVar = SIZES

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.max_sequence_length
        if length is not None and not 1 <= length <= LONGEST[True]:
            raise ValueError(f"max_sequence_length must be null or from 1 to {LONGEST[True]}, got {length}.")
        guidance = self.embedded_guidance
        if guidance is not None and not (math.isfinite(guidance) and guidance >= 0):
            raise ValueError(f"embedded_guidance must be null or a number >= 0, got {guidance}.")

    def problems(self, run: Config) -> list[Problem]:
        """See `PipelineModel`; a scale that was meant for another family's guidance is refused."""
        found = super().problems(run)
        scale = run.sampler.guidance_scale
        if scale != 1.0 and not self.true_cfg:
            message = f"must be 1 for FLUX.1, whose guidance is model.embedded_guidance, got {scale}."
            hint = "Set it to 1, or model.true_cfg=true for guidance by negative prompts as well, at twice the work."
            found.append(Problem("sampler.guidance_scale", message, hint))
        return found

    def resolved(self, pipeline: Any) -> Self:
        """See `PipelineModel`. Raises ConfigError for more tokens than schnell has been distilled with."""
        longest = LONGEST[pipeline.transformer.config.guidance_embeds]
        length = longest if self.max_sequence_length is None else self.max_sequence_length
        if length > longest:
            message = f"must be null or at most {longest} for {self}, got {length}."
            raise ConfigError(Problem("model.max_sequence_length", message))
        return replace(self, max_sequence_length=length)

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

    @property
    def guidance(self) -> float:
        """What a transformer that takes one is given."""
        return EMBEDDED_GUIDANCE if self.embedded_guidance is None else self.embedded_guidance


class FluxPolicy(PackedPolicy):
    """FLUX.1 as flowrl sees it (`types.Policy`)."""

    config: Flux

    # Attention projections of both kinds of blocks, and the two-stream blocks' feed-forward layers: what flow_grpo's
    # recipes for FLUX.1 and diffusers' LoRA example for it adapt.
    lora_targets: Sequence[str] = (
        *JOINT_ATTENTION,
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

    def read_schedule(self, scheduler: Any) -> Schedule:
        """1, ..., 1/N with the shift that `scheduler/scheduler_config.json` says: dynamic for dev, none for schnell."""
        return euler_schedule(scheduler, grid="linspace")

    def embed(self, text: str) -> Text:
        """T5's embeddings, of fixed length, and CLIP's pooled ones."""
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=text, device=self.device, max_sequence_length=self.config.max_sequence_length
        )
        return Text(embeds, pooled)

    def num_tokens(self, text: str) -> int:
        """See `PipelinePolicy`: T5's; CLIP's 77 are for the pooled embedding alone."""
        return len(self.pipeline.tokenizer_2(text).input_ids)

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
