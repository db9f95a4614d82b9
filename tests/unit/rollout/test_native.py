"""The engine: what a sample is must depend on the sample alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.config import Config, ConfigError
from flowrl.flow.dynamics.cps import CPS
from flowrl.flow.dynamics.dance_sde import DanceSDE
from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.flow.schedule import DynamicShift
from flowrl.rollout.native import Native
from flowrl.trainers.evaluator import evaluation_engine
from flowrl.types import DivergedError, Trajectory
from tests.support import tiny
from tests.support.ranks import configure


def joined(sampled: list) -> Trajectory:  # type: ignore[type-arg]
    return Trajectory.concat([group.drawn.fetch().trajectory for group in sampled])


@pytest.mark.parametrize("batch_size", [1, 5, 7, 12, 64])
def test_batch_size_does_not_change_samples(tiny_folder: Path, batch_size: int) -> None:
    """Noise is bit-identical; latents differ by the matmul kernels' rounding at most."""
    policy = tiny.load(tiny_folder)
    groups = tiny.groups(3, 4)
    whole = joined(list(tiny.engine(policy, batch_size=12).generate(groups, 0)))
    parts = joined(list(tiny.engine(policy, batch_size=batch_size).generate(groups, 0)))
    assert parts.sample_ids == whole.sample_ids
    assert torch.equal(parts.step_index, whole.step_index)
    torch.testing.assert_close(parts.final_latents, whole.final_latents, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts.log_probs, whole.log_probs, atol=1e-5, rtol=0)


def test_order_and_company_of_groups_do_not_matter(tiny_folder: Path) -> None:
    policy = tiny.load(tiny_folder)
    groups = tiny.groups(4, 2)
    together = {s.group.ordinal: s for s in tiny.engine(policy, batch_size=3).generate(groups[::-1], 0)}
    for group in groups:
        (alone,) = tiny.engine(policy).generate([group], 0)
        final = together[group.ordinal].drawn.fetch().trajectory.final_latents
        torch.testing.assert_close(alone.drawn.fetch().trajectory.final_latents, final, atol=1e-5, rtol=0)


def test_noise_is_bit_identical_in_any_batch(tiny_folder: Path) -> None:
    """x_T is the first stored latent when step 0 is stochastic."""
    policy = tiny.load(tiny_folder)
    sampler = tiny.sampler(steps=tiny.Window(size=2, low=0, high=2))
    starts = []
    for batch_size in (1, 5, 12):
        engine = tiny.engine(policy, batch_size=batch_size, sampler=sampler)
        starts.append(joined(list(engine.generate(tiny.groups(3, 4), 0))).latents[:, 0])
    assert torch.equal(starts[0], starts[1]) and torch.equal(starts[0], starts[2])
    assert len({row.numpy().tobytes() for row in starts[0]}) == 12


def test_shared_start(tiny_folder: Path) -> None:
    """`same_latent`: one x_T for a group, another for the next, and fresh noise at the steps."""
    sampler = tiny.sampler(steps=tiny.Window(size=2, low=0, high=2), same_latent=True)
    engine = tiny.engine(tiny.load(tiny_folder), sampler=sampler)
    first, second = engine.generate(tiny.groups(2, 3), 0)
    start = first.drawn.fetch().trajectory.latents[:, 0]
    assert torch.equal(start[0], start[1]) and torch.equal(start[0], start[2])
    assert not torch.equal(start[0], second.drawn.fetch().trajectory.latents[0, 0])
    assert not torch.equal(
        first.drawn.fetch().trajectory.next_latents[0, 0], first.drawn.fetch().trajectory.next_latents[1, 0]
    )


def test_groups_come_as_they_finish(tiny_folder: Path) -> None:
    """The first group is handed over before the last is drawn."""
    engine = tiny.engine(tiny.load(tiny_folder), batch_size=3)
    stream = engine.generate(tiny.groups(4, 3), 0)
    first = next(stream)
    engine.publish(7)
    rest = list(stream)
    assert first.drawn.fetch().trajectory.policy_version.tolist() == [0, 0, 0]
    assert rest[-1].drawn.fetch().trajectory.policy_version.tolist() == [7, 7, 7]
    with pytest.raises(ValueError, match="older"):
        engine.publish(6)


