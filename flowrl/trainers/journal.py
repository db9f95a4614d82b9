"""What a trainer writes down: metrics, pictures, artifacts, and at the end the report and the weights."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors.numpy import load, save
from torch import Tensor

from flowrl.config import Config
from flowrl.distributed.checkpoint.folders import Committed
from flowrl.files import atomic_folder
from flowrl.tracking.artifacts import ArtifactStore
from flowrl.tracking.loggers.base import RunInfo
from flowrl.tracking.metrics import reward_metrics
from flowrl.tracking.pictures import before_after_sheet
from flowrl.tracking.report import build_report
from flowrl.tracking.summary import Summary
from flowrl.tracking.tracker import Tracker
from flowrl.tracking.video import still
from flowrl.trainers.evaluator import Evaluated, by_component
from flowrl.trainers.stages import Stages
from flowrl.trainers.state import SHOWN, STATE
from flowrl.types import ScoredGroup

NUM_LOGGED_IMAGES = 16
NUM_SHEET_PAIRS = 32


@dataclass(frozen=True)
class Shown:
    """What is kept of an evaluation: its numbers, and the first picture, or still of a video, of its first prompts."""

    metrics: dict[str, float]
    images: np.ndarray  # uint8 [M, H, W, 3]
    labels: list[str]
    scores: list[float]  # of the first component; NaN where it failed

    @classmethod
    def of(cls, evaluated: Evaluated) -> Shown:
        """From the first set."""
        groups = next(iter(evaluated.sets.values()))[:NUM_SHEET_PAIRS]
        component = next(iter(groups[0].rewards))
        return cls(
            metrics=evaluated.metrics(),
            images=np.stack([still(picture) for picture in _firsts(groups)]),
            labels=[_label(group) for group in groups],
            scores=[float(group.rewards[component][0]) if component in group.rewards else np.nan for group in groups],
        )


class Journal:
    """One record per step: whatever happened in it is collected, then logged once.

    Use as a context: loggers are open inside, and the report is made at the end even if the run broke off.

    Args:
        run: whose folder exists and holds `config.yaml`.
        total_steps: of the whole run.
        start: the checkpoint that this process goes on from.
    """

    def __init__(self, run: Config, total_steps: int, start: Committed | None) -> None:
        self.run = run
        self.run_dir = run.run_dir
        self.total_steps = total_steps
        self.resumed_from = None if start is None else start.step
        self.elsewhere = start is not None and start.path.parent != run.checkpoints_dir
        self.tracker = Tracker(list(run.logger.components.values()))
        self.artifacts = ArtifactStore(
            run_dir=self.run_dir,
            keep=run.artifacts.keep,
            trajectories=run.artifacts.trajectories,
            fps=run.sampler.fps,
        )
        self.metrics: dict[str, float] = {}
        self.logged: dict[str, float] = {}  # the last record
        self.names: set[str] = set()  # of all metrics so far
        self.first: Shown | None = None
        self.last: Shown | None = None
        self._scored: dict[str, float] = {}
        self._opened = ExitStack()
        self._began = time.perf_counter()
        self._seconds_before = 0.0  # of earlier processes
        if start is not None:
            self._restore(start.document(SHOWN), start.json(STATE)["journal"])

    def __enter__(self) -> Self:
        info = RunInfo(
            name=self.run.name,
            run_dir=self.run_dir,
            total_steps=self.total_steps,
            config_yaml=(self.run_dir / "config.yaml").read_text(),
            fps=self.run.sampler.fps,
            resumed_from=self.resumed_from,
            elsewhere=self.elsewhere,
        )
        self._opened.callback(build_report, self.run_dir)
        self._opened.callback(self.tracker.close)
        self.tracker.start(info)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def trained(self, step: int, batch: list[ScoredGroup], advantages: Tensor, scored: dict[str, float]) -> None:
        """A train batch and what it was worth. `scored` are the reward pool's totals up to now."""
        groups = [scored.sampled.group for scored in batch]
        ids = np.repeat([group.ordinal for group in groups], [group.num_samples for group in groups])
        weights = self.run.reward.weights
        total = _combined(batch, weights)
        self.metrics |= reward_metrics(by_component(batch), advantages, ids, total) | self._scoring(scored)
        self.metrics["reward/num_samples"] = float(len(total))
        complete = [group for group in batch if group.rewards.keys() == weights.keys()]
        if complete:
            self.metrics["reward/mean"] = float(_combined(complete, weights).mean())
        else:  # what lacks a component is another sum
            del self.metrics["reward/mean"]
        if self.run.artifacts.every and step % self.run.artifacts.every == 0:
            self.artifacts.write_rollout(step, batch)

    def evaluated(self, step: int, evaluated: Evaluated) -> None:
        """An evaluation; its pictures go to the loggers and the run folder."""
        self.metrics |= evaluated.metrics()
        for name, groups in evaluated.sets.items():
            self.artifacts.write_evaluation(step, name, groups)
            shown = groups[:NUM_LOGGED_IMAGES]
            captions = [f"{_label(g)} {' '.join(f'{r[0]:.2f}' for r in g.rewards.values())}" for g in shown]
            self.tracker.log_images(step, f"eval/{name}", np.stack(_firsts(shown)), captions)
        if evaluated.sets:
            self.last = Shown.of(evaluated)
            self.first = self.first or self.last

    def _scoring(self, scored: dict[str, float]) -> dict[str, float]:
        """Seconds of workers' time, how much of it showed, samples per second, and what was tried again or dropped."""
        spent = {name: total - self._scored.get(name, 0.0) for name, total in scored.items()}
        self._scored = scored
        metrics = {f"reward/score_{n}": count for n, count in spent.items() if n.startswith(("dropped", "retries"))}
        if spent["seconds"]:
            metrics["perf/score_s"] = spent["seconds"]
            metrics |= {f"perf/score_{part}_s": spent[part] for part in ("hidden", "exposed")}
            metrics["perf/score_samples_per_s"] = spent["samples"] / spent["seconds"]
        return metrics

    def log(self, step: int, stages: Stages) -> None:
        """Hand the step's record to every logger."""
        metrics = self.metrics | stages.actor.metrics() | stages.meter.collect() | stages.timers.collect()
        metrics |= stages.buffer.accounting().metrics()
        self.logged = metrics | _throughput(metrics)
        self.names |= self.logged.keys()
        self.tracker.log(step, self.logged)
        self.metrics = {}

    def finish(self, stages: Stages) -> None:
        """Weights, summary and the before/after sheet. The report follows when the journal closes."""
        with atomic_folder(self.run_dir / "final") as folder:
            stages.actor.save(folder)
        if self.first is None or self.last is None:
            return
        both = self.first.metrics.keys() & self.last.metrics.keys()  # an optional component may have failed in one
        before, after = ({n: v for n, v in s.metrics.items() if n in both} for s in (self.first, self.last))
        Summary(before=before, after=after, steps=self.total_steps, seconds=self.seconds()).write(self.run_dir)
        sheet = before_after_sheet(
            self.first.images, self.last.images, self.first.labels, self.first.scores, self.last.scores
        )
        sheet.save(self.run_dir / "before_after.png")

    # ------------------------------------------------------------------------------------------ checkpoints

    def seconds(self) -> float:
        """How long the run has taken, earlier processes included."""
        return self._seconds_before + time.perf_counter() - self._began

    def shown(self) -> bytes:
        """What the report's before and after need of evaluations, as a safetensors file."""
        tensors: dict[str, np.ndarray] = {}
        about: dict[str, str] = {}
        for name, shown in (("first", self.first), ("last", self.last)):
            if shown is not None:
                tensors[f"{name}.images"] = np.ascontiguousarray(shown.images)  # safetensors takes that for granted
                tensors[f"{name}.scores"] = np.array(shown.scores)
                about[name] = json.dumps({"metrics": shown.metrics, "labels": shown.labels})
        return save(tensors, about)

    def _restore(self, shown: bytes, state: Mapping[str, Any]) -> None:
        self._seconds_before, self.names = state["seconds"], set(state["names"])
        self.first, self.last = (_shown(shown, name) for name in ("first", "last"))


