"""A pipeline's folder: what its index lists, read so that nothing is missing.

diffusers and transformers initialise what they do not find with random numbers, and make do with tokenizers that know
no word; both only warn. Here it is a `LoadError`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from flowrl.types import LoadError

LIBRARIES = ("diffusers", "transformers")
WHOLE_TOKENIZER = "tokenizer.json"
DIFFERENT = ("cat", "dog")  # for a tokenizer that has learnt anything


@dataclass(frozen=True)
class PipelineFolder:
    """What `model_index.json` says that there is: `parts` have a library and a class, by name."""

    path: Path
    parts: Mapping[str, tuple[str, str]]

    @classmethod
    def read(cls, path: Path, family: str) -> PipelineFolder:
        """The folder at `path`. Raises LoadError if it holds no pipeline, or another than one of `family`."""
        file = path / "model_index.json"
        if not file.is_file():
            raise LoadError(f"{path} holds no model_index.json: it is no folder of a diffusers pipeline.")
        index = json.loads(file.read_text(encoding="utf-8"))
        found = index.get("_class_name") if isinstance(index, dict) else None
        if found is None:
            raise LoadError(f"{file} names no class of a pipeline.")
        if found != family:
            raise LoadError(f"{path} holds a {found}, not a {family}: set model=... to its family.")
        pairs = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
        return cls(path, {name: (library, kind) for name, (library, kind) in pairs.items() if library is not None})

    def check(self, needed: Collection[str]) -> None:
        """Raise LoadError unless all that is needed is listed, and all that is listed lies there."""
        for name in sorted(needed):
            if name not in self.parts:
                raise LoadError(f"{self.path}: model_index.json lists no {name}.")
        for name in self.parts:
            if not (self.path / name).is_dir():
                raise LoadError(f"{self.path}: the folder {name} is missing, which model_index.json lists.")
            for file in (self.path / name).glob("*config.json"):
                if not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
                    raise LoadError(f"{file} holds no settings.")

    def networks(self) -> dict[str, Any]:
        """The classes of all networks, by name."""
        libraries = {name: library for name, (library, _) in self.parts.items() if library in LIBRARIES}
        classes = {name: self.type_of(name) for name in libraries}
        return {name: found for name, found in classes.items() if issubclass(found, nn.Module)}

    def type_of(self, name: str) -> Any:
        """The class of a part. Raises LoadError unless it is of one of the two libraries."""
        library, kind = self.parts[name]
        if library not in LIBRARIES:
            raise LoadError(f"{self.path}: {name} is of {library}, not of {' or '.join(LIBRARIES)}.")
        return resolve_name(f"{library}:{kind}")


@contextmanager
def odd_contents(folder: Path) -> Iterator[None]:
    """What the libraries stumble over in files that say other things than they expect, as a `LoadError`."""
    from huggingface_hub.errors import StrictDataclassError  # by which transformers checks config.json

    try:
        yield
    except (AttributeError, KeyError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise LoadError(f"{folder} holds what cannot be read: {type(error).__name__}: {reason}") from error


def read_network(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A network with every tensor that it has: which ones it has found, its library says.

    Args:
        cls: of diffusers or transformers.
        folder: its own, whose files are safetensors, by whatever names the library knows for its tensors.
        dtype: of the weights, but for those that the class keeps in float32.

    Raises:
        LoadError: naming the first missing tensor. What the libraries raise passes.
    """
    from transformers import PreTrainedModel

    named = {"dtype" if issubclass(cls, PreTrainedModel) else "torch_dtype": dtype}
    module, found = cls.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **named)
    missing = sorted(found["missing_keys"])
    if missing:
        raise LoadError(
            f"{folder.parent}: {len(missing)} tensors of {folder.name} are missing, among them {missing[0]}."
        )
    assert isinstance(module, nn.Module)
    return module


def outline(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A network of diffusers without storage: its settings and its shapes."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        module: nn.Module = cls.from_config(cls.load_config(folder))
    return module.to(dtype)


def check_vocabulary(cls: Any, folder: Path) -> None:
    """Raise LoadError unless a tokenizer's folder has the files from which `cls`, of transformers, reads its words."""
    parts = [name for name in cls.vocab_files_names.values() if name != WHOLE_TOKENIZER]
    if not (folder / WHOLE_TOKENIZER).is_file() and not (parts and all((folder / name).is_file() for name in parts)):
        instead = f", or {' and '.join(parts)}" if parts else ""
        raise LoadError(f"{folder} has no vocabulary: there must be {WHOLE_TOKENIZER}{instead}.")


def check_tokenizer(tokenizer: Any, folder: Path, encoder: Any) -> None:
    """Raise LoadError unless a tokenizer, read from `folder`, tells words apart, and `encoder` knows all its tokens."""
    first, second = (list(tokenizer(word).input_ids) for word in DIFFERENT)
    if not first or first == second:
        raise LoadError(f"{folder} has no vocabulary: all words are one to it.")
    size, known = len(tokenizer), encoder.get_input_embeddings().num_embeddings
    if size > known:
        raise LoadError(f"{folder} has {size} tokens, but its encoder knows {known}: they do not belong together.")
