"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206), and `tiny_sd3`, which has the same architecture."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.config import ConfigError, Problem, Sampler
from flowrl.flow.schedule import Schedule, StaticShift
from flowrl.models.loading import absent_parts, check_complete, content_fingerprint, quiet_loading, resolve_path
from flowrl.prompts import Prompt
from flowrl.types import Conditions, LoadError

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
OPTIONAL = ("text_encoder_3", "tokenizer_3")
PARTS = (
    "transformer",
    "vae",
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "tokenizer",
    "tokenizer_2",
    "tokenizer_3",
)

# Attention projections of both streams: what SD3 recipes of the literature adapt.
LORA_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)


@dataclass(frozen=True)
class SD3Conditions(Conditions):
    """CLIP and T5 embeddings of B prompts; the negative ones only when guidance is on."""

    prompt_embeds: Tensor  # [B, L, D]
    pooled: Tensor  # [B, P]
    negative_embeds: Tensor | None = None  # [B, L, D]
    negative_pooled: Tensor | None = None  # [B, P]


@dataclass(frozen=True)
class SD3:
    """A `StableDiffusion3Pipeline` folder, `pkg://` folder shipped with flowrl, or Hub id."""

    path: str
    revision: str | None = None
    dtype: str = "float32"  # of the frozen parts and of the forward pass: float32 | bfloat16
    max_sequence_length: int = 256  # T5 tokens; without a T5 encoder that many zero rows
    decode_batch_size: int = 32  # pictures decoded at a time
    cache_mb: int = 2048  # host memory for the embeddings of prompts seen before

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            why = " float16 gradients need loss scaling, which flowrl does not do." if self.dtype == "float16" else ""
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}.{why}")
        for name, least in (("max_sequence_length", 0), ("decode_batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")

    def load(self, device: torch.device) -> SD3Policy:
        """Read the folder with diffusers. Raises `LoadError` in one sentence when it is absent or incomplete."""
        source = resolve_path(self.path)
        absent = absent_parts(source, OPTIONAL)
        with quiet_loading():
            from diffusers import StableDiffusion3Pipeline  # its faults, and an interrupt in it, are none of the folder
        try:
            with quiet_loading():
                pipeline = StableDiffusion3Pipeline.from_pretrained(
                    source, revision=self.revision, torch_dtype=getattr(torch, self.dtype), **absent
                )
            check_complete(source, {name: part for name, part in pipeline.components.items() if name in PARTS})
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise LoadError(
                f"model.path={self.path}: not a complete Stable Diffusion 3 folder or Hub id: {reason}"
            ) from error
        pipeline.vae.to(device)
        return SD3Policy(self, pipeline, device)

    # ------------------------------------------------------------------------------------------ for exports

    def folder(self) -> Path:
        """The folder itself, or the snapshot of a Hub id in the local cache (`types.Exportable`)."""
        source = resolve_path(self.path)
        if Path(source).is_dir():
            return Path(source)
        from diffusers import StableDiffusion3Pipeline

        try:
            with quiet_loading():
                return Path(StableDiffusion3Pipeline.download(source, revision=self.revision))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise LoadError(f"model.path={self.path}: no folder, and no Hub id that can be had: {reason}") from error

    def in_float32(self) -> SD3:
        """See `types.Exportable`."""
        return replace(self, dtype="float32")

    @torch.no_grad()
    def draw(
        self, folder: Path, adapter: Path | None, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler
    ) -> Tensor:
        """With `StableDiffusion3Pipeline` and `load_lora_weights` (`types.Exportable`)."""
        with quiet_loading():
            from diffusers import StableDiffusion3Pipeline
            from diffusers.utils import logging

            logging.set_verbosity_error()  # it remarks on text encoders that the adapter does not adapt
            pipeline = StableDiffusion3Pipeline.from_pretrained(str(folder), **absent_parts(str(folder), OPTIONAL))
            if adapter is not None:
                pipeline.load_lora_weights(adapter)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.to(device=start.device, dtype=torch.float32)
        latents: Tensor = pipeline(
            prompt=[prompt.text for prompt in prompts],
            negative_prompt=[prompt.negative for prompt in prompts],
            height=sampler.height,
            width=sampler.width,
            num_inference_steps=sampler.num_steps,
            guidance_scale=sampler.guidance_scale,
            max_sequence_length=self.max_sequence_length,
            latents=start,
            output_type="latent",
        ).images
        return latents


class SD3Policy:
    """SD3 as flowrl sees it (`types.Policy`)."""

    lora_targets: Sequence[str] = LORA_TARGETS

    def __init__(self, config: SD3, pipeline: Any, device: torch.device) -> None:
        from diffusers.models.attention import JointTransformerBlock

        self.config = config
        self.pipeline = pipeline
        self.device = device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.module: nn.Module = pipeline.transformer
        self.blocks: Sequence[type[nn.Module]] = (JointTransformerBlock,)
        self.embeddings = EmbeddingCache(config.cache_mb * 2**20)
        for name in ("vae", *ENCODERS):
            part = getattr(pipeline, name)
            if part is not None:
                part.requires_grad_(False).eval()
        # No dropout anywhere: a replay must be the function that the rollout was.
        self.module.eval()

    def schedule(self) -> Schedule:
        """Static shift on diffusers' own grid, as `scheduler/scheduler_config.json` says."""
        return StaticShift(shift=float(self.pipeline.scheduler.config.shift), grid="diffusers")

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """[C, H / f, W / f]; raises ConfigError unless both sizes are multiples of VAE factor times patch."""
        factor = self.pipeline.vae_scale_factor
        multiple = factor * self.pipeline.patch_size
        if frames != 1:
            raise ConfigError(Problem("sampler.frames", f"must be 1 for SD3, got {frames}."))
        problems = [
            Problem(f"sampler.{name}", f"must be a multiple of {multiple} for {self.config.path}, got {size}.")
            for name, size in (("height", height), ("width", width))
            if size % multiple
        ]
        largest = multiple * self.pipeline.transformer.config.pos_embed_max_size
        problems += [
            Problem(f"sampler.{name}", f"must be at most {largest} for {self.config.path}, got {size}.")
            for name, size in (("height", height), ("width", width))
            if size > largest
        ]
        if problems:
            raise ConfigError(*problems)
        return (self.pipeline.transformer.config.in_channels, height // factor, width // factor)

    def image_seq_len(self, height: int, width: int) -> int:
        """Patches in one picture."""
        multiple: int = self.pipeline.vae_scale_factor * self.pipeline.patch_size
        return (height // multiple) * (width // multiple)

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], guidance_scale: float = 1.0) -> SD3Conditions:
        """One row per prompt, with the negative prompt's embeddings beside it when `guidance_scale` != 1."""
        embeds, pooled = self._embed([prompt.text for prompt in prompts])
        negative_embeds = negative_pooled = None
        if guidance_scale != 1.0:
            negative_embeds, negative_pooled = self._embed([prompt.negative for prompt in prompts])
        return SD3Conditions(embeds, pooled, negative_embeds, negative_pooled, guidance_scale=guidance_scale)

    def _embed(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        unknown = [text for text in dict.fromkeys(texts) if text not in self.embeddings]
        if unknown:
            self._encode_unknown(unknown)
        rows = [self.embeddings.get(text) for text in texts]
        self.embeddings.shrink()
        embeds, pooled = (torch.stack(parts).to(self.device) for parts in zip(*rows, strict=True))
        return embeds, pooled

    def _encode_unknown(self, texts: Sequence[str]) -> None:
        """Fill the cache. The encoders visit the device for as long as that takes: T5 alone is larger than SD3.

        One text at a time: in a batch its embeddings would depend, in the last bits, on how many others are new, so
        that a run that goes on with an empty cache would not be the run that it was.
        """
        encoders = [getattr(self.pipeline, name) for name in ENCODERS]
        for encoder in encoders:
            if encoder is not None:
                encoder.to(self.device)
        for text in texts:
            embeds, _, pooled, _ = self.pipeline.encode_prompt(
                prompt=text,
                prompt_2=None,
                prompt_3=None,
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.config.max_sequence_length,
            )
            self.embeddings.put(text, (embeds[0].cpu(), pooled[0].cpu()))
        for encoder in encoders:
            if encoder is not None:
                encoder.to("cpu")

    def velocity(self, sample: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v_u + g (v_c - v_u), both halves in one forward, as the pipeline does."""
        assert isinstance(conditions, SD3Conditions)
        if conditions.negative_embeds is None or conditions.negative_pooled is None:
            return self._forward(sample, sigma, conditions.prompt_embeds, conditions.pooled)
        both = self._forward(
            torch.cat([sample, sample]),
            torch.cat([sigma, sigma]),
            torch.cat([conditions.negative_embeds, conditions.prompt_embeds]),
            torch.cat([conditions.negative_pooled, conditions.pooled]),
        )
        unconditional, conditional = both.chunk(2)
        return unconditional + conditions.guidance_scale * (conditional - unconditional)

    def _forward(self, sample: Tensor, sigma: Tensor, embeds: Tensor, pooled: Tensor) -> Tensor:
        dtype = self.dtype
        # Autocast, not a cast of the inputs: master weights stay float32 and the timestep is never rounded.
        with torch.autocast(sample.device.type, dtype=dtype, enabled=dtype != torch.float32):
            output = self.module(
                hidden_states=sample.to(dtype),
                timestep=sigma.float() * 1000,
                encoder_hidden_states=embeds.to(dtype),
                pooled_projections=pooled.to(dtype),
                return_dict=False,
            )[0]
        velocity: Tensor = output.float()
        return velocity

    @torch.no_grad()
    def decode(self, latents: Tensor) -> np.ndarray:
        """uint8 [B, H, W, 3], through the VAE and the rounding of diffusers' image processor."""
        vae = self.pipeline.vae
        pictures = []
        for chunk in latents.split(self.config.decode_batch_size):
            unscaled = chunk / vae.config.scaling_factor + vae.config.shift_factor
            decoded = vae.decode(unscaled.to(vae.dtype), return_dict=False)[0]
            pixels = (decoded.float() * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
            pictures.append((pixels * 255).round().astype(np.uint8))
        return np.concatenate(pictures)

    def fingerprint(self) -> str:
        """Of the transformer, the encoders, the autoencoder and the noise schedule."""
        parts = {name: getattr(self.pipeline, name) for name in ("transformer", "vae", *ENCODERS)}
        return content_fingerprint(parts, dict(self.pipeline.scheduler.config))

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """`transformer/`, which `SD3Transformer2DModel.from_pretrained` reads."""
        if not state:
            return
        with torch.device("meta"):  # the module itself may be spread over ranks
            whole = type(self.module).from_config(self.module.config)  # type: ignore[attr-defined]
        whole.load_state_dict(state, strict=True, assign=True)
        whole.save_pretrained(folder / "transformer")


@dataclass
class EmbeddingCache:
    """Embeddings by text, on the host, the least recently used dropped first."""

    max_bytes: int
    _rows: OrderedDict[str, tuple[Tensor, Tensor]] = field(default_factory=OrderedDict, repr=False)

    def __contains__(self, text: str) -> bool:
        return text in self._rows

    def get(self, text: str) -> tuple[Tensor, Tensor]:
        """The rows of `text`, now the most recently used. Raises KeyError."""
        self._rows.move_to_end(text)
        return self._rows[text]

    def put(self, text: str, rows: tuple[Tensor, Tensor]) -> None:
        """Remember `rows`; nothing is dropped before `shrink`, so a batch larger than the cache still works."""
        self._rows[text] = rows

    def shrink(self) -> None:
        """Drop what exceeds the size; all rows are equally large."""
        if self._rows:
            row_bytes = sum(part.nbytes for part in next(iter(self._rows.values())))
            while len(self._rows) * row_bytes > self.max_bytes:
                self._rows.popitem(last=False)
