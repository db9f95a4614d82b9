"""Latents scored by a server: a latent reward model in an environment, and on a GPU, of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowrl.rewards.latent_wire import TEXT, VERSION_HEADER, LatentSample, encode
from flowrl.rewards.scoring import FinalError
from flowrl.rewards.transport import PAGE_BYTES, AnswerError, Server, UnreachableError, check_whole
from flowrl.rewards.wire import CONTENT_TYPE, PATH, VERSION, read_scores

if TYPE_CHECKING:
    from flowrl.prompts import Prompt

HEADERS = {"content-type": CONTENT_TYPE, VERSION_HEADER: VERSION}


@dataclass(frozen=True, kw_only=True)
class LatentHTTP(Server):
    """raw * `scale` + `bias`, where raw is what a server says of a latent and the prompt's embeddings.

    Each sample is a request; the server batches those of all groups. See `transport.Server` for the other fields.

    Args:
        u: the noise level, 0 to 1, at which the model judges.
        seed: of its noise; None leaves it to the server.
        scale: of the raw score.
        bias: added to it.
    """

    u: float = 0.4
    seed: int | None = None
    scale: float = 1.0
    bias: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.u <= 1:
            raise ValueError(f"u must be in [0, 1], got {self.u}")
        if self.scale == 0 or not math.isfinite(self.scale):
            raise ValueError(f"scale must be a finite number and not 0, got {self.scale}")
        if not math.isfinite(self.bias):
            raise ValueError(f"bias must be a finite number, got {self.bias}")
        if self.seed is not None:
            check_whole("seed", self.seed, -(2**63), 2**63 - 1)

    def load(self) -> None:
        """Wait until the server is ready. Raises UnreachableError if it is not within `start_timeout_s`."""
        self.connection.wait("/healthz")

    def score_latents(
        self, latents: np.ndarray, text: Mapping[str, np.ndarray], prompts: Sequence[Prompt]
    ) -> np.ndarray:
        """float64 [K]. Raises UnreachableError once the retries are spent, AnswerError for what they cannot mend."""
        if "prompt_embeds" not in text:
            raise FinalError(f"the server needs prompt_embeds, and the model gives only {sorted(text)}")
        rows = {name: text[name] for name in TEXT if name in text}

        def raw(slot: int) -> float:
            sample = LatentSample(latents[slot : slot + 1], rows, self.u, self.seed)
            if not np.isfinite(sample.latents).all():
                raise AnswerError(f"the latents of sample {slot} are not finite, and were not sent")
            try:
                answer = self.connection.post(PATH, encode(sample), HEADERS, PAGE_BYTES)
                return float(read_scores(answer, 1, "raw_scores")[0])
            except UnreachableError as error:
                raise UnreachableError(f"sample {slot}: {error}") from error
            except FinalError as error:
                raise AnswerError(f"sample {slot}: {error}") from error

        raws = self.connection.map(raw, range(len(latents)))
        return np.array(raws, dtype=np.float64) * self.scale + self.bias
