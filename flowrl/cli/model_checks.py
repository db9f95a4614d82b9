"""What is asked of a model: is it its pipeline's equal, and does it do the same whenever it is asked the same?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from flowrl.cli.trained import settle
from flowrl.cli.verification import drawn, largest, noise
from flowrl.config import Config, Sampler
from flowrl.device import choose_device
from flowrl.flow.noise import Noise
from flowrl.models.policy import PipelinePolicy
from flowrl.prompts import Prompt
from flowrl.rollout.native import NativeEngine
from flowrl.types import Group

TEXTS = ("a cat", 'A rusty sign over the door of a very old bakery that says "OPEN"', "x")  # of different lengths


@dataclass(frozen=True)
class Check:
    """A sentence that should be true, and by how much it is not."""

    sentence: str
    difference: float
    allowed: float

    @property
    def holds(self) -> bool:
        """NaN is not within anything."""
        return self.difference <= self.allowed


def checks(run: Config, negative: str, tolerance: float) -> Iterator[Check]:
    """All of them, the most basic first, each made when it is asked for. Raises LoadError.

    Args:
        run: its model, which is a `PipelineModel` in float32, and its sampler are tried.
        negative: the negative prompt of all.
        tolerance: for latents.
    """
    policy: PipelinePolicy = run.model.load(choose_device(run))
    settle(policy)
    prompts = [Prompt(str(i), text, negative=negative) for i, text in enumerate(TEXTS)]
    scale = run.sampler.guidance_scale
    for sampler in [replace(run.sampler, guidance_scale=1.0), *([run.sampler] if policy.guided(scale) else [])]:
        words = f"with guidance {scale:g}" if policy.guided(sampler.guidance_scale) else "without guidance"
        start = noise(policy, sampler, len(prompts))
        together = drawn(policy, prompts, start, sampler)
        by_pipeline = run.model.draw(run.model.folder(), None, prompts, start, sampler)
        yield Check(f"{words} it draws what its pipeline draws", largest(together - by_pipeline), tolerance)
        alone = torch.cat([drawn(policy, [prompt], start[i : i + 1], sampler) for i, prompt in enumerate(prompts)])
        yield Check(f"{words} a sample is the same alone and in a batch", largest(together - alone), tolerance)
    replayed = _replayed(policy, prompts, run.sampler)
    yield Check("the forward that trains gives a rollout's log-probabilities, bit for bit", replayed, 0)
    without = _blocks_left_out(policy)
    yield Check("repeated blocks that `blocks` does not name, or `lora_targets` has nothing of: none", without, 0)


def _replayed(policy: PipelinePolicy, prompts: Sequence[Prompt], sampler: Sampler) -> float:
    """The largest difference of any log-probability."""
    groups = [Group(i, prompt, 0, 1) for i, prompt in enumerate(prompts)]
    engine = NativeEngine(policy, sampler, Noise.of(0, "check"), batch_size=len(groups), decode=False)
    found = [sampled.drawn.fetch() for sampled in engine.generate(groups, 0)]
    trajectory = type(found[0].trajectory).concat([one.trajectory for one in found]).to(policy.device)
    conditions = type(found[0].conditions).concat([one.conditions for one in found]).to(policy.device)
    differences = []
    for slot in range(trajectory.step_index.shape[1]):
        sample, step = trajectory.latents[:, slot], trajectory.step_index[:, slot]
        with torch.no_grad():
            velocity = policy.velocity(sample, trajectory.sigmas[step], conditions)
        transition = sampler.dynamics.transition(sample, velocity, trajectory.sigmas, step)
        log_prob = sampler.dynamics.log_prob(trajectory.next_latents[:, slot], transition)
        differences.append(largest(log_prob - trajectory.log_probs[:, slot]))
    return max(differences)


def _blocks_left_out(policy: PipelinePolicy) -> int:
    """Those in the outermost lists of a transformer that have weights: a missed class is never sharded."""
    lists = [module for module in policy.module.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(part) for blocks in lists for block in blocks for part in block.modules()}
    outermost = [block for blocks in lists if id(blocks) not in inner for block in blocks]
    with_weights = [block for block in outermost if next(block.parameters(), None) is not None]
    targets = tuple(f".{target}" for target in policy.lora_targets)
    adapted = [any(f".{name}".endswith(targets) for name, _ in block.named_modules()) for block in with_weights]
    named = [isinstance(block, tuple(policy.blocks)) for block in with_weights]
    return sum(not (adapts and names) for adapts, names in zip(adapted, named, strict=True))
