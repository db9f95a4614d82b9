"""What configurations are refused."""

from __future__ import annotations

import pytest

from flowrl import load_config
from flowrl.buffer.memory import MemoryBuffer
from flowrl.config import ConfigError
from flowrl.preflight import preflight
from tests.unit.buffer.test_ledger import HighestReward


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        preflight(load_config(list(overrides)))
    return [str(problem) for problem in caught.value.problems]


def test_the_default_is_memory_without_bounds() -> None:
    assert preflight(load_config()).buffer == MemoryBuffer()


def test_bounds_that_no_batch_keeps_to() -> None:
    found = problems("data.train_batch_size=8", "buffer.max_groups=7", "buffer.max_bytes=0", "buffer.order=newest")
    assert found == [
        "buffer.max_groups: must be at least data.train_batch_size = 8, got 7.",
        "buffer.max_bytes: must be at least 1, got 0.",
        "buffer.order: must be called with a scored group and give a key, got 'newest'. "
        "Set buffer.order._target_ to the dotpath of such a class.",
    ]


def test_an_order_is_a_component() -> None:
    run = preflight(load_config(["buffer.order={_target_: tests.unit.buffer.test_ledger.HighestReward}"]))
    assert run.buffer.order == HighestReward()
