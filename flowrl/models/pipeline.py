"""Where a pipeline of diffusers comes from: what the configurations of all families have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from flowrl.config import Config, Problem, Sampler
from flowrl.hub import in_one_sentence
from flowrl.models.folders import (
    PipelineFolder,
    check_tokenizer,
    odd_contents,
    outline,
    read_network,
    read_other,
)
from flowrl.models.latents import check_scaling
from flowrl.models.loading import is_folder, local_folder, quiet
from flowrl.models.policy import PipelinePolicy
from flowrl.models.untrained import Published, assemble
from flowrl.prompts import Prompt
from flowrl.types import LoadError

RANDOM_SEED = 0  # of untrained models: all processes of a run must build the same one


@dataclass(frozen=True)
class PipelineModel(ABC):
    """A folder that diffusers reads, `pkg://` folder inside an installed package, or Hub id; or random weights.

    A Hub id is downloaded with the token in `HF_TOKEN`, if there is one.
    """

    path: str | None = None
    revision: str | None = None  # of a Hub id: branch, tag or commit
    init: str = "pretrained"  # pretrained | random: untrained weights, without `path` | tiny: those of a miniature
    size: str = "full"  # which of the family's architectures that is: full | its variants | a tiny one
    task: str = "t2i"  # t2i | t2v
    dtype: str = "float32"  # of the frozen parts and of the forward pass: float32 | bfloat16
    max_sequence_length: int | None = 512  # text tokens; null where a family says what it means
    decode_batch_size: int = 8  # pictures, or videos, decoded at a time
    vae_tiling: bool = False  # decode in overlapping tiles: less memory, slightly other pixels
    cache_mb: int = 2048  # host memory for the embeddings of prompts seen before
    cache_dir: str | None = None  # folder for them that any number of runs share; null: they are in memory only

    family: ClassVar[str]  # its class in diffusers
    tasks: ClassVar[tuple[str, ...]] = ("t2i",)
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    optional: ClassVar[tuple[str, ...]] = ()  # parts that a folder's index need not list
    float32_parts: ClassVar[tuple[str, ...]] = ()  # computed in float32 whatever `dtype` says
    text_settings: ClassVar[tuple[str, ...]] = ("max_sequence_length",)  # fields that embeddings depend on
    sizes: ClassVar[Mapping[str, Published]] = {}  # architectures for random weights, by `size`

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            why = " float16 gradients need loss scaling, which flowrl does not do." if self.dtype == "float16" else ""
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}.{why}")
        family = type(self).__name__
        if self.init != "pretrained" and not self.sizes:
            hint = "debug=tiny needs one, debug=short does not."
            raise ValueError(f"init must be pretrained for {family}, which has no random build (no `sizes`): {hint}")
        choices = {"init": ("pretrained", "random", "tiny"), "task": self.tasks}
        if self.init == "random" or (self.init == "tiny" and self.size != "full"):
            choices["size"] = tuple(self.sizes)
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be {' or '.join(allowed)} for {family}, got {value!r}.")
        for name, least in (("max_sequence_length", 0), ("decode_batch_size", 1), ("cache_mb", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")

    def __str__(self) -> str:
        """What messages call it."""
        return str(self.path) if self.init == "pretrained" else f"a random {type(self).__name__}"

    def problems(self, run: Config) -> list[Problem]:
        """What is missing, and what cannot be used."""
        problems = []
        if self.init == "pretrained" and not self.path:
            hint = "Set model.path=..., or model.init=random for untrained weights."
            problems.append(Problem("model.path", "must be set: a diffusers folder or a Hub id.", hint))
        if self.init == "pretrained" and self.path and self.revision is not None and is_folder(self.path):
            message = f"is of a Hub id, but model.path={self.path} is a folder, which has no revisions."
            problems.append(Problem("model.revision", message, "Set it to null."))
        if self.cache_dir is not None and not self.cache_dir.strip():
            problems.append(Problem("model.cache_dir", f"must be null or a folder, got {self.cache_dir!r}."))
        elif self.cache_dir is not None and Path(self.cache_dir).expanduser().is_file():
            problems.append(Problem("model.cache_dir", f"must be a folder; {self.cache_dir} is a file."))
        return problems

    def encoding(self) -> dict[str, Any]:
        """What embeddings depend on, besides the content of encoders and tokenizers."""
        return {name: getattr(self, name) for name in ("family", "dtype", *self.text_settings)}

    # ------------------------------------------------------------------------------------------ each family's own

    @abstractmethod
    def policy(self, pipeline: Any, device: torch.device) -> PipelinePolicy:
        """The family's policy over a loaded pipeline."""

    @abstractmethod
    def arguments(self, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler) -> dict[str, Any]:
        """What the pipeline is called with to draw `prompts` from x_T `start` [B, ...]."""

    def resolved(self, pipeline: Any) -> Self:
        """With the settings that depend on which of the family's models `pipeline` is."""
        return self

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
        with quiet():
            return resolve_name(cls.family)

    def load(self, device: torch.device) -> PipelinePolicy:
        """Read the folder with diffusers. Raises `LoadError` in one sentence when it is absent or incomplete."""
        with quiet():
            pipeline = self._read(self.folder()) if self.init == "pretrained" else self._assembled(device)
            pipeline.vae.to(device)
        with self.reading("vae"):
            check_scaling(pipeline.vae)
        return self.resolved(pipeline).policy(pipeline, device)

    def load_encoders(self, device: torch.device) -> PipelinePolicy:
        """A policy that can encode texts and no more: of other networks it has the shapes alone, without memory."""
        pretrained, encoders = self.init == "pretrained", self.encoders
        with quiet():  # of networks without weights, too
            pipeline = self._read(self.folder(), encoders) if pretrained else self._assembled(device, encoders)
        return self.resolved(pipeline).policy(pipeline, device)

    def _untrained(self) -> Published:
        """`size` itself, or its miniature: the family's, unless it has one of its own."""
        if self.init == "random":
            return self.sizes[self.size]
        return self.sizes.get(f"tiny_{self.size}", self.sizes["tiny"])

    def _assembled(self, device: torch.device, only: Collection[str] | None = None) -> Any:
        return assemble(
            self._untrained(),
            self.pipeline_class(),
            dtype=getattr(torch, self.dtype),
            device=device,
            seed=RANDOM_SEED,
            float32_parts=self.float32_parts,
            only=only,
        )

    def _read(self, path: Path, only: Collection[str] | None = None) -> Any:
        """The pipeline in a folder, whole, or with weights for some of its networks alone."""
        family, tokenizers = self.pipeline_class(), {name: _tokenizer(name) for name in self.encoders}
        needed = {"transformer", "vae", "scheduler", *tokenizers, *tokenizers.values()}.difference(self.optional)
        with self.reading():
            folder = PipelineFolder.read(path, family.__name__)
            present = {encoder: name for encoder, name in tokenizers.items() if encoder in folder.parts}
            folder.check(needed.union(present.values()))
            types = folder.types()
        parts: dict[str, Any] = dict.fromkeys(name for name in self.optional if name not in folder.parts)
        for name, cls in types.items():
            with self.reading(name):
                parts[name] = self._part(cls, path / name, only)
        for encoder, name in present.items():
            with self.reading(name):
                check_tokenizer(parts[name], path / name, parts[encoder])
        with self.reading():
            return family.from_pretrained(str(path), **parts)

    def _part(self, cls: Any, folder: Path, only: Collection[str] | None) -> Any:
        if not issubclass(cls, nn.Module):
            return read_other(cls, folder)
        dtype = torch.float32 if folder.name in self.float32_parts else getattr(torch, self.dtype)
        read = read_network if only is None or folder.name in only else outline
        return read(cls, folder, dtype)

    @contextmanager
    def reading(self, part: str = "") -> Iterator[None]:
        """What cannot be read of the folder, or of one of its parts, as one `LoadError` that says where it lies."""
        with in_one_sentence(f"model.path={self.path}{f': {part}' if part else ''}"), odd_contents():
            yield

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
        """With the family's pipeline and `load_lora_weights` (`types.Exportable`).

        Its networks take turns on the device, and wait in host memory: all at once may be more than there is room for.
        """
        family = self.pipeline_class()
        with quiet():
            listed = PipelineFolder.read(folder, family.__name__).parts
            absent = {name: None for name in self.optional if name not in listed}
            pipeline = family.from_pretrained(str(folder), **absent)
            if adapter is not None:
                self.read_adapter(pipeline, adapter)
            pipeline.set_progress_bar_config(disable=True)
            pipeline.to(dtype=torch.float32)
            pipeline.enable_model_cpu_offload(device=start.device)
            pipeline.scheduler = self.first_order(pipeline)
            arguments = self.resolved(pipeline).arguments(prompts, start, sampler)
            output = pipeline(**arguments, output_type="latent", return_dict=False)
        return self.drawn(output[0], sampler, pipeline)


def _tokenizer(encoder: str) -> str:
    """The name of the tokenizer that belongs to a text encoder, in pipelines of diffusers."""
    return encoder.replace("text_encoder", "tokenizer")
