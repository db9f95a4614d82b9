"""Schedules in simulated time, against what can be said of them with a pencil."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.trainers.events import Event
from flowrl.trainers.rollouts import SeparateRollouts
from flowrl.trainers.simulation import Run, Setting, simulate

SYNC = Setting(mode="sync", num_workers=1, batch_size=8, full_chunk=2, group_s=1.0, update_s=3.0, publish_s=0.5)
ASYNC = replace(SYNC, mode="separate_async")


def test_one_worker_in_turn() -> None:
    """Chunks one after the other, then the scores of the last one, the updates, the publication."""
    found = simulate(replace(SYNC, chunk_s=0.25, score_s=0.4, num_updates=2))
    assert found.wait_s == pytest.approx(4 * (0.25 + 2 * 1) + 2 * 0.4)
    assert found.update_s == pytest.approx(2 * 3) and found.publish_s == pytest.approx(0.5)
    assert found.step_s == pytest.approx(9 + 0.8 + 6 + 0.5)
    assert found.actor_idle == pytest.approx(9.8 / 16.3)
    assert found.rollout_idle == pytest.approx(1 - 9 / 16.3)
    assert found.overlap == found.staleness_max == 0


def test_scoring_that_takes_longer_than_drawing_is_what_a_step_waits_for() -> None:
    found = simulate(replace(SYNC, score_s=4.0, num_reward_workers=2))
    assert found.wait_s == pytest.approx(2 * 1 + 8 / 2 * 4.0), "the first chunk, then both scorers without a pause"


@pytest.mark.parametrize("num_workers", [8, 1024])
def test_more_workers_than_groups_draw_one_each(num_workers: int) -> None:
    found = simulate(replace(SYNC, num_workers=num_workers, score_s=0.1, num_reward_workers=8), num_steps=5)
    assert found.wait_s == pytest.approx(1.0 + 0.1)


def test_drawing_is_hidden_behind_longer_updates() -> None:
    """The actor never waits, and what it trains on is as old as it is allowed to get."""
    found = simulate(replace(ASYNC, num_workers=8, num_warmup_batches=2, max_staleness=2))
    assert found.step_s == pytest.approx(3 + 0.5) and found.wait_s == 0 == found.actor_idle
    assert found.staleness_mean == found.staleness_max == 2 and found.num_evicted == 0
    assert found.rollout_idle == pytest.approx(1 - 1 / 3.5), "each draws one group of a second"


def test_updates_are_hidden_behind_longer_drawing() -> None:
    """The worker never waits, except for its weights, and a step takes what a batch takes."""
    found = simulate(replace(ASYNC, group_s=2.0))
    assert found.step_s == pytest.approx(8 * 2 + 0.5)
    assert found.rollout_idle == pytest.approx(0.5 / 16.5), "it waits for its weights, and for nothing else"
    assert found.overlap == pytest.approx(1)
    assert simulate(replace(ASYNC, group_s=2.0, publish_s=0)).step_s == pytest.approx(16)


def test_a_publication_waits_for_what_is_being_drawn_and_for_no_more() -> None:
    """Weights are taken between two chunks, and none is begun until they are."""
    setting = replace(ASYNC, full_chunk=8, group_s=2.0, publish_s=0, num_warmup_batches=3, max_staleness=3)
    found = simulate(setting)
    assert found.step_s == pytest.approx(16) and found.publish_s <= 16 - found.update_s


def test_nothing_overlaps_when_it_must_not() -> None:
    """One worker without warm-up: the synchronous trainer, to the last digit."""
    changes = {"num_warmup_batches": 0, "max_staleness": 0, "sync_compatible": True}
    setting = replace(ASYNC, score_s=0.3, chunk_s=0.1, **cast(Any, changes))
    assert simulate(setting) == simulate(replace(setting, mode="sync", sync_compatible=False))


def test_two_on_one_core_take_turns() -> None:
    """Whatever overlaps, a step costs all that is computed in it."""
    found = simulate(replace(ASYNC, num_cores=1, score_s=0.1))
    assert found.step_s == pytest.approx(8 * 1 + 8 * 0.1 + 3 + 0.5)


def test_durations_vary_around_their_mean() -> None:
    setting = replace(SYNC, spread=0.3, publish_s=0, update_s=0)
    found = simulate(setting, num_steps=300)
    assert found.step_s == pytest.approx(8, rel=0.02) and len({step.step_s for step in found.steps}) > 290
    assert found == simulate(setting, num_steps=300) != simulate(replace(setting, seed=1), num_steps=300)


def test_steps_that_fill_and_empty_the_pipeline_do_not_count() -> None:
    found = simulate(ASYNC, num_steps=10)
    assert len(found.steps) == 10
    assert found.steps[0].staleness_max == 0 and found.staleness_mean == 0.5
    assert found.steps[-1].rollout_idle > 5 * found.rollout_idle, "what no step would use is not drawn"
    assert simulate(ASYNC, num_steps=1).steps[0].step_s == pytest.approx(8 + 3 + 0.5)


DURATIONS = st.sampled_from([0.0, 0.1, 1.0, 3.7])
SETTINGS = st.builds(
    lambda updates, groups, lead, slack, **other: Setting(
        mode="separate_async",
        batch_size=updates * groups,
        num_updates=updates,
        num_warmup_batches=lead,
        max_staleness=lead + slack,
        **other,
    ),
    updates=st.integers(1, 3),
    groups=st.integers(1, 5),
    lead=st.integers(0, 2),
    slack=st.integers(0, 1),
    num_workers=st.integers(1, 5),
    num_reward_workers=st.integers(1, 3),
    full_chunk=st.integers(1, 4),
    chunk_s=DURATIONS,
    group_s=DURATIONS,
    score_s=DURATIONS,
    update_s=DURATIONS,
    publish_s=DURATIONS,
    spread=st.sampled_from([0.0, 1.0]),
    num_cores=st.sampled_from([None, 1, 3]),
)


@settings(deadline=None, max_examples=150)
@given(SETTINGS)
def test_every_group_is_accounted_for(setting: Setting) -> None:
    """submitted = trained + evicted + in flight; at the end nothing is, since nothing more would be used."""
    run, end = Run(setting, 6), Event()
    run.clock.start(run.train(end))
    run.clock.run(end)
    assert run.num_trained == 6 * setting.batch_size
    assert run.num_submitted == run.num_trained + run.num_evicted + len(run.finished) and not run.finished
    for step in run.steps:
        assert step.staleness_max <= setting.max_staleness
        assert step.step_s == pytest.approx(step.wait_s + step.update_s + step.publish_s)
        assert all(-1e-9 <= share <= 1 + 1e-9 for share in (step.actor_idle, step.overlap))
    assert sum(step.num_evicted for step in run.steps) == run.num_evicted


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8), st.integers(1, 70))
def test_chunks_are_as_large_as_the_trainers(
    rollout_size: int, batch_size: int, num_samples: int, workers: int
) -> None:
    rollouts = SimpleNamespace(
        run=SimpleNamespace(rollout=SimpleNamespace(batch_size=batch_size)), workers=range(workers)
    )
    expected = SeparateRollouts.chunk_size(cast(Any, rollouts), rollout_size, num_samples)
    full = max(1, batch_size // num_samples)
    setting = replace(SYNC, batch_size=rollout_size, full_chunk=full, num_workers=workers)
    assert setting.chunk_size == expected


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_workers": 0}, "num_workers must be at least 1, got 0"),
        ({"group_s": float("nan")}, "group_s must be finite and at least 0, got nan"),
        ({"num_updates": 3}, "num_updates must divide batch_size = 8, got 3"),
        ({"num_warmup_batches": 2}, "max_staleness must be at least num_warmup_batches = 2, got 1"),
        ({"sync_compatible": True}, "num_warmup_batches must be 0 with sync_compatible, got 1"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(SYNC, **changes)
