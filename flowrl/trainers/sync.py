"""The synchronous trainer: one complete batch, then one cycle of updates, in turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrl.config import Config, Evaluation, Problem
from flowrl.rewards.combine import batch_advantages
from flowrl.trainers import placement
from flowrl.trainers.evaluator import Evaluated
from flowrl.trainers.journal import Journal
from flowrl.trainers.placement import LAYOUTS
from flowrl.trainers.stages import Stages, open_stages
from flowrl.types import DivergedError, ScoredGroup


@dataclass(frozen=True, kw_only=True)
class SyncTrainer:
    """`trainer=sync`.

    Args:
        total_steps: train batches.
        layout: who samples. "shared": the actor's ranks, with their own modules, so there are no weights to publish.
            "colocated": a process beside each rank, on the same GPU, in turns. "standalone": processes of their own.
        eval: held-out evaluation.
    """

    total_steps: int
    layout: str = "shared"
    eval: Evaluation = field(default_factory=Evaluation)

    def problems(self, run: Config) -> list[Problem]:
        """What this mode cannot run."""
        problems = []
        if self.total_steps < 1:
            problems.append(Problem("trainer.total_steps", f"must be at least 1, got {self.total_steps}."))
        if self.layout not in LAYOUTS:
            problems.append(Problem("trainer.layout", f"must be {' or '.join(LAYOUTS)}, got {self.layout!r}."))
        else:
            problems.extend(placement.problems(run))
        return problems

    def fit(self, run: Config) -> None:
        """Train from the first step to the last and leave the report in the run folder."""
        with Journal(run, self.total_steps) as journal, open_stages(run, self.total_steps) as stages:
            journal.evaluated(0, self._evaluate(stages), stages.rewards.totals())
            journal.log(0, stages)
            for step in range(1, self.total_steps + 1):
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
                    journal.evaluated(step, self._evaluate(stages), stages.rewards.totals())
                journal.log(step, stages)
            journal.finish(stages)
            if stages.actor.num_updates == 0:
                raise DivergedError(
                    f"no update was made in {self.total_steps} steps: in every batch all advantages were equal. Do the "
                    "rewards differ between the samples of a prompt? See reward/zero_std_ratio and reward/degenerate."
                )

    def _collect(self, stages: Stages, step: int) -> list[ScoredGroup]:
        """A complete batch of scored groups; scoring overlaps generation."""
        groups = stages.data.next_batch()
        stages.buffer.submit(groups)
        with stages.timers.phase("rollout"):
            for scored in stages.rewards.stream(stages.rollouts.generate(groups, rollout_id=step - 1)):
                stages.buffer.put(scored)
        return stages.buffer.take(len(groups), timeout_s=0)  # all of them have been put

    def _evaluate(self, stages: Stages) -> Evaluated:
        with stages.timers.phase("eval"):
            return stages.evaluator.run()
