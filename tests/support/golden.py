"""Reference numbers in `tests/golden`: what published code computes, with the hyper-parameters it was given.

`FLOWRL_GOLDEN=<folder>` reads another set of the same files; no test knows their shapes or values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

FOLDER = Path(os.environ.get("FLOWRL_GOLDEN", Path(__file__).parents[1] / "golden"))


@dataclass(frozen=True)
class Golden:
    """One file. Keys `f64_*` are the same quantities computed in float64 from the same float32 inputs."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def doubles(self, *keys: str) -> list[Tensor]:
        """Inputs cast up, as the `f64_*` quantities were computed from them."""
        return [self.tensors[key].double() for key in keys]


def load(name: str) -> Golden:
    """The tensors and the metadata of `tests/golden/<name>.safetensors`."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (a handle, not a dict)
        metadata = {key: _value(text) for key, text in (file.metadata() or {}).items()}
    return Golden(tensors, metadata)


def load_json(name: str) -> Any:
    """The contents of `tests/golden/<name>.json`."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
