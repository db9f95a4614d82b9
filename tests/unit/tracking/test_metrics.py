"""Spreads against numpy, meters over calls and ranks, reward metrics against closed forms."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flowrl.tracking.metrics import Meter, Spread, Timers, component_metrics, memory_metrics, reward_metrics

numbers = st.floats(-1e6, 1e6, allow_nan=False)


@settings(deadline=None)
@given(arrays(np.float64, st.integers(2, 40), elements=numbers), st.data())
def test_merged_spreads_are_the_spread_of_all(values: np.ndarray, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(values) - 1))
    merged = Spread.of(values[:cut]).merge(Spread.of(values[cut:]))
    assert merged.count == len(values)
    assert merged.mean == pytest.approx(values.mean(), rel=1e-12, abs=1e-9)
    assert merged.std == pytest.approx(values.std(), rel=1e-9, abs=1e-8)
    assert (merged.min, merged.max) == (values.min(), values.max())


def test_std_survives_a_ratio_close_to_one() -> None:
    """sum(x^2)/n - mean^2 gives 0 or a negative number here: 1e-18 is below the rounding of 1."""
    steps = np.array([-1.0, 1.0]) * 2.0**-30
    spread = Spread.of(1 + steps[:1]).merge(Spread.of(1 + steps[1:]))
    assert spread.std == pytest.approx(2.0**-30, rel=1e-6)


def test_nan_shows_in_every_statistic() -> None:
    good, bad = Spread.of(np.array([1.0, 2.0])), Spread.of(np.array([3.0, np.nan]))
    for merged in (good.merge(bad), bad.merge(good)):
        assert all(math.isnan(value) for value in merged.metrics("x").values())


def test_meter_shows_each_kind() -> None:
    meter = Meter()
    for micro in (torch.tensor([1.0, 2.0]), torch.tensor([6.0])):
        meter.mean("loss", micro)
        meter.spread("ratio", micro)
        meter.count("rows", len(micro))
        meter.worst("memory", micro.max())
        meter.gauge("lr", float(micro[0]))
    assert meter.collect() == {
        "loss": 3.0,  # over values, not over calls
        "ratio_mean": 3.0,
        "ratio_std": pytest.approx(math.sqrt(14 / 3)),
        "ratio_min": 1.0,
        "ratio_max": 6.0,
        "rows": 3.0,
        "memory": 6.0,
        "lr": 6.0,
    }
    assert meter.collect() == {}


def test_metrics_do_not_depend_on_micro_batches() -> None:
    values = torch.rand(64, generator=torch.Generator().manual_seed(0))
    collected = []
    for size in (64, 7):
        meter = Meter()
        for micro in values.split(size):
            meter.spread("ratio", micro)
        collected.append(meter.collect())
    assert collected[0] == collected[1]


def test_meter_counts_exactly() -> None:
    meter = Meter()
    for _ in range(2**10):
        meter.count("n", 3)
    assert meter.collect() == {"n": 3.0 * 2**10}


def test_meter_passes_empty_tensors_over_and_refuses_two_kinds() -> None:
    meter = Meter()
    meter.mean("loss", torch.empty(0))
    assert meter.collect() == {}
    meter.mean("loss", 1.0)
    with pytest.raises(ValueError, match="loss was collected as a mean and now comes as a spread"):
        meter.spread("loss", 1.0)


RANK_VALUES = [torch.tensor([0.5, 3.0, -2.0]), torch.tensor([7.0])]


def _collect_on(rank: int, folder: str) -> None:
    torch.set_num_threads(1)  # a forked process must not wait for its parent's threads
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    meter = Meter()
    meter.spread("ratio", RANK_VALUES[rank])
    meter.count("skips", rank + 1)
    meter.worst("memory", 10.0 - rank)
    if rank == 1:
        meter.mean("only_here", 4.0)
    torch.save(meter.collect(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_collect_what_one_process_does(tmp_path: Path) -> None:
    # fork: two fresh imports of torch would take longer than all other tests of this folder
    torch.multiprocessing.start_processes(_collect_on, (str(tmp_path),), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    alone = Meter()
    alone.spread("ratio", torch.cat(RANK_VALUES))
    assert first == second
    assert first == pytest.approx(alone.collect() | {"skips": 3.0, "memory": 10.0, "only_here": 4.0}, rel=1e-15)
    assert (first["ratio_min"], first["ratio_max"]) == (-2.0, 7.0)


def test_timers_nest_repeat_and_count_phases_that_raise() -> None:
    timers = Timers()
    with timers.phase("step"):
        for _ in range(2):
            with pytest.raises(RuntimeError), timers.phase("rollout"):
                time.sleep(0.01)
                raise RuntimeError
    metrics = timers.collect()
    assert metrics["perf/step_s"] >= metrics["perf/rollout_s"] >= 0.02
    assert timers.collect() == {}


def test_cpu_memory_follows_what_is_allocated() -> None:
    before = memory_metrics(torch.device("cpu"))
    held = np.ones(25_000_000)  # 0.2 GB
    after = memory_metrics(torch.device("cpu"))
    assert after["perf/mem_allocated_gb"] - before["perf/mem_allocated_gb"] == pytest.approx(
        held.nbytes / 1e9, abs=0.02
    )
    assert after["perf/mem_peak_gb"] >= 0.99 * after["perf/mem_allocated_gb"]


def test_reward_metrics_in_closed_form() -> None:
    ocr = np.array([0.0, 1.0, 0.5, 0.5, 1.0])
    metrics = reward_metrics({"ocr": ocr}, torch.tensor([-1.0, 1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 3, 3, 9]))
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.6,
            "reward/ocr_mean": 0.6,
            "reward/ocr_std": ocr.std(),
            "reward/ocr_min": 0.0,
            "reward/ocr_max": 1.0,
            "reward/group_std_mean": 0.5 / 3,
            "reward/zero_std_ratio": 2 / 3,  # a group of one counts: it has no advantage either
            "reward/advantage_mean": 0.0,
            "reward/advantage_std": math.sqrt(2 / 5),
            "reward/num_groups": 3.0,
        }
    )


def test_group_metrics_are_of_the_total() -> None:
    """Components that cancel leave nothing to learn from, however much each of them varies."""
    a = np.array([0.0, 1.0])
    ids, advantages = np.zeros(2), np.zeros(2)
    metrics = reward_metrics({"a": a, "b": 1 - a}, advantages, ids, total=a + (1 - a))
    assert (metrics["reward/mean"], metrics["reward/zero_std_ratio"], metrics["reward/a_std"]) == (1.0, 1.0, 0.5)
    with pytest.raises(ValueError, match="total is needed for 2 reward components"):
        reward_metrics({"a": a, "b": 1 - a}, advantages, ids)


def test_component_metrics_take_a_prefix() -> None:
    assert component_metrics({"ocr": np.array([1.0, 3.0])}, "eval/heldout") == {
        "eval/heldout/ocr_mean": 2.0,
        "eval/heldout/ocr_std": 1.0,
        "eval/heldout/ocr_min": 1.0,
        "eval/heldout/ocr_max": 3.0,
    }
