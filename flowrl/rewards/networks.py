"""What scorers with a network have in common: where its files lie, whether all of it is there, one batch at a time.

`NetworkScorer` and the functions here are for scorers of your own, too (docs/rewards.md).

A folder, or an id of the Hugging Face Hub, holds a model as `transformers` saves it or one file of weights. torch and
transformers are imported where a network is loaded or used, so that the workers of other rewards do without.
"""

from __future__ import annotations

import abc
import pickle
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.hub import in_one_sentence, no_hub_id
from flowrl.rewards.scoring import FinalError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from flowrl.prompts import Prompt

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")
WRAPPERS = ("state_dict", "model")  # keys under which training scripts put the weights
BROKEN_PICKLE = (pickle.UnpicklingError, EOFError, LookupError, AssertionError, TypeError, UnicodeError, struct.error)
"""What torch raises for files that it has not written, besides RuntimeError."""


@dataclass(kw_only=True, eq=False)
class NetworkScorer(abc.ABC):
    """A score that a network gives to a picture and its prompt.

    A subclass reads the network in `load`, puts it where it is computed with `settled`, and gives the scores of one
    batch in `score_batch`.

    Args:
        path: where the weights lie: a folder, or a Hub id, which is downloaded into the local cache unless it is there.
        revision: of the Hub id `path`; None = its main branch.
        device: auto (CUDA if this process sees a GPU), cpu or cuda.
        dtype: of the weights and of what is computed with them; scores are float64.
        batch_size: pictures at once.
    """

    path: str
    revision: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    batch_size: int = 16

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"device must be {' or '.join(DEVICES)}, got {self.device!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {self.dtype!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")

    @abc.abstractmethod
    def load(self) -> None:
        """Read the network. Raises `flowrl.types.LoadError` in one sentence if it is absent or incomplete."""

    @abc.abstractmethod
    def score_batch(self, images: Sequence[np.ndarray], prompts: Sequence[Prompt]) -> Tensor:
        """[b], at most `batch_size`, for pictures uint8 [H, W, 3] and their prompts; called in inference mode."""

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B] for uint8 [B, H, W, 3]."""
        import torch

        cuts = [slice(start, start + self.batch_size) for start in range(0, len(images), self.batch_size)]
        with torch.inference_mode():
            scores = torch.cat([self.score_batch(list(images[cut]), prompts[cut]) for cut in cuts])
        array: np.ndarray = scores.double().cpu().numpy()
        return array

    def settled(self, module: Any, dtype: str | None = None) -> Any:
        """`module` where and as it is computed, for inference; `dtype` by name, None = the scorer's.

        Raises LoadError if that is a GPU and this process sees none.
        """
        import torch

        torch.backends.cudnn.allow_tf32 = False  # as in the trainer's own process: float32 is float32
        return module.to(_choose(self.device), dtype_of(dtype or self.dtype)).eval().requires_grad_(False)


def _choose(device: str) -> str:
    import torch

    from flowrl.types import LoadError

    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise LoadError("device is cuda, but this process sees no GPU: give it one, or set device to auto or cpu.")
    return ("cuda" if found else "cpu") if device == "auto" else device


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def pretrained(kind: Any, path: str, revision: str | None = None, **settings: Any) -> Any:
    """The model of class `kind` of transformers that lies at `path`, every tensor of it read from there.

    Args:
        settings: for `from_pretrained`. With `config` and `state_dict`, these are used and `path` is only a name.

    Raises:
        LoadError: if it cannot be read or lacks a tensor, which transformers would fill with random numbers.
    """
    from flowrl.types import LoadError

    source = None if "state_dict" in settings else _located(path)
    with in_one_sentence(_subject(path)), quiet():
        model, report = kind.from_pretrained(
            source, revision=revision or "main", output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise LoadError(f"{path}: {len(missing)} tensors of {kind.__name__} are missing, among them {missing[0]}.")
    for name, found, expected in report["mismatched_keys"]:
        raise LoadError(f"{path}: {name} has shape {list(found)} instead of {list(expected)}.")
    return model


def configuration(kind: Any, folder: Path) -> Any:
    """What `folder` says of the architecture. Raises LoadError if nothing: transformers would take its own defaults."""
    from flowrl.types import LoadError

    if not (folder / "config.json").is_file():
        raise LoadError(f"{folder} holds no config.json: it is no folder of a transformers model.")
    with in_one_sentence(f"{folder}, config.json"), quiet():
        return kind.from_pretrained(folder)


def tokenizer(folder: Path, **settings: Any) -> Any:
    """The tokenizer in `folder`. Raises LoadError if it has no vocabulary: transformers would make one up."""
    from transformers import AutoTokenizer

    from flowrl.types import LoadError

    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise LoadError(f"{folder} holds no tokenizer: there is none of {', '.join(VOCABULARIES)}.")
    with in_one_sentence(f"{folder}, tokenizer"), quiet():
        return AutoTokenizer.from_pretrained(folder, **settings)


def plain(tokenizer: Any, texts: Sequence[str]) -> list[str]:
    """`texts`, if all of them are nothing but text to `tokenizer`.

    Raises FinalError for one that holds a special token: that which ends a text, say, would hide what comes after it.
    """
    # A single character is a word that serves as padding, too: "!" in some of CLIP's tokenizers.
    signs = [sign for sign in tokenizer.get_added_vocab() if len(sign) > 1]
    for text in dict.fromkeys(texts):
        for sign in signs:
            if sign in text or sign in text.lower():  # CLIP's tokenizer looks for them in lower case
                raise FinalError(f"the prompt must not contain {sign}, which is a sign to the scorer: {text}")
    return list(texts)


def image_processor(folder: Path) -> Any:
    """The preparation of pictures in `folder`, done by Pillow as when the scorers were published."""
    from transformers import AutoImageProcessor

    with in_one_sentence(f"{folder}, image processor"), quiet():
        return AutoImageProcessor.from_pretrained(folder, backend="pil")


def small_files(path: str, revision: str | None = None) -> Path:
    """The folder that holds the configuration, vocabulary and so on of `path`, of a Hub id in the local cache."""
    from huggingface_hub import snapshot_download

    source = _located(path)
    if Path(source).is_dir():
        return Path(source)
    with in_one_sentence(_subject(path)), quiet():
        return Path(snapshot_download(source, revision=revision, allow_patterns=["*.json", "*.txt", "*.model"]))


def weights(path: str, file: str, revision: str | None = None) -> dict[str, Tensor]:
    """Tensors by name from `file` in the folder or Hub repository `path`, or from `path` if that is a file itself.

    Safetensors, or what `torch.save` wrote, of which only tensors and plain values are read.
    """
    from huggingface_hub import hf_hub_download
    from safetensors.torch import load_file

    from flowrl.types import LoadError

    source = Path(_located(path))
    if source.is_dir():
        source = source / file
    elif not source.is_file():
        with in_one_sentence(_subject(path)), quiet():
            source = Path(hf_hub_download(path, file, revision=revision))
    if not source.is_file():
        raise LoadError(f"{path} holds no {file}.")
    with in_one_sentence(str(source)):
        return load_file(source) if source.suffix == ".safetensors" else _unpickled(source)


def _unpickled(file: Path) -> dict[str, Tensor]:
    import torch

    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except BROKEN_PICKLE as error:
        raise ValueError("it is no file of tensors alone; nothing else is unpickled.") from error
    for wrapper in WRAPPERS:
        inner = content.get(wrapper) if isinstance(content, Mapping) else None
        content = inner if isinstance(inner, Mapping) else content
    if not isinstance(content, Mapping):
        raise ValueError(f"it must hold tensors by name, and holds a {type(content).__name__}.")
    return {str(name): tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}


def part_of(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What begins with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def renamed(state: Mapping[str, Tensor], rules: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """`state` after the substitutions (pattern, replacement) in its names, one after the other."""
    result = {}
    for name, tensor in state.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        result[name] = tensor
    return result


def filled(module: nn.Module, state: Mapping[str, Tensor], source: str) -> nn.Module:
    """`module` with the tensors of `state`, all of its own. Raises LoadError."""
    from flowrl.types import LoadError

    own = module.state_dict()
    missing = [name for name in own if name not in state]
    if missing:
        raise LoadError(f"{source}: {len(missing)} tensors are missing, among them {missing[0]}.")
    for name, tensor in own.items():
        if state[name].shape != tensor.shape:
            found, expected = list(state[name].shape), list(tensor.shape)
            raise LoadError(f"{source}: {name} has shape {found} instead of {expected}.")
    module.load_state_dict({name: state[name] for name in own})
    return module


def linear_head(width: int) -> nn.Sequential:
    """width -> 1024 -> 128 -> 64 -> 16 -> 1 without nonlinearities: LAION's aesthetic predictor, and ImageReward's.

    Identities stand where the published modules drop out, so that the names of the tensors agree.
    """
    from torch import nn

    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.Identity(),
        nn.Linear(1024, 128),
        nn.Identity(),
        nn.Linear(128, 64),
        nn.Identity(),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )


def _located(path: str) -> str:
    """A folder or file that exists, or what may be a Hub id."""
    from flowrl.types import LoadError

    local = Path(path).expanduser()
    if local.exists():
        return str(local)
    reason = no_hub_id(path)
    if reason:
        raise LoadError(f"{path}: there is no such folder or file, and {reason}.")
    return path


def _subject(path: str) -> str:
    return path if Path(path).expanduser().exists() else f"{path}: no folder, and as a Hub id it cannot be had"


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without progress bars and remarks; what is missing, we say ourselves."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
