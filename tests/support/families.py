"""Every family at tiny size with random weights: the real classes of diffusers and transformers, nothing learnt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor

from flowrl.config import Sampler
from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.flow.noise import Noise
from flowrl.flow.solvers import Euler
from flowrl.flow.steps import Fixed
from flowrl.models.flux import Flux
from flowrl.models.flux2 import Flux2
from flowrl.models.pipeline import PipelineModel
from flowrl.models.policy import PipelinePolicy
from flowrl.models.qwen_image import QwenImage
from flowrl.models.sd3 import SD3
from flowrl.models.wan import Wan
from flowrl.models.z_image import ZImage
from flowrl.prompts import Prompt

PROMPTS = (
    Prompt("0", "a cat", negative="blurry"),
    Prompt("1", 'A rusty sign over the door of a very old bakery that says "OPEN"', negative="a photo of low quality"),
    Prompt("2", "x"),
)
NO_NEGATIVES = tuple(replace(prompt, negative="") for prompt in PROMPTS)


@dataclass(frozen=True)
class Family:
    """A pipeline, and sizes that it can draw."""

    model: PipelineModel
    frames: int = 1
    sizes: tuple[tuple[int, int], ...] = ((32, 32), (32, 64))  # square and not
    prompts: tuple[Prompt, ...] = PROMPTS  # that its pipeline takes

    def sampler(self, **changes: object) -> Sampler:
        """Four steps, two of them stochastic."""
        height, width = self.sizes[1]
        settings: dict[str, object] = {
            "num_steps": 4,
            "height": height,
            "width": width,
            "frames": self.frames,
            "dynamics": FlowSDE(0.7),
            "steps": Fixed([0, 2]),
            "solver": Euler(),
        }
        return Sampler(**(settings | changes))  # type: ignore[arg-type]


FAMILIES: Mapping[str, Family] = {
    "sd3": Family(SD3(init="random", size="tiny", max_sequence_length=16)),
    "qwen_image": Family(QwenImage(init="random", size="tiny")),
    "flux": Family(Flux(init="random", size="tiny", max_sequence_length=32)),
    "flux2": Family(Flux2(init="random", size="tiny", max_sequence_length=64), prompts=NO_NEGATIVES),
    "z_image": Family(ZImage(init="random", size="tiny", max_sequence_length=128)),
    "wan": Family(Wan(init="random", size="tiny", max_sequence_length=80, decode_batch_size=3), frames=5),
    "wan_ti2v": Family(Wan(init="random", size="tiny_ti2v_5b", max_sequence_length=80, decode_batch_size=3), frames=5),
    "wan_a14b": Family(Wan(init="random", size="tiny_a14b", max_sequence_length=80, decode_batch_size=3), frames=5),
}


@cache
def random_policy(name: str) -> PipelinePolicy:
    """The family's tiny policy; do not change it."""
    return FAMILIES[name].model.load(torch.device("cpu"))


@cache
def folder(name: str) -> Path:
    """The same model as an ordinary folder of diffusers; do not write to it."""
    path = Path(mkdtemp(prefix=f"flowrl-{name}-"))
    random_policy(name).pipeline.save_pretrained(path)
    return path


def saved(name: str) -> PipelineModel:
    """The configuration of that folder."""
    return replace(FAMILIES[name].model, init="pretrained", path=str(folder(name)))


def start(policy: PipelinePolicy, sampler: Sampler, count: int) -> Tensor:
    """x_T of as many samples."""
    shape = policy.latent_shape(sampler.height, sampler.width, sampler.frames)
    return Noise.of(0, "test").normal(shape, [(i,) for i in range(count)])
