"""Rewards that look at latents instead of pictures: nothing need be decoded for them.

Free of torch, like everything that a worker imports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.prompts import Prompt
    from flowrl.types import Drawn


@runtime_checkable
class LatentScorer(Protocol):
    """One reward component that is given final latents, x_0, and never a picture. Else like `types.Scorer`."""

    def load(self) -> None:
        """Read models into memory; called once in each worker before the first `score_latents`."""
        ...

    def score_latents(
        self, latents: np.ndarray, text: Mapping[str, np.ndarray], prompts: Sequence[Prompt]
    ) -> np.ndarray:
        """float64 [K] for the K samples of one prompt. Raises on failure, never a stand-in.

        Args:
            latents: float32 [K, C, (F,) h, w], in the form in which the model denoises them.
            text: the prompt as the model reads it, by diffusers' names, one row each: float32 `prompt_embeds`
                [1, L, D] and, of some families, `pooled_prompt_embeds` [1, D] and `prompt_embeds_mask` bool [1, L].
            prompts: K times the one prompt.
        """
        ...


@dataclass(frozen=True)
class Latents:
    """What a rollout leaves of one prompt, as a `LatentScorer` is given it: on the host, contiguous, and a copy."""

    samples: np.ndarray  # float32 [K, C, (F,) h, w]
    text: Mapping[str, np.ndarray]  # [1, ...] each

    @classmethod
    def of(cls, drawn: Drawn) -> Self:
        """Of all samples, wherever the tensors lie."""
        text = {name: _on_host(part) for name, part in drawn.conditions.embeddings().items()}
        return cls(_on_host(drawn.trajectory.final_latents), text)


def _on_host(tensor: Tensor) -> np.ndarray:
    """Numbers in float32, a mask as it is."""
    values = tensor.float() if tensor.is_floating_point() else tensor
    return np.array(values.numpy(force=True), order="C")
