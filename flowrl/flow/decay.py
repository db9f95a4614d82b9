"""Decay schedules of weight averages: theta_old <- d theta_old + (1 - d) theta, with d = schedule.at(step)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from flowrl.flow.checks import require, require_at_least


@dataclass(frozen=True)
class Decay(ABC):
    """How much of the average is kept at a step: 0 copies the weights, 1 keeps the average as it is."""

    @abstractmethod
    def at(self, step: int) -> float:
        """The decay in [0, 1] at a step >= 0 (optimiser steps, where nothing else is said)."""


@dataclass(frozen=True)
class FlowGRPODecay(Decay):
    """min((1 + step) / (warmup + step), max_decay): flow_grpo's averaged weights, Flow-Factory's with warm-up."""

    max_decay: float = 0.9
    warmup: int = 10

    def __post_init__(self) -> None:
        require(0 <= self.max_decay <= 1, self, "max_decay", "a number between 0 and 1")
        require_at_least(self, "warmup", 1)

    def at(self, step: int) -> float:
        """See `Decay.at`."""
        return min((1 + step) / (self.warmup + step), self.max_decay)


@dataclass(frozen=True)
class LinearRamp(Decay):
    """`start` for `flat` steps, then up by `rate` a step as far as `cap`.

    DiffusionNFT's types are (flat, rate, cap) = (0, 0, 0), (0, 1e-3, 0.5) and (75, 7.5e-3, 0.999): `NFT_DECAYS`.
    CRD's strings "flat-start-rate-cap" are these four fields; its presets are `CRD_DECAYS`.
    """

    flat: int = 0
    rate: float = 0.0
    cap: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(self, "flat", 0)
        require_at_least(self, "rate", 0)
        require(0 <= self.start <= self.cap, self, "start", f"between 0 and cap = {self.cap}")
        require(self.cap <= 1, self, "cap", "at most 1")

    def at(self, step: int) -> float:
        """See `Decay.at`."""
        return min(self.start + max(step - self.flat, 0) * self.rate, self.cap)


NFT_DECAYS = (
    LinearRamp(flat=0, rate=0.0, cap=0.0),
    LinearRamp(flat=0, rate=1e-3, cap=0.5),
    LinearRamp(flat=75, rate=7.5e-3, cap=0.999),
)

CRD_DECAYS = (
    *NFT_DECAYS,
    LinearRamp(start=1.0, rate=0.0, cap=1.0),
    LinearRamp(rate=0.02, cap=0.99),
    LinearRamp(rate=0.01, cap=0.5),
    LinearRamp(rate=7.5e-3, cap=0.999),
)
