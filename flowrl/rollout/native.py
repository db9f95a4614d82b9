"""The native engine: samples with a module of its own process, the trainer's or a rollout worker's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flowrl.config import Config, Sampler
from flowrl.distributed.offload import Offloader, training_state
from flowrl.flow.noise import Noise
from flowrl.rollout.checks import sampled_at
from flowrl.rollout.denoise import Denoised, denoise
from flowrl.types import Conditions, DivergedError, Drawn, Group, OwnSolver, Policy, SampledGroup, Trajectory


@dataclass(frozen=True)
class Slot:
    """One picture to be drawn: sample `index` of `group`, which is row `row` of the conditions."""

    group: Group
    row: int
    index: int


@dataclass(frozen=True)
class Native:
    """`rollout.engine=native`: the denoising loop of this package, in the process that holds the policy."""

    def open(self, run: Config, policy: Policy) -> NativeEngine:
        """Samples with the module of `policy`."""
        return NativeEngine(
            policy,
            run.sampler,
            Noise.of(run.seed).child("rollout"),
            run.rollout.batch_size,
            deterministic=run.algorithm.needs.rollout == "ode",
            decode=run.rollout.output != "latent",
        )


class NativeEngine:
    """Draws groups in batches of `batch_size` samples, whatever the group size (`types.Engine`).

    A sample's noise depends on the seed, its group's ordinal, its slot and the step, never on its neighbours.
    `deterministic=True` takes no stochastic step and stores x_0 alone: evaluation, and forward-process algorithms.
    """

    def __init__(
        self,
        policy: Policy,
        sampler: Sampler,
        noise: Noise,
        batch_size: int,
        *,
        deterministic: bool = False,
        decode: bool = True,
    ) -> None:
        self.policy = policy
        self.sampler = sampler
        self.noise = noise
        self.batch_size = batch_size
        self.deterministic = deterministic
        self.decode = decode
        self.shape = policy.latent_shape(sampler.height, sampler.width, sampler.frames)
        self.sigmas = sampled_at(sampler, policy)
        if deterministic and sampler.schedule is None and isinstance(policy, OwnSolver):
            policy.check_solver(sampler.solver)
        self._version = 0
        self._offloader = Offloader(policy.device)

    @property
    def version(self) -> int:
        """Version of the weights. Whoever changes them says so by `publish`."""
        return self._version

    def publish(self, version: int) -> None:
        """Stamp what follows with `version`. Raises ValueError if it goes back."""
        if version < self._version:
            raise ValueError(f"version {version} is older than the {self._version} already published")
        self._version = version

    def sleep(self) -> None:
        """The module's weights wait on the host. Only for a module of one's own: a trainer has its own way."""
        self._offloader.offload(training_state(self.policy.module))

    def wake(self) -> None:
        """They come back."""
        self._offloader.reload()

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        """Every group, in order, as soon as its last sample is drawn."""
        steps = () if self.deterministic else self.sampler.steps.choose(rollout_id, self.sampler.num_steps)
        conditions = self.policy.encode([group.prompt for group in groups], self.sampler.guidance_scale)
        slots = [Slot(group, row, k) for row, group in enumerate(groups) for k in range(group.num_samples)]
        queue = deque(enumerate(groups))
        pending: Trajectory | None = None
        for start in range(0, len(slots), self.batch_size):
            drawn = self._draw(slots[start : start + self.batch_size], conditions, steps)
            pending = drawn if pending is None else Trajectory.concat([pending, drawn])
            while queue and queue[0][1].num_samples <= len(pending):
                row, group = queue.popleft()
                yield self._finish(group, pending.rows(torch.arange(group.num_samples)), conditions, row)
                pending = pending.rows(torch.arange(group.num_samples, len(pending)))

    def _draw(self, slots: Sequence[Slot], conditions: Conditions, steps: Sequence[int]) -> Trajectory:
        rows = conditions.rows(torch.tensor([slot.row for slot in slots]))
        sigmas = self.sigmas.to(self.policy.device)
        start = self._normal("x_T", slots, shared=self.sampler.same_latent)

        @torch.no_grad()
        def velocity(sample: Tensor, sigma: Tensor) -> Tensor:
            return self.policy.velocity(sample, sigma.expand(len(sample)), rows)

        if self.deterministic:
            done = Denoised.final_only(self.sampler.solver.solve(velocity, start, sigmas))
        else:
            fresh = partial(self._normal, "step", slots)
            done = denoise(velocity, start, sigmas, self.sampler.dynamics, steps, fresh)
        return self._record(slots, done)

    def _normal(self, purpose: str, slots: Sequence[Slot], step: int = 0, *, shared: bool = False) -> Tensor:
        keys = [(s.group.ordinal, 0 if shared else s.index, step) for s in slots]
        return self.noise.child(purpose).normal(self.shape, keys).to(self.policy.device)

    def _record(self, slots: Sequence[Slot], done: Denoised) -> Trajectory:
        if not bool(done.final_latents.isfinite().all()):
            cause = "Lower actor.optimizer.lr," if self._version else "If its own weights are whole, lower"
            raise DivergedError(
                f"the model draws latents that are not finite (weights of version {self._version}). {cause} "
                "sampler.guidance_scale or the noise of sampler.dynamics."
            )
        return Trajectory(
            latents=done.latents,
            next_latents=done.next_latents,
            step_index=done.step_index,
            log_probs=done.log_probs,
            final_latents=done.final_latents,
            sample_ids=tuple(s.group.sample_id(s.index) for s in slots),
            group_ids=torch.tensor([s.group.ordinal for s in slots]),
            slots=torch.tensor([s.index for s in slots]),
            policy_version=torch.full((len(slots),), self._version),
            sigmas=self.sigmas,
            dynamics=self.sampler.dynamics,
            solver=self.sampler.solver,
        )

    def _finish(self, group: Group, trajectory: Trajectory, conditions: Conditions, row: int) -> SampledGroup:
        images = self.policy.decode(trajectory.final_latents) if self.decode else None
        drawn = Drawn(trajectory, conditions.rows(torch.tensor([row])))
        return SampledGroup.of(group, images, drawn)
