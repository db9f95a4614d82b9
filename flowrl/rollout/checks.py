"""What an engine must have delivered before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from flowrl.config import Config, ConfigError, Problem, Sampler
from flowrl.types import Drawn, Engine, Group, Policy, SampledGroup, Sampling, Trajectory

SIGMA_TOLERANCE = 1e-6  # an engine may compute the schedule in its own way


def sampled_at(sampler: Sampler, policy: Policy) -> Tensor:
    """The sigmas of the sampler's schedule, or the model's own, float32 [N + 1].

    Raises ConfigError where that schedule cannot have so few steps.
    """
    schedule = sampler.schedule or policy.schedule()
    try:
        return schedule.sigmas(sampler.num_steps, policy.image_seq_len(sampler.height, sampler.width))
    except ValueError as error:
        raise ConfigError(Problem("sampler.num_steps", f"cannot be {sampler.num_steps}: {error}.")) from error


class EngineError(RuntimeError):
    """Generation failed: an engine gave an incomplete or contradictory group, or one group after the other is lost.

    Args:
        message: for the user.
        ordinal: of the group that is at fault, if it is one.
    """

    def __init__(self, message: str, ordinal: int | None = None) -> None:
        super().__init__(message, ordinal)
        self.ordinal = ordinal

    def __str__(self) -> str:
        return str(self.args[0])


def checked(
    engine: Engine, groups: Sequence[Group], rollout_id: int, run: Config, policy: Policy, version: int
) -> Iterator[SampledGroup]:
    """What `engine.generate(groups, rollout_id)` gives, if it is what `run` asks for.

    Args:
        engine: any.
        groups: what is to be drawn, in this order.
        rollout_id: of this rollout; it chooses the steps to be stored.
        run: the configuration.
        policy: knows the latents' shape and the model's own schedule.
        version: of the weights that the engine holds.

    Raises:
        EngineError: a group is incomplete or contradicts the request, or there are fewer or more than asked for.
    """
    order = Order.of(run, policy, rollout_id, version)
    for group, sampled in zip_longest(groups, engine.generate(groups, rollout_id)):
        if group is None or sampled is None:
            raise EngineError(f"rollout.engine gave {'more' if group is None else 'fewer'} groups than {len(groups)}.")
        faults = order.faults(sampled, group)
        if faults:
            message = f"rollout.engine gave group {group.ordinal} not as it was asked to: {'; '.join(faults)}."
            raise EngineError(message, group.ordinal)
        yield sampled


@dataclass(frozen=True)
class Order:
    """How all groups of one rollout are to be drawn."""

    sampler: Sampler
    steps: tuple[int, ...]  # the stored ones
    sigmas: Tensor  # float32 [N + 1]
    shape: tuple[int, ...]  # of one sample's latents
    pictures: tuple[int, ...]  # the shape of one sample's pixels
    decoded: bool  # must there be any?
    version: int

    @classmethod
    def of(cls, run: Config, policy: Policy, rollout_id: int, version: int) -> Order:
        """What `run` asks for in this rollout."""
        sampler = run.sampler
        stochastic = run.algorithm.needs.rollout == "sde"
        return cls(
            sampler=sampler,
            steps=tuple(sampler.steps.choose(rollout_id, sampler.num_steps)) if stochastic else (),
            sigmas=sampled_at(sampler, policy),
            shape=tuple(policy.latent_shape(sampler.height, sampler.width, sampler.frames)),
            pictures=(*((sampler.frames,) if run.model.task == "t2v" else ()), sampler.height, sampler.width, 3),
            decoded=run.rollout.output != "latent",
            version=version,
        )

    def faults(self, sampled: SampledGroup, group: Group) -> list[str]:
        """What is wrong with `sampled`, which should be all of `group`."""
        drawn: Drawn = sampled.drawn.fetch()
        faults = [*self._unlike(drawn.trajectory, group.num_samples), *self._incomplete(sampled, drawn, group)]
        # Values are compared where shapes and dtypes are right.
        return faults or [*self._untrue(drawn.trajectory, group), *self._contradictory(sampled, drawn)]

    def _unlike(self, trajectory: Trajectory, num_samples: int) -> Iterator[str]:
        """Shapes, dtypes, and numbers that are none."""
        rows, stored = (num_samples,), (num_samples, len(self.steps))
        for name, shape, dtype in (
            ("latents", (*stored, *self.shape), torch.float32),
            ("next_latents", (*stored, *self.shape), torch.float32),
            ("step_index", stored, torch.int64),
            ("log_probs", stored, torch.float64),
            ("final_latents", (*rows, *self.shape), torch.float32),
            ("group_ids", rows, torch.int64),
            ("slots", rows, torch.int64),
            ("policy_version", rows, torch.int64),
            ("sigmas", tuple(self.sigmas.shape), torch.float32),
        ):
            value: Tensor = vars(trajectory)[name]
            if tuple(value.shape) != shape:
                yield f"{name} has the shape {list(value.shape)} instead of {list(shape)}"
            if value.dtype != dtype:
                yield f"{name} is {value.dtype} instead of {dtype}"
            if not bool(value.isfinite().all()):
                yield f"{name} is not finite"

    def _incomplete(self, sampled: SampledGroup, drawn: Drawn, group: Group) -> Iterator[str]:
        if sampled.group != group:
            yield f"it is group {sampled.group.ordinal} instead of {group.ordinal}"
        if len(drawn.conditions) != 1:
            yield f"it has {len(drawn.conditions)} rows of conditions instead of 1"
        yield from self._unlike_pictures(sampled.images, (group.num_samples, *self.pictures))

    def _unlike_pictures(self, images: np.ndarray | None, shape: tuple[int, ...]) -> Iterator[str]:
        if images is None:
            if self.decoded:
                yield "it has no pictures"
            return
        if images.shape != shape:
            yield f"its pictures have the shape {list(images.shape)} instead of {list(shape)}"
        if images.dtype != "uint8":
            yield f"its pictures are {images.dtype} instead of uint8"

    def _untrue(self, trajectory: Trajectory, group: Group) -> Iterator[str]:
        """Whose samples they are, and how they were drawn."""
        samples = range(group.num_samples)
        for name, found, expected in (
            ("group_ids", trajectory.group_ids.tolist(), [group.ordinal] * len(samples)),
            ("slots", trajectory.slots.tolist(), list(samples)),
            ("sample_ids", list(trajectory.sample_ids), [group.sample_id(slot) for slot in samples]),
            ("policy_version", trajectory.policy_version.tolist(), [self.version] * len(samples)),
            ("step_index", trajectory.step_index.tolist(), [list(self.steps)] * len(samples)),
            ("dynamics", trajectory.dynamics, self.sampler.dynamics),
            ("solver", trajectory.solver, self.sampler.solver),
        ):
            if found != expected:
                yield f"{name} is {found} instead of {expected}"
        if not torch.allclose(trajectory.sigmas.cpu(), self.sigmas, rtol=0, atol=SIGMA_TOLERANCE):
            yield f"sigmas is {trajectory.sigmas.tolist()} instead of {self.sigmas.tolist()}"

    def _contradictory(self, sampled: SampledGroup, drawn: Drawn) -> Iterator[str]:
        """What travels light against what travels heavy."""
        if sampled.sampling.policy_version != self.version:
            yield f"it claims version {sampled.sampling.policy_version} of the weights instead of {self.version}"
        elif sampled.sampling != Sampling.of(drawn):
            yield "what it says about its sampling is not what its trajectory says"
        if drawn.conditions.guidance_scale != self.sampler.guidance_scale:
            asked = self.sampler.guidance_scale
            yield f"its conditions have the guidance scale {drawn.conditions.guidance_scale} instead of {asked}"
