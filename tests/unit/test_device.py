"""How a process computes while it works for a run, and afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.config import Config
from flowrl.device import torch_settings
from tests.support.ranks import configure


@pytest.fixture(autouse=True)
def torchs_own() -> Iterator[None]:
    """Workers in this very process may have settled it for good."""
    before = switches()
    set_switches(False, True, True)
    yield
    set_switches(*before)


def set_switches(deterministic: bool, attention: bool, tf32: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.enable_cudnn_sdp(attention)
    torch.backends.cudnn.allow_tf32 = tf32


def switches() -> tuple[bool, bool, bool]:
    backends = torch.backends
    deterministic = torch.are_deterministic_algorithms_enabled()
    return deterministic, backends.cuda.cudnn_sdp_enabled(), backends.cudnn.allow_tf32


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_has_its_own_kernels_and_leaves_none(deterministic: bool) -> None:
    with torch_settings(Config(deterministic=deterministic)):
        assert switches() == (deterministic, False, False)
    assert switches() == (False, True, True)


def test_generators_of_others_go_on_as_if_there_had_been_no_run() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with torch_settings(Config(deterministic=True, seed=3)):
        torch.rand(3), random.random(), np.random.rand()
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_an_autoencoder_may_round(tiny_folder: Path) -> None:
    """For the length of a decode, in a run that rounds nothing else."""
    policy = configure(tiny_folder).model.load(torch.device("cpu"))
    seen = []
    policy.pipeline.vae.decoder.register_forward_pre_hook(lambda *_: seen.append(switches()[2]))
    with torch_settings(Config()):
        policy.decode(torch.zeros(1, *policy.latent_shape(32, 32)))
        assert seen == [True] and switches()[2] is False
