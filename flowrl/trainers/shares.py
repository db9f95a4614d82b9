"""How a batch is dealt out: to the updates of a cycle, and within each update to the ranks.

Pure bookkeeping on the driver's side: trajectories stay where they are, and every rank fetches the groups it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowrl.flow.noise import Noise
from flowrl.types import Algorithm, Handle, ScoredGroup


@dataclass(frozen=True)
class Part:
    """One rank's samples of one update. All ranks have equally many, so that they stay in step."""

    groups: np.ndarray  # int64 [M], places in `Share.groups`
    slots: np.ndarray  # int64 [M], places within the group
    advantages: np.ndarray  # float64 [M]
    num_fillers: int  # the last so many are there to keep in step: nothing is learnt from them
    num_samples: int  # of the whole update, on all ranks, without fillers

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class Share:
    """What one rank does in one cycle."""

    cycle: int
    groups: tuple[Handle, ...]  # of `Drawn`: those that the parts refer to, each once
    parts: tuple[Part, ...]  # one per update


def deal(
    batch: Sequence[ScoredGroup], advantages: Tensor, algorithm: Algorithm, noise: Noise, cycle: int, num_ranks: int
) -> list[Share]:
    """The share of every rank.

    The algorithm selects samples; whole groups, in a keyed random order, make equal updates, whatever the number of
    ranks; within an update samples are cut into equal runs. Only a selection can make them unequal (preflight has seen
    to the rest): then the shorter ones are filled up with samples that do not count.

    Args:
        batch: in the order of `advantages`.
        advantages: float64 [B], not all equal, so that no selection is empty.
    """
    sizes = [group.sampled.group.num_samples for group in batch]
    place = np.repeat(np.arange(len(batch)), sizes)
    slot = np.concatenate([np.arange(size) for size in sizes])
    ordinals = torch.tensor([group.sampled.group.ordinal for group in batch])
    rows = algorithm.select(advantages, ordinals[torch.from_numpy(place)]).numpy()
    worth = advantages.numpy()
    shares: list[list[Part]] = [[] for _ in range(num_ranks)]
    for update in _updates(place[rows], rows, ordinals, algorithm.num_updates_per_batch, noise, cycle):
        longest = -(-len(update) // num_ranks)
        cuts = np.array_split(update, num_ranks)
        for parts, cut in zip(shares, cuts, strict=True):
            filled = np.concatenate([cut, np.repeat(update[:1], longest - len(cut))])
            parts.append(Part(place[filled], slot[filled], worth[filled], longest - len(cut), len(update)))
    return [_share(cycle, batch, parts) for parts in shares]


def _updates(
    places: np.ndarray, rows: np.ndarray, ordinals: Tensor, num_updates: int, noise: Noise, cycle: int
) -> list[np.ndarray]:
    """Rows of each update: whole groups in a keyed random order, samples within a group in their own."""
    groups = sorted(np.unique(places).tolist(), key=lambda place: int(ordinals[place]))
    order = noise.permutation(len(groups), "order", cycle).tolist()
    parts = np.array_split(np.array([groups[i] for i in order]), min(num_updates, len(groups)))
    return [np.concatenate([rows[places == place] for place in part]) for part in parts]


def _share(cycle: int, batch: Sequence[ScoredGroup], parts: Sequence[Part]) -> Share:
    """With the groups that these parts need, renumbered."""
    needed = np.unique(np.concatenate([part.groups for part in parts]))
    renumbered = tuple(
        Part(np.searchsorted(needed, p.groups), p.slots, p.advantages, p.num_fillers, p.num_samples) for p in parts
    )
    return Share(cycle, tuple(batch[place].sampled.drawn for place in needed), renumbered)
