"""The feed with drawing stood in for: what is submitted, replaced, drawn again, and when it ends."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowrl.buffer.accounting import BufferFull, State
from flowrl.buffer.ledger import Ledger
from flowrl.buffer.memory import AsItIs
from flowrl.buffer.replay import ReplayBuffer
from flowrl.data.group_sampler import GroupSampler
from flowrl.prompts import Prompt
from flowrl.rewards.combine import Component
from flowrl.rewards.pool import RewardPool
from flowrl.rollout.checks import EngineError
from flowrl.trainers.chunks import Chunk, Source, settle
from flowrl.trainers.feed import Feed, Pace
from flowrl.trainers.separate_async import SeparateAsyncTrainer
from flowrl.types import Group, InMemory, SampledGroup, Sampling, ScoredGroup
from tests.support.scorers import Indifferent
from tests.unit.rewards.scorers import Obeys

BATCH = 4
PROMPTS = [Prompt(f"p{i}", f"sign {i}") for i in range(7)]


@dataclass
class Painter:
    """Rollout workers that paint everything black at once, and fail where they are told to."""

    num_workers: int = 1
    size: int = 2
    version: int = 0
    fails: Callable[[Group], bool] = lambda group: False
    begins: Callable[[Group], None] = lambda group: None  # called when a group is
    drawn: list[Chunk] = field(default_factory=list)
    versions: Mapping[int, int] = field(default_factory=dict)  # of single groups, where not `version`

    report_stuck_s: float = 300.0

    @property
    def run(self) -> Any:
        return SimpleNamespace(rollout=SimpleNamespace(report_stuck_s=self.report_stuck_s))

    @property
    def workers(self) -> range:
        return range(self.num_workers)

    def chunk_size(self, num_groups: int, num_samples: int) -> int:
        return min(self.size, num_groups)

    def serve(self, index: int, source: Source, sink: Callable[[SampledGroup], None]) -> None:
        while (chunk := source.next()) is not None:
            self.drawn.append(chunk)
            for place, group in enumerate(chunk.groups):
                self.begins(group)
                if self.fails(group):
                    settle(source, chunk, chunk.groups[place:], EngineError("it is blank", group.ordinal))
                    break
                sink(self.paint(group))

    def paint(self, group: Group) -> SampledGroup:
        version = self.versions.get(group.ordinal, self.version)
        sampling = Sampling(version, (0,), (1.0, 0.0), "FlowSDE()", 1.0, (1, 2, 2))
        return SampledGroup(group, np.zeros((2, 4, 4, 3), np.uint8), sampling, InMemory(None))

    def ordinals(self) -> list[int]:
        return [group.ordinal for chunk in self.drawn for group in chunk.groups]


@dataclass
class Bench:
    """A feed with everything around it real, and a trainer's loop by hand."""

    painter: Painter
    buffer: ReplayBuffer
    feed: Feed
    trained: list[int] = field(default_factory=list)

    def train(self, batch: list[ScoredGroup]) -> list[int]:
        """What a trainer does after an update: publish, advance, account."""
        ordinals = [scored.sampled.group.ordinal for scored in batch]
        assert not set(ordinals) & set(self.trained), "no group trains twice"
        self.painter.version += 1
        self.feed.advance()
        self.buffer.trained(ordinals)
        self.trained += ordinals
        return ordinals


@contextmanager
def bench(painter: Painter, lead: int = 0, total: int = 10, **options: Any) -> Iterator[Bench]:
    """Without threads unless told otherwise."""
    state: Mapping[str, Any] | None = options.pop("state", None)
    scorer, num_reward_workers = options.pop("scorer", Indifferent()), options.pop("num_reward_workers", 0)
    orders = options.pop("orders", {})
    prompts = [replace(prompt, metadata=orders) for prompt in PROMPTS]
    buffer = ReplayBuffer(Ledger(options.pop("max_groups", None), options.pop("max_bytes", None)), AsItIs())
    data = GroupSampler(prompts, BATCH, 2, seed=0)
    if state is not None:
        data.load_state_dict(state["data"])
        buffer.load_state_dict(state["buffer"])
    settings: dict[str, Any] = {"max_failures": 3, "threads": False, **options}
    with RewardPool({"any": Component(scorer=scorer)}, num_reward_workers) as rewards:
        rewards.warm()
        size = settings.pop("rollout_size", BATCH)
        pace = Pace(BATCH, lead, total)
        with Feed(data, painter, rewards, buffer, pace, size, **settings) as feed:  # type: ignore[arg-type]
            yield Bench(painter, buffer, feed)


