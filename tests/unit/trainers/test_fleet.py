"""The actor as the driver sees it."""

from __future__ import annotations

from pathlib import Path

import torch

from flowrl.distributed.launch.inline import Inline
from tests.support import tiny
from tests.support.ranks import configure, ranks, scored, weights


def test_equal_rewards_skip_the_cycle_whole(tiny_folder: Path) -> None:
    """Weight decay and momentum included."""
    run = configure(tiny_folder, "actor=full", "actor.optimizer.lr=0.1", "actor.optimizer.weight_decay=0.5")
    with ranks(Inline(), run) as processes:
        fleet = processes.fleet(run)
        batch = scored(list(fleet.generate(tiny.groups(4, 3), 0, 0)))
        (before,) = processes.all(weights)
        fleet.update(batch, torch.full((12,), 3e-4, dtype=torch.float64))
        (after,) = processes.all(weights)
        metrics = fleet.meter.collect()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert metrics["reward/degenerate"] == 1 and metrics["train/optimizer_skips"] == 1
    assert metrics["train/optimizer_steps"] == 0 and fleet.version == 0
