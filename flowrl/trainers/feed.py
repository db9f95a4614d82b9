"""Generation that goes on while the actor trains: groups are drawn, scored and buffered in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from types import TracebackType
from typing import Self

from flowrl.buffer.accounting import State
from flowrl.buffer.replay import ReplayBuffer
from flowrl.data.group_sampler import GroupSampler
from flowrl.distributed.launch.stuck import reporting
from flowrl.rewards.pool import RewardPool
from flowrl.rollout.checks import EngineError
from flowrl.trainers.chunks import Chunk, FailedGroup
from flowrl.trainers.rollouts import SeparateRollouts
from flowrl.types import Group, SampledGroup, ScoredGroup

LOOK_AGAIN_S = 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How far generation may run ahead, in groups.

    Groups are trained in the order of their submission, `batch_size` in each cycle, so the n-th group that is not given
    up is used in cycle n // batch_size. Submitted after `cycles` cycles, it will be that many cycles minus `cycles`
    old when it is used, which is its staleness if every cycle publishes. Nothing is submitted whose predicted age
    exceeds `lead`.
    """

    batch_size: int
    lead: int  # batches beyond the one that is collected: `num_warmup_batches`
    total_cycles: int  # of the run: what none of them would use is not submitted

    def allowance(self, num_submitted: int, num_evicted: int, cycles: int) -> int:
        """How many groups may be submitted now."""
        batches = min(cycles + 1 + self.lead, self.total_cycles)
        return max(0, batches * self.batch_size - (num_submitted - num_evicted))