def balance(buffer: ReplayBuffer) -> None:
    """The books close."""
    books = buffer.accounting()
    assert books.submitted == books.trained + books.num_evicted + books.num_in_flight


# ------------------------------------------------------------------------------------------ pace and staleness


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_batches_are_as_old_as_the_lead(lead: int) -> None:
    with bench(Painter(), lead) as b:
        for cycle in range(5):
            batch = b.feed.collect(BATCH)
            ages = {cycle - scored.sampled.sampling.policy_version for scored in batch}
            assert ages == {min(cycle, lead)}
            b.train(batch)
        assert b.trained == list(range(5 * BATCH))
        balance(b.buffer)


class Taking(SeparateAsyncTrainer):
    """The trainer's own collection, without a run around it."""

    def collected(self, b: Bench, version: int) -> list[ScoredGroup]:
        stages: Any = SimpleNamespace(
            actor=SimpleNamespace(version=version), buffer=b.buffer, timers=Nothing(), meter=Nothing()
        )
        run: Any = SimpleNamespace(data=SimpleNamespace(train_batch_size=BATCH))
        return self._collect(run, stages, b.feed)


class Nothing:
    """Timers and meters that nobody reads."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def spread(self, name: str, value: float) -> None:
        pass

    gauge = spread


def test_a_group_that_is_too_old_is_evicted_whole_and_replaced_exactly() -> None:
    """Versions that jump by three leave what was drawn ahead too old."""
    trainer = Taking(total_steps=10, mini_batch_size=BATCH, num_warmup_batches=1, max_staleness=1)
    with bench(Painter(), lead=1) as b:
        b.train(trainer.collected(b, version=0))
        b.painter.version = 3  # the second batch was drawn with version 0
        batch = trainer.collected(b, version=3)
        assert [scored.sampled.sampling.policy_version for scored in batch] == [3] * BATCH
        assert b.train(batch) == [8, 9, 10, 11], "a complete batch, in order"
        books = b.buffer.accounting()
        assert books.evicted == {"stale": BATCH} and books.trained == 2 * BATCH
        assert books.submitted == 2 * BATCH + BATCH + BATCH, "as many as were evicted, and the next batch"
        assert b.train(trainer.collected(b, version=4)) == [12, 13, 14, 15]
        assert len(set(b.painter.ordinals())) == len(b.painter.ordinals()), "nobody twice"
        balance(b.buffer)


def test_a_batch_that_is_old_in_part_keeps_its_young_groups() -> None:
    trainer = Taking(total_steps=10, mini_batch_size=BATCH, num_warmup_batches=0, max_staleness=0)
    with bench(Painter(version=1, versions={0: 0, 1: 0})) as b:
        batch = trainer.collected(b, version=1)
        assert b.train(batch) == [2, 3, 4, 5] and b.buffer.accounting().evicted == {"stale": 2}
        balance(b.buffer)


@pytest.mark.parametrize(("num_workers", "drawing_s"), [(1, 0.0), (0, 0.0), (1, 0.2)], ids=["own", "here", "slow"])
def test_scoring_that_the_trainer_waits_for_is_exposed(num_workers: int, drawing_s: float) -> None:
    """All but the last of a batch is hidden if drawing takes longer, and so is all that goes on while it trains."""
    painter = Painter(size=1, begins=lambda group: time.sleep(drawing_s))
    scored_s = 0.1
    rewards = {"scorer": Obeys(), "num_reward_workers": num_workers, "orders": {"sleep": scored_s}}
    with bench(painter, 1, 2, threads=True, **rewards) as b:
        b.train(b.feed.collect(BATCH))
        waited = b.feed.rewards.exposure.seconds()
        while b.buffer.accounting().in_flight[State.FINISHED] < BATCH:
            time.sleep(0.01)  # it trains
        trained = b.feed.rewards.exposure.seconds()
    if drawing_s:
        assert waited.hidden > waited.exposed >= 0.9 * scored_s
    else:
        assert waited.exposed >= 0.9 * scored_s * BATCH > waited.hidden
    assert trained.exposed == waited.exposed and trained.hidden >= (BATCH - 1) * scored_s * 0.9


def test_generation_ends_where_the_run_does() -> None:
    with bench(Painter(), lead=3, total=2) as b:
        for _ in range(2):
            b.train(b.feed.collect(BATCH))
        assert b.buffer.accounting().submitted == 2 * BATCH and b.buffer.accounting().num_in_flight == 0


# ------------------------------------------------------------------------------------------ failures


def test_a_group_that_fails_is_evicted_and_replaced() -> None:
    with bench(Painter(fails=lambda group: group.ordinal in (1, 6))) as b:
        assert b.train(b.feed.collect(BATCH)) == [0, 2, 3, 4]
        assert b.train(b.feed.collect(BATCH)) == [5, 7, 8, 9]
        assert b.buffer.accounting().evicted == {"rollout_failed": 2}
        balance(b.buffer)
    assert {chunk.rollout_id for chunk in b.painter.drawn if chunk.groups[0].ordinal >= 8} == {2}


@pytest.mark.parametrize("threads", [False, True])
def test_too_many_failures_in_a_row_end_the_run_with_the_last_reason(threads: bool) -> None:
    message = r"4 groups in a row .* trainer.max_failed_rollouts_in_a_row = 3. The last: group \d+ \(sign \d\) .* blank"
    with (
        pytest.raises(EngineError, match=message),
        bench(Painter(fails=lambda group: group.ordinal > 0), threads=threads) as b,
    ):
        b.feed.collect(BATCH)
    books = b.buffer.accounting()
    assert books.evicted == {"rollout_failed": 4} and books.in_flight[State.FINISHED] == 1
    balance(b.buffer)


def test_a_success_begins_the_count_anew() -> None:
    with bench(Painter(fails=lambda group: group.ordinal % 4 != 3)) as b:
        assert b.train(b.feed.collect(BATCH)) == [3, 7, 11, 15]


def test_a_trainer_that_waits_for_long_says_for_what(caplog: pytest.LogCaptureFixture) -> None:
    waiting = "the trainer waits for 4 finished groups; in flight: 0 pending, 1 running, 3 finished, 0 failed, 0 taken"
    deadline = time.monotonic() + 20

    def begins(group: Group) -> None:
        while group.ordinal == 3 and not any(line.endswith(waiting) for line in caplog.messages):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with (
        caplog.at_level(logging.WARNING),
        bench(Painter(size=1, report_stuck_s=0.05, begins=begins), threads=True) as b,
    ):
        b.feed.collect(BATCH)
    assert all(line.startswith("stuck? For ") for line in caplog.messages)


# ------------------------------------------------------------------------------------------ bounds


@pytest.mark.parametrize("max_groups", [BATCH, BATCH + 1, 3 * BATCH])
def test_a_slow_trainer_is_never_overrun(max_groups: int) -> None:
    most = 0
    with bench(Painter(num_workers=3, size=3), lead=1, threads=True, max_groups=max_groups) as b:
        for _ in range(6):
            batch = b.feed.collect(BATCH)
            for _ in range(20):  # an update, during which workers draw whatever they may
                time.sleep(0.001)
                most = max(most, b.buffer.accounting().num_in_flight)
            b.train(batch)
            balance(b.buffer)
    assert most <= min(max_groups, 2 * BATCH) and len(b.trained) == 6 * BATCH


def test_the_last_free_places_are_filled_one_by_one() -> None:
    """A chunk that does not fit must not keep a batch from becoming complete."""
    failing = {0}
    with bench(Painter(size=3, fails=lambda g: g.ordinal in failing), lead=1, max_groups=BATCH) as b:
        assert b.train(b.feed.collect(BATCH)) == [1, 2, 3, 4]


def test_a_batch_that_never_fits_is_an_error_at_once() -> None:
    message = r"max_bytes=500\). It cannot hold 4 finished groups"
    with pytest.raises(BufferFull, match=message), bench(Painter(size=1), threads=True, max_bytes=500) as b:
        b.feed.collect(BATCH)


# ------------------------------------------------------------------------------------------ the ends


def saved(b: Bench) -> dict[str, Any]:
    """As a checkpoint has it."""
    with b.feed.held():
        return json.loads(json.dumps({"data": b.feed.data.state_dict(), "buffer": b.buffer.state_dict()}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("lead", [0, 1])
def test_a_resumed_feed_draws_what_was_in_flight_first(lead: int) -> None:
    with bench(Painter(), lead, rollout_size=3) as b:
        b.train(b.feed.collect(BATCH))
        b.feed.collect(BATCH)  # taken, not trained
        state = saved(b)
        in_flight = b.buffer.accounting().num_in_flight
    with bench(Painter(version=1), lead, rollout_size=3, state=state, cycles=1) as resumed:
        first = resumed.train(resumed.feed.collect(BATCH))
        assert first == [4, 5, 6, 7] and resumed.buffer.accounting().restored == in_flight
        assert resumed.train(resumed.feed.collect(BATCH)) == [8, 9, 10, 11]
        assert all(g.ordinal // 3 == chunk.rollout_id for chunk in resumed.painter.drawn for g in chunk.groups)
        drawn = resumed.painter.ordinals()
        assert drawn == sorted(drawn) == list(range(4, 4 + len(drawn))), "by age, and nothing is left out"
        assert resumed.buffer.accounting().submitted == (3 + lead) * BATCH
        balance(resumed.buffer)


def test_a_group_that_failed_in_the_moment_of_saving_is_drawn_again() -> None:
    with bench(Painter()) as b:
        b.train(b.feed.collect(BATCH))
        (group,) = b.feed.data.take(1)
        b.buffer.submit([group])
        b.buffer.fail(group.ordinal, "it is blank")
        state = saved(b)
    with bench(Painter(), state=state, cycles=1) as resumed:
        assert resumed.train(resumed.feed.collect(BATCH)) == [4, 5, 6, 7]


def test_a_draining_feed_completes_the_batch_that_is_collected_and_no_other() -> None:
    painter = Painter(size=1)
    with bench(painter, lead=2, threads=True, only_on_demand=True) as b:
        painter.begins = lambda group: b.feed.drain() if group.ordinal == 1 else None
        b.train(b.feed.collect(BATCH))
        b.feed._set_paused(False)
        time.sleep(0.2)
        assert b.trained == [0, 1, 2, 3] and b.buffer.accounting().submitted == BATCH
    with bench(Painter(), lead=0) as b:  # asked during the update
        batch = b.feed.collect(BATCH)
        b.feed.drain()
        b.train(batch)
        assert b.feed.next() is None
        assert b.buffer.accounting().submitted == BATCH


def test_a_draining_feed_still_gives_a_batch_that_is_asked_for_afterwards() -> None:
    """The signal came while the step before was being saved: the trainer takes one more step, and stops then."""
    with bench(Painter(), lead=0, threads=True, only_on_demand=True) as b:
        b.train(b.feed.collect(BATCH))
        b.feed.drain()
        b.train(b.feed.collect(BATCH))
        assert b.trained == [0, 1, 2, 3, 4, 5, 6, 7] and b.buffer.accounting().submitted == 2 * BATCH


def test_a_draining_feed_replaces_what_fails() -> None:
    with bench(Painter(), lead=2) as b:
        b.feed.drain()  # before anything is asked for
        assert b.feed.next() is None
    painter = Painter(size=1, fails=lambda group: group.ordinal in (1, 2, 3))
    with bench(painter, lead=2, threads=True, only_on_demand=True) as b:
        painter.begins = lambda group: b.feed.drain() if group.ordinal == 0 else None
        assert b.train(b.feed.collect(BATCH)) == [0, 4, 5, 6]
        assert b.buffer.accounting().submitted == BATCH + 3
