"""Wan (arXiv 2503.20314): Wan2.1, and of Wan2.2 the TI2V-5B, from text alone, and the A14B with its two experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowrl.config import Config, ConfigError, Problem, Sampler
from flowrl.flow.schedule import Schedule
from flowrl.flow.solvers import Solver, UniPC
from flowrl.models.embeddings import Text
from flowrl.models.experts import Experts
from flowrl.models.latents import unstandardised
from flowrl.models.pipeline import PipelineModel
from flowrl.models.policy import PipelinePolicy, save_module
from flowrl.models.published.wan import SIZES
from flowrl.models.schedules import check_unipc, unipc_schedule
from flowrl.models.timesteps import without_autocast
from flowrl.prompts import Prompt
from flowrl.types import LoadError

NUM_TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True)
class Wan(PipelineModel):
    """A `WanPipeline`. With `task=t2i` it draws pictures: videos of one frame."""

    task: str = "t2v"
    max_sequence_length: int = 512
    decode_batch_size: int = 1
    guidance_scale_2: float | None = None  # guidance of the expert for low noise; None = sampler.guidance_scale

    family: ClassVar[str] = "diffusers.WanPipeline"
    tasks: ClassVar[tuple[str, ...]] = ("t2v", "t2i")
    optional: ClassVar[tuple[str, ...]] = ("transformer_2",)
    float32_parts: ClassVar[tuple[str, ...]] = ("vae",)
    sizes: ClassVar = SIZES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_sequence_length < 1:
            raise ValueError(f"max_sequence_length must be at least 1 for Wan, got {self.max_sequence_length}.")
        second = self.guidance_scale_2
        if second is not None and not (math.isfinite(second) and second >= 0):
            raise ValueError(f"guidance_scale_2 must be null or a number >= 0, got {second}.")

    def problems(self, run: Config) -> list[Problem]:
        """See `PipelineModel`; the second guidance scale belongs to guidance."""
        found = super().problems(run)
        if self.guidance_scale_2 is not None and run.sampler.guidance_scale == 1.0:
            message = "has no effect with sampler.guidance_scale=1.0, which turns guidance off for both experts."
            found.append(Problem("model.guidance_scale_2", message, "Set it to null."))
        return found

    def policy(self, pipeline: Any, device: torch.device) -> WanPolicy:
        """See `PipelineModel`.

        Raises:
            LoadError: an expert is missing.
            ConfigError: for a second guidance scale of a model without a second expert.
        """
        two = pipeline.config.boundary_ratio is not None
        for name in ("transformer", "transformer_2") if two else ("transformer",):
            if pipeline.components[name] is None:
                raise LoadError(f"model.path={self.path}: the folder {name} is missing.")
        if self.guidance_scale_2 is not None and not two:
            message = f"must be null for {self}, which has one transformer for all noise levels."
            raise ConfigError(Problem("model.guidance_scale_2", message))
        return WanPolicy(self, pipeline, device)

    def arguments(self, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler) -> dict[str, Any]:
        """See `PipelineModel`."""
        return {
            "prompt": [prompt.text for prompt in prompts],
            "negative_prompt": [prompt.negative for prompt in prompts],
            "height": sampler.height,
            "width": sampler.width,
            "num_frames": sampler.frames,
            "num_inference_steps": sampler.num_steps,
            "guidance_scale": sampler.guidance_scale,
            "guidance_scale_2": self.guidance_scale_2,
            "max_sequence_length": self.max_sequence_length,
            "latents": start,
        }

    def first_order(self, pipeline: Any) -> Any:
        """See `PipelineModel`: UniPC of order 1, never corrected and without thresholds, is Euler's method."""
        own = pipeline.scheduler
        never = list(range(NUM_TRAIN_TIMESTEPS))
        return type(own).from_config(own.config, solver_order=1, disable_corrector=never, thresholding=False)

    def read_adapter(self, pipeline: Any, folder: Path) -> None:
        """See `PipelineModel`: each expert's adapter lies in a folder of its own."""
        if pipeline.config.boundary_ratio is None:
            super().read_adapter(pipeline, folder)
        else:
            pipeline.load_lora_weights(folder / "transformer")
            pipeline.load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)


