"""What a trainer writes down: metrics, pictures, artifacts, and at the end the report and the weights."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
from PIL import Image
from torch import Tensor

from flowrl.config import Config
from flowrl.distributed.lora import save_adapter
from flowrl.tracking.artifacts import ArtifactStore
from flowrl.tracking.loggers.base import RunInfo
from flowrl.tracking.metrics import memory_metrics, reward_metrics
from flowrl.tracking.pictures import before_after_sheet
from flowrl.tracking.report import build_report
from flowrl.tracking.summary import Summary
from flowrl.tracking.tracker import Tracker
from flowrl.trainers.evaluator import Evaluated, by_component
from flowrl.trainers.stages import Stages
from flowrl.types import ScoredGroup

NUM_LOGGED_IMAGES = 16
NUM_SHEET_PAIRS = 32


class Journal:
    """One record per step: whatever happened in it is collected, then logged once.

    Use as a context: loggers are open inside.
    """

    def __init__(self, run: Config, total_steps: int) -> None:
        self.run = run
        self.run_dir = run.run_dir
        self.total_steps = total_steps
        self.tracker = Tracker(list(run.logger.components.values()))
        self.artifacts = ArtifactStore(
            run_dir=self.run_dir, keep=run.artifacts.keep, trajectories=run.artifacts.trajectories
        )
        self.metrics: dict[str, float] = {}
        self.evaluations: dict[int, Evaluated] = {}  # the first and the last
        self._scored: dict[str, float] = {}
        self._opened = ExitStack()
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        info = RunInfo(
            name=self.run.name,
            run_dir=self.run_dir,
            total_steps=self.total_steps,
            config_yaml=(self.run_dir / "config.yaml").read_text(),
        )
        self._opened.callback(self.tracker.close)
        self.tracker.start(info)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def trained(self, step: int, batch: list[ScoredGroup], advantages: Tensor) -> None:
        """A train batch and what it was worth."""
        ids = np.concatenate([group.sampled.trajectory.group_ids.numpy() for group in batch])
        weights = self.run.reward.weights
        total = np.concatenate([sum(weights[name] * r for name, r in group.rewards.items()) for group in batch])
        self.metrics |= reward_metrics(by_component(batch), advantages, ids, total)
        if self.run.artifacts.every and step % self.run.artifacts.every == 0:
            self.artifacts.write_rollout(step, batch)

    def evaluated(self, step: int, evaluated: Evaluated) -> None:
        """An evaluation; its pictures go to the loggers and the run folder."""
        self.metrics |= evaluated.metrics()
        for name, groups in evaluated.sets.items():
            self.artifacts.write_evaluation(step, name, groups)
            images, captions = _pictures(groups, NUM_LOGGED_IMAGES)
            self.tracker.log_images(step, f"eval/{name}", images, captions)
        first = min(self.evaluations, default=step)
        self.evaluations = {first: self.evaluations.get(first, evaluated), step: evaluated}

    def log(self, step: int, stages: Stages) -> None:
        """Hand the step's record to every logger."""
        for name, value in memory_metrics(stages.device).items():
            stages.meter.worst(name, value)
        metrics = self.metrics | stages.meter.collect() | stages.timers.collect() | stages.buffer.accounting().metrics()
        metrics |= self._scoring(stages.rewards.totals())
        num_samples = self.run.data.train_batch_size * self.run.data.num_samples_per_prompt
        self.tracker.log(step, metrics | _throughput(metrics, num_samples))
        self.metrics = {}

    def _scoring(self, totals: dict[str, float]) -> dict[str, float]:
        """What the reward workers did since the last record, evaluation included."""
        spent = {name: value - self._scored.get(name, 0.0) for name, value in totals.items()}
        self._scored = totals
        metrics = {
            f"reward/score_{name}": count for name, count in spent.items() if name.startswith(("dropped", "retries"))
        }
        if spent["seconds"]:
            metrics |= {
                "reward/score_time": spent["seconds"],
                "reward/score_samples_per_s": spent["samples"] / spent["seconds"],
            }
        return metrics

    def finish(self, stages: Stages) -> None:
        """Weights, before/after sheet, summary and report."""
        self._save_weights(stages)
        before, after = self.evaluations[min(self.evaluations)], self.evaluations[max(self.evaluations)]
        summary = Summary(
            before=before.metrics(),
            after=after.metrics(),
            steps=self.total_steps,
            seconds=time.perf_counter() - self._began,
        )
        summary.write(self.run_dir)
        for name in list(before.sets)[:1]:
            _sheet(before.sets[name], after.sets[name]).save(self.run_dir / "before_after.png")
        build_report(self.run_dir)

    def _save_weights(self, stages: Stages) -> None:
        """`final/`: a PEFT adapter for `pipe.load_lora_weights`, or the whole transformer."""
        folder = self.run_dir / "final"
        if self.run.actor.mode == "lora":
            save_adapter(stages.policy.module, folder)
        else:
            stages.policy.module.save_pretrained(folder / "transformer")  # type: ignore[operator]


def _pictures(groups: list[ScoredGroup], limit: int) -> tuple[np.ndarray, list[str]]:
    """The first sample of the first groups, with its target and score beneath."""
    captions = []
    for group in groups[:limit]:
        scores = " ".join(f"{values[0]:.2f}" for values in group.rewards.values())
        captions.append(f"{_label(group)}  {scores}")
    return _first_images(groups[:limit]), captions


def _sheet(before: list[ScoredGroup], after: list[ScoredGroup]) -> Image.Image:
    """The first sample of the first prompts, before and after, with the first component's score."""
    before, after = before[:NUM_SHEET_PAIRS], after[:NUM_SHEET_PAIRS]
    component = next(iter(before[0].rewards))
    scores = [[float(group.rewards[component][0]) for group in groups] for groups in (before, after)]
    labels = [_label(group) for group in before]
    return before_after_sheet(_first_images(before), _first_images(after), labels, *scores)


def _label(group: ScoredGroup) -> str:
    prompt = group.sampled.group.prompt
    return prompt.target or prompt.text


def _first_images(groups: list[ScoredGroup]) -> np.ndarray:
    return np.stack([group.sampled.images[0] for group in groups if group.sampled.images is not None])


def _throughput(metrics: dict[str, float], num_samples: int) -> dict[str, float]:
    """Samples and training rows per second of their phases."""
    rates = {}
    if metrics.get("perf/rollout_s"):
        rates["perf/rollout_samples_per_s"] = num_samples / metrics["perf/rollout_s"]
    if metrics.get("perf/update_s"):
        rates["perf/train_samples_per_s"] = num_samples / metrics["perf/update_s"]
        rates["perf/train_transitions_per_s"] = metrics.get("train/num_rows", 0.0) / metrics["perf/update_s"]
    return rates
