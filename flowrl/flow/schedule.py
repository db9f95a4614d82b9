"""Noise schedules: the sigmas of a sampler, from pure noise down to 0.

Every schedule is a grid of times from 1 downwards, warped ("shifted") so that more steps are spent at high noise when
the picture has more tokens. Timesteps are the policies' business.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowrl.flow.checks import require, require_one_of


@dataclass(frozen=True)
class Schedule(ABC):
    """Where a sampler evaluates the velocity."""

    def sigmas(self, num_steps: int, image_seq_len: int | None = None) -> Tensor:
        """The schedule of `num_steps` steps: float32 [num_steps + 1] on the CPU, decreasing, the last 0.

        `image_seq_len` is the number of image tokens (patches of the latents); only dynamic shifts read it.

        Raises:
            ValueError: for num_steps < 1, or a schedule that needs image_seq_len and is not given it.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        return torch.from_numpy(np.append(self.nonzero_sigmas(num_steps, image_seq_len), 0.0).astype(np.float32))

    @abstractmethod
    def nonzero_sigmas(self, num_steps: int, image_seq_len: int | None) -> np.ndarray:
        """All sigmas but the last, [num_steps]."""


def static_shift(t: np.ndarray, shift: float) -> np.ndarray:
    """s t / (1 + (s - 1) t), in the dtype of t."""
    shifted: np.ndarray = shift * t / (1 + (shift - 1) * t)
    return shifted


def exponential_shift(t: np.ndarray, mu: float) -> np.ndarray:
    """e^mu / (e^mu + 1 / t - 1), in the dtype of t; the static shift by e^mu."""
    shifted: np.ndarray = math.exp(mu) / (math.exp(mu) + (1 / t - 1))
    return shifted


UNIT_GRIDS = ("linspace", "linspace_float32")


def unit_grid(num_steps: int, grid: str = "linspace") -> np.ndarray:
    """1, 1 - 1/N, ..., 1/N in float32, as diffusers holds the sigmas that a pipeline passes.

    Most pipelines compute them in float64 ("linspace"), Z-Image's in float32 ("linspace_float32"): last bits differ.
    """
    if grid == "linspace_float32":
        computed: np.ndarray = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float32, device="cpu").numpy()
        return computed
    return np.linspace(1, 1 / num_steps, num_steps).astype(np.float32)


@dataclass(frozen=True)
class StaticShift(Schedule):
    """The same shift for every picture size (SD3, SD3.5: 3.0).

    `grid` names the times that are shifted:

    * "diffusers" (default): what `FlowMatchEulerDiscreteScheduler.set_timesteps(N)` samples with: N times from 1 to the
      *shifted* 1/1000, so that the low end is shifted twice. For N = 10, shift 3 it ends ..., 0.278, 0.0089, 0.
      flow_grpo, DiffusionNFT, Flow-Factory and verl-omni use it for SD3.
    * "linspace": 1, 1 - 1/N, ..., 1/N, which ends ..., 0.429, 0.25, 0. DanceGRPO, MixGRPO and UniRL use it, and so
      does a pipeline that is given `sigmas=`.
    * "linspace_float32": the same with Z-Image's rounding.
    """

    shift: float = 3.0
    grid: str = "diffusers"

    def __post_init__(self) -> None:
        require(math.isfinite(self.shift) and self.shift > 0, self, "shift", "a number > 0")
        require_one_of(self, "grid", ("diffusers", *UNIT_GRIDS))

    def nonzero_sigmas(self, num_steps: int, image_seq_len: int | None) -> np.ndarray:
        """See `Schedule.sigmas`; the image size does not matter."""
        if self.grid in UNIT_GRIDS:
            return static_shift(unit_grid(num_steps, self.grid), self.shift)
        lowest = static_shift(np.array([1 / 1000], np.float32), self.shift)  # float32, like diffusers' sigma_min
        return static_shift(np.linspace(1, float(lowest[0]), num_steps), self.shift)


