"""Any number of ranks reads what any number has saved. The checks are in `rank_checks.py`; three processes run them."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from flowrl.distributed.checkpoint.folders import Folders
from flowrl.distributed.checkpoint.tensors import TensorStore, read_tensors
from tests.unit.distributed.checkpoint.rank_checks import CHECKS, STAGES, WORLD, assert_same, run_checks, whole_values
from tests.unit.distributed.checkpoint.support import PRELOADED

NOT_RUN = "not run: the ranks were out of step after the check before it"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one rank saved, and then all checks have run."""
    folder = tmp_path_factory.mktemp("ranks")
    store, folders = TensorStore(torch.device("cpu"), 60.0), Folders(folder / "by_1")
    temp = folders.begin(1)
    store.save(whole_values() | {"rng.rank_0": torch.zeros(16, dtype=torch.uint8)}, temp / "tensors", background=True)
    folders.commit(1, temp, {}, store.written(wait=True) or [], store.keys)
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(run_checks, (folder,), nprocs=WORLD, start_method="forkserver")
    return folder


@pytest.mark.parametrize(("stage", "check"), CHECKS)
def test_on_several_ranks(scratch: Path, stage: int, check: str) -> None:
    for rank in range(STAGES[stage][0]):
        error = json.loads((scratch / f"outcomes-{rank}.json").read_text()).get(f"{stage}.{check}", NOT_RUN)
        assert not error, f"rank {rank}: {error}"


@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_reads_what_several_saved(scratch: Path, world: int) -> None:
    """In place, and as whole tensors for an export."""
    folder = scratch / f"by_{world}" / "step_0000001" / "tensors"
    tensors = {key: torch.zeros_like(value) for key, value in whole_values().items()}
    rngs = {f"rng.rank_{rank}": torch.zeros(16, dtype=torch.uint8) for rank in range(world)}
    TensorStore(torch.device("cpu"), 60.0).load(tensors | rngs, folder)
    assert_same(tensors, whole_values())
    assert [int(rng[0]) for rng in rngs.values()] == list(range(world))
    weights = {key.removeprefix("weights."): v for key, v in whole_values().items() if key.startswith("weights.")}
    found = read_tensors(folder, "weights.")
    assert found.keys() == weights.keys()
    assert_same(found, weights)
