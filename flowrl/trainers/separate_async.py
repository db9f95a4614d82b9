"""The asynchronous trainer: rollout workers stream groups into the replay buffer while the actor trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from signal import Signals

from flowrl.buffer.accounting import State
from flowrl.config import Config, Evaluation, Problem
from flowrl.distributed.checkpoint.folders import Committed
from flowrl.distributed.launch.inline import Inline
from flowrl.rewards.combine import batch_advantages
from flowrl.trainers import placement
from flowrl.trainers.checkpoints import Checkpoints
from flowrl.trainers.evaluator import Evaluated
from flowrl.trainers.feed import Feed, Pace
from flowrl.trainers.journal import Journal
from flowrl.trainers.rollouts import SeparateRollouts
from flowrl.trainers.stages import Stages, open_stages
from flowrl.types import DivergedError, ScoredGroup


@dataclass(frozen=True, kw_only=True)
class SeparateAsyncTrainer:
    """`trainer=separate_async`, on rollout workers of their own (layout standalone).

    One step collects `parameter_sync_step` mini-batches, freezes the old policy on the weights that it begins with,
    takes one update for each mini-batch, and publishes once.

    Args:
        total_steps: cycles of updates, each followed by a publication.
        mini_batch_size: prompts of one update; None = an N-th of the batch.
        parameter_sync_step: N, updates between two publications. `data.train_batch_size` = N x `mini_batch_size`, and
            `algorithm.num_updates_per_batch` = N.
        num_warmup_batches: batches in flight, beyond the one that is collected, before step 1 and from then on.
        max_staleness: published versions between sampling and use; older groups are evicted whole and replaced.
        max_failed_rollouts_in_a_row: groups that cannot be drawn are evicted and replaced; after more than so many
            without one that can, the run stops.
        sync_compatible: draw only while the trainer waits for groups; needs `num_warmup_batches=0`, and with one worker
            gives what `trainer=sync` gives, to the last bit.
        eval: held-out evaluation.
    """

    total_steps: int
    mini_batch_size: int | None = None
    parameter_sync_step: int = 1
    num_warmup_batches: int = 1
    max_staleness: int = 1
    max_failed_rollouts_in_a_row: int = 8
    sync_compatible: bool = False
    layout: str = "standalone"
    eval: Evaluation = field(default_factory=Evaluation)

    def problems(self, run: Config) -> list[Problem]:
        """What this mode cannot run."""
        found = [*self._own_problems(run), *self._correction_problems(run)]
        if self.layout != "standalone":
            message = f"must be standalone: generation goes on while the actor trains; got {self.layout!r}."
            found.append(Problem("trainer.layout", message))
        else:
            found.extend(placement.problems(run))
        return found

    def _own_problems(self, run: Config) -> Iterator[Problem]:
        least = {"total_steps": 1, "mini_batch_size": 1, "parameter_sync_step": 1, "num_warmup_batches": 0}
        for name, low in {**least, "max_staleness": 0, "max_failed_rollouts_in_a_row": 0}.items():
            if vars(self)[name] is not None and vars(self)[name] < low:
                yield Problem(f"trainer.{name}", f"must be at least {low}, got {vars(self)[name]}.")
        n, size = self.parameter_sync_step, self.mini_batch_size
        if size is not None and run.data.train_batch_size != n * size:
            message = f"must be trainer.parameter_sync_step x trainer.mini_batch_size = {n} x {size} = {n * size}, got "
            yield Problem("data.train_batch_size", f"{message}{run.data.train_batch_size}.")
        if run.algorithm.num_updates_per_batch != n:
            message = f"must be trainer.parameter_sync_step = {n}, got {run.algorithm.num_updates_per_batch}."
            yield Problem("algorithm.num_updates_per_batch", message)
        if self.max_staleness < self.num_warmup_batches:
            message = f"must be at least trainer.num_warmup_batches = {self.num_warmup_batches}, which are as old when "
            yield Problem("trainer.max_staleness", f"{message}they are used; got {self.max_staleness}.")
        if self.sync_compatible and self.num_warmup_batches:
            message = f"must be 0 with trainer.sync_compatible=true, got {self.num_warmup_batches}."
            yield Problem("trainer.num_warmup_batches", message)

    def _correction_problems(self, run: Config) -> Iterator[Problem]:
        """An algorithm that takes all samples for the present weights' would be wrong without a word."""
        if self.max_staleness and run.algorithm.needs.on_policy:
            message = f"must be 0, got {self.max_staleness}: the algorithm takes samples of older weights for new ones."
            hint = "Set algorithm/correction=truncated, or algorithm.old_log_prob=rollout."
            yield Problem("trainer.max_staleness", message, hint)

    def fit(self, run: Config, start: Committed | None) -> Signals | None:
        """Train to the last step and leave the report in the run folder. See `preflight.Trainer`."""
        with (
            Journal(run, self.total_steps, start) as journal,
            open_stages(run, self.total_steps, start) as stages,
            self._feed(run, stages, start) as feed,
            Checkpoints(run, self.total_steps, stages, journal, start, feed.held, feed.drain) as checkpoints,
        ):
            if start is None:
                with feed.rollouts.occupied():
                    journal.evaluated(0, self._evaluate(stages))
                    journal.log(0, stages)
            for step in checkpoints.steps():
                with stages.timers.phase("step"), self._watched(stages, feed):
                    batch = self._collect(run, stages, feed)
                    advantages = batch_advantages(batch, run.reward.weights, run.algorithm.advantages)
                    with feed.rollouts.occupied():
                        with stages.timers.phase("update"), self._overlap(stages, feed):
                            stages.actor.update(batch, advantages)
                        with stages.timers.phase("publish"), feed.paused():
                            stages.rollouts.publish(stages.actor.version)
                    feed.advance()
                with feed.rollouts.occupied():
                    journal.trained(step, batch, advantages, stages.rewards.totals())
                    stages.buffer.trained(group.sampled.group.ordinal for group in batch)
                    if step == self.total_steps or (self.eval.every and step % self.eval.every == 0):
                        journal.evaluated(step, self._evaluate(stages))
                    journal.log(step, stages)
                    checkpoints.after(step)
            if checkpoints.stopped_by is not None:
                return checkpoints.stopped_by
            journal.finish(stages)
            if stages.actor.num_updates == 0:
                raise DivergedError(f"no update was made in {self.total_steps} steps: all advantages were equal.")
        return None

    def _feed(self, run: Config, stages: Stages, start: Committed | None) -> Feed:
        assert isinstance(stages.rollouts, SeparateRollouts)
        pace = Pace(run.data.train_batch_size, self.num_warmup_batches, self.total_steps)
        return Feed(
            stages.data,
            stages.rollouts,
            stages.rewards,
            stages.buffer,
            pace,
            rollout_size=run.data.train_batch_size // self.parameter_sync_step,
            max_failures=self.max_failed_rollouts_in_a_row,
            cycles=start.step if start else 0,
            threads=not isinstance(run.launcher, Inline),
            only_on_demand=self.sync_compatible,
        )

    def _collect(self, run: Config, stages: Stages, feed: Feed) -> list[ScoredGroup]:
        """A complete batch, none of it too old."""
        version, size = stages.actor.version, run.data.train_batch_size
        with stages.timers.phase("wait"):
            batch = feed.collect(size)
            while too_old := [g for g in batch if version - g.sampled.sampling.policy_version > self.max_staleness]:
                stale = {group.sampled.group.ordinal for group in too_old}
                stages.buffer.release(g.sampled.group.ordinal for g in batch if g.sampled.group.ordinal not in stale)
                for ordinal in stale:
                    stages.buffer.evict(ordinal, "stale")
                feed.evicted()
                batch = feed.collect(size)
        for group in batch:
            stages.meter.spread("async/staleness", float(version - group.sampled.sampling.policy_version))
        stages.meter.gauge("async/queue_depth", stages.buffer.accounting().in_flight[State.FINISHED])
        return batch

    @contextmanager
    def _watched(self, stages: Stages, feed: Feed) -> Iterator[None]:
        """`async/{actor,rollout}_idle`: the shares of a step in which the actor waits, and the workers do not draw."""
        began, drawn, waited = time.perf_counter(), feed.drawing_seconds(), feed.waited_s
        yield
        seconds = time.perf_counter() - began
        stages.meter.gauge("async/actor_idle", (feed.waited_s - waited) / seconds)
        stages.meter.gauge("async/rollout_idle", 1 - (feed.drawing_seconds() - drawn) / (seconds * feed.num_workers))

    @contextmanager
    def _overlap(self, stages: Stages, feed: Feed) -> Iterator[None]:
        """`async/overlap`: the share of the updates' time in which workers draw."""
        began, drawn = time.perf_counter(), feed.drawing_seconds()
        yield
        seconds = time.perf_counter() - began
        stages.meter.gauge("async/overlap", (feed.drawing_seconds() - drawn) / (seconds * feed.num_workers))

    def _evaluate(self, stages: Stages) -> Evaluated:
        with stages.timers.phase("eval"):
            return stages.evaluator.run()