def test_stored_transitions_chain(tiny_folder: Path) -> None:
    """Only the chosen steps are stored, and consecutive ones share their latents."""
    policy = tiny.load(tiny_folder)
    for dynamics in (FlowSDE(0.7), DanceSDE(0.4), CPS(0.8)):
        engine = tiny.engine(policy, sampler=tiny.sampler(dynamics))
        trajectory = joined(list(engine.generate(tiny.groups(2, 2), 3)))
        steps = engine.sampler.steps.choose(3, 6)
        assert trajectory.step_index.tolist() == [list(steps)] * 4
        assert torch.equal(trajectory.next_latents[:, 0], trajectory.latents[:, 1])
        assert trajectory.latents.dtype == torch.float32 and trajectory.log_probs.dtype == torch.float64
        assert trajectory.dynamics is dynamics


def test_deterministic_rollout_stores_only_the_end(tiny_folder: Path) -> None:
    engine = tiny.engine(tiny.load(tiny_folder), deterministic=True)
    (group,) = engine.generate(tiny.groups(1, 3), 0)
    assert group.drawn.fetch().trajectory.latents.shape == (3, 0, 8, 8, 20)
    assert group.drawn.fetch().trajectory.log_probs.shape == (3, 0)
    assert group.images is not None and group.images.shape == (3, 32, 80, 3) and group.images.dtype == np.uint8


def test_what_is_not_asked_for_is_not_decoded(tiny_folder: Path) -> None:
    """And what is drawn is the same."""
    run, policy = configure(tiny_folder), tiny.load(tiny_folder)
    drawn = {}
    for output in ("image", "latent", "both"):
        run = replace(run, rollout=replace(run.rollout, output=output))
        (drawn[output],) = Native().open(run, policy).generate(tiny.groups(1, 2), 0)
    assert {output for output, group in drawn.items() if group.images is None} == {"latent"}
    final = {output: group.drawn.fetch().trajectory.final_latents for output, group in drawn.items()}
    assert torch.equal(final["latent"], final["image"]) and torch.equal(final["both"], final["image"])


def test_a_schedule_that_cannot_have_so_few_steps_names_the_field(tiny_folder: Path) -> None:
    """Before anything is drawn; that of an evaluation where it has steps of its own."""
    run, policy = configure(tiny_folder), tiny.load(tiny_folder)
    run.sampler.schedule = DynamicShift(terminal=0.02)
    evaluation_engine(run, policy)
    for field, asked in (
        ("sampler.num_steps", replace(run, sampler=replace(run.sampler, num_steps=1))),
        ("trainer.eval.num_steps", evaluating(run, num_steps=1)),
    ):
        with pytest.raises(ConfigError, match=rf"^{re.escape(field)}: cannot be 1: .*needs at least 2 steps"):
            evaluation_engine(asked, policy)
    with pytest.raises(ConfigError, match=r"^sampler\.num_steps: cannot be 1: "):
        Native().open(replace(run, sampler=replace(run.sampler, num_steps=1)), policy)


def evaluating(run: Config, **changes: Any) -> Config:
    """`run` with other settings of its evaluations."""
    return replace(run, trainer=replace(run.trainer, eval=replace(run.trainer.eval, **changes)))


def test_a_model_that_draws_nan_is_an_error(tiny_folder: Path) -> None:
    """uint8 pictures would hide it, and rewards would all be equal. Who has trained nothing cannot lower a rate."""
    policy = tiny.load(tiny_folder)
    with torch.no_grad():
        policy.module.proj_out.bias.fill_(float("nan"))
    for deterministic in (False, True):
        for version, advice in ((0, "If its own weights are whole, lower sampler"), (3, "Lower actor.optimizer.lr")):
            engine = tiny.engine(policy, deterministic=deterministic)
            engine.publish(version)
            with pytest.raises(DivergedError, match=rf"not finite .*\. {advice}"):
                list(engine.generate(tiny.groups(1, 2), 0))
