"""Checkpoints on one rank, whole: saved in the way the driver and its ranks do it together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flowrl.distributed.checkpoint.folders import Committed, Folders, open_checkpoint
from flowrl.distributed.checkpoint.tensors import TensorStore, read_tensors

CPU = torch.device("cpu")
PRELOADED = [f"{__package__}.{name}" for name in ("rank_checks", "saving")]
"""Imported once, by the process that all others of these tests are forked from: torch takes seconds."""


def state_of(value: float, size: int = 6) -> dict[str, Tensor]:
    """A small state with nothing but one number in it."""
    return {
        "weights.layer.weight": torch.full((size, 2), value),
        "weights.layer.bias": torch.full((3,), value, dtype=torch.bfloat16),
        "optimizer.layer.weight.step": torch.tensor(value),
    }


def save(root: Path, step: int, tensors: Mapping[str, Tensor], label: str = "") -> Committed:
    """A committed checkpoint with one document, `state.json`."""
    store, folders = TensorStore(CPU, 10.0), Folders(root)
    temp = folders.begin(step)
    store.save(tensors, temp / "tensors", background=True)
    documents = {"state.json": json.dumps({"label": label}).encode()}
    return folders.commit(step, temp, documents, store.written(wait=True) or [], store.keys)


def value_in(path: Path) -> float:
    """The number in a checkpoint of `state_of`, every part of which is checked."""
    opened = open_checkpoint(path, verify=True)
    tensors = read_tensors(opened.tensors, "")
    assert tensors.keys() == state_of(0.0).keys()
    values = {value.float().unique().item() for value in tensors.values()}
    assert len(values) == 1, values
    assert opened.json("state.json") == {"label": str(values.copy().pop())}
    return values.pop()
