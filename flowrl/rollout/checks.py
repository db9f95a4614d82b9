"""What an engine must have delivered before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flowrl.config import Sampler
from flowrl.types import Drawn, Group, SampledGroup


class EngineError(RuntimeError):
    """An engine gave an incomplete or contradictory group."""


def check_complete(sampled: SampledGroup, group: Group, sampler: Sampler, shape: Sequence[int], version: int) -> None:
    """Raise EngineError unless `sampled` is all of `group`: pictures, latents, next latents, sigmas, step indices.

    Args:
        sampled: what the engine gave for `group`.
        group: what it was asked for.
        sampler: how it was to be drawn.
        shape: of one sample's latents.
        version: of the weights that the engine holds.
    """
    drawn: Drawn = sampled.drawn.fetch()
    trajectory, num_samples = drawn.trajectory, group.num_samples
    stored = trajectory.step_index.shape[1:]
    expected = {
        "latents": (num_samples, *stored, *shape),
        "next_latents": (num_samples, *stored, *shape),
        "step_index": (num_samples, *stored),
        "log_probs": (num_samples, *stored),
        "final_latents": (num_samples, *shape),
        "slots": (num_samples,),
        "group_ids": (num_samples,),
        "policy_version": (num_samples,),
        "sigmas": (sampler.num_steps + 1,),
    }
    found: dict[str, Tensor] = {name: vars(trajectory)[name] for name in expected}
    faults = [
        f"{name} has the shape {list(value.shape)} instead of {list(expected[name])}"
        for name, value in found.items()
        if tuple(value.shape) != expected[name]
    ]
    faults += [f"{name} is not finite" for name, value in found.items() if not bool(value.isfinite().all())]
    if sampled.group != group:
        faults.append(f"it is group {sampled.group.ordinal} instead of {group.ordinal}")
    if sampled.sampling.policy_version != version:
        faults.append(f"it claims version {sampled.sampling.policy_version} of the weights instead of {version}")
    if len(drawn.conditions) != 1:
        faults.append(f"it has {len(drawn.conditions)} rows of conditions instead of 1")
    pictures = (num_samples, sampler.height, sampler.width, 3)
    if sampled.images is not None and sampled.images.shape != pictures:
        faults.append(f"its pictures have the shape {list(sampled.images.shape)} instead of {list(pictures)}")
    if faults:
        raise EngineError(f"rollout.engine gave group {group.ordinal} incomplete: {'; '.join(faults)}")
