"""A random SD3 of 100k parameters: every part real, nothing learnt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from flowrl.config import Sampler
from flowrl.flow.dynamics.base import Dynamics
from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.flow.noise import Noise
from flowrl.flow.solvers import Euler
from flowrl.flow.steps import Window
from flowrl.models.sd3 import SD3, SD3Policy
from flowrl.prompts import Prompt
from flowrl.rollout.native import NativeEngine
from flowrl.tiny.build import Denoiser, Size, build_pipeline, build_tokenizer, build_vae
from flowrl.types import Group, ScoredGroup

SIZE = Size(width=32, layers=2, heads=2, text_width=16, text_layers=2, text_heads=2, vae_channels=(8, 8, 16))


def save_random_folder(folder: Path, seed: int = 0) -> Path:
    """An ordinary diffusers folder."""
    tokenizer = build_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = build_pipeline(Denoiser(SIZE, tokenizer), build_vae(SIZE), tokenizer)
        # diffusers initialises the output projection to zero, and a velocity of 0 would test nothing
        torch.nn.init.normal_(pipeline.transformer.proj_out.weight, std=0.2)
    pipeline.save_pretrained(folder)
    return folder


def load(folder: Path, **options: object) -> SD3Policy:
    """The policy of a folder, on the CPU in float32."""
    return SD3(str(folder), max_sequence_length=0, **options).load(torch.device("cpu"))  # type: ignore[arg-type]


def sampler(dynamics: Dynamics | None = None, **changes: object) -> Sampler:
    """Six steps at 32x80, two of them stochastic."""
    settings: dict[str, object] = {
        "num_steps": 6,
        "height": 32,
        "width": 80,
        "dynamics": dynamics or FlowSDE(0.7),
        "steps": Window(size=2, low=0, high=4),
        "solver": Euler(),
    }
    return Sampler(**(settings | changes))  # type: ignore[arg-type]


def groups(count: int, num_samples: int, first: int = 0) -> list[Group]:
    """Groups with ordinals from `first` on."""
    words = ["FLOW", "OPEN", "SALE", "MILK", "TAXI", "STOP", "CAFE", "BOOK"]
    prompts = [Prompt(f"p{i}", f'A sign that says "{words[i % len(words)]}"') for i in range(first, first + count)]
    return [Group(first + i, prompt, 0, num_samples) for i, prompt in enumerate(prompts)]


def engine(policy: SD3Policy, batch_size: int = 16, **options: object) -> NativeEngine:
    """A native engine with seed 0."""
    settings = options.pop("sampler", None) or sampler()
    return NativeEngine(policy, settings, Noise.of(0, "rollout"), batch_size, **options)  # type: ignore[arg-type]


def brightness(sampled: list) -> list[ScoredGroup]:  # type: ignore[type-arg]
    """Scored by the mean pixel: a reward that any picture has."""
    return [ScoredGroup(s, {"bright": s.images.reshape(len(s.images), -1).mean(1).astype(np.float64)}) for s in sampled]
