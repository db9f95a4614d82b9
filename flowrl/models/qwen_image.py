"""Qwen-Image (arXiv 2508.02324)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.config import Sampler
from flowrl.flow.schedule import Schedule
from flowrl.models.embeddings import Text
from flowrl.models.latents import pack, unpack, unstandardised
from flowrl.models.packed import PackedModel, PackedPolicy
from flowrl.models.policy import JOINT_ATTENTION
from flowrl.models.published.qwen_image import SIZES
from flowrl.models.schedules import euler_schedule
from flowrl.models.timesteps import exact_timestep
from flowrl.prompts import Prompt
from flowrl.types import LoadError

MAX_SEQUENCE_LENGTH = 1024  # the pipeline's tokenizer cuts what is longer
OTHER_INPUTS = ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")
"""Settings of transformers that are distilled, edit pictures or draw layers: text alone is not what they are given."""


@dataclass(frozen=True)
class QwenImage(PackedModel):
    """A `QwenImagePipeline`."""

    max_sequence_length: int = 512

    family: ClassVar[str] = "diffusers.QwenImagePipeline"
    sizes: ClassVar = SIZES

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_sequence_length <= MAX_SEQUENCE_LENGTH:
            allowed = f"between 1 and {MAX_SEQUENCE_LENGTH} for Qwen-Image"
            raise ValueError(f"max_sequence_length must be {allowed}, got {self.max_sequence_length}.")

    def policy(self, pipeline: Any, device: torch.device) -> QwenImagePolicy:
        """See `PipelineModel`; raises LoadError for a transformer that wants more than text."""
        config = pipeline.transformer.config
        wanted = [name for name in OTHER_INPUTS if config[name]]
        if wanted:
            what = f"transformer/config.json sets {', '.join(wanted)}"
            raise LoadError(f"model.path={self.path}: {what}: it does not draw from text alone.")
        return QwenImagePolicy(self, pipeline, device)

    def arguments(self, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler) -> dict[str, Any]:
        """See `PipelineModel`."""
        guided = sampler.guidance_scale != 1.0
        return {
            "prompt": [prompt.text for prompt in prompts],
            "negative_prompt": [prompt.negative for prompt in prompts] if guided else None,
            "true_cfg_scale": sampler.guidance_scale,
            "height": sampler.height,
            "width": sampler.width,
            "num_inference_steps": sampler.num_steps,
            "max_sequence_length": self.max_sequence_length,
            "latents": pack(start),
        }


class QwenImagePolicy(PackedPolicy):
    """Qwen-Image as flowrl sees it (`types.Policy`)."""

    # What the published PickScore recipe adapts.
    lora_targets: Sequence[str] = JOINT_ATTENTION

    def __init__(self, config: QwenImage, pipeline: Any, device: torch.device) -> None:
        from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock

        super().__init__(config, pipeline, device)
        self.blocks = (QwenImageTransformerBlock,)

    def read_schedule(self, scheduler: Any) -> Schedule:
        """Dynamic shift, stretched so that the last step begins at 0.02, as `scheduler/scheduler_config.json` says."""
        return euler_schedule(scheduler, grid="linspace")

    def embed(self, text: str) -> Text:
        """The last hidden states of Qwen2.5-VL over `text` in its template, without the template's beginning."""
        embeds, _ = self.pipeline.encode_prompt(
            text, device=self.device, max_sequence_length=self.config.max_sequence_length
        )
        return Text(embeds, mask=torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device))

    def num_tokens(self, text: str) -> int:
        """See `PipelinePolicy`; those of the template's end count, too."""
        whole = self.pipeline.prompt_template_encode.format(text)
        dropped: int = self.pipeline.prompt_template_encode_start_idx
        return len(self.pipeline.tokenizer(whole).input_ids) - dropped

    def forward(self, sample: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """See `PipelinePolicy`. Positions of the text follow the picture's, so that padding moves nothing."""
        height, width = sample.shape[-2:]
        text = text.trimmed()
        timestep = sigma * 1000 / 1000  # which is not always sigma: bit for bit what the pipeline embeds
        with exact_timestep(self.module.get_submodule("time_text_embed"), timestep):
            tokens = self.module(
                hidden_states=pack(sample),
                timestep=timestep,
                encoder_hidden_states=text.embeds,
                encoder_hidden_states_mask=text.mask,
                img_shapes=[[(1, height // 2, width // 2)]] * len(sample),
                return_dict=False,
            )[0]
        return unpack(tokens, height, width)

    def guide(self, conditional: Tensor, unconditional: Tensor, scale: float, sigma: Tensor) -> Tensor:
        """The guided velocity with every token (2 x 2 latents, all channels) as long as the conditional one."""
        guided = pack(super().guide(conditional, unconditional, scale, sigma))
        length = pack(conditional).norm(dim=-1, keepdim=True)
        return unpack(guided * (length / guided.norm(dim=-1, keepdim=True)), *conditional.shape[-2:])

    def for_vae(self, latents: Tensor) -> Tensor:
        """See `PipelinePolicy`: a video of one frame."""
        return unstandardised(latents[:, :, None], self.pipeline.vae)

    def decoded(self, latents: Tensor) -> Tensor:
        """See `PipelinePolicy`."""
        return super().decoded(latents)[:, :, 0]
