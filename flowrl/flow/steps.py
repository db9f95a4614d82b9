"""Step strategies: which denoising steps are stochastic, stored and trained.

One draw per rollout, shared by all its samples. Evaluation never draws.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.flow.checks import require, require_at_least, require_one_of


@dataclass(frozen=True)
class Steps(ABC):
    """Chooses the trained steps of a rollout; all other steps are ODE steps."""

    @abstractmethod
    def choose(self, rollout_id: int, num_steps: int) -> tuple[int, ...]:
        """The steps of this rollout, sorted, unique, in 0..num_steps-1. The same arguments give the same steps."""

    @abstractmethod
    def invalid(self, num_steps: int) -> list[str]:
        """Why `choose` cannot serve a schedule of `num_steps` steps: nothing to train, or a step that is not there."""


@dataclass(frozen=True)
class All(Steps):
    """Every step but the last, or with `include_last` every step.

    The last step (sigma' = 0) makes the picture itself. CPS adds no noise there; a flow-SDE does, which nothing
    removes any more: grain in the picture, and on the diffusers grid a likelihood so sharp that it drowns the others.
    flow_grpo samples it stochastically and leaves it out of training.
    """

    include_last: bool = False

    def choose(self, rollout_id: int, num_steps: int) -> tuple[int, ...]:
        """See `Steps.choose`; the same for every rollout."""
        return tuple(range(num_steps if self.include_last else num_steps - 1))

    def invalid(self, num_steps: int) -> list[str]:
        """See `Steps.invalid`."""
        return [] if self.choose(0, num_steps) else [f"{self} is empty: a schedule of {num_steps} has no step to train"]


@dataclass(frozen=True)
class Window(Steps):
    """`size` steps in a row, somewhere in low..high-1 (Flow-GRPO-Fast): start uniform in low..high-size, inclusive.

    `high` None means all but the last step. `draw` names the generator, so that published runs can be followed:

    * "python" (default): `random.Random(seed + rollout_id).randint`, as verl-omni.
    * "numpy": `numpy.random.default_rng(seed + rollout_id).integers`, as miles.
    """

    size: int = 2
    low: int = 0
    high: int | None = None
    seed: int = 0
    draw: str = "python"

    def __post_init__(self) -> None:
        require_at_least(self, "size", 1)
        require_at_least(self, "low", 0)
        require_one_of(self, "draw", ("python", "numpy"))

    def choose(self, rollout_id: int, num_steps: int) -> tuple[int, ...]:
        """See `Steps.choose`."""
        last_start = _end(self.high, num_steps) - self.size
        if self.draw == "python":
            start = random.Random(self.seed + rollout_id).randint(self.low, last_start)
        else:
            start = int(np.random.default_rng(self.seed + rollout_id).integers(self.low, last_start + 1))
        return tuple(range(start, start + self.size))

    def invalid(self, num_steps: int) -> list[str]:
        """See `Steps.invalid`."""
        return _range_faults(self, self.low, _end(self.high, num_steps), self.size, num_steps)


@dataclass(frozen=True)
class Progressive(Steps):
    """A window of `size` steps that moves on, to less noise, by `stride` every `iters_per_group` rollouts (MixGRPO).

    `high` None means all but the last step. `tail` says how the range low..high-1 ends:

    * "full": only whole windows at multiples of the stride.
    * "clamp": the same, and one last window that ends exactly at `high`.
    * "truncate": windows start at every multiple of the stride below `high` and are cut off there.

    After the last window the first follows with `roll_back`, else the last one stays. Three published schedules:

    * MixGRPO (25 steps, arXiv 2507.21802): size 4, stride 1, high 23, tail "truncate", roll_back. (Its code spends one
      more turn on an empty window, which trains nothing and is left out here.)
    * verl-omni: stride = size, tail "clamp", no roll_back.
    * UniRL: stride = size - overlap, high = num_steps, tail "full", roll_back or not.
    """

    size: int = 4
    iters_per_group: int = 25
    stride: int = 1
    low: int = 0
    high: int | None = None
    tail: str = "truncate"
    roll_back: bool = True

    def __post_init__(self) -> None:
        for name in ("size", "iters_per_group", "stride"):
            require_at_least(self, name, 1)
        require_at_least(self, "low", 0)
        require_one_of(self, "tail", ("full", "clamp", "truncate"))

    def choose(self, rollout_id: int, num_steps: int) -> tuple[int, ...]:
        """See `Steps.choose`."""
        high = _end(self.high, num_steps)
        starts = self._starts(high)
        turn = rollout_id // self.iters_per_group
        start = starts[turn % len(starts) if self.roll_back else min(turn, len(starts) - 1)]
        return tuple(range(start, min(start + self.size, high)))

    def invalid(self, num_steps: int) -> list[str]:
        """See `Steps.invalid`."""
        return _range_faults(self, self.low, _end(self.high, num_steps), self.size, num_steps)

    def _starts(self, high: int) -> list[int]:
        if self.tail == "truncate":
            return list(range(self.low, high, self.stride))
        starts = list(range(self.low, high - self.size + 1, self.stride))
        if self.tail == "clamp" and starts[-1] < high - self.size:
            starts.append(high - self.size)
        return starts


@dataclass(frozen=True)
class RandomChoice(Steps):
    """`num_steps` steps of `pool`, drawn anew for each rollout by `numpy.random.default_rng(rollout_id)`.

    No seed and no communication: every rank and every engine that knows the rollout's number draws the same steps.
    """

    num_steps: int
    pool: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "pool", tuple(self.pool))

    def choose(self, rollout_id: int, num_steps: int) -> tuple[int, ...]:
        """See `Steps.choose`."""
        drawn = np.random.default_rng(rollout_id).choice(self.pool, self.num_steps, replace=False)
        return tuple(sorted(int(step) for step in drawn))

    def invalid(self, num_steps: int) -> list[str]:
        """See `Steps.invalid`."""
        reasons = _set_faults(self, self.pool, num_steps)
        if not 1 <= self.num_steps <= len(self.pool):
            reasons.append(f"{self} must draw between 1 and {len(self.pool)} steps, the size of its pool")
        if len(set(self.pool)) < len(self.pool):
            reasons.append(f"{self} names a step of its pool twice")
        return reasons


@dataclass(frozen=True)
class Fixed(Steps):
    """The same named steps in every rollout; sorted, repeats dropped."""

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(sorted(set(self.steps))))

    def choose(self, rollout_id: int, num_steps: int) -> tuple[int, ...]:
        """See `Steps.choose`; the same for every rollout."""
        return self.steps

    def invalid(self, num_steps: int) -> list[str]:
        """See `Steps.invalid`."""
        return _set_faults(self, self.steps, num_steps)


@dataclass(frozen=True)
class Fraction(Steps):
    """`num_steps` steps spread evenly over the part [low, high] of the schedule, 0 its start and 1 its end.

    Of the n steps in that part, step number floor(k n / num_steps) for k = 0, 1, ...: [0, 0.5] of 12 steps with
    num_steps = 3 are steps 0, 2, 4.
    """

    low: float = 0.0
    high: float = 1.0
    num_steps: int = 1

    def __post_init__(self) -> None:
        require(0 <= self.low <= 1, self, "low", "a number between 0 and 1")
        require(self.low < self.high <= 1, self, "high", f"> low = {self.low} and at most 1")
        require_at_least(self, "num_steps", 1)

    def choose(self, rollout_id: int, num_steps: int) -> tuple[int, ...]:
        """See `Steps.choose`; the same for every rollout."""
        part = self._part(num_steps)
        return tuple(part[k * len(part) // self.num_steps] for k in range(self.num_steps))

    def invalid(self, num_steps: int) -> list[str]:
        """See `Steps.invalid`."""
        available = len(self._part(num_steps))
        if self.num_steps <= available:
            return []
        return [f"{self} asks for {self.num_steps} steps, but that part of {num_steps} steps has {available}"]

    def _part(self, num_steps: int) -> range:
        return range(round(self.low * num_steps), round(self.high * num_steps))


def _end(high: int | None, num_steps: int) -> int:
    return num_steps - 1 if high is None else high


def _range_faults(steps: Steps, low: int, high: int, size: int, num_steps: int) -> list[str]:
    if high > num_steps:
        return [f"{steps} reaches step {high - 1}, but the last of {num_steps} steps is {num_steps - 1}"]
    if low + size > high:
        return [f"{steps} needs {size} steps from {low} on, but there are {max(high - low, 0)} below {high}"]
    return []


def _set_faults(steps: Steps, chosen: Sequence[int], num_steps: int) -> list[str]:
    if not chosen:
        return [f"{steps} is empty: there is no step to train"]
    outside = [step for step in chosen if not 0 <= step < num_steps]
    return [f"{steps} names {outside}, but the steps are 0..{num_steps - 1}"] if outside else []
