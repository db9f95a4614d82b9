"""Rewards that look at latents: what reaches them, from wherever the latents lie."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.distributed.launch.shelf import Shelf
from flowrl.distributed.records import pack
from flowrl.models.embeddings import Text, TextConditions
from flowrl.rewards.combine import Component
from flowrl.rewards.latents import Latents
from flowrl.rewards.pool import RewardPool
from flowrl.rewards.scoring import RewardError
from flowrl.types import Drawn, SampledGroup
from tests.unit.rewards.scorers import Brightness, Energy
from tests.unit.rewards.support import sampled_group

EMBEDS = torch.arange(12.0).reshape(1, 3, 4)


def drawn(dtype: torch.dtype = torch.float32) -> Drawn:
    """Two samples, of a policy that computes its embeddings in `dtype`."""
    plain: Drawn = sampled_group().drawn.fetch()
    final = torch.randn(2, 4, 3, 2, generator=torch.Generator().manual_seed(0)).transpose(2, 3)  # not contiguous
    text = Text(EMBEDS.to(dtype), pooled=torch.ones(1, 5), mask=torch.tensor([[True, True, False]]))
    return Drawn(replace(plain.trajectory, final_latents=final), TextConditions(text))


def undecoded(value: Drawn) -> SampledGroup:
    return SampledGroup.of(sampled_group().group, None, value)


def energy(value: Drawn) -> np.ndarray:
    return value.trajectory.final_latents.double().square().mean(dim=(1, 2, 3)).numpy() + EMBEDS.double().mean().item()


@dataclass(frozen=True)
class Recorded:
    """A handle that says who fetched it, and how often."""

    value: Any
    log: list[str]

    def fetch(self) -> Any:
        self.log.append(threading.current_thread().name)
        return self.value


@pytest.fixture(scope="module")
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.clear()


def test_what_a_scorer_is_given() -> None:
    value = drawn(torch.bfloat16)
    shown = Latents.of(value)
    np.testing.assert_array_equal(shown.samples, value.trajectory.final_latents.numpy())
    assert {name: (part.dtype.name, part.shape) for name, part in shown.text.items()} == {
        "prompt_embeds": ("float32", (1, 3, 4)),
        "pooled_prompt_embeds": ("float32", (1, 5)),
        "prompt_embeds_mask": ("bool", (1, 3)),
    }
    arrays = [shown.samples, *shown.text.values()]
    assert all(array.flags.c_contiguous and array.flags.owndata for array in arrays)
    shown.samples[:] = 0
    assert not bool((value.trajectory.final_latents == 0).any()), "what is trained on is not the scorer's to change"


def test_a_policy_need_not_have_embeddings() -> None:
    assert Latents.of(sampled_group().drawn.fetch()).text == {}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_latents_are_scored_where_they_were_left(shelf: Shelf, num_workers: int) -> None:
    """In shared memory, as rollout workers leave them; a scorer of pictures beside it gets its own."""
    value = drawn()
    left = replace(sampled_group(), drawn=shelf.own(shelf.put(pack(value))))
    components = {"energy": Component(scorer=Energy()), "style": Component(scorer=Brightness())}
    with RewardPool(components, num_workers) as pool:
        scored = pool.submit(left).result(timeout=20)
    np.testing.assert_allclose(scored.rewards["energy"], energy(value), rtol=1e-12)
    np.testing.assert_array_equal(scored.rewards["style"], left.images.mean(axis=(1, 2, 3)) / 255)


def test_they_are_fetched_once_and_in_the_thread_that_scores() -> None:
    log: list[str] = []
    components = {name: Component(scorer=Energy()) for name in ("one", "other")}
    with RewardPool(components, num_workers=1) as pool:
        scored = pool.submit(replace(undecoded(drawn()), drawn=Recorded(drawn(), log))).result(timeout=20)
    assert len(log) == 1 and log[0].startswith("flowrl-reward")
    np.testing.assert_array_equal(scored.rewards["one"], scored.rewards["other"])


def test_latents_that_are_gone(shelf: Shelf) -> None:
    handle = shelf.put(pack(drawn()))
    shelf.clear()
    with (
        RewardPool({"energy": Component(scorer=Energy())}, num_workers=0) as pool,
        pytest.raises(RewardError, match=r"'energy' failed on prompt 'p0': .* is gone"),
    ):
        pool.submit(replace(undecoded(drawn()), drawn=handle)).result()
