"""A pool with one worker, and pauses that are noted and not slept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowrl.rewards import transport
from flowrl.rewards.pool import RewardPool
from tests.unit.rewards.scorers import Obeys
from tests.unit.rewards.support import one


@pytest.fixture(scope="module")
def obedient() -> Iterator[RewardPool]:
    """One worker with a short temper, and no second attempts."""
    with RewardPool(one(Obeys()), num_workers=1, timeout_s=1.0, retries=0, report_stuck_s=0.4) as pool:
        pool.warm()
        yield pool


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it would have waited, each time; it does not."""
    slept: list[float] = []
    monkeypatch.setattr(transport, "sleep", slept.append)
    return slept
