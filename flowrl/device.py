"""Where this process computes, and how."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flowrl.config import Config


def choose_device(run: Config) -> torch.device:
    """`device=auto` is CUDA where there is one."""
    if run.device != "auto":
        return torch.device(run.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def settle_torch(run: Config) -> None:
    """`deterministic`, for a process that does nothing else."""
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)


@contextmanager
def torch_settings(run: Config) -> Iterator[None]:
    """The same for the length of a run; the next one in this process has its own."""
    before = torch.are_deterministic_algorithms_enabled()
    settle_torch(run)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
