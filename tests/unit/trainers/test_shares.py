"""How a batch is dealt out to updates and ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.flow.noise import Noise
from flowrl.prompts import Prompt
from flowrl.trainers.shares import Share, deal
from flowrl.types import Group, InMemory, SampledGroup, Sampling, ScoredGroup

DRAWN_BY_NOBODY = Sampling(0, (), (), "", 1.0, ())


def batch(sizes: list[int]) -> list[ScoredGroup]:
    """Groups whose handle is their ordinal, in an order that is not that of the ordinals."""
    groups = [Group(100 - i, Prompt(f"p{i}", "text"), 0, size) for i, size in enumerate(sizes)]
    return [ScoredGroup(SampledGroup(g, None, DRAWN_BY_NOBODY, InMemory(g.ordinal)), {}) for g in groups]


def samples(share: Share, update: int) -> list[tuple[int, int, float]]:
    """(ordinal, slot, advantage) of what counts in one update of one rank."""
    part = share.parts[update]
    real = len(part) - part.num_fillers
    ordinals = [share.groups[place].fetch() for place in part.groups]
    return list(zip(ordinals, part.slots.tolist(), part.advantages.tolist(), strict=True))[:real]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=9),
    num_updates=st.integers(1, 4),
    num_ranks=st.integers(1, 5),
    cycle=st.integers(1, 3),
    drop=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_sample_is_dealt_once_whatever_the_number_of_ranks(
    sizes: list[int], num_updates: int, num_ranks: int, cycle: int, drop: bool, seed: int
) -> None:
    groups = batch(sizes)
    advantages = torch.randint(-1, 2, (sum(sizes),), generator=torch.Generator().manual_seed(seed)).double()
    advantages[0] = 1.0  # not everything is dropped
    algorithm = FlowGRPO(num_updates_per_batch=num_updates, drop_zero_advantage=drop)
    shares = deal(groups, advantages, algorithm, Noise.of(0), cycle, num_ranks)
    (alone,) = deal(groups, advantages, algorithm, Noise.of(0), cycle, 1)
    slots = [(g.sampled.group.ordinal, slot) for g in groups for slot in range(g.sampled.group.num_samples)]
    expected = [(*slot, a) for slot, a in zip(slots, advantages.tolist(), strict=True) if a or not drop]
    dealt = [[sample for share in shares for sample in samples(share, u)] for u in range(len(alone.parts))]
    assert Counter(sample for update in dealt for sample in update) == Counter(expected)
    assert dealt == [samples(alone, u) for u in range(len(alone.parts))]
    for u, update in enumerate(dealt):
        parts = [share.parts[u] for share in shares]
        assert {len(part) for part in parts} == {-(-len(update) // num_ranks)}
        assert {part.num_samples for part in parts} == {len(update)}
        assert sum(part.num_fillers for part in parts) == -len(update) % num_ranks
    owners = [{ordinal for ordinal, _, _ in update} for update in dealt]
    assert sum(map(len, owners)) == len(set.union(*owners)), "a group is in two updates"


def test_groups_travel_once_and_only_where_they_are_needed() -> None:
    groups = batch([4, 4, 4, 4])
    advantages = torch.arange(16).double()
    shares = deal(groups, advantages, FlowGRPO(num_updates_per_batch=2), Noise.of(0), 1, 2)
    for share in shares:
        used = np.unique(np.concatenate([part.groups for part in share.parts]))
        assert used.tolist() == list(range(len(share.groups)))
    assert sum(len(share.groups) for share in shares) == 4


def test_the_order_of_groups_changes_with_the_cycle_and_the_seed() -> None:
    groups, advantages = batch([1] * 8), torch.arange(8).double()
    orders = {
        tuple(samples(deal(groups, advantages, FlowGRPO(), Noise.of(seed), cycle, 1)[0], 0))
        for seed, cycle in ((0, 1), (0, 2), (1, 1))
    }
    assert len(orders) == 3


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equal_batches_need_no_filler(num_ranks: int) -> None:
    shares = deal(
        batch([4] * 4), torch.arange(16).double(), FlowGRPO(num_updates_per_batch=2), Noise.of(0), 1, num_ranks
    )
    assert [part.num_fillers for share in shares for part in share.parts] == [0] * 2 * num_ranks
