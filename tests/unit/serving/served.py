"""What scorer processes of tests live on. A module of its own, so that they import nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.rewards.scoring import FinalError

HANGS = -1  # the seed with which a latent model does


@dataclass(frozen=True)
class Obeys:
    """Scores 1 for each payload, or does what one of them says."""

    def load(self) -> None:
        """Nothing to load."""

    def score(self, payloads: Sequence[str]) -> np.ndarray:
        for payload in payloads:
            match payload:
                case "raise":
                    raise RuntimeError("too large")
                case "refuse":
                    raise FinalError("no target")
                case "half":
                    raise FinalError("no file caf\udce9.png")
                case "nothing":
                    return None  # type: ignore[return-value]
                case "exit":
                    raise SystemExit
                case "die":
                    os._exit(3)
                case "hang":
                    time.sleep(60)
                case order if order.startswith("touch "):
                    Path(order.removeprefix("touch ")).touch()
        return np.ones(len(payloads))


@dataclass(frozen=True)
class CannotLoad(Obeys):
    """Has no model."""

    def load(self) -> None:
        raise FileNotFoundError("no model.onnx")


@dataclass(frozen=True)
class LoadsAtTimes(Obeys):
    """As `file` says: in each of its lines what to do, one after the other, and in the end nothing but to load."""

    file: str

    def load(self) -> None:
        orders = Path(self.file).read_text().splitlines()
        Path(self.file).write_text("\n".join(orders[1:]))
        if orders and orders[0] == "raise":
            raise MemoryError("CUDA out of memory")


@dataclass(frozen=True, kw_only=True)
class TinyLatentModel:
    """A random reward model of latents: one vector for each of what it sees, and noise if it is given a seed."""

    channels: int = 4
    seed: int = 0

    def load(self) -> None:
        draw = np.random.default_rng(self.seed)
        weights = {name: draw.standard_normal(64).astype(np.float32) for name in ("latents", "prompt_embeds")}
        object.__setattr__(self, "weights", weights)

    def score(
        self, latents: np.ndarray, text: Mapping[str, np.ndarray], u: np.ndarray, seeds: Sequence[int | None]
    ) -> np.ndarray:
        if HANGS in seeds:
            time.sleep(60)
        if latents.shape[1] != self.channels:
            raise FinalError(f"latents must have {self.channels} channels, got {latents.shape[1]}")
        noise = [0.0 if seed is None else np.random.default_rng(seed).standard_normal() for seed in seeds]
        parts: Mapping[str, Any] = {"latents": latents, "prompt_embeds": text["prompt_embeds"]}
        seen = sum(
            part.reshape(len(part), -1)[:, :64].astype(np.float64) @ vars(self)["weights"][name][: part[0].size]
            for name, part in parts.items()
        )
        return (1 - u) * np.tanh(seen) + u * np.array(noise)
