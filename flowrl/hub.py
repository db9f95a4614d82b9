"""What may be an id of the Hugging Face Hub, and what is said when a model cannot be had: from there, or from a folder.

Free of torch and of the Hub's client until something has failed: reward workers import this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_LOCAL = ("/", "./", "../", "~")


def no_hub_id(path: str) -> str | None:
    """Why `path`, which is not there, is not looked for on the Hub; None if it may be an id.

    `models/mine` has the form of an id. Whoever has a folder `models` means what is in it, and a typing error should
    not download what somebody else has published under that name.
    """
    if path.startswith(_LOCAL) or path.count("/") != 1:
        return "a Hub id has the form owner/name"
    owner = path.split("/", 1)[0]
    if Path(path).suffix in WEIGHT_FILES:
        return "with that ending it is no Hub id"
    if Path(owner).is_dir():
        return (
            f"since there is a folder {owner} here it is not taken for a Hub id (if it is one: hf download {path} "
            f"--local-dir {path})"
        )
    return None


@contextmanager
def in_one_sentence(subject: str) -> Iterator[None]:
    """What the libraries say of files that they cannot read or get, as one `LoadError`."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError, _broken_connection()) as error:
        from flowrl.types import LoadError  # with torch

        raise LoadError(f"{subject}: {_reason(error)}") from error


def _broken_connection() -> type[BaseException]:
    """What the Hub's client raises in the middle of an answer: `HTTPError` of httpx or, by its version, httpx2."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


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


_HUB_ERRORS = {  # by name: huggingface_hub is imported only where something has failed
    "GatedRepoError": "access is granted by its owners: accept its terms on its page and set HF_TOKEN.",
    "RevisionNotFoundError": "it has no such revision.",
    "RepositoryNotFoundError": "there is no such repository, or it is private: is HF_TOKEN set?",
    "OfflineModeIsEnabled": "it is not in the local cache, and HF_HUB_OFFLINE forbids a download.",
    "LocalEntryNotFoundError": "it is not in the local cache, and the Hub cannot be reached.",
    "ConnectionError": "it is not in the local cache, and the Hub cannot be reached.",
    "TransportError": "it is not in the local cache, and the Hub cannot be reached.",
    "HFValidationError": "a Hub id has the form owner/name.",
}
