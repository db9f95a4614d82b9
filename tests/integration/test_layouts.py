"""Rollout workers draw what the actor would: every layout, every way of publishing, real processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowrl.config import Config
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.spawn import Spawn
from flowrl.tracking.metrics import Meter
from flowrl.trainers.rollouts import SeparateRollouts
from flowrl.types import SampledGroup
from tests.support import tiny
from tests.support.ranks import Ranks, advantages, configure, ranks, scored

LAYOUTS = {
    "standalone": ("trainer.layout=standalone", "rollout.num_workers=2"),
    "colocated": ("trainer.layout=colocated", "actor.num_ranks=2"),
}
PUBLICATIONS = [
    ("actor=full", "full"),
    ("actor=lora", "lora"),
    ("actor=lora", "merged"),
]
# By default each mode is tried in one of the layouts: processes take seconds to start.
TRIED = (("standalone", "full"),)  # by default; the others in the campaign


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[tuple[Ranks, tuple[str, ...]]]:
    """The processes of one layout, and what asks for it."""
    layout = LAYOUTS[request.param]
    with ranks(Spawn(), configure(tiny_folder, *layout)) as processes:
        yield processes, layout


def rollouts(processes: Ranks, run: Config) -> SeparateRollouts:
    """Fresh workers beside the actor of `run`, with its first weights."""
    fleet = processes.fleet(run)
    names = [f"rollout-{i}" for i in range(run.rollout.num_workers if run.trainer.layout == "standalone" else 2)]
    found = SeparateRollouts(run, processes.cluster, names, fleet, Meter())
    found.publish(0)
    return found


def assert_same_drawing(found: list[SampledGroup], expected: list[SampledGroup], version: int) -> None:
    assert {group.group.ordinal for group in found} == {group.group.ordinal for group in expected}
    by_ordinal = {group.group.ordinal: group for group in expected}
    for sampled in found:
        here, there = sampled.drawn.fetch(), by_ordinal[sampled.group.ordinal].drawn.fetch()
        assert sampled.sampling.policy_version == version
        assert torch.equal(here.trajectory.step_index, there.trajectory.step_index)
        torch.testing.assert_close(here.trajectory.final_latents, there.trajectory.final_latents, atol=1e-4, rtol=0)
        torch.testing.assert_close(here.trajectory.log_probs, there.trajectory.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("started", "actor", "mode"),
    [
        pytest.param(
            layout, actor, mode, marks=() if (layout, mode) in TRIED else pytest.mark.campaign, id=f"{layout}-{mode}"
        )
        for layout in LAYOUTS
        for actor, mode in PUBLICATIONS
    ],
    indirect=["started"],
)
def test_workers_draw_with_the_weights_that_were_published(
    started: tuple[Ranks, tuple[str, ...]], tiny_folder: Path, actor: str, mode: str
) -> None:
    processes, layout = started
    transport = "broadcast" if (mode == "lora") == ("colocated" in layout[0]) else "object_store"
    sync = (f"weight_sync.mode={mode}", f"weight_sync.transport={transport}", "weight_sync.bucket_mb=1")
    run = configure(tiny_folder, actor, *layout, *sync, "actor.optimizer.lr=1e-2")
    workers = rollouts(processes, run)
    drawn = list(workers.generate(tiny.groups(4, 4), 0))
    batch = scored(drawn)
    workers.actor.update(batch, advantages(batch))
    groups = tiny.groups(5, 2, first=10)
    stale = list(workers.generate(groups, 1))
    workers.publish(1)
    fresh = list(workers.generate(groups, 1))
    expected = list(workers.actor.generate(groups, 1, 1))
    assert_same_drawing(fresh, expected, version=1)
    moved = [
        (a.drawn.fetch().trajectory.final_latents - b.drawn.fetch().trajectory.final_latents).abs().max()
        for a, b in zip(by_ordinal(stale), by_ordinal(fresh), strict=True)
    ]
    assert max(moved) > 1e-3, "the update must show, else nothing is tested"
    metrics = workers.meter.collect()
    assert metrics["publish/version"] == 1 and metrics["publish/bytes"] > 0 and metrics["publish/failures"] == 0


def by_ordinal(groups: list[SampledGroup]) -> list[SampledGroup]:
    return sorted(groups, key=lambda sampled: sampled.group.ordinal)


@pytest.mark.parametrize(("actor", "mode"), PUBLICATIONS, ids=[mode for _, mode in PUBLICATIONS])
@pytest.mark.parametrize("layout", ["standalone", "colocated"])
def test_one_process_has_every_layout(tiny_folder: Path, actor: str, mode: str, layout: str) -> None:
    """`inline`: for tests and debuggers, the same schedule without other processes."""
    run = configure(tiny_folder, actor, f"trainer.layout={layout}", f"weight_sync.mode={mode}", "launcher=inline")
    with ranks(Inline(), run) as processes:
        fleet = processes.fleet(run)
        workers = SeparateRollouts(run, processes.cluster, ["rollout-0"], fleet, Meter())
        workers.publish(0)
        groups = tiny.groups(3, 2)
        assert_same_drawing(list(workers.generate(groups, 0)), list(fleet.generate(groups, 0, 0)), version=0)


def test_nothing_is_drawn_before_the_first_publication(tiny_folder: Path) -> None:
    run = configure(tiny_folder, "actor=full", "trainer.layout=standalone", "launcher=inline")
    with ranks(Inline(), run) as processes:
        workers = SeparateRollouts(run, processes.cluster, ["rollout-0"], processes.fleet(run), Meter())
        with pytest.raises(RuntimeError, match="no weights have been published"):
            list(workers.generate(tiny.groups(1, 2), 0))


def test_a_behaviour_policy_is_what_is_published(tiny_folder: Path) -> None:
    """DiffusionNFT samples with its old policy, not with the weights that are trained."""
    run = configure(
        tiny_folder, "actor=full", "trainer.layout=standalone", "launcher=inline", "algorithm=diffusion_nft",
        "actor.optimizer.lr=1e-2",
    )  # fmt: skip
    with ranks(Inline(), run) as processes:
        fleet = processes.fleet(run)
        workers = SeparateRollouts(run, processes.cluster, ["rollout-0"], fleet, Meter())
        workers.publish(0)
        batch = scored(list(workers.generate(tiny.groups(4, 4), 0)))
        fleet.update(batch, advantages(batch))
        workers.publish(1)
        groups = tiny.groups(2, 2, first=20)
        assert_same_drawing(list(workers.generate(groups, 1)), list(fleet.generate(groups, 1, 1)), version=1)


def test_an_adapter_of_another_scale_is_refused(tiny_folder: Path) -> None:
    run = configure(tiny_folder, "actor=lora", "trainer.layout=standalone", "launcher=inline")
    other = replace(run, actor=replace(run.actor, lora=replace(run.actor.lora, alpha=16.0)))
    with ranks(Inline(), run) as processes:
        fleet = processes.fleet(run)
        workers = SeparateRollouts(other, processes.cluster, ["rollout-0"], fleet, Meter())
        with pytest.raises(RuntimeError, match="alpha"):
            workers.publish(0)
