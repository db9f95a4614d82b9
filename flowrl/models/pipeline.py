"""Where a pipeline of diffusers comes from: what the configurations of all families have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flowrl.config import Config, Problem, Sampler
from flowrl.models.loading import (
    absent_parts,
    check_complete,
    check_family,
    in_one_sentence,
    local_folder,
    quiet_loading,
)
from flowrl.models.policy import PipelinePolicy
from flowrl.models.untrained import Published, assemble
from flowrl.prompts import Prompt
from flowrl.types import LoadError

RANDOM_SEED = 0  # of untrained models: all processes of a run must build the same one
NOT_OF_TEXT = (
    "path", "revision", "init", "size", "task", "decode_batch_size", "vae_tiling", "cache_mb", "cache_dir",
)  # fmt: skip
"""Settings that embeddings do not depend on, weights and tokenizers being known by their content."""


@dataclass(frozen=True)
class PipelineModel(ABC):
    """A folder that diffusers reads, `pkg://` folder inside an installed package, or Hub id; or random weights.

    A Hub id is downloaded with the token in `HF_TOKEN`, if there is one.
    """

    path: str | None = None
    revision: str | None = None  # of a Hub id: branch, tag or commit
    init: str = "pretrained"  # pretrained | random: the published architecture, untrained, without `path`
    size: str = "full"  # of a random model: tiny | full | the family's variants
    task: str = "t2i"  # t2i | t2v
    dtype: str = "float32"  # of the frozen parts and of the forward pass: float32 | bfloat16
    max_sequence_length: int = 512  # text tokens
    decode_batch_size: int = 8  # pictures, or videos, decoded at a time
    vae_tiling: bool = False  # decode in overlapping tiles: less memory, slightly other pixels
    cache_mb: int = 2048  # host memory for the embeddings of prompts seen before
    cache_dir: str | None = None  # folder for them that any number of runs share; null: they are in memory only

    family: ClassVar[str]  # its class in diffusers
    tasks: ClassVar[tuple[str, ...]] = ("t2i",)
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    optional: ClassVar[tuple[str, ...]] = ()  # parts that a folder may lack
    float32_parts: ClassVar[tuple[str, ...]] = ()  # computed in float32 whatever `dtype` says
    sizes: ClassVar[Mapping[str, Published]]

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            why = " float16 gradients need loss scaling, which flowrl does not do." if self.dtype == "float16" else ""
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}.{why}")
        for name, allowed in (
            ("init", ("pretrained", "random")),
            ("size", tuple(self.sizes)),
            ("task", self.tasks),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be {' or '.join(allowed)} for {type(self).__name__}, got {value!r}.")
        for name, least in (("max_sequence_length", 0), ("decode_batch_size", 1), ("cache_mb", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")

    def __str__(self) -> str:
        """What messages call it."""
        return f"a random {type(self).__name__}" if self.init == "random" else str(self.path)

    def problems(self, run: Config) -> list[Problem]:
        """What is missing, and what cannot be used."""
        problems = []
        if self.init == "pretrained" and not self.path:
            hint = "Set model.path=..., or model.init=random for untrained weights."
            problems.append(Problem("model.path", "must be set: a diffusers folder or a Hub id.", hint))
        if self.cache_dir is not None and Path(self.cache_dir).expanduser().is_file():
            problems.append(Problem("model.cache_dir", f"must be a folder; {self.cache_dir} is a file."))
        return problems

    def encoding(self) -> dict[str, Any]:
        """What embeddings depend on, or may: all that families add."""
        return {"family": self.family} | {key: value for key, value in asdict(self).items() if key not in NOT_OF_TEXT}

    # ------------------------------------------------------------------------------------------ each family's own

    @abstractmethod
    def policy(self, pipeline: Any, device: torch.device) -> PipelinePolicy:
        """The family's policy over a loaded pipeline."""

    @abstractmethod
    def arguments(self, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler) -> dict[str, Any]:
        """What the pipeline is called with to draw `prompts` from x_T `start` [B, ...]."""

    def drawn(self, latents: Tensor, sampler: Sampler, pipeline: Any) -> Tensor:
        """x_0 in flowrl's layout from what the pipeline gives with `output_type="latent"`."""
        return latents

    def first_order(self, pipeline: Any) -> Any:
        """The scheduler with which the pipeline takes Euler's steps."""
        return pipeline.scheduler

    def read_adapter(self, pipeline: Any, folder: Path) -> None:
        """Put an exported adapter on the pipeline."""
        pipeline.load_lora_weights(folder)

    # ------------------------------------------------------------------------------------------ loading

    @classmethod
    def pipeline_class(cls) -> Any:
        """The class itself; importing diffusers takes seconds, so only on demand."""
        with quiet_loading():
            return resolve_name(cls.family)

    def load(self, device: torch.device) -> PipelinePolicy:
        """Read the folder with diffusers. Raises `LoadError` in one sentence when it is absent or incomplete."""
        if self.init == "random":
            pipeline = assemble(
                self.sizes[self.size],
                self.pipeline_class(),
                dtype=getattr(torch, self.dtype),
                device=device,
                seed=RANDOM_SEED,
                float32_parts=self.float32_parts,
            )
        else:
            pipeline = self._read(self.folder())
        pipeline.vae.to(device)
        return self.policy(pipeline, device)

    def _read(self, folder: Path) -> Any:
        family = self.pipeline_class()
        dtype = getattr(torch, self.dtype)
        dtypes = {"default": dtype, **dict.fromkeys(self.float32_parts, torch.float32)}
        with in_one_sentence(f"model.path={self.path}"):
            check_family(folder, family.__name__)
            with quiet_loading():
                absent = absent_parts(folder, self.optional)
                pipeline = family.from_pretrained(str(folder), torch_dtype=dtypes, **absent)
            check_complete(folder, pipeline.components)
        return pipeline

    # ------------------------------------------------------------------------------------------ for exports

    def folder(self) -> Path:
        """The folder itself, or the snapshot of a Hub id in the local cache (`types.Exportable`)."""
        if self.path is None:
            raise LoadError("model.path must be set: a model with random weights lies in no folder.")
        return local_folder(self.path, self.revision, self.pipeline_class())

    def in_float32(self) -> Self:
        """See `types.Exportable`."""
        return replace(self, dtype="float32")

    @torch.no_grad()
    def draw(
        self, folder: Path, adapter: Path | None, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler
    ) -> Tensor:
        """With the family's pipeline and `load_lora_weights` (`types.Exportable`)."""
        family = self.pipeline_class()
        with quiet_loading():
            from diffusers.utils import logging

            logging.set_verbosity_error()  # it remarks on text encoders that the adapter does not adapt
            pipeline = family.from_pretrained(str(folder), **absent_parts(folder, self.optional))
            if adapter is not None:
                self.read_adapter(pipeline, adapter)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.to(device=start.device, dtype=torch.float32)
        pipeline.scheduler = self.first_order(pipeline)
        output = pipeline(**self.arguments(prompts, start, sampler), output_type="latent", return_dict=False)
        return self.drawn(output[0], sampler, pipeline)