def _shown(data: bytes, name: str) -> Shown | None:
    length = int.from_bytes(data[:8], "little")
    about: Mapping[str, Any] = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    if name not in about:
        return None
    tensors = load(data)
    return Shown(**json.loads(about[name]), images=tensors[f"{name}.images"], scores=tensors[f"{name}.scores"].tolist())


def _combined(groups: Sequence[ScoredGroup], weights: Mapping[str, float]) -> np.ndarray:
    """What the samples are worth in all, by the components that their groups have."""
    return np.concatenate([sum(weights[name] * scores for name, scores in group.rewards.items()) for group in groups])


def _label(group: ScoredGroup) -> str:
    prompt = group.sampled.group.prompt
    return prompt.target or prompt.text


def _firsts(groups: list[ScoredGroup]) -> list[np.ndarray]:
    """The first picture or video of each."""
    return [group.sampled.images[0] for group in groups if group.sampled.images is not None]


def _throughput(metrics: dict[str, float]) -> dict[str, float]:
    """Per second of the phase: samples drawn, samples trained, training rows."""
    rates = {
        "perf/rollout_samples_per_s": ("reward/num_samples", "perf/rollout_s"),
        "perf/train_samples_per_s": ("train/num_samples", "perf/update_s"),
        "perf/train_transitions_per_s": ("train/num_rows", "perf/update_s"),
    }
    return {name: metrics[n] / metrics[s] for name, (n, s) in rates.items() if n in metrics and metrics.get(s)}
