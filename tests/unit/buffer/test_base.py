"""One buffer for each run, and what configurations are refused."""

from __future__ import annotations

import pytest

from flowrl import load_config
from flowrl.buffer.accounting import BufferClosed, BufferFull
from flowrl.buffer.memory import MemoryBuffer
from flowrl.config import ConfigError
from flowrl.distributed.launch.inline import Inline
from flowrl.preflight import preflight
from tests.unit.buffer.support import group, scored
from tests.unit.buffer.test_ledger import HighestReward


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        preflight(load_config(list(overrides)))
    return [str(problem) for problem in caught.value.problems]


def test_the_default_is_memory_without_bounds() -> None:
    assert preflight(load_config()).buffer == MemoryBuffer()


def test_a_buffer_is_open_for_one_run() -> None:
    settings = MemoryBuffer(max_groups=1, max_bytes=1000)
    with pytest.raises(ZeroDivisionError), Inline().open([]) as cluster, settings.open(cluster) as buffer:
        buffer.submit([group(0)])
        assert not buffer.room(1)
        raise ZeroDivisionError
    with pytest.raises(BufferClosed):
        buffer.take(1)
    with Inline().open([]) as cluster, settings.open(cluster) as another:
        another.submit([group(0)])
        another.put(scored(0))
        assert another.accounting().submitted == 1
        with pytest.raises(BufferFull, match="1 are in flight"):
            another.submit([group(1)])


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
