"""The synchronous trainer: one complete batch, then one cycle of updates, in turn."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from signal import Signals

from flowrl.config import Config, Evaluation, Problem
from flowrl.distributed.checkpoint.folders import Committed
from flowrl.rewards.combine import batch_advantages
from flowrl.rollout.checks import EngineError
from flowrl.trainers import placement
from flowrl.trainers.checkpoints import Checkpoints
from flowrl.trainers.chunks import FailedGroup
from flowrl.trainers.evaluator import Evaluated
from flowrl.trainers.journal import Journal
from flowrl.trainers.placement import LAYOUTS
from flowrl.trainers.stages import Stages, open_stages
from flowrl.types import DivergedError, Group, ScoredGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SyncTrainer:
    """`trainer=sync`.

    Args:
        total_steps: train batches.
        drop_incomplete_groups: groups that cannot be drawn are evicted, and as many new prompts drawn in their place;
            else the first of them stops the run.
        max_incomplete_group_refill_rounds: for one batch; if groups still fail in the last, the run stops.
        layout: who samples. "shared": the actor's ranks, with their own modules, so there are no weights to publish.
            "colocated": a process beside each rank, on the same GPU, in turns. "standalone": processes of their own.
        eval: held-out evaluation.
    """

    total_steps: int
    drop_incomplete_groups: bool = False
    max_incomplete_group_refill_rounds: int = 3
    layout: str = "shared"
    eval: Evaluation = field(default_factory=Evaluation)

    def problems(self, run: Config) -> list[Problem]:
        """What this mode cannot run."""
        problems = []
        if self.total_steps < 1:
            problems.append(Problem("trainer.total_steps", f"must be at least 1, got {self.total_steps}."))
        problems.extend(self._refill_problems(run))
        if self.layout not in LAYOUTS:
            problems.append(Problem("trainer.layout", f"must be {' or '.join(LAYOUTS)}, got {self.layout!r}."))
        else:
            problems.extend(placement.problems(run))
        return problems

    def _refill_problems(self, run: Config) -> Iterator[Problem]:
        rounds = self.max_incomplete_group_refill_rounds
        if rounds < 1:
            yield Problem("trainer.max_incomplete_group_refill_rounds", f"must be at least 1, got {rounds}.")
        if self.drop_incomplete_groups and self.layout == "shared" and run.actor.num_ranks > 1:
            message = "is not possible while several ranks sample in step: a failure in one of them leaves the others."
            hint = "Set trainer.layout=colocated or standalone, or actor.num_ranks=1."
            yield Problem("trainer.drop_incomplete_groups", message, hint)

    def fit(self, run: Config, start: Committed | None) -> Signals | None:
        """Train to the last step and leave the report in the run folder. See `preflight.Trainer`."""
        with (
            Journal(run, self.total_steps, start) as journal,
            open_stages(run, self.total_steps, start) as stages,
            Checkpoints(run, self.total_steps, stages, journal, start) as checkpoints,
        ):
            if start is None:
                journal.evaluated(0, self._evaluate(stages))
                journal.log(0, stages)
            for step in checkpoints.steps():
                with stages.timers.phase("step"):
                    batch = self._collect(stages, step)
                    advantages = batch_advantages(batch, run.reward.weights, run.algorithm.advantages)
                    with stages.timers.phase("update"):
                        stages.actor.update(batch, advantages)
                    with stages.timers.phase("publish"):
                        stages.rollouts.publish(stages.actor.version)
                journal.trained(step, batch, advantages, stages.rewards.totals())
                stages.buffer.trained([scored.sampled.group.ordinal for scored in batch])
                if step == self.total_steps or (self.eval.every and step % self.eval.every == 0):
                    journal.evaluated(step, self._evaluate(stages))
                journal.log(step, stages)
                checkpoints.after(step)
            if checkpoints.stopped_by is not None:
                return checkpoints.stopped_by
            journal.finish(stages)
            if stages.actor.num_updates == 0:
                raise DivergedError(
                    f"no update was made in {self.total_steps} steps: in every batch all advantages were equal. Do the "
                    "rewards differ between the samples of a prompt? See reward/zero_std_ratio and reward/degenerate."
                )
        return None

    def _collect(self, stages: Stages, step: int) -> list[ScoredGroup]:
        """A complete batch of scored groups; scoring overlaps generation."""
        size = stages.data.batch_size
        failed = self._drawn(stages, stages.data.take(size), step)
        num_rounds = num_refilled = 0
        while failed:
            if num_rounds == self.max_incomplete_group_refill_rounds:
                raise EngineError(
                    f"the batch is not complete after {num_rounds} rounds of refill "
                    f"(trainer.max_incomplete_group_refill_rounds). The last failure: {failed[-1]}"
                ) from failed[-1].error
            num_rounds, num_refilled = num_rounds + 1, num_refilled + len(failed)
            failed = self._drawn(stages, stages.data.take(len(failed)), step)
        if self.drop_incomplete_groups:
            stages.meter.gauge("rollout/refill_rounds", num_rounds)
            stages.meter.gauge("rollout/refilled", num_refilled)
        return stages.buffer.take(size, timeout_s=0)  # all of them have been put

    def _drawn(self, stages: Stages, groups: Sequence[Group], step: int) -> list[FailedGroup]:
        """Draw, score and buffer; returns those that could not be drawn, and were evicted."""
        failed: list[FailedGroup] = []
        stages.buffer.submit(groups)
        give_up = failed.append if self.drop_incomplete_groups else None
        with stages.timers.phase("rollout"):
            for scored in stages.rewards.stream(stages.rollouts.generate(groups, step - 1, give_up)):
                stages.buffer.put(scored)
        for each in failed:
            log.warning("%s; another takes its place", each)
            stages.buffer.fail(each.group.ordinal, str(each.error))
            stages.buffer.evict(each.group.ordinal, each.reason)
        return failed

    def _evaluate(self, stages: Stages) -> Evaluated:
        with stages.timers.phase("eval"):
            return stages.evaluator.run()
