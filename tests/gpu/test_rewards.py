"""Which GPUs reward workers see, with a driver and GPUs that are really there: `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.config import Config
from flowrl.rewards.combine import Component
from flowrl.rewards.pool import RewardPool
from flowrl.trainers.placement import on_host, pool_places, trainer_places
from tests.support.ranks import configure
from tests.unit.rewards.support import sampled_group

pytestmark = pytest.mark.gpu
one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@dataclass(frozen=True)
class Memory:
    """Free bytes of the worker's first GPU, after it has taken 4 GiB of it; -1 without CUDA."""

    def load(self) -> None:
        """Nothing."""

    def score(self, images: np.ndarray, prompts: Sequence[Any]) -> np.ndarray:
        """The same for every picture."""
        if not torch.cuda.is_available():
            return np.full(len(images), -1.0)
        assert torch.cuda.device_count() == 1
        taken = torch.empty(2**32, dtype=torch.uint8, device="cuda").fill_(1)
        free, _ = torch.cuda.mem_get_info()
        return np.full(len(images), float(free + 0 * int(taken[0])))


def free_bytes(run: Config, runtime: str) -> float:
    """What the one worker sees while this process holds 8 GiB of the first GPU."""
    run = replace(run, reward=replace(run.reward, runtime=runtime, num_workers=1))
    workers = on_host(pool_places(run)["reward"], trainer_places(run))
    held = torch.empty(2**33, dtype=torch.uint8, device="cuda:0").fill_(1)
    with RewardPool({"memory": Component(scorer=Memory())}, 1, make_worker=workers) as pool:
        found = float(pool.submit(sampled_group()).result(timeout=120).rewards["memory"][0])
    del held
    torch.cuda.empty_cache()
    return found


@one_gpu
def test_the_gpu_that_draws_or_none(tiny_folder: Path) -> None:
    run = replace(configure(tiny_folder, "launcher=inline"), device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    assert free_bytes(run, "cpu") == -1
    assert 0 < free_bytes(run, "colocated") < total - 2**33 - 2**32


@two_gpus
def test_a_gpu_of_its_own(tiny_folder: Path) -> None:
    run = replace(configure(tiny_folder, "launcher=inline"), device="cuda")
    assert free_bytes(run, "remote") > torch.cuda.get_device_properties(0).total_memory - 2**33
