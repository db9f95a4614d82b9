"""The same workers as Ray actors: ranks train as one, and a rollout worker draws with what was published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from flowrl.distributed.launch.base import Cluster
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.weight_sync.publisher import Transport
from flowrl.tracking.metrics import Meter
from flowrl.trainers.fleet import ActorFleet
from flowrl.trainers.placement import actor_places, rollout_places
from flowrl.trainers.rollouts import SeparateRollouts
from flowrl.types import SampledGroup
from tests.support import tiny
from tests.support.ranks import Ranks, advantages, configure, ranks, scored, weights

TWO_RANKS = ("launcher=ray", "actor.num_ranks=2")
STANDALONE = ("trainer.layout=standalone", "rollout.num_workers=1")
TRANSPORTS: tuple[Transport, ...] = ("broadcast", "object_store")
# A small eps would turn rounding of tiny gradients into signs.
OPTIMIZER = ("actor.optimizer.lr=1e-2", "actor.optimizer.eps=1e-3")


@pytest.fixture(scope="module")
def cluster(tiny_folder: Path) -> Iterator[Cluster]:
    """Of Ray, with places for two ranks and a rollout worker."""
    run = configure(tiny_folder, *TWO_RANKS, *STANDALONE)
    with Ray(num_threads=1).open([*actor_places(run), *rollout_places(run)]) as opened:
        yield opened


@pytest.fixture(scope="module")
def two(cluster: Cluster, tiny_folder: Path) -> Ranks:
    """Two actors of Ray's with a gloo group."""
    return Ranks(cluster, configure(tiny_folder, *TWO_RANKS))


def cycle(fleet: ActorFleet) -> list[SampledGroup]:
    """Draw and train; what was drawn, in order."""
    batch = scored(list(fleet.generate(tiny.groups(4, 4), 0, fleet.version)))
    fleet.update(batch, advantages(batch))
    return [group.sampled for group in batch]


def assert_same_drawing(found: list[SampledGroup], expected: list[SampledGroup]) -> None:
    """Noise and order to the bit, values to rounding."""
    assert [group.group.ordinal for group in found] == [group.group.ordinal for group in expected]
    for sampled, other in zip(found, expected, strict=True):
        here, there = sampled.drawn.fetch().trajectory, other.drawn.fetch().trajectory
        assert here.sample_ids == there.sample_ids and torch.equal(here.step_index, there.step_index)
        assert difference(sampled, other) < 1e-4


@pytest.mark.parametrize("actor", ["actor=lora", "actor=full"])
def test_two_ranks_are_one(two: Ranks, tiny_folder: Path, actor: str) -> None:
    fleet = two.fleet(configure(tiny_folder, actor, *OPTIMIZER, *TWO_RANKS))
    run = configure(tiny_folder, actor, *OPTIMIZER)
    with ranks(Inline(), run) as alone:
        lone = alone.fleet(run)
        (first,) = alone.all(weights)
        assert_same_drawing(cycle(fleet), cycle(lone))
        (expected,), (found, same) = alone.all(weights), two.all(weights)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], same[name]), f"ranks differ in {name}"
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)
    assert max((expected[name] - first[name]).abs().max().item() for name in expected) > 1e-3, "nothing was trained"


def test_a_rollout_worker_draws_with_what_was_published(two: Ranks, tiny_folder: Path) -> None:
    """First by broadcast, then by Ray's object store; what one process draws with weights of its own is the measure."""
    run = configure(tiny_folder, "actor=full", *OPTIMIZER, *TWO_RANKS, *STANDALONE, "weight_sync.bucket_mb=1")
    rollouts = SeparateRollouts(run, two.cluster, ["rollout-0"], two.fleet(run), Meter())
    alone = configure(tiny_folder, "actor=full", *OPTIMIZER)
    with ranks(Inline(), alone) as one:
        lone = one.fleet(alone)
        for version, transport in enumerate(TRANSPORTS):
            rollouts.publisher.transport = transport
            rollouts.publish(version)
            groups = tiny.groups(4, 4, first=4 * version)
            found = scored(list(rollouts.generate(groups, version)))
            expected = scored(list(lone.generate(groups, version, version)))
            assert_same_drawing([group.sampled for group in found], [group.sampled for group in expected])
            assert {group.sampled.sampling.policy_version for group in found} == {version}
            rollouts.actor.update(found, advantages(found))
            lone.update(expected, advantages(expected))
        assert rollouts.meter.collect()["publish/version"] == 1
        stale = lone.generate(groups, 1, 2)  # with the weights that nobody has published
        moved = [difference(a, b.sampled) for a, b in zip(by_ordinal(stale), found, strict=True)]
    assert max(moved) > 1e-3, "updates must show, else nothing is tested"


def by_ordinal(groups: Iterable[SampledGroup]) -> list[SampledGroup]:
    return sorted(groups, key=lambda sampled: sampled.group.ordinal)


def difference(here: SampledGroup, there: SampledGroup) -> float:
    """The largest, of final latents."""
    a, b = (sampled.drawn.fetch().trajectory.final_latents for sampled in (here, there))
    return float((a - b).abs().max())
