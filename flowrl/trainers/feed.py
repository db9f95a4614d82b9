"""Generation that goes on while the actor trains: groups are drawn, scored and buffered in the background."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from flowrl.buffer.replay import ReplayBuffer
from flowrl.data.group_sampler import GroupSampler
from flowrl.rewards.pool import RewardPool
from flowrl.trainers.rollouts import Chunk, SeparateRollouts
from flowrl.types import SampledGroup, ScoredGroup

LOOK_AGAIN_S = 0.1


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
    """Keeps the rollout workers at work, as far ahead as `pace` and the buffer's bounds allow (`rollouts.Source`).

    One thread for each worker draws; reward workers score while it goes on. Whatever fails there closes the buffer, so
    that it is raised where the trainer waits for groups. Without threads (`launcher=inline`) groups are drawn when
    `collect` is called, as many as are allowed: a deterministic interleave without overlap.

    Args:
        rollout_size: groups that share their stochastic steps: a mini-batch.
        threads: whether generation goes on in the background.
        only_on_demand: draw while `collect` waits and at no other time; for a pace without lead.
    """

    def __init__(
        self,
        data: GroupSampler,
        rollouts: SeparateRollouts,
        rewards: RewardPool,
        buffer: ReplayBuffer,
        pace: Pace,
        rollout_size: int,
        *,
        threads: bool,
        only_on_demand: bool = False,
    ) -> None:
        self.data = data
        self.rollouts = rollouts
        self.rewards = rewards
        self.buffer = buffer
        self.pace = pace
        self.rollout_size = rollout_size
        self.cycles = 0
        self.waited_s = 0.0
        self.num_workers = len(rollouts.workers)
        self._changed = threading.Condition()
        self._returned: list[Chunk] = []
        self.only_on_demand = self._paused = only_on_demand
        self._closed = False
        self._drawing: dict[int, float] = {}  # since when, by thread
        self._drawn_s = 0.0
        self._scoring = 0
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
        self._set_paused(False)
        if self._threads is None:
            self._serve(0)
        batch = self.buffer.take(num_groups)
        self._set_paused(self.only_on_demand)
        self.waited_s += time.perf_counter() - began
        return batch

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
                if self._returned and not self._paused:
                    return self._began(self._returned.pop())
                count = 0 if self._paused else self._allowance()
                if count:
                    return self._began(self._submitted(count))
                if self._threads is None:
                    return None
                self._changed.wait(LOOK_AGAIN_S)  # the buffer does not say when it has room
            return None

    def give_back(self, chunk: Chunk) -> None:
        """See `Source`."""
        with self._changed:
            self._returned.append(chunk)
            self._changed.notify_all()

    def _allowance(self) -> int:
        balance = self.buffer.accounting()
        allowed = self.pace.allowance(balance.submitted, balance.num_evicted, self.cycles)
        size = self.rollouts.chunk_size(self.rollout_size, self.data.num_samples)
        in_rollout = self.rollout_size - self.data.next_ordinal % self.rollout_size
        count = min(allowed, size, in_rollout)
        return count if self.buffer.room(count) else 0

    def _submitted(self, count: int) -> Chunk:
        rollout_id = self.data.next_ordinal // self.rollout_size
        groups = self.data.take(count)
        self.buffer.submit(groups)
        for group in groups:
            self.buffer.begin(group.ordinal)
        return Chunk(groups, rollout_id)

    def _began(self, chunk: Chunk) -> Chunk:
        self._drawing[threading.get_ident()] = time.perf_counter()
        return chunk

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
        self.rewards.submit(sampled).add_done_callback(self._put)

    def _put(self, done: Future[ScoredGroup]) -> None:
        try:
            self.buffer.put(done.result())
        except BaseException as error:  # here it would only be logged, and the trainer would wait for ever
            self.buffer.close(error)