class Feed:
    """Keeps the rollout workers at work, as far ahead as `pace` and the buffer's bounds allow (`chunks.Source`).

    One thread for each worker draws; reward workers score while it goes on. Whatever fails there closes the buffer, so
    that it is raised where the trainer waits for groups. Without threads (`launcher=inline`) groups are drawn when
    `collect` is called, as many as are allowed: a deterministic interleave without overlap.

    Groups that cannot be drawn are evicted, and others are submitted in their place. Groups that `buffer` holds from
    the beginning, those of a resumed run, are drawn first.

    Args:
        rollout_size: groups that share their stochastic steps: a mini-batch.
        max_failures: groups in a row that may fail; one more ends generation.
        cycles: that have ended already, of a resumed run.
        threads: whether generation goes on in the background.
        only_on_demand: draw while `collect` waits and at no other time; for a pace without lead.
    """

    tolerant = True

    def __init__(
        self,
        data: GroupSampler,
        rollouts: SeparateRollouts,
        rewards: RewardPool,
        buffer: ReplayBuffer,
        pace: Pace,
        rollout_size: int,
        *,
        max_failures: int,
        cycles: int = 0,
        threads: bool = True,
        only_on_demand: bool = False,
    ) -> None:
        self.data = data
        self.rollouts = rollouts
        self.rewards = rewards
        self.buffer = buffer
        self.pace = pace
        self.rollout_size = rollout_size
        self.max_failures = max_failures
        self.cycles = self._num_asked = cycles
        self.waited_s = 0.0
        self.num_workers = len(rollouts.workers)
        self._changed = threading.Condition()
        self._returned: deque[Chunk] = deque()
        self._restored = deque(self._chunks(self._still_to_draw()))
        self._failures_in_a_row = 0
        self._num_awaited = self._num_scoring = 0
        self.only_on_demand = self._paused = only_on_demand
        self._closed = self._draining = False
        self._drawing: dict[int, float] = {}  # since when, by thread
        self._drawn_s = 0.0
        self._threads = ThreadPoolExecutor(len(rollouts.workers), "flowrl-feed") if threads else None

    def __enter__(self) -> Self:
        if self._threads is not None:
            for index in range(len(self.rollouts.workers)):
                self._threads.submit(self._serve, index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._threads is not None:
            self._threads.shutdown(wait=error is None, cancel_futures=True)

    # ------------------------------------------------------------------------------------------ the trainer's side

    def collect(self, num_groups: int) -> list[ScoredGroup]:
        """The oldest finished groups, once there are so many. Raises whatever has stopped generation."""
        began = time.perf_counter()
        with self._changed:
            self._num_asked = self.cycles + 1
            self._num_awaited = num_groups
            self._expose()
        self._set_paused(False)
        if self._threads is None:
            self._serve(0)
        with reporting(self.rollouts.run.rollout.report_stuck_s, lambda: self._waiting(num_groups)):
            batch = self.buffer.take(num_groups)
        with self._changed:
            self._num_awaited = 0
            self._expose()
        self._set_paused(self.only_on_demand)
        self.waited_s += time.perf_counter() - began
        return batch

    def _waiting(self, num_groups: int) -> str:
        in_flight = ", ".join(f"{count} {state}" for state, count in self.buffer.accounting().in_flight.items())
        return f"the trainer waits for {num_groups} finished groups; in flight: {in_flight}"

    def _set_paused(self, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._changed.notify_all()

    def advance(self) -> None:
        """A cycle has ended, and its weights are published: more may be submitted."""
        with self._changed:
            self.cycles += 1
            self._changed.notify_all()

    def evicted(self) -> None:
        """Groups were given up: others may be submitted in their place."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is submitted inside: the states of `data` and `buffer` fit together."""
        with self._changed:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No chunk is begun inside. A publication waits for what a worker draws, and must not wait for more."""
        self._set_paused(True)
        try:
            yield
        finally:
            self._set_paused(self.only_on_demand)

    def drain(self) -> None:
        """Submit nothing more, except for what a batch that is asked for still needs.

        Called by a signal handler, in the middle of anything: it takes no lock.
        """
        self._draining = True

    def drawing_seconds(self) -> float:
        """Seconds that workers have drawn up to now, all together."""
        with self._changed:
            now = time.perf_counter()
            return self._drawn_s + sum(now - began for began in self._drawing.values())

    # ------------------------------------------------------------------------------------------ the workers' side

    def next(self) -> Chunk | None:
        """See `Source`. None at the end, and without threads when no more is allowed for now."""
        with self._changed:
            self._ended()
            while not self._closed:
                if not self._paused and (chunk := self._following()) is not None:
                    self._drawing[threading.get_ident()] = time.perf_counter()
                    return chunk
                if self._threads is None:
                    return None
                self._changed.wait(LOOK_AGAIN_S)  # the buffer does not say when it has room
            return None

    def give_back(self, chunk: Chunk) -> None:
        """See `Source`."""
        with self._changed:
            self._returned.append(chunk)
            self._changed.notify_all()

    def give_up(self, failed: FailedGroup) -> None:
        """See `Source`. Raises EngineError after too many in a row."""
        log.warning("%s; another takes its place", failed)
        with self._changed:
            self.buffer.fail(failed.group.ordinal, str(failed.error))
            self.buffer.evict(failed.group.ordinal, failed.reason)
            self._failures_in_a_row += 1
            if self._failures_in_a_row > self.max_failures:
                raise EngineError(
                    f"{self._failures_in_a_row} groups in a row could not be drawn, more than "
                    f"trainer.max_failed_rollouts_in_a_row = {self.max_failures}. The last: {failed}"
                ) from failed.error
            self._changed.notify_all()

    def _following(self) -> Chunk | None:
        """What is to be drawn next: what was begun before, then what a resumed run has left, then new groups."""
        if self._returned:
            return self._returned.popleft()
        if self._restored:
            chunk = self._restored.popleft()
        elif count := self._allowance():
            groups = self.data.take(count)
            self.buffer.submit(groups)
            (chunk,) = self._chunks(groups)
        else:
            return None
        for group in chunk.groups:
            self.buffer.begin(group.ordinal)
        return chunk

    def _allowance(self) -> int:
        balance = self.buffer.accounting()
        pace = self.pace
        if self._draining:
            pace = replace(pace, lead=0, total_cycles=min(pace.total_cycles, self._num_asked))
        allowed = pace.allowance(balance.submitted, balance.num_evicted, self.cycles)
        in_rollout = self.rollout_size - self.data.next_ordinal % self.rollout_size
        most = min(allowed, self._chunk_size(), in_rollout)
        return next((count for count in range(most, 0, -1) if self.buffer.room(count)), 0)

    def _chunk_size(self) -> int:
        return self.rollouts.chunk_size(self.rollout_size, self.data.num_samples)

    def _still_to_draw(self) -> list[Group]:
        """Of a resumed run, by age. What failed just before the end is tried once more."""
        for ordinal in self.buffer.failed():
            self.buffer.retry(ordinal)
        return sorted(self.buffer.pending(), key=lambda group: group.ordinal)

    def _chunks(self, groups: Sequence[Group]) -> Iterator[Chunk]:
        """Rollout n has the ordinals from n x `rollout_size` on."""
        size = self._chunk_size()
        for rollout_id, members in groupby(groups, lambda group: group.ordinal // self.rollout_size):
            together = list(members)
            yield from (Chunk(together[i : i + size], rollout_id) for i in range(0, len(together), size))

    def _ended(self) -> None:
        began = self._drawing.pop(threading.get_ident(), None)
        if began is not None:
            self._drawn_s += time.perf_counter() - began
            self._changed.notify_all()

    def _serve(self, index: int) -> None:
        try:
            self.rollouts.serve(index, self, self._score)
        except BaseException as error:
            if self._threads is None:
                raise
            self.buffer.close(error)
        finally:
            with self._changed:
                self._ended()

    def _score(self, sampled: SampledGroup) -> None:
        with self._changed:
            self._failures_in_a_row = 0
            self._num_scoring += 1
            self._expose()
        self.rewards.submit(sampled).add_done_callback(self._put)

    def _put(self, done: Future[ScoredGroup]) -> None:
        try:
            self.buffer.put(done.result())
        except BaseException as error:  # here it would only be logged, and the trainer would wait for ever
            self.buffer.close(error)
        with self._changed:
            self._num_scoring -= 1
            self._expose()

    def _expose(self) -> None:
        """Does the trainer wait for scores alone: is all that it waits for drawn, or held up by scoring?"""
        num_drawn = self.buffer.accounting().in_flight[State.FINISHED] + self._num_scoring
        enough = num_drawn >= self._num_awaited or not self.rewards.overlaps
        self.rewards.exposure.expose(enough and self._num_awaited > 0)
