"""How a process computes while it works for a run, and afterwards."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from flowrl.config import Config
from flowrl.device import torch_settings


def switches() -> tuple[bool, bool, bool]:
    backends = torch.backends
    deterministic = torch.are_deterministic_algorithms_enabled()
    return deterministic, backends.cuda.cudnn_sdp_enabled(), backends.cudnn.allow_tf32


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_has_its_own_kernels_and_leaves_none(deterministic: bool) -> None:
    before = switches()
    assert before == (False, True, True), "torch's own"
    with torch_settings(Config(deterministic=deterministic)):
        assert switches() == (deterministic, False, False)
    assert switches() == before


def test_generators_of_others_go_on_as_if_there_had_been_no_run() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with torch_settings(Config(deterministic=True, seed=3)):
        torch.rand(3), random.random(), np.random.rand()
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
