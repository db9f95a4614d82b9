"""Stand-ins that sleep where others compute, so that more workers than cores do not get in each other's way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.config import Config
from flowrl.prompts import Prompt
from flowrl.rewards.jpeg import JPEGCompressibility
from flowrl.rollout.native import Native
from flowrl.types import Engine, Group, Policy, SampledGroup, TrainBatch, Velocities


@dataclass(frozen=True)
class SlowEngine:
    """`rollout.engine`: takes `group_s` for every group of a chunk, and gives all of them in the end."""

    group_s: float = 0.0

    def open(self, run: Config, policy: Policy) -> Slowed:
        """The native engine, slowed."""
        return Slowed(Native().open(run, policy), self.group_s)


class Slowed:
    """Draws, and sleeps for what is left of the time (`types.Engine`)."""

    def __init__(self, inner: Engine, group_s: float) -> None:
        self.inner = inner
        self.group_s = group_s
        self.publish, self.sleep, self.wake = inner.publish, inner.sleep, inner.wake

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.inner.version

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        """See `Engine`."""
        end = time.perf_counter() + self.group_s * len(groups)
        drawn = list(self.inner.generate(groups, rollout_id))
        time.sleep(max(0.0, end - time.perf_counter()))
        yield from drawn


@dataclass(frozen=True, kw_only=True)
class SlowGRPO(FlowGRPO):
    """`algorithm`: sleeps before each update."""

    pause_s: float = 0.0

    def couple(self, update: TrainBatch, velocities: Velocities) -> TrainBatch:
        """See `Algorithm`."""
        time.sleep(self.pause_s)
        return super().couple(update, velocities)


@dataclass(frozen=True)
class SlowJPEG(JPEGCompressibility):
    """A scorer that sleeps first."""

    pause_s: float = 0.0

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B]."""
        time.sleep(self.pause_s)
        return super().score(images, prompts)
