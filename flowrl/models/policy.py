"""A pipeline of diffusers as flowrl sees it: what all families do alike. Each family adds its own part in its file."""

from __future__ import annotations

import json
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.config import ConfigError, Problem
from flowrl.device import tf32_convolutions
from flowrl.flow.schedule import Schedule
from flowrl.models.embedding_files import EmbeddingFiles, encoding_fingerprint
from flowrl.models.embeddings import EmbeddingCache, Text, TextConditions
from flowrl.models.latents import unscaled
from flowrl.models.loading import content_fingerprint, network_settings, quiet, tokenizer_identity
from flowrl.prompts import Prompt
from flowrl.types import Conditions, DivergedError

if TYPE_CHECKING:
    from flowrl.models.pipeline import PipelineModel

log = logging.getLogger(__name__)

JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""Attention projections of the picture's and of the text's stream, where a family has both."""


class PipelinePolicy(ABC):
    """The transformer of a pipeline with its encoders, autoencoder and scheduler (`types.Policy`)."""

    lora_targets: Sequence[str]
    blocks: Sequence[type[nn.Module]]

    def __init__(self, config: PipelineModel, pipeline: Any, device: torch.device) -> None:
        self.config = config
        self.pipeline = pipeline
        self.device = device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.module: nn.Module = self.trained(pipeline)
        folder = config.cache_dir
        self.files = None if folder is None else EmbeddingFiles(Path(folder).expanduser(), self._encoding)
        self._warned = False
        self.embeddings = EmbeddingCache(config.cache_mb * 2**20, self.files)
        for part in self._parts().values():
            # No dropout anywhere: a replay must be the function that the rollout was.
            part.requires_grad_(False).eval()
        if self.dtype != torch.float32:
            # Norms that keep float32 weights under autocast are computed in float32, as they are meant to be.
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight", category=UserWarning)
        if config.vae_tiling:
            pipeline.vae.enable_tiling()

    # ------------------------------------------------------------------------------------------ each family's own

    @abstractmethod
    def read_schedule(self, scheduler: Any) -> Schedule:
        """What the pipeline's scheduler, an object of diffusers, samples with. Raises LoadError if flowrl cannot."""

    @abstractmethod
    def embed(self, text: str) -> Text:
        """One row for one text, on the policy's device, where the encoders are at that time."""

    @abstractmethod
    def num_tokens(self, text: str) -> int:
        """How many a text has, uncut, for the encoder that sees most of it."""

    @property
    def max_tokens(self) -> int:
        """How many of them that encoder sees."""
        assert self.config.max_sequence_length is not None
        return self.config.max_sequence_length

    @abstractmethod
    def forward(self, sample: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """The velocity without guidance, [B, ...], of sample [B, ...] and sigma [B], float32; called under autocast."""

    def for_vae(self, latents: Tensor) -> Tensor:
        """Final latents as the autoencoder takes them; here by the factor and the shift of an `AutoencoderKL`."""
        return unscaled(latents, self.pipeline.vae)

    def decoded(self, latents: Tensor) -> Tensor:
        """Pixels in -1..1, [B, 3, H, W] or [B, 3, F, H, W], of final latents."""
        vae = self.pipeline.vae
        pixels: Tensor = vae.decode(self.for_vae(latents).to(vae.dtype), return_dict=False)[0]
        return pixels

    @abstractmethod
    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """See `types.Policy.latent_shape`."""

    @property
    def token_side(self) -> int:
        """Pixels to the side of what a token stands for: 2 x 2 latents, in most families."""
        return 2 * int(self.pipeline.vae_scale_factor)

    def image_seq_len(self, height: int, width: int) -> int:
        """See `types.Policy.image_seq_len`."""
        return (height // self.token_side) * (width // self.token_side)

    def trained(self, pipeline: Any) -> nn.Module:
        """The part that is trained."""
        module: nn.Module = pipeline.transformer
        return module

    def guided(self, scale: float) -> bool:
        """Does a `guidance_scale` ask for a second velocity?"""
        return scale != 1.0

    def guide(self, conditional: Tensor, unconditional: Tensor, scale: float, sigma: Tensor) -> Tensor:
        """v_u + g (v_c - v_u), all [B, ...], at sigma [B]."""
        return unconditional + scale * (conditional - unconditional)

    # ------------------------------------------------------------------------------------------ noise schedule

    def schedule(self) -> Schedule:
        """See `types.Policy.schedule`. Raises LoadError for a scheduler that flowrl has no equal of."""
        with self.config.reading("scheduler"):
            return self.read_schedule(self.pipeline.scheduler)

    # ------------------------------------------------------------------------------------------ text

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], guidance_scale: float = 1.0) -> TextConditions:
        """One row per prompt, with the negative prompt's embeddings beside it when there is guidance.

        Warns, once, of prompts that are cut.
        """
        if not self._warned:
            self._warn_of_cuts(prompts)
        prompt = self._embedded([prompt.text for prompt in prompts])
        negative = self._embedded([prompt.negative for prompt in prompts]) if self.guided(guidance_scale) else None
        return TextConditions(prompt, negative, guidance_scale=guidance_scale)

    def reads(self) -> str:
        """How much of a text the encoders are given, in words."""
        by_setting = self.max_tokens == self.config.max_sequence_length
        return f"{self.max_tokens} tokens that are read of one{' (model.max_sequence_length)' * by_setting}"

    def is_cut(self, text: str) -> bool:
        """Is it longer than what the encoders are given of it?"""
        with quiet():
            return self.num_tokens(text) > self.max_tokens

    def _warn_of_cuts(self, prompts: Sequence[Prompt]) -> None:
        different = dict.fromkeys(prompt.text for prompt in prompts)
        cut = [text for text in different if self.is_cut(text)]
        if cut:
            self._warned = True
            log.warning(
                "%d of %d prompts are longer than the %s, and are cut off there, the first of them %s. Later "
                "ones are not reported.",
                *(len(cut), len(different), self.reads(), json.dumps(cut[0][:200], ensure_ascii=False)),
            )

    def texts(self, prompts: Sequence[Prompt], guidance_scale: float = 1.0) -> list[str]:
        """The different texts that `encode` embeds."""
        negative = [prompt.negative for prompt in prompts] if self.guided(guidance_scale) else []
        return list(dict.fromkeys([*(prompt.text for prompt in prompts), *negative]))

    @torch.no_grad()
    def encode_ahead(self, texts: Sequence[str]) -> Iterator[bool]:
        """Make sure that there are files of the embeddings of all `texts`. For each: was it new?"""
        with ExitStack() as visit:
            placed = False
            for text in texts:
                new = not self.embeddings.find(text)
                if new and not placed:
                    visit.enter_context(self._encoders_on_device())
                    placed = True
                if new:
                    self._embed(text)
                self.embeddings.shrink()
                yield new

    def _embedded(self, texts: Sequence[str]) -> Text:
        unknown = [text for text in dict.fromkeys(texts) if not self.embeddings.find(text)]
        if unknown:
            with self._encoders_on_device():
                for text in unknown:
                    self._embed(text)
        rows = Text.concat([self.embeddings.get(text) for text in texts])
        self.embeddings.shrink()
        return rows.to(self.device)

    def _embed(self, text: str) -> None:
        """Encode one text, and keep it.

        One at a time: in a batch its embeddings would depend, in the last bits, on how many others are new, so that a
        run that goes on with an empty cache would not be the run that it was.
        """
        with quiet():  # whose remarks on what is cut would be one for each text
            self.embeddings.put(text, self.embed(text).to("cpu"))

    @contextmanager
    def _encoders_on_device(self) -> Iterator[None]:
        """They visit it while there is something to encode: some are larger than what is trained."""
        tensors = [
            tensor for encoder in self._encoders().values() for tensor in (*encoder.parameters(), *encoder.buffers())
        ]
        at_home = [tensor.data for tensor in tensors]
        try:
            for tensor in tensors:
                tensor.data = tensor.data.to(self.device)
            yield
        finally:
            for tensor, home in zip(tensors, at_home, strict=True):
                tensor.data = home  # which has not changed: nothing is copied back

    def _encoders(self) -> dict[str, nn.Module]:
        return {name: part for name, part in self._parts().items() if name in self.config.encoders}

    def _tokenizers(self) -> dict[str, Any]:
        from transformers import PreTrainedTokenizerBase

        parts = sorted(self.pipeline.components.items())
        return {name: part for name, part in parts if isinstance(part, PreTrainedTokenizerBase)}

    def _encoding(self) -> str:
        """The fingerprint of what makes embeddings of texts."""
        settings = {**self.config.encoding(), "device": self.device.type}
        return encoding_fingerprint(self._encoders(), self._tokenizers(), settings)

    # ------------------------------------------------------------------------------------------ velocity, pictures

    def velocity(self, sample: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """The guided velocity; with guidance, both halves come from one forward."""
        assert isinstance(conditions, TextConditions)
        if conditions.negative is None:
            return self._unguided(sample, sigma, conditions.prompt)
        text = Text.concat([conditions.negative, conditions.prompt])
        both = self._unguided(torch.cat([sample, sample]), torch.cat([sigma, sigma]), text)
        unconditional, conditional = both.chunk(2)
        return self.guide(conditional, unconditional, conditions.guidance_scale, sigma)

    def _unguided(self, sample: Tensor, sigma: Tensor, text: Text) -> Tensor:
        # Autocast, not a cast of the inputs: master weights stay float32 and the timestep is never rounded.
        with torch.autocast(sample.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return self.forward(sample, sigma.float(), text).float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> np.ndarray:
        """uint8 [B, H, W, 3] or [B, F, H, W, 3], with the rounding of diffusers' image processor.

        Raises DivergedError for pixels that are not finite, which would be black.
        """
        pictures = []
        for chunk in latents.split(self.config.decode_batch_size):
            with tf32_convolutions():
                decoded = self.decoded(chunk).float()
            if not bool(decoded.isfinite().all()):
                raise DivergedError(
                    f"the autoencoder of {self} decodes latents to pixels that are not finite. Its own weights are "
                    "damaged, or training has driven the latents out of its range: then lower actor.optimizer.lr."
                )
            pixels = (decoded * 0.5 + 0.5).clamp(0, 1).movedim(1, -1).cpu().numpy()
            pictures.append((pixels * 255).round().astype(np.uint8))
        return np.concatenate(pictures)

    # ------------------------------------------------------------------------------------------ sizes

    def check_sizes(
        self, height: int, width: int, frames: int, *, multiple: int, largest: int | None = None, period: int = 1
    ) -> None:
        """Raise ConfigError unless the sides are multiples of `multiple` and at most `largest`.

        Of pictures there is one frame; of videos there is one, and then whole periods of `period` frames.
        """
        problems = []
        for name, size in (("height", height), ("width", width)):
            if size % multiple:
                problems.append(Problem(f"sampler.{name}", f"must be a multiple of {multiple} for {self}, got {size}."))
            if largest is not None and size > largest:
                problems.append(Problem(f"sampler.{name}", f"must be at most {largest} for {self}, got {size}."))
        if self.config.task == "t2i" and frames != 1:
            problems.append(Problem("sampler.frames", f"must be 1 for {self}, which draws pictures, got {frames}."))
        elif (frames - 1) % period:
            message = f"must be {period} k + 1 for {self}, got {frames}."
            problems.append(Problem("sampler.frames", message, f"Set it to {frames - (frames - 1) % period}."))
        if problems:
            raise ConfigError(*problems)

    def __str__(self) -> str:
        return str(self.config)

    # ------------------------------------------------------------------------------------------ identity, files

    def _parts(self) -> dict[str, nn.Module]:
        """Every network of the pipeline, by name."""
        return {name: part for name, part in sorted(self.pipeline.components.items()) if isinstance(part, nn.Module)}

    def fingerprint(self) -> str:
        """Of all networks with their settings, the tokenizers, the noise schedule and the pipeline's own settings."""
        options = {name: value for name, value in self.pipeline.config.items() if isinstance(value, float | int | str)}
        settings: dict[str, Any] = {**options, "scheduler": network_settings(self.pipeline.scheduler)}
        settings["networks"] = {name: network_settings(part) for name, part in self._parts().items()}
        settings["tokenizers"] = {name: tokenizer_identity(part) for name, part in self._tokenizers().items()}
        return content_fingerprint(self._parts(), settings)

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """`transformer/`, which the family's class in diffusers reads."""
        if state:
            save_module(self.module, folder / "transformer", state)


def save_module(module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write a model of diffusers with other weights; the module itself may be spread over ranks."""
    with torch.device("meta"):
        whole = type(module).from_config(module.config)  # type: ignore[attr-defined]
    whole.load_state_dict(state, strict=True, assign=True)
    whole.save_pretrained(folder)
