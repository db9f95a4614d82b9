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
INDEX = "model_index.json"
WHOLE_TOKENIZER = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
DIFFERENT = ("cat", "dog")  # for a tokenizer that has learnt anything


@dataclass(frozen=True)
class PipelineFolder:
    """What `model_index.json` says that there is: `parts` have a library and a class, by name."""

    path: Path
    parts: Mapping[str, tuple[str, str]]

    @classmethod
    def read(cls, path: Path, family: str) -> PipelineFolder:
        """The folder at `path`. Raises LoadError if it holds no pipeline, or another than one of `family`."""
        file = path / INDEX
        if not file.is_file():
            raise LoadError(f"{path} holds no {INDEX}: it is no folder of a diffusers pipeline.")
        index = settings(file)
        found = index.get("_class_name")
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
                raise LoadError(f"{self.path}: {INDEX} lists no {name}.")
        for name in self.parts:
            if not (self.path / name).is_dir():
                raise LoadError(f"{self.path}: the folder {name} is missing, which {INDEX} lists.")
            for file in (self.path / name).glob("*config.json"):
                settings(file)

    def types(self) -> dict[str, Any]:
        """The class of every part, by name, those of networks last: their files are the large ones."""
        types = {name: self._type_of(name) for name in self.parts}
        return dict(sorted(types.items(), key=lambda entry: issubclass(entry[1], nn.Module)))

    def _type_of(self, name: str) -> Any:
        """Raises LoadError unless it is of one of the two libraries."""
        library, kind = self.parts[name]
        if library not in LIBRARIES:
            raise LoadError(f"{self.path}: {name} is of {library}, not of {' or '.join(LIBRARIES)}.")
        try:
            found = resolve_name(f"{library}:{kind}")
        except (AttributeError, ImportError, ValueError):
            found = None
        if not isinstance(found, type):
            raise LoadError(f"{self.path}: {library} has no class {kind}, which {INDEX} lists for {name}.")
        return found


def settings(file: Path) -> dict[str, Any]:
    """What a file of JSON says. Raises LoadError if that is nothing."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{file} is not JSON: {error}.") from error
    if not isinstance(content, dict) or not content:
        raise LoadError(f"{file} holds no settings.")
    return content


@contextmanager
def odd_contents() -> Iterator[None]:
    """What the libraries stumble over in files that say other things than they expect, as a `LoadError`."""
    from huggingface_hub.errors import StrictDataclassError  # by which transformers checks config.json

    try:
        yield
    except (AttributeError, ImportError, KeyError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise LoadError(f"it holds what cannot be read: {type(error).__name__}: {reason}") from error


def read_network(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A network with every tensor that it has: which ones it has found, its library says.

    One of diffusers uses all that there are, too: others belong to a network of more layers than its settings say. Text
    encoders are published as parts of larger models.

    Args:
        cls: of diffusers or transformers.
        folder: its own, whose files are safetensors, by whatever names the library knows for its tensors.
        dtype: of the weights, but for those that the class keeps in float32.

    Raises:
        LoadError: naming the first tensor that does not fit. What the libraries raise passes.
    """
    from transformers import PreTrainedModel

    check_settings(cls, folder)
    encoder = issubclass(cls, PreTrainedModel)
    # transformers only logs which shapes it did not expect, but for this.
    named = {"dtype": dtype, "ignore_mismatched_sizes": True} if encoder else {"torch_dtype": dtype}
    module, found = cls.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **named)
    faults = {
        "are missing": found["missing_keys"],
        "have other shapes than its config.json says": [name for name, *_ in found["mismatched_keys"]],
        "are not of its config.json": [] if encoder else found["unexpected_keys"],
    }
    for words, names in faults.items():
        if names:
            raise LoadError(f"{len(names)} tensors of {folder.name} {words}, among them {min(names)}.")
    assert isinstance(module, nn.Module)
    return module


def read_other(cls: Any, folder: Path) -> Any:
    """A part that is no network, such as a tokenizer or a scheduler."""
    from diffusers import SchedulerMixin
    from transformers import PreTrainedTokenizerBase

    if issubclass(cls, PreTrainedTokenizerBase):
        check_vocabulary(cls, folder)
    elif issubclass(cls, SchedulerMixin):
        check_settings(cls, folder)
    return cls.from_pretrained(folder)


def check_settings(cls: Any, folder: Path) -> None:
    """Raise LoadError unless a part's settings are those of a `cls`: the libraries would take defaults for all else."""
    from diffusers import ConfigMixin

    if not issubclass(cls, ConfigMixin):
        if "model_type" not in settings(folder / "config.json"):
            raise LoadError(f"{folder / 'config.json'} names no model_type.")
        return
    file = folder / cls.config_name
    found = settings(file).get("_class_name")
    if found != cls.__name__:
        raise LoadError(f"{file} is of a {found}, not of a {cls.__name__}, which {INDEX} lists.")


def outline(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A network of diffusers without storage: its settings and its shapes."""
    from accelerate import init_empty_weights

    check_settings(cls, folder)
    with init_empty_weights():
        module: nn.Module = cls.from_config(cls.load_config(folder))
    return module.to(dtype)


def check_vocabulary(cls: Any, folder: Path) -> None:
    """Raise LoadError unless a tokenizer's folder has the files from which `cls`, of transformers, reads its words."""
    parts = [name for name in cls.vocab_files_names.values() if name != WHOLE_TOKENIZER]
    if not (folder / WHOLE_TOKENIZER).is_file() and not (parts and all((folder / name).is_file() for name in parts)):
        instead = f", or {' and '.join(parts)}" if parts else ""
        raise LoadError(f"{folder} has no vocabulary: there must be {WHOLE_TOKENIZER}{instead}.")
    if not (folder / TOKENIZER_SETTINGS).is_file():
        raise LoadError(f"{folder} has no {TOKENIZER_SETTINGS}: how it cuts and pads is not known.")


def check_tokenizer(tokenizer: Any, folder: Path, encoder: Any) -> None:
    """Raise LoadError unless a tokenizer, read from `folder`, tells words apart, and `encoder` knows all its tokens.

    It pads, too; what transformers raises of one that cannot passes.
    """
    first, second = tokenizer(list(DIFFERENT), padding="max_length", truncation=True, max_length=16).input_ids
    if first == second:
        raise LoadError(f"{folder} has no vocabulary: all words are one to it.")
    size, known = len(tokenizer), encoder.get_input_embeddings().num_embeddings
    if size > known:
        raise LoadError(f"{folder} has {size} tokens, but its encoder knows {known}: they do not belong together.")