class WanPolicy(PipelinePolicy):
    """Wan as flowrl sees it (`types.Policy`). Latents are [C, (F - 1) / 4 + 1, h, w], also those of pictures."""

    config: Wan

    # Attention projections, between the patches and to the text: what Flow-GRPO adapts of Wan2.1.
    lora_targets: Sequence[str] = tuple(
        f"{attention}.{layer}" for attention in ("attn1", "attn2") for layer in ("to_q", "to_k", "to_v", "to_out.0")
    )

    def __init__(self, config: Wan, pipeline: Any, device: torch.device) -> None:
        from diffusers.models.transformers.transformer_wan import WanTransformerBlock

        super().__init__(config, pipeline, device)
        self.blocks = (WanTransformerBlock,)
        for name, part in self.module.named_modules():
            if name.endswith("condition_embedder.time_embedder"):
                without_autocast(part)

    def trained(self, pipeline: Any) -> nn.Module:
        """The transformer, or both experts as one module."""
        ratio = pipeline.config.boundary_ratio
        if ratio is None:
            return super().trained(pipeline)
        return Experts(pipeline.transformer, pipeline.transformer_2, ratio * NUM_TRAIN_TIMESTEPS)

    def read_schedule(self, scheduler: Any) -> Schedule:
        """UniPC's grid with the folder's `flow_shift`."""
        return unipc_schedule(scheduler)

    def check_solver(self, solver: Solver) -> None:
        """See `types.OwnSolver`: UniPC with the settings that flowrl's has."""
        if isinstance(solver, UniPC):
            with self.config.reading("scheduler"):
                check_unipc(self.pipeline.scheduler)

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """[C, F', H / f, W / f]; raises ConfigError unless sides are whole patches, and frames 4 k + 1."""
        pipeline, config = self.pipeline, self.pipeline.transformer.config
        factor, period = pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal
        largest = self.token_side * config.rope_max_seq_len
        self.check_sizes(height, width, frames, multiple=self.token_side, largest=largest, period=period)
        return (config.in_channels, (frames - 1) // period + 1, height // factor, width // factor)

    @property
    def token_side(self) -> int:
        """See `PipelinePolicy`."""
        return int(self.pipeline.vae_scale_factor_spatial * self.pipeline.transformer.config.patch_size[1])

    def embed(self, text: str) -> Text:
        """UMT5's last hidden states, with zeros in the place of padding; all of them are attended to."""
        embeds, _ = self.pipeline.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_sequence_length,
            device=self.device,
        )
        return Text(embeds)

    def num_tokens(self, text: str) -> int:
        """See `PipelinePolicy`; the pipeline tidies up spaces and entities before."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return len(self.pipeline.tokenizer(prompt_clean(text)).input_ids)

    def forward(self, sample: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """See `PipelinePolicy`.

        One timestep a sample, also where the pipeline gives one to each token (TI2V-5B): they differ only for a video
        that goes on from a given picture. Otherwise it would be gigabytes of the same numbers.
        """
        velocity: Tensor = self.module(
            hidden_states=sample, timestep=timesteps(sigma), encoder_hidden_states=text.embeds, return_dict=False
        )[0]
        return velocity

    def guide(self, conditional: Tensor, unconditional: Tensor, scale: float, sigma: Tensor) -> Tensor:
        """See `PipelinePolicy`; each expert has a scale of its own."""
        second = self.config.guidance_scale_2
        if second is None:
            return super().guide(conditional, unconditional, scale, sigma)
        assert isinstance(self.module, Experts)
        scales = torch.where(timesteps(sigma) < self.module.boundary, second, scale).view(-1, 1, 1, 1, 1)
        return unconditional + scales * (conditional - unconditional)

    def for_vae(self, latents: Tensor) -> Tensor:
        """See `PipelinePolicy`."""
        return unstandardised(latents, self.pipeline.vae)

    def decoded(self, latents: Tensor) -> Tensor:
        """See `PipelinePolicy`."""
        pixels = super().decoded(latents)
        return pixels[:, :, 0] if self.config.task == "t2i" else pixels

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """`transformer/`, and `transformer_2/` of the second expert."""
        if not isinstance(self.module, Experts):
            super().save(folder, state)
        elif state:
            for name, expert in self.module.named_children():
                prefix = f"{name}."
                own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
                save_module(expert, folder / name, own)


def timesteps(sigma: Tensor) -> Tensor:
    """What Wan is conditioned on, [B] of float32 sigma [B]: 1000 sigma without its fraction, as in diffusers."""
    return (sigma * NUM_TRAIN_TIMESTEPS).floor()
