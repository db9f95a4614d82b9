"""What a checkpoint holds: every file by its hash, every tensor by its shape."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

FORMAT = 1
"""Of the manifest and of all that it lists; another number is refused."""

TENSORS = "tensors"
"""The folder of the tensor files inside a checkpoint."""

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_PATH = re.compile(rf"{_NAME}|{TENSORS}/{_NAME}\.safetensors")  # leaves the folder neither by `..` nor by a root
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message says which file, and what is wrong with it."""


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint, by its path inside the folder: a document's name, or `tensors/<name>.safetensors`."""

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not _PATH.fullmatch(self.path):
            raise CheckpointError(f"{self.path!r} is no path of a file in a checkpoint.")
        if self.num_bytes < 0 or not _SHA256.fullmatch(self.sha256):
            raise CheckpointError(f"{self.path}: {self.num_bytes} bytes with hash {self.sha256!r} is no file.")

    @property
    def is_tensors(self) -> bool:
        """Else it is a document."""
        return self.path.startswith(f"{TENSORS}/")


@dataclass(frozen=True)
class TensorSpec:
    """A whole tensor, whatever ranks hold it."""

    shape: tuple[int, ...]
    dtype: str  # torch's name: "float32"

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """The list of everything in a checkpoint but the list itself and its seal."""

    step: int
    files: Mapping[str, FileRecord]  # by path
    tensors: Mapping[str, TensorSpec]  # by key

    def dump(self) -> bytes:
        """As JSON, the same bytes for the same content."""
        files = [asdict(record) for _, record in sorted(self.files.items())]
        tensors = {key: asdict(spec) for key, spec in sorted(self.tensors.items())}
        content = {"format": FORMAT, "step": self.step, "files": files, "tensors": tensors}
        return json.dumps(content, indent=1).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CheckpointError for anything that `dump` does not write."""
        try:
            content = json.loads(data)
            if content["format"] != FORMAT:
                raise CheckpointError(f"its format is {content['format']!r}, and this version reads {FORMAT}.")
            records = [FileRecord(str(f["path"]), int(f["num_bytes"]), str(f["sha256"])) for f in content["files"]]
            tensors = {
                key: TensorSpec(tuple(int(size) for size in spec["shape"]), str(spec["dtype"]))
                for key, spec in content["tensors"].items()
            }
            step = int(content["step"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"it is no manifest ({type(error).__name__}: {error}).") from error
        return cls(step, {record.path: record for record in records}, tensors)
