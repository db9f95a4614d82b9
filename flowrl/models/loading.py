"""Where models lie, and what they are known by."""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.files import sha256, sha256_of
from flowrl.hub import in_one_sentence, no_hub_id
from flowrl.types import LoadError

INSIDE_PACKAGE = "pkg://"


def local_folder(path: str, revision: str | None, family: Any) -> Path:
    """Where a model lies: the folder itself, one inside an installed package (`pkg://package/folder`), or a snapshot.

    Args:
        path: a folder, or a Hub id, which is downloaded into the local cache unless it is there.
        revision: of a Hub id; None = its main branch.
        family: the class of diffusers that says which files of a repository are needed.

    Raises:
        LoadError: in one sentence.
    """
    if path.startswith(INSIDE_PACKAGE):
        package, _, inside = path.removeprefix(INSIDE_PACKAGE).partition("/")
        try:
            return Path(str(resources.files(package) / inside))
        except (ImportError, TypeError, ValueError) as error:  # none, a module, and no name at all
            raise LoadError(f"model.path={path}: there is no installed package {package!r}.") from error
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    reason = no_hub_id(path)
    if reason:
        raise LoadError(f"model.path={path}: there is no such folder, and {reason}.")
    with in_one_sentence(f"model.path={path}: no folder, and as a Hub id it cannot be had"), quiet():
        return Path(family.download(path, revision=revision))


def is_folder(path: str) -> bool:
    """Is it no Hub id?"""
    return path.startswith(INSIDE_PACKAGE) or Path(path).expanduser().is_dir()


def content_fingerprint(parts: Mapping[str, nn.Module | None], settings: Mapping[str, Any]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, wherever they were read from, and `settings`.

    Settings that begin with an underscore say by what they were written, such as diffusers' version; they do not count.
    Tensors are hashed several at a time, those on the host as they lie there; of the others each is copied to the host,
    so that there must be room for a few of the largest.
    """
    tensors = {
        f"{name}.{key}": value
        for name, part in parts.items()
        if part is not None
        for key, value in part.state_dict().items()
    }
    with ThreadPoolExecutor() as threads:  # hashlib lets go of the interpreter
        digests = list(threads.map(tensor_sha256, tensors.values()))
    named = {name: value for name, value in sorted(settings.items()) if not name.startswith("_")}
    whole = hashlib.sha256(json.dumps(named, default=str).encode())
    for (name, tensor), digest in zip(tensors.items(), digests, strict=True):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest}\n".encode())
    return whole.hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """Of a tensor's bytes, in hexadecimal."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


ORIGIN = {"architectures", "dtype", "is_local", "local_files_only", "transformers_version"}
"""Settings that say where something was read from and how, or by what it was written, not what it computes."""


OF_CALLS = {"max_length", "pad_to_multiple_of", "stride", "truncation_strategy"}
"""What a tokenizer is called with."""


SAMPLES = (
    'A sign that says "Open 24 h"',
    "Ein Stra\u00dfenschild:  \u201eM\u00fcnchen\u201c\t\u4eac\u90fd",
    "2,000 dogs' paws...",
)
"""Texts that tokenizers who differ in anything cut up in different ways."""


def network_settings(network: Any) -> dict[str, Any]:
    """What the configuration of a part of diffusers or transformers says that its class does not, wherever it is from.

    Defaults do not count: the next version of a library has more of them, and the model is the same.
    """
    from transformers import PreTrainedModel

    if isinstance(network, PreTrainedModel):
        return _content(json.loads(json.dumps(network.config.to_diff_dict(), default=str)))
    defaults = {name: each.default for name, each in signature(type(network).__init__).parameters.items()}
    usual = {name: json.loads(json.dumps(value, default=str)) for name, value in defaults.items()}
    said = json.loads(network.to_json_string())
    return _content({name: value for name, value in said.items() if name not in usual or value != usual[name]})


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """By what it does, whatever version of its library has read and would write it."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    cut = [tokenizer(text).input_ids for text in SAMPLES]
    pads = (tokenizer.pad_token, tokenizer.padding_side, tokenizer.truncation_side, tokenizer.model_max_length)
    return {"vocabulary": sha256(vocabulary.encode()), "samples": cut, "pads": pads, "chat": tokenizer.chat_template}


def tokenizer_hashes(tokenizer: Any) -> dict[str, str]:
    """SHA-256 of each file that a tokenizer of transformers is saved as, wherever it comes from."""
    tokenizer("")  # else the last call's truncation and padding would be saved, too
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        config = Path(folder) / "tokenizer_config.json"
        said = _content(json.loads(config.read_text(encoding="utf-8")))
        # One that was saved after a call has its arguments among the settings when it is read, and all defaults.
        settings = {name: value for name, value in said.items() if name not in OF_CALLS}
        settings |= {"padding_side": tokenizer.padding_side, "truncation_side": tokenizer.truncation_side}
        settings |= {"pad_token_type_id": tokenizer.pad_token_type_id}
        config.write_text(json.dumps(settings, sort_keys=True), encoding="utf-8")
        return {path.name: sha256_of(path) for path in sorted(Path(folder).iterdir())}


def _content(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without where they were read from, and by what they were written."""
    kept = {name: value for name, value in settings.items() if name[0] != "_" and name not in ORIGIN}
    return {name: _content(value) if isinstance(value, Mapping) else value for name, value in sorted(kept.items())}


@contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' progress bars and remarks: they are for those who use nothing else.

    Everything is as loud afterwards as it was before.
    """
    from transformers.utils import logging as transformers_logging

    with _silent(transformers_logging, transformers_logging.ERROR):
        from diffusers.utils import logging as diffusers_logging  # it imports transformers' parts, and they speak

        # What diffusers logs as an error, it raises, too.
        with _silent(diffusers_logging, diffusers_logging.CRITICAL), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
            yield


@contextmanager
def _silent(logging: Any, level: int) -> Iterator[None]:
    """With the `logging` of diffusers or transformers at a level, and no progress bars."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(level)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
