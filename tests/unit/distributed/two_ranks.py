"""Two processes, each of which runs the same checks in turn."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from tests.unit.distributed.family_checks import FAMILY_CHECKS, MORE_CHECKS
from tests.unit.distributed.rank_checks import CHECKS, WORLD, Ranks

ALL = CHECKS | FAMILY_CHECKS | MORE_CHECKS


def on_two_ranks(names: Iterable[str], folder: Path, scratch: Path) -> list[dict[str, str]]:
    """What became of the checks of these names, by rank; "" is good.

    Args:
        names: of checks.
        folder: the model's.
        scratch: for files.
    """
    mp.spawn(run_checks, (folder, scratch, list(names)), nprocs=WORLD)
    return [json.loads((scratch / f"outcomes-{rank}.json").read_text()) for rank in range(WORLD)]


def run_checks(rank: int, folder: Path, scratch: Path, names: Sequence[str]) -> None:
    """The checks of these names on one rank, up to the first that fails: after it the ranks are out of step.

    Outcomes go to a file.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(str(scratch / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
    ranks = Ranks(folder, scratch, init_device_mesh("cpu", (WORLD,)))
    outcomes: dict[str, str] = {}
    for name in names:
        try:
            ALL[name](ranks)
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
            break
    (scratch / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    if not any(outcomes.values()):
        dist.destroy_process_group()
