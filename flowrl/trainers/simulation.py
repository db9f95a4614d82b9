"""How long a step will take, and who will wait for whom: the schedules of both trainers in simulated time.

A discrete-event simulation of `sync` (on rollout workers of their own) and `separate_async`, with measured durations:
chunks, pace, pauses, scoring and publication follow `rollouts`, `feed` and `weight_sync.publisher` step by step. What
takes milliseconds there takes nothing here: calls, books, logs. The buffer has no bounds, nobody dies, and rewards are
scored by workers, not by the driver. A publication is a broadcast; evaluation and artifacts are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flowrl.trainers.events import Change, Clock, Event, Process, Queue
from flowrl.trainers.feed import Pace


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run, as far as its schedule goes. Durations are seconds of one worker that nobody disturbs.

    Args:
        mode: of the trainer.
        num_workers: `rollout.num_workers`.
        num_reward_workers: `reward.num_workers`, at least 1; each scores one group at a time.
        batch_size: `data.train_batch_size`, in prompts (groups).
        num_updates: N, `algorithm.num_updates_per_batch`; in separate_async also `trainer.parameter_sync_step`.
        full_chunk: groups that a worker draws in one forward: `rollout.batch_size` // `data.num_samples_per_prompt`,
            at least 1.
        chunk_s: to draw a chunk, whatever its size.
        group_s: in addition, for every group in it.
        score_s: to score a group.
        update_s: one update, its part of the replay included: `perf/update_s` / N.
        publish_s: one publication to workers that do not draw: `perf/publish_s` of `sync`.
        num_warmup_batches: as in the trainer (separate_async).
        max_staleness: as in the trainer (separate_async).
        sync_compatible: as in the trainer (separate_async).
        spread: standard deviation of the durations of drawing and scoring, relative to them (log-normal).
        num_cores: that all these processes share; None: everybody has a device of its own.
        seed: of what `spread` draws.
    """

    mode: Literal["sync", "separate_async"]
    num_workers: int
    batch_size: int
    full_chunk: int
    group_s: float
    update_s: float
    chunk_s: float = 0.0
    score_s: float = 0.0
    publish_s: float = 0.0
    num_reward_workers: int = 1
    num_updates: int = 1
    num_warmup_batches: int = 1
    max_staleness: int = 1
    sync_compatible: bool = False
    spread: float = 0.0
    num_cores: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_reward_workers", "batch_size", "num_updates", "full_chunk"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {vars(self)[name]}.")
        for name in ("group_s", "chunk_s", "score_s", "update_s", "publish_s", "num_warmup_batches", "spread"):
            if not 0 <= vars(self)[name] < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {vars(self)[name]}.")
        if self.batch_size % self.num_updates:
            raise ValueError(f"num_updates must divide batch_size = {self.batch_size}, got {self.num_updates}.")
        if self.max_staleness < self.num_warmup_batches:
            message = f"max_staleness must be at least num_warmup_batches = {self.num_warmup_batches}, got "
            raise ValueError(f"{message}{self.max_staleness}.")
        if self.sync_compatible and self.num_warmup_batches:
            raise ValueError(f"num_warmup_batches must be 0 with sync_compatible, got {self.num_warmup_batches}.")

    @property
    def rollout_size(self) -> int:
        """Groups that share their stochastic steps, and that chunks are cut from."""
        return self.batch_size if self.mode == "sync" else self.batch_size // self.num_updates

    @property
    def chunk_size(self) -> int:
        """Groups of a chunk: a full forward, unless that leaves other workers without work."""
        return min(self.full_chunk, -(-self.rollout_size // self.num_workers))


@dataclass(frozen=True)
class Step:
    """One step of the trainer, by the names that it logs."""

    step_s: float
    wait_s: float  # for groups: `perf/rollout_s` in sync, `perf/wait_s` in separate_async
    update_s: float
    publish_s: float  # until all workers have ended what they draw, and the transfer
    actor_idle: float  # share of the step
    rollout_idle: float  # share of the step, as the trainer counts it: a worker draws from getting a chunk to its end
    overlap: float  # share of the updates' time in which workers draw
    staleness_mean: float  # versions between sampling and use
    staleness_max: float
    num_evicted: float  # groups that were too old


@dataclass(frozen=True)
class Prediction(Step):
    """Means over the steps of a run that is under way, staleness_max apart; and what they are made of."""

    steps: tuple[Step, ...]  # all of them, from the first

    @classmethod
    def of(cls, steps: Sequence[Step], first: int, end: int) -> Prediction:
        """Of steps[first:end], or of all if there are none."""
        steady = steps[first:end] or steps
        means = {name: float(np.mean([vars(step)[name] for step in steady])) for name in vars(steady[0])}
        means["staleness_max"] = max(step.staleness_max for step in steady)
        return cls(**means, steps=tuple(steps))


def simulate(setting: Setting, num_steps: int = 40) -> Prediction:
    """A run of so many steps.

    Steps in which the pipeline still fills, and the last, for which nothing is drawn ahead, do not count.
    """
    lead = setting.num_warmup_batches if setting.mode == "separate_async" else 0
    run = Run(setting, num_steps)
    end = Event()
    run.clock.start(run.train(end))
    run.clock.run(end)
    return Prediction.of(run.steps, 2 * (lead + 1), num_steps - lead - 1)


# ---------------------------------------------------------------------------------------------- within


@dataclass
class Drawn:
    """A group that is somewhere between its submission and its use."""

    ordinal: int
    version: int = -1  # of the weights that draw it, once they do


class Worker:
    """A rollout worker: does one thing after the other, in the order in which it was asked."""

    def __init__(self) -> None:
        self.version = 0
        self._asked: Queue[tuple[Process[None], Event]] = Queue()

    def ask(self, work: Process[None]) -> Event:
        """Happens when the work is done."""
        done = Event()
        self._asked.put((work, done))
        return done

    def serve(self) -> Process[None]:
        """For ever."""
        while True:
            work, done = yield from self._asked.get()
            yield from work
            done.happen()


class Run:
    """Everything that takes part."""

    def __init__(self, setting: Setting, num_steps: int) -> None:
        self.setting = setting
        self.num_steps = num_steps
        self.clock = Clock(setting.num_cores)
        self.steps: list[Step] = []
        self.num_submitted = self.num_evicted = self.num_trained = 0
        self.finished: list[Drawn] = []
        self.version = 0  # = cycles that have ended
        self._pace = Pace(setting.batch_size, setting.num_warmup_batches, num_steps)
        self._paused = setting.sync_compatible
        self._allowed_more, self._finished_more = Change(), Change()
        self._unscored: Queue[Drawn] = Queue()
        self._drawing: dict[int, float] = {}  # since when, by worker
        self._drawn_s = 0.0
        self._random = np.random.default_rng(setting.seed)
        self._workers = [Worker() for _ in range(setting.num_workers)]
        for worker in self._workers:
            self.clock.start(worker.serve())
        for _ in range(setting.num_reward_workers):
            self.clock.start(self._score())

    # ------------------------------------------------------------------------------------------ the trainer

    def train(self, end: Event) -> Process[None]:
        """All steps, then `end`."""
        if self.setting.mode == "separate_async":
            self._serve(self._allowed)
        while len(self.steps) < self.num_steps:
            yield from self._step()
        end.happen()

    def _step(self) -> Process[None]:
        began, drawn, evicted = self.clock.now, self._drawing_seconds(), self.num_evicted
        batch = yield from (self._collect() if self.setting.mode == "separate_async" else self._generate())
        collected, overlapped = self.clock.now, self._drawing_seconds()
        for _ in range(self.setting.num_updates):
            yield self.setting.update_s
        updated, overlapped = self.clock.now, self._drawing_seconds() - overlapped
        ages = [self.version - group.version for group in batch]
        yield from self._publish()
        self.num_trained += len(batch)
        self.version += 1
        self._allowed_more.happen()
        seconds, update_s, num_workers = self.clock.now - began, updated - collected, self.setting.num_workers
        self.steps.append(
            Step(
                step_s=seconds,
                wait_s=collected - began,
                update_s=update_s,
                publish_s=self.clock.now - updated,
                actor_idle=_share(collected - began, seconds),
                rollout_idle=1 - _share(self._drawing_seconds() - drawn, seconds * num_workers),
                overlap=_share(overlapped, update_s * num_workers),
                staleness_mean=float(np.mean(ages)),
                staleness_max=max(ages),
                num_evicted=self.num_evicted - evicted,
            )
        )

    def _generate(self) -> Process[list[Drawn]]:
        """`sync`: one batch, drawn and scored."""
        left = self.setting.batch_size

        def listed() -> Process[list[Drawn]]:
            nonlocal left
            yield from ()  # it never waits
            count = min(left, self.setting.chunk_size)
            left -= count
            return self._submitted(count)

        self._serve(listed)
        return (yield from self._take())

    def _collect(self) -> Process[list[Drawn]]:
        """`separate_async`: a batch that is not too old; other groups come in the place of those that are."""
        while True:
            self._pause(False)
            batch = yield from self._take()
            self._pause(self.setting.sync_compatible)
            fresh = [group for group in batch if self.version - group.version <= self.setting.max_staleness]
            if len(fresh) == len(batch):
                return batch
            self.finished += fresh
            self.num_evicted += len(batch) - len(fresh)
            self._allowed_more.happen()

    def _take(self) -> Process[list[Drawn]]:
        """The oldest of the finished groups, once there are enough."""
        while len(self.finished) < self.setting.batch_size:
            yield self._finished_more.next
        self.finished.sort(key=lambda group: group.ordinal)
        batch, self.finished = self.finished[: self.setting.batch_size], self.finished[self.setting.batch_size :]
        return batch

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        self._allowed_more.happen()

    # ------------------------------------------------------------------------------------------ publication

    def _publish(self) -> Process[None]:
        """A worker answers between two chunks, three times; while it receives it waits for all the others, too.

        No chunk is begun meanwhile.
        """
        self._pause(True)
        sent = Event()
        yield from _all([worker.ask(_nothing()) for worker in self._workers])
        arrived = [Event() for _ in self._workers]
        received = [worker.ask(_receive(here, sent)) for worker, here in zip(self._workers, arrived, strict=True)]
        yield from _all(arrived)
        yield self.setting.publish_s
        sent.happen()
        yield from _all(received)
        yield from _all([worker.ask(_commit(worker, self.version + 1)) for worker in self._workers])
        self._pause(self.setting.sync_compatible)

    # ------------------------------------------------------------------------------------------ drawing

    def _serve(self, source: Callable[[], Process[list[Drawn]]]) -> None:
        """A thread for each worker, which ends when there is nothing more to be drawn."""
        for index in range(self.setting.num_workers):
            self.clock.start(self._thread(index, source))

    def _thread(self, index: int, source: Callable[[], Process[list[Drawn]]]) -> Process[None]:
        worker = self._workers[index]
        while chunk := (yield from source()):
            self._drawing[index] = self.clock.now
            yield worker.ask(self._draw(worker, chunk))
            self._drawn_s += self.clock.now - self._drawing.pop(index)
            for group in chunk:
                self._unscored.put(group)

    def _draw(self, worker: Worker, chunk: Sequence[Drawn]) -> Process[None]:
        for group in chunk:
            group.version = worker.version
        yield self._vary(self.setting.chunk_s + len(chunk) * self.setting.group_s)

    def _allowed(self) -> Process[list[Drawn]]:
        """`separate_async`: the next chunk, once the pace allows it."""
        while not (count := self._allowance()):
            yield self._allowed_more.next
        return self._submitted(count)

    def _allowance(self) -> int:
        if self._paused:
            return 0
        in_rollout = self.setting.rollout_size - self.num_submitted % self.setting.rollout_size
        allowed = self._pace.allowance(self.num_submitted, self.num_evicted, self.version)
        return min(allowed, self.setting.chunk_size, in_rollout)

    def _submitted(self, count: int) -> list[Drawn]:
        self.num_submitted += count
        return [Drawn(ordinal) for ordinal in range(self.num_submitted - count, self.num_submitted)]

    def _drawing_seconds(self) -> float:
        """Of all workers up to now."""
        return self._drawn_s + sum(self.clock.now - since for since in self._drawing.values())

    # ------------------------------------------------------------------------------------------ scoring

    def _score(self) -> Process[None]:
        while True:
            group = yield from self._unscored.get()
            yield self._vary(self.setting.score_s)
            self.finished.append(group)
            self._finished_more.happen()

    def _vary(self, seconds: float) -> float:
        if self.setting.spread == 0:
            return seconds
        sigma = math.sqrt(math.log1p(self.setting.spread**2))
        return seconds * math.exp(self._random.normal(-(sigma**2) / 2, sigma))


def _all(events: Sequence[Event]) -> Process[None]:
    yield from events


def _nothing() -> Process[None]:
    yield 0.0


def _receive(here: Event, sent: Event) -> Process[None]:
    here.happen()
    yield sent


def _commit(worker: Worker, version: int) -> Process[None]:
    worker.version = version
    yield 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
