"""What every adapter does with a folder: find it, read it without noise, and make sure that all of it is there."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flowrl.types import LoadError


def local_folder(path: str, revision: str | None, family: Any) -> Path:
    """Where a model lies: the folder itself, one inside an installed package (`pkg://package/folder`), or a snapshot.

    Args:
        path: a folder, or a Hub id, which is downloaded into the local cache unless it is there.
        revision: of a Hub id; None = its main branch.
        family: the class of diffusers that says which files of a repository are needed.

    Raises:
        LoadError: in one sentence.
    """
    if path.startswith("pkg://"):
        package, _, inside = path.removeprefix("pkg://").partition("/")
        return Path(str(resources.files(package) / inside))
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith(("/", "./", "../", "~")) or path.count("/") != 1:
        raise LoadError(f"model.path={path}: there is no such folder, and a Hub id has the form owner/name.")
    with in_one_sentence(f"model.path={path}: no folder, and as a Hub id it cannot be had"), quiet_loading():
        try:
            return Path(family.download(path, revision=revision))
        except _broken_connection() as error:
            raise OSError(str(error)) from error


@contextmanager
def in_one_sentence(prefix: str) -> Iterator[None]:
    """What the libraries say of a model that they cannot read, as one `LoadError`."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise LoadError(f"{prefix}: {_reason(error)}") from error


def _broken_connection() -> type[BaseException]:
    """What the Hub's client raises in the middle of an answer, whichever library its own errors build on."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def _reason(error: BaseException) -> str:
    """The cause that a user can do something about, else the first line of the message."""
    cause: BaseException | None = error
    while cause is not None:
        for kind, words in _HUB_ERRORS.items():
            if any(base.__name__ == kind for base in type(cause).__mro__):
                return words
        cause = cause.__cause__
    lines = str(error).strip().splitlines()
    return lines[0].split(". If you want", 1)[0] if lines else type(error).__name__


_HUB_ERRORS = {  # by name: huggingface_hub is imported by diffusers, and only where a model is loaded
    "GatedRepoError": "access is granted by its owners: accept its terms on its page and set HF_TOKEN.",
    "RevisionNotFoundError": "it has no such model.revision.",
    "RepositoryNotFoundError": "there is no such repository, or it is private: is HF_TOKEN set?",
    "OfflineModeIsEnabled": "it is not in the local cache, and HF_HUB_OFFLINE forbids a download.",
    "LocalEntryNotFoundError": "it is not in the local cache, and the Hub cannot be reached.",
    "ConnectionError": "it is not in the local cache, and the Hub cannot be reached.",
    "TransportError": "it is not in the local cache, and the Hub cannot be reached.",
    "HFValidationError": "a Hub id has the form owner/name.",
}


def absent_parts(folder: Path, names: tuple[str, ...]) -> dict[str, None]:
    """The optional parts that a folder lacks, as the explicit `None` that diffusers wants for them."""
    return {name: None for name in names if not (folder / name).is_dir()}


def check_family(folder: Path, expected: str) -> None:
    """Raise LoadError if the folder holds no pipeline, or another than `expected`."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise LoadError(f"{folder} holds no model_index.json: it is no folder of a diffusers pipeline.")
    found = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    if found != expected:
        raise LoadError(f"{folder} holds a {found}, not a {expected}: set model=... to its family.")


def check_complete(folder: Path, parts: Mapping[str, Any]) -> None:
    """Every part of a folder must be there, networks with every tensor that they have.

    diffusers and transformers initialise what they do not find with random numbers, and only warn.

    Args:
        folder: the pipeline's.
        parts: its components by folder name; None where there is none.

    Raises:
        LoadError: naming the part and the first missing tensor.
    """
    for name, part in parts.items():
        if part is None:
            continue
        if not (folder / name).is_dir():
            raise LoadError(f"{folder}: the folder {name} is missing.")
        if not isinstance(part, nn.Module):
            continue
        missing = sorted(_expected_names(part) - _saved_names(folder / name))
        if missing:
            raise LoadError(f"{folder}: {len(missing)} tensors of {name} are missing, among them {missing[0]}.")


def content_fingerprint(parts: Mapping[str, nn.Module | None], settings: Mapping[str, Any]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, wherever they were read from, and `settings`.

    Settings that begin with an underscore say by what they were written, such as diffusers' version; they do not count.
    Tensors on the host are hashed as they lie there, several at a time; others are copied one by one.
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


def _saved_names(folder: Path) -> set[str]:
    """Names of all tensors in a folder's safetensors files."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return names


def _expected_names(module: nn.Module) -> set[str]:
    """Names of what it has learnt in the files that it was read from, where transformers keeps some under older names.

    Of parameters that share memory, only the first is expected. Statistics of batches are learnt, too.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    own: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=True))
    own |= {name: buffer for name, buffer in module.named_buffers() if name.endswith(("running_mean", "running_var"))}
    return set(revert_weight_conversion(module, own) if isinstance(module, PreTrainedModel) else own)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bars, no remarks on image processors that nobody uses here, nor on an argument's newer name."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    from diffusers.utils import logging as diffusers_logging  # it imports transformers' parts, and they speak

    diffusers_logging.set_verbosity(diffusers_logging.CRITICAL)  # what it logs as an error, it raises, too
    diffusers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
        yield
