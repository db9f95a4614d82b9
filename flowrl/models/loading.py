"""What every adapter does with a folder: find it, and read it without noise."""

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
from safetensors import safe_open
from torch import Tensor, nn

from flowrl.types import LoadError


def resolve_path(path: str) -> str:
    """A local folder as it is, `pkg://package/folder` inside an installed package, anything else a Hub id."""
    if not path.startswith("pkg://"):
        return path
    package, _, inside = path.removeprefix("pkg://").partition("/")
    return str(resources.files(package) / inside)


def absent_parts(source: str, names: tuple[str, ...]) -> dict[str, None]:
    """The optional parts that a folder lacks, as the explicit `None` that diffusers wants for them."""
    folder = Path(source)
    return {name: None for name in names if folder.is_dir() and not (folder / name).is_dir()}


def check_complete(source: str, parts: Mapping[str, Any]) -> None:
    """Every part of a local folder must be there, with every tensor that its module has.

    diffusers and transformers initialise what they do not find with random numbers, and only warn.

    Args:
        source: the folder; a Hub id is passed over, its download being complete or an error.
        parts: the pipeline's components by folder name, None where there is none.

    Raises:
        LoadError: naming the part and the first missing tensor.
    """
    folder = Path(source)
    if not folder.is_dir():
        return
    for name, part in parts.items():
        if part is None:
            continue
        if not (folder / name).is_dir():
            raise LoadError(f"{source}: the folder {name} is missing.")
        if isinstance(part, nn.Module):
            missing = sorted(_untied(part) - _saved_names(folder / name))
            if missing:
                raise LoadError(f"{source}: {len(missing)} tensors of {name} are missing, among them {missing[0]}.")


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
        digests = list(threads.map(_digest, tensors.values()))
    named = {name: value for name, value in sorted(settings.items()) if not name.startswith("_")}
    whole = hashlib.sha256(json.dumps(named, default=str).encode())
    for (name, tensor), digest in zip(tensors.items(), digests, strict=True):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest}\n".encode())
    return whole.hexdigest()


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def _saved_names(folder: Path) -> set[str]:
    """Names of all tensors in a folder's safetensors files."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return names


def _untied(module: nn.Module) -> set[str]:
    """Parameter names; of parameters that share memory, only the first is expected in a file."""
    return {name for name, _ in module.named_parameters(remove_duplicate=True)}


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bars, no remarks on image processors that nobody uses here, nor on an argument's newer name."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    from diffusers.utils import logging as diffusers_logging  # it imports transformers' parts, and they speak

    diffusers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
        yield
