"""Embeddings on the disk, a file for each text: what one run has encoded, others need not."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from flowrl.files import sha256, write_atomic
from flowrl.models.embeddings import Text
from flowrl.models.loading import content_fingerprint, network_settings, tensor_sha256, tokenizer_hashes
from flowrl.types import LoadError

FORMAT = "1"  # of what is kept: to be raised when an adapter makes other embeddings of the same text
LIBRARIES = ("torch", "transformers", "diffusers")  # a pipeline's template for prompts is part of diffusers
OPTIONAL_LIBRARIES = ("ftfy",)  # with which diffusers mends the prompts of some families where it is installed

log = logging.getLogger(__name__)


def encoding_fingerprint(
    encoders: Mapping[str, Any], tokenizers: Mapping[str, Any], settings: Mapping[str, Any]
) -> str:
    """Of everything but the text that embeddings depend on.

    Args:
        encoders: models of transformers, by name; their weights and their configurations count.
        tokenizers: of transformers, by name; the content of their files counts, wherever those lie.
        settings: what else does, such as the kind of device, whose kernels round in their own way.
    """
    configs = {name: network_settings(encoder) for name, encoder in encoders.items()}
    files = {name: tokenizer_hashes(tokenizer) for name, tokenizer in tokenizers.items()}
    versions = {name: version(name) for name in LIBRARIES} | {name: _version(name) for name in OPTIONAL_LIBRARIES}
    whole = {"format": FORMAT, "configs": configs, "tokenizers": files, "versions": versions, "settings": settings}
    return content_fingerprint(encoders, whole | {"kernels": _kernels()})


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _kernels() -> dict[str, Any]:
    """The switches of this process by which torch chooses other kernels, which round otherwise."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "float32": torch.get_float32_matmul_precision(),
    }


class Damaged(Exception):
    """A file that is not what was written for its text."""


@dataclass
class EmbeddingFiles:
    """A folder that any number of processes and runs may share, of the same encoders or of different ones.

    A file is named by the SHA-256 of the encoders' fingerprint and the text. It appears whole, and is verified whenever
    it is read: one that is damaged, or holds another text or what other encoders made of it, is reported, counted in
    `num_damaged` and treated as if it were not there, so that the text is encoded again and the file replaced.

    Args:
        folder: is made when the first file is written.
        fingerprint: of the encoders, asked for once, when the first text is looked up: their weights are hashed for it.
    """

    folder: Path
    fingerprint: Callable[[], str]
    num_damaged: int = field(default=0, init=False)

    def get(self, text: str) -> Text | None:
        """The one row of `text`, on the host, or None. Raises LoadError for a file that may not be read."""
        path = self.path(text)
        try:
            return _read(path, self._labels(text))
        except FileNotFoundError:
            return None
        except Damaged as error:
            self.num_damaged += 1
            log.warning("%s: %s: the text is encoded again, and the file replaced.", path, error)
            return None
        except OSError as error:
            reason = error.strerror or error  # safetensors' own have none
            raise LoadError(f"model.cache_dir={self.folder}: {path.name} cannot be read: {reason}.") from error

    def put(self, text: str, row: Text) -> None:
        """Write the one row of `text`. Raises LoadError if the folder cannot be written."""
        path = self.path(text)
        tensors = {name: value.contiguous() for name, value in vars(row).items() if value is not None}
        data = save(tensors, {**self._labels(text), "sha256": _checksum(tensors)})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another process may write the same text at the same time.
            write_atomic(path, data, f"{secrets.token_hex(4)}.", durable=False)
        except OSError as error:
            raise LoadError(f"model.cache_dir={self.folder} cannot be written: {error.strerror}.") from error

    def path(self, text: str) -> Path:
        """The file of `text`, in one of 256 folders."""
        name = sha256(f"{self._encoders}\n{text}".encode())
        return self.folder / name[:2] / f"{name}.safetensors"

    @cached_property
    def _encoders(self) -> str:
        return self.fingerprint()

    def _labels(self, text: str) -> dict[str, str]:
        return {"text": text, "encoders": self._encoders}


def _read(path: Path, labels: Mapping[str, str]) -> Text:
    """What a file holds. Raises FileNotFoundError, Damaged, and OSError if the file may not be read."""
    try:
        with safe_open(path, "pt") as file:
            found = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name).clone() for name in names}  # else it is the file's own memory
    except SafetensorError as error:
        raise Damaged(f"is no whole safetensors file ({error})") from error
    wrong = [name for name, value in labels.items() if found.get(name) != value]
    if wrong:
        raise Damaged(f"is of other {' and '.join(wrong)}")
    if found.get("sha256") != _checksum(tensors):
        raise Damaged("has another checksum than it was written with")
    if "embeds" not in tensors or not tensors.keys() <= {part.name for part in fields(Text)}:
        raise Damaged(f"holds {', '.join(tensors)}, which is no text's embeddings")
    return Text(**tensors)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of names, dtypes, shapes and bytes."""
    parts = {name: [str(value.dtype), list(value.shape), tensor_sha256(value)] for name, value in tensors.items()}
    return sha256(json.dumps(parts, sort_keys=True).encode())
