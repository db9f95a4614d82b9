"""Where this process computes, and how."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from flowrl.config import Config
from flowrl.flow.noise import Noise


def choose_device(run: Config) -> torch.device:
    """`device=auto` is CUDA where there is one."""
    if run.device != "auto":
        return torch.device(run.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def settle_torch(run: Config, place: str) -> None:
    """`deterministic`, and attention to be relied on, for a process that does nothing else: the worker at `place`.

    flowrl draws from keyed generators alone. The global ones are for code that is not its own, an engine or a scorer.
    """
    # On Hopper torch prefers cuDNN's attention, whose backward pass has given NaN with masks (pytorch issue 196678,
    # torch 2.11) and illegal memory accesses (169849). Flash and memory-efficient attention take its place.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # float32 is float32, in convolutions as it is in matrix products: by default torch rounds theirs to 10 bits.
    torch.backends.cudnn.allow_tf32 = False
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        seed = Noise.of(run.seed, "process").generator(place).initial_seed()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


@contextmanager
def tf32_convolutions() -> Iterator[None]:
    """For pictures of 8 bits, of which TF32's 10 are enough: Wan's autoencoder is float32 and all convolutions."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextmanager
def torch_settings(run: Config) -> Iterator[None]:
    """The same for the length of a run; the next one in this process has its own."""
    deterministic, attention = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    tf32 = torch.backends.cudnn.allow_tf32
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    settle_torch(run, "driver")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cuda.enable_cudnn_sdp(attention)
        torch.backends.cudnn.allow_tf32 = tf32
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
