"""What a foreign engine may get wrong, one thing at a time; the native engine's groups are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.config import Config
from flowrl.flow.dynamics.cps import CPS
from flowrl.flow.schedule import StaticShift
from flowrl.flow.solvers import DPM2
from flowrl.rollout.checks import EngineError, checked
from flowrl.rollout.native import Native
from flowrl.types import Drawn, Engine, Group, Policy, SampledGroup, Trajectory
from tests.support import tiny
from tests.support.ranks import configure

VERSION = 3
ROLLOUT = 5
Change = Callable[[SampledGroup], SampledGroup]


@dataclass(frozen=True)
class Replayed:
    """An engine that gives what it was given."""

    given: Sequence[SampledGroup]

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        yield from self.given


@dataclass(frozen=True)
class Case:
    """A run, and what the native engine draws for it."""

    run: Config
    policy: Policy
    groups: list[Group]
    drawn: list[SampledGroup]

    @classmethod
    def of(cls, folder: Path, *overrides: str) -> Case:
        run = configure(folder, *overrides)
        policy, groups = tiny.load(folder), tiny.groups(2, 3)
        return cls(run, policy, groups, list(draw(run, policy, groups)))

    def check(self, given: Sequence[SampledGroup], rollout_id: int = ROLLOUT) -> list[SampledGroup]:
        engine: Engine = Replayed(given)  # type: ignore[assignment]  # it is asked to generate only
        return list(checked(engine, self.groups, rollout_id, self.run, self.policy, VERSION))


def draw(run: Config, policy: Policy, groups: Sequence[Group]) -> Iterator[SampledGroup]:
    engine = Native().open(run, policy)
    engine.publish(VERSION)
    return engine.generate(groups, ROLLOUT)


@pytest.fixture(scope="module")
def case(tiny_folder: Path) -> Case:
    """Two of six steps, which depend on the rollout, are stored."""
    return Case.of(tiny_folder, "sampler.num_steps=6", "sampler/steps=random_choice", "sampler.steps.num_steps=2")


@pytest.fixture(scope="module")
def deterministic(tiny_folder: Path) -> Case:
    """No step is stored."""
    return Case.of(tiny_folder, "algorithm=diffusion_nft")


def changed(**fields: Callable[[Trajectory], object]) -> Change:
    """With other fields of the trajectory, and everything that is derived from it."""

    def change(sampled: SampledGroup) -> SampledGroup:
        drawn: Drawn = sampled.drawn.fetch()
        values = {name: of(drawn.trajectory) for name, of in fields.items()}
        trajectory = replace(drawn.trajectory, **values)  # type: ignore[arg-type]
        return SampledGroup.of(sampled.group, sampled.images, replace(drawn, trajectory=trajectory))

    return change


def other_guidance(sampled: SampledGroup) -> SampledGroup:
    drawn: Drawn = sampled.drawn.fetch()
    conditions = replace(drawn.conditions, guidance_scale=7.5)
    return SampledGroup.of(sampled.group, sampled.images, replace(drawn, conditions=conditions))


def two_conditions(sampled: SampledGroup) -> SampledGroup:
    drawn: Drawn = sampled.drawn.fetch()
    conditions = drawn.conditions.rows(torch.tensor([0, 0]))
    return SampledGroup.of(sampled.group, sampled.images, replace(drawn, conditions=conditions))


def pictures(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def apply(sampled: SampledGroup) -> SampledGroup:
        assert sampled.images is not None
        return replace(sampled, images=change(sampled.images))

    return apply


def nothing_stored(sampled: SampledGroup) -> SampledGroup:
    """The whole of it: no transition at all."""
    names = ("latents", "next_latents", "step_index", "log_probs")
    return changed(**{name: lambda t, name=name: vars(t)[name][:, :0] for name in names})(sampled)


def test_what_the_native_engine_draws_is_right(case: Case, deterministic: Case) -> None:
    assert case.check(case.drawn) == case.drawn
    assert case.drawn[0].drawn.fetch().trajectory.step_index.shape == (3, 2)
    assert deterministic.check(deterministic.drawn) == deterministic.drawn
    latents = replace(case, run=replace(case.run, rollout=replace(case.run.rollout, output="latent")))
    no_pictures = [replace(sampled, images=None) for sampled in case.drawn]
    assert latents.check(no_pictures) == no_pictures
    assert latents.check(case.drawn) == case.drawn, "an engine may decode all the same"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nothing_stored, r"latents has the shape \[3, 0, .* instead of \[3, 2, "),
        (changed(latents=lambda t: t.latents[:, :1]), "latents has the shape"),
        (changed(latents=lambda t: t.latents.bfloat16()), "latents is torch.bfloat16 instead of torch.float32"),
        (changed(next_latents=lambda t: t.next_latents.half()), "next_latents is torch.float16"),
        (changed(final_latents=lambda t: t.final_latents.double()), "final_latents is torch.float64"),
        (changed(final_latents=lambda t: t.final_latents[:, :1]), "final_latents has the shape"),
        (changed(log_probs=lambda t: t.log_probs.float()), "log_probs is torch.float32 instead of torch.float64"),
        (changed(log_probs=lambda t: t.log_probs * float("nan")), "log_probs is not finite"),
        (changed(step_index=lambda t: t.step_index + 1), r"step_index is .* instead of"),
        (changed(step_index=lambda t: t.step_index.int()), "step_index is torch.int32"),
        (changed(group_ids=lambda t: t.group_ids + 100), r"group_ids is \[100, 100, 100\] instead of \[0, 0, 0\]"),
        (changed(slots=lambda t: t.slots * 0), r"slots is \[0, 0, 0\] instead of \[0, 1, 2\]"),
        (changed(sample_ids=lambda t: t.sample_ids[::-1]), r"sample_ids is \['p0:0:2', "),
        (changed(policy_version=lambda t: t.policy_version + 2), r"policy_version is \[5, 5, 5\] instead of \[3, 3"),
        (changed(sigmas=lambda t: StaticShift(1.5).sigmas(6)), r"sigmas is \[1\.0, 0\.857"),
        (changed(sigmas=lambda t: t.sigmas[1:]), r"sigmas has the shape \[6\] instead of \[7\]"),
        (changed(dynamics=lambda t: CPS(0.5)), r"dynamics is CPS\("),
        (changed(solver=lambda t: DPM2()), r"solver is DPM2\("),
        (other_guidance, "guidance scale 7.5 instead of"),
        (two_conditions, "2 rows of conditions instead of 1"),
        (pictures(lambda images: images[:, :16]), "its pictures have the shape"),
        (pictures(lambda images: images / 255), "its pictures are float64 instead of uint8"),
        (lambda s: replace(s, images=None), "it has no pictures"),
        (lambda s: replace(s, sampling=replace(s.sampling, policy_version=99)), "claims version 99 of the weights"),
        (lambda s: replace(s, sampling=replace(s.sampling, drawn_by="?")), "what it says about its sampling is not"),
    ],
)
def test_what_is_wrong_is_named(case: Case, change: Change, message: str) -> None:
    with pytest.raises(EngineError, match=rf"rollout\.engine gave group 0 not as it was asked to: .*{message}"):
        case.check([change(case.drawn[0]), case.drawn[1]])


def test_steps_are_those_of_the_rollout(case: Case, deterministic: Case) -> None:
    """They are drawn anew for every rollout, and there are none where the algorithm trains without."""
    other = next(n for n in range(99) if steps(case.run, n) != steps(case.run, ROLLOUT))
    with pytest.raises(EngineError, match="step_index"):
        case.check(case.drawn, rollout_id=other)
    with pytest.raises(EngineError, match=r"latents has the shape \[3, 3, .* instead of \[3, 0, "):
        stochastic = replace(deterministic.run, algorithm=case.run.algorithm)
        deterministic.check(list(draw(stochastic, deterministic.policy, deterministic.groups)))


def steps(run: Config, rollout_id: int) -> tuple[int, ...]:
    return tuple(run.sampler.steps.choose(rollout_id, run.sampler.num_steps))


def test_groups_come_in_order_and_all_of_them(case: Case) -> None:
    with pytest.raises(EngineError, match="it is group 1 instead of 0"):
        case.check(case.drawn[::-1])
    with pytest.raises(EngineError, match="fewer groups than 2"):
        case.check(case.drawn[:1])
    with pytest.raises(EngineError, match="more groups than 2"):
        case.check([*case.drawn, case.drawn[0]])