@dataclass(frozen=True)
class DynamicShift(Schedule):
    """An exponential shift by mu, which is linear in the number of image tokens.

    The defaults are FLUX.1-dev's. Qwen-Image has max_shift 0.9, max_seq_len 8192 and terminal 0.02: with `terminal`
    the schedule is stretched so that its last sigma before 0 is exactly that. `grid`: see `unit_grid`.
    """

    base_shift: float = 0.5
    max_shift: float = 1.15
    base_seq_len: int = 256
    max_seq_len: int = 4096
    terminal: float | None = None
    grid: str = "linspace"

    def __post_init__(self) -> None:
        require(self.max_seq_len > self.base_seq_len, self, "max_seq_len", f"> base_seq_len = {self.base_seq_len}")
        require(self.terminal is None or 0 < self.terminal < 1, self, "terminal", "None or a number between 0 and 1")
        require_one_of(self, "grid", UNIT_GRIDS)

    def mu(self, image_seq_len: int) -> float:
        """The shift's logarithm: base_shift at base_seq_len tokens, max_shift at max_seq_len."""
        slope = (self.max_shift - self.base_shift) / (self.max_seq_len - self.base_seq_len)
        return slope * image_seq_len + (self.base_shift - slope * self.base_seq_len)

    def nonzero_sigmas(self, num_steps: int, image_seq_len: int | None) -> np.ndarray:
        """See `Schedule.sigmas`."""
        sigmas = exponential_shift(unit_grid(num_steps, self.grid), self.mu(_needed(self, image_seq_len)))
        if self.terminal is None:
            return sigmas
        if num_steps == 1:
            raise ValueError("DynamicShift.terminal needs at least 2 steps: one step starts and ends at sigma 1")
        scale = (1 - sigmas[-1]) / (1 - self.terminal)
        stretched: np.ndarray = 1 - (1 - sigmas) / scale
        return stretched


@dataclass(frozen=True)
class WanUniPC(Schedule):
    """Wan's schedule: diffusers' UniPCMultistepScheduler with `use_flow_sigmas`, which starts at 0.999999.

    As of diffusers 0.42; older releases start at 0.999. flow_shift is 3.0 for 480p and 5.0 for 720p. Truncated,
    1000 sigma is diffusers' integer timestep.
    """

    flow_shift: float = 3.0

    def __post_init__(self) -> None:
        require(math.isfinite(self.flow_shift) and self.flow_shift > 0, self, "flow_shift", "a number > 0")

    def nonzero_sigmas(self, num_steps: int, image_seq_len: int | None) -> np.ndarray:
        """See `Schedule.sigmas`; the image size does not matter."""
        sigmas = static_shift(np.linspace(1, 1 / 1000, num_steps + 1)[:-1], self.flow_shift)
        sigmas[0] -= 1e-6  # at exactly 1 UniPC's log signal-to-noise ratio is infinite
        return _with_timesteps(sigmas)


@dataclass(frozen=True)
class Flux2Empirical(Schedule):
    """FLUX.2's schedule: an exponential shift by a mu fitted to the number of tokens and of steps.

    Linear in the steps between two fits (10 and 200 steps); above 4300 tokens the fit for 200 steps alone, so that mu
    jumps there.
    """

    def mu(self, image_seq_len: int, num_steps: int) -> float:
        """The shift's logarithm."""
        mu_200 = 1.6927e-4 * image_seq_len + 0.45666666
        if image_seq_len > 4300:
            return mu_200
        mu_10 = 8.73809524e-5 * image_seq_len + 1.89833333
        return mu_200 + (mu_10 - mu_200) * (200 - num_steps) / 190

    def nonzero_sigmas(self, num_steps: int, image_seq_len: int | None) -> np.ndarray:
        """See `Schedule.sigmas`."""
        return exponential_shift(unit_grid(num_steps), self.mu(_needed(self, image_seq_len), num_steps))


def _needed(schedule: Schedule, image_seq_len: int | None) -> int:
    if image_seq_len is None:
        raise ValueError(f"{type(schedule).__name__} depends on the picture's size: pass image_seq_len")
    if image_seq_len < 1:
        raise ValueError(f"image_seq_len must be at least 1, got {image_seq_len}")
    return image_seq_len


def _with_timesteps(sigmas: np.ndarray) -> np.ndarray:
    """`sigmas` in float32, rounded so that 1000 sigma keeps the whole part that it has in float64: Wan's timestep.

    It changes last bits where 1000 sigma is almost an integer, which a shift of 1 makes common.
    """
    rounded = sigmas.astype(np.float32)
    while True:
        crossed = np.floor(rounded * np.float32(1000)) - np.floor(sigmas * 1000)
        if not crossed.any():
            return rounded
        toward = (crossed < 0).astype(np.float32)
        rounded = np.where(crossed == 0, rounded, np.nextafter(rounded, toward))
