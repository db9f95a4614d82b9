"""The actor's invariants, on a real (random) SD3 and real rollouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowrl import config
from flowrl.algorithms.base import AlgorithmBase, Transitions
from flowrl.algorithms.diffusion_nft import DiffusionNFT
from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.algorithms.grpo_guard import GRPOGuard
from flowrl.flow.dynamics.base import Dynamics
from flowrl.flow.dynamics.cps import CPS
from flowrl.flow.dynamics.dance_sde import DanceSDE
from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.flow.importance import TruncatedImportance
from flowrl.flow.noise import Noise
from flowrl.flow.steps import Window
from flowrl.tracking.metrics import Meter
from flowrl.trainers.actor import Actor
from flowrl.trainers.shares import deal
from flowrl.types import DivergedError, Loss, ScoredGroup, TrainBatch, Trajectory, Velocities, Velocity
from tests.support import tiny


def make_actor(folder: Path, algorithm: AlgorithmBase, seed: int = 0, **settings: object) -> Actor:
    average = bool(settings.pop("average", False))
    options = config.Actor(**({"mode": "full", "micro_batch_size": 6} | settings))  # type: ignore[arg-type]
    return Actor(tiny.load(folder), algorithm, options, Noise.of(seed), 10, Meter(), average=average)


def rollout(actor: Actor, dynamics: Dynamics | None = None, num_groups: int = 4) -> list[ScoredGroup]:
    deterministic = actor.algorithm.needs.rollout == "ode"
    engine = tiny.engine(actor.policy, sampler=tiny.sampler(dynamics), deterministic=deterministic)  # type: ignore[arg-type]
    return tiny.brightness(list(engine.generate(tiny.groups(num_groups, 3), 0)))


def advantages(batch: list[ScoredGroup], seed: int = 0) -> Tensor:
    """Any advantages: brightness hardly varies in a random model."""
    count = sum(group.sampled.group.num_samples for group in batch)
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def update(actor: Actor, batch: list[ScoredGroup], given: Tensor) -> None:
    """A cycle of the only rank."""
    (share,) = deal(batch, given, actor.algorithm, actor.noise, actor.num_updates + actor.num_skips + 1, num_ranks=1)
    actor.update(share)


def weights(actor: Actor) -> Tensor:
    return torch.cat([p.detach().flatten() for p in actor.parameters.values()])


@pytest.mark.parametrize("dynamics", [FlowSDE(0.7), DanceSDE(0.5), CPS(0.7)], ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_first_ratio_is_bitwise_one(tiny_folder: Path, dynamics: Dynamics, mode: str) -> None:
    """Same rows, same micro-batches: pi_old replayed is pi, to the last bit."""
    actor = make_actor(tiny_folder, FlowGRPO(), mode=mode)
    batch = rollout(actor, dynamics)
    update(actor, batch, advantages(batch))
    metrics = actor.meter.collect()
    assert metrics["train/ratio_min"] == metrics["train/ratio_max"] == 1.0
    assert metrics["train/log_prob_abs_diff"] == 0.0
    assert metrics["train/grad_norm"] > 0


def test_rollout_log_probs_agree_with_the_replay(tiny_folder: Path) -> None:
    """With the engine's own log-probabilities the first ratio is 1 to float32 rounding."""
    actor = make_actor(tiny_folder, FlowGRPO(old_log_prob="rollout"))
    batch = rollout(actor)
    update(actor, batch, advantages(batch))
    metrics = actor.meter.collect()
    assert max(abs(metrics[f"train/ratio_{end}"] - 1) for end in ("min", "max")) <= 1e-6


@pytest.mark.parametrize(
    "algorithm",
    [FlowGRPO(kl_coef=0.1), GRPOGuard(clip_range=1e-3), DiffusionNFT(num_train_times=2)],
    ids=lambda a: type(a).__name__,
)
def test_micro_batch_size_does_not_change_the_update(tiny_folder: Path, algorithm: AlgorithmBase) -> None:
    """It changes memory and time, not the gradient."""
    norms, after = [], []
    for micro_batch_size in (1, 5, 64):
        optimizer = config.Optimizer(lr=1e-3, eps=1e-3)  # a small eps would turn rounding of tiny gradients into signs
        actor = make_actor(tiny_folder, algorithm, micro_batch_size=micro_batch_size, optimizer=optimizer)
        batch = rollout(actor)
        update(actor, batch, advantages(batch))
        norms.append(actor.meter.collect()["train/grad_norm"])
        after.append(weights(actor))
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)
    for other in after[1:]:
        torch.testing.assert_close(other, after[0], atol=1e-6, rtol=0)


@dataclass(frozen=True, kw_only=True)
class Recording(FlowGRPO):
    """Flow-GRPO that remembers which rows each loss call saw."""

    seen: tuple[list[Tensor], ...] = ([],)

    def loss(self, micro: TrainBatch, velocity: Velocity) -> Loss:
        assert isinstance(micro, Transitions)
        self.seen[0].append(torch.stack([micro.group_ids.double(), micro.advantages, micro.step_index.double()], 1))
        return super().loss(micro, velocity)


def test_updates_are_disjoint_whole_groups_and_use_every_row_once(tiny_folder: Path) -> None:
    algorithm = Recording(num_updates_per_batch=2, seen=([],))
    actor = make_actor(tiny_folder, algorithm, micro_batch_size=12)
    batch = rollout(actor)
    given = advantages(batch)
    update(actor, batch, given)
    first, second = algorithm.seen[0]  # 2 groups x 3 samples x 2 steps each: one micro-batch per update
    assert len(first) == len(second) == 12
    assert not set(first[:, 0].tolist()) & set(second[:, 0].tolist())
    rows = torch.cat([first, second])
    assert len(torch.unique(rows, dim=0)) == 24
    assert sorted(set(rows[:, 1].tolist())) == sorted(given.tolist())
    assert actor.num_updates == 2 and actor.version == 1


def test_old_policy_is_frozen_over_the_updates_of_a_cycle(tiny_folder: Path) -> None:
    """The second update's ratios are measured against the weights before the first."""
    optimizer = config.Optimizer(lr=1e-3)
    actor = make_actor(tiny_folder, FlowGRPO(num_updates_per_batch=2), micro_batch_size=12, optimizer=optimizer)
    batch = rollout(actor)
    update(actor, batch, advantages(batch))
    metrics = actor.meter.collect()
    assert metrics["train/log_prob_abs_diff"] > 1e-6  # the first update's are exactly 0
    assert metrics["train/ratio_min"] < 1 < metrics["train/ratio_max"]


@dataclass(frozen=True, kw_only=True)
class Exploding(FlowGRPO):
    """Flow-GRPO whose loss is not a number."""

    def loss(self, micro: TrainBatch, velocity: Velocity) -> Loss:
        loss = super().loss(micro, velocity)
        return replace(loss, terms=loss.terms * float("nan"))


def test_non_finite_updates_are_skipped_counted_and_finally_fatal(tiny_folder: Path) -> None:
    actor = make_actor(tiny_folder, Exploding(), max_skipped_updates=3)
    batch = rollout(actor)
    before = weights(actor)
    for _ in range(2):
        update(actor, batch, advantages(batch))
    assert torch.equal(weights(actor), before)
    assert actor.num_skips == 2
    with pytest.raises(DivergedError, match="3 updates in a row"):
        update(actor, batch, advantages(batch))


def test_target_kl_ends_the_cycle(tiny_folder: Path) -> None:
    algorithm = FlowGRPO(num_updates_per_batch=4, target_kl=1e-12)
    actor = make_actor(tiny_folder, algorithm, optimizer=config.Optimizer(lr=1e-2))
    batch = rollout(actor)
    update(actor, batch, advantages(batch))
    assert actor.num_updates == 2  # the first update's ratios are 1; the second moved too far
    assert actor.meter.collect()["train/target_kl_stops"] == 1


def test_zero_advantages_are_dropped_if_asked(tiny_folder: Path) -> None:
    algorithm = Recording(drop_zero_advantage=True, seen=([],))
    actor = make_actor(tiny_folder, algorithm, micro_batch_size=64)
    batch = rollout(actor)
    given = advantages(batch)
    given[:6] = 0
    update(actor, batch, given)
    (rows,) = algorithm.seen[0]
    assert len(rows) == 12 and sorted(set(rows[:, 1].tolist())) == sorted(given[6:].tolist())


def test_reference_of_lora_is_the_base(tiny_folder: Path) -> None:
    """Before any update the adapter is the identity, so the penalty is 0; afterwards it is not."""
    actor = make_actor(tiny_folder, FlowGRPO(kl_coef=1.0), mode="lora", optimizer=config.Optimizer(lr=1e-2))
    batch = rollout(actor)
    for step in range(2):
        update(actor, batch, advantages(batch))
        kl = actor.meter.collect()["train/kl"]
        assert kl == 0 if step == 0 else kl > 0


def test_nft_samples_with_the_old_policy(tiny_folder: Path) -> None:
    """Rollouts use the snapshot; it follows the policy by the decay, and the live weights come back."""
    actor = make_actor(tiny_folder, DiffusionNFT(num_train_times=1), optimizer=config.Optimizer(lr=1e-3))
    initial = weights(actor)
    batch = rollout(actor)
    update(actor, batch, advantages(batch))
    live = weights(actor)
    decay = actor.algorithm.decay.at(1)  # type: ignore[attr-defined]
    with actor.behaviour():
        old = weights(actor)
    assert torch.equal(weights(actor), live) and not torch.equal(live, initial)
    torch.testing.assert_close(old, decay * initial + (1 - decay) * live, atol=1e-7, rtol=0)


def test_ema_follows_the_weights(tiny_folder: Path) -> None:
    ema, optimizer = config.EMA(decay=0.9), config.Optimizer(lr=1e-2)
    actor = make_actor(tiny_folder, FlowGRPO(), ema=ema, optimizer=optimizer, average=True)
    initial = weights(actor)
    batch = rollout(actor)
    update(actor, batch, advantages(batch))
    live = weights(actor)
    decay = (1 + 1) / (10 + 1)
    with actor.evaluation():
        averaged = weights(actor)
    torch.testing.assert_close(averaged, decay * initial + (1 - decay) * live, atol=1e-6, rtol=0)
    assert torch.equal(weights(actor), live)


@dataclass(frozen=True, kw_only=True)
class Coupled(FlowGRPO):
    """Flow-GRPO that asks for the policy's velocity of a whole update, as algorithms that tie samples together do."""

    seen: tuple[list[tuple[Tensor, Tensor]], ...] = ([],)

    def couple(self, update: TrainBatch, velocities: Velocities) -> TrainBatch:
        assert isinstance(update, Transitions)
        v = velocities.policy(update.sample, update.sigmas[update.step_index], update.condition_rows)
        self.seen[0].append((update.sample, v))
        return update


@pytest.mark.parametrize("size", [1, 2, 3])
def test_coupling_gets_a_velocity_for_every_row_of_its_update(tiny_folder: Path, size: int) -> None:
    algorithm = Coupled(num_updates_per_batch=2, seen=([],))
    actor = make_actor(tiny_folder, algorithm, micro_batch_size=4)
    engine = tiny.engine(actor.policy, sampler=tiny.sampler(steps=Window(size=size, low=0, high=4)))  # type: ignore[arg-type]
    batch = tiny.brightness(list(engine.generate(tiny.groups(4, 3), 0)))
    update(actor, batch, advantages(batch))
    assert [sample.shape == v.shape for sample, v in algorithm.seen[0]] == [True, True]
    assert [len(sample) for sample, _ in algorithm.seen[0]] == [6 * size, 6 * size]


def likelihood(actor: Actor, batch: list[ScoredGroup], given: Tensor) -> float:
    """Sum of A log p of the stored steps under the present weights."""
    trajectory = Trajectory.concat([group.sampled.drawn.fetch().trajectory for group in batch])
    conditions = actor.policy.encode([group.sampled.group.prompt for group in batch for _ in range(3)])
    total = 0.0
    for s in range(trajectory.step_index.shape[1]):
        index = trajectory.step_index[:, s]
        with torch.no_grad():
            v = actor.policy.velocity(trajectory.latents[:, s], trajectory.sigmas[index], conditions)
        transition = trajectory.dynamics.transition(trajectory.latents[:, s], v, trajectory.sigmas, index)
        total += float((given * trajectory.dynamics.log_prob(trajectory.next_latents[:, s], transition)).sum())
    return total


def test_samples_of_older_weights_are_weighted(tiny_folder: Path) -> None:
    """Proximal over behaviour: 1 for the weights that sampled, and another number once they have moved."""
    algorithm = FlowGRPO(correction=TruncatedImportance(cap=1e6), clip_range=0.5)
    actor = make_actor(tiny_folder, algorithm, optimizer=config.Optimizer(lr=1e-2))
    batch = rollout(actor)
    update(actor, batch, advantages(batch))
    assert actor.meter.collect()["train/importance"] == pytest.approx(1.0, abs=1e-6)
    update(actor, batch, advantages(batch))
    metrics = actor.meter.collect()
    assert abs(metrics["train/importance"] - 1.0) > 1e-6 and metrics["train/importance_rejected"] == 0.0
    assert metrics["train/ratio_min"] == metrics["train/ratio_max"] == 1.0, "clipping is around the proximal policy"


def test_rejected_samples_teach_nothing(tiny_folder: Path) -> None:
    algorithm = FlowGRPO(correction=TruncatedImportance(reject_above=1e-9))
    actor = make_actor(tiny_folder, algorithm)
    batch = rollout(actor)
    update(actor, batch, advantages(batch))
    metrics = actor.meter.collect()
    assert metrics["train/importance_rejected"] == 1.0 and metrics["train/grad_norm"] == 0.0


@pytest.mark.parametrize(
    "algorithm", [FlowGRPO(clip_range=0.5), GRPOGuard(clip_range=0.5)], ids=lambda a: type(a).__name__
)
def test_updates_raise_the_likelihood_of_what_was_better(tiny_folder: Path, algorithm: FlowGRPO) -> None:
    actor = make_actor(tiny_folder, algorithm, optimizer=config.Optimizer(lr=1e-3))
    batch = rollout(actor)
    given = advantages(batch)
    before = likelihood(actor, batch, given)
    for _ in range(5):
        update(actor, batch, given)
    assert likelihood(actor, batch, given) > before + 1e-4


def test_the_penalty_pulls_towards_the_reference(tiny_folder: Path) -> None:
    """With a large coefficient the weights stay nearer to where they began."""
    distances = []
    for coefficient in (0.0, 1e3):
        algorithm = FlowGRPO(clip_range=0.5, kl_coef=coefficient, kl="v")
        actor = make_actor(tiny_folder, algorithm, optimizer=config.Optimizer(lr=1e-3))
        batch = rollout(actor)
        start = tiny.load(tiny_folder)
        for _ in range(6):
            update(actor, batch, advantages(batch))
        conditions = start.encode([group.sampled.group.prompt for group in batch])
        sample = torch.stack([group.sampled.drawn.fetch().trajectory.latents[0, 0] for group in batch])
        sigma = torch.full((4,), 0.8)
        with torch.no_grad():
            moved = actor.policy.velocity(sample, sigma, conditions) - start.velocity(sample, sigma, conditions)
        distances.append(float(moved.square().mean()))
    assert distances[1] < 0.5 * distances[0]


def test_checkpointing_changes_memory_not_the_update(tiny_folder: Path) -> None:
    after = []
    for gradient_checkpointing in (False, True):
        actor = make_actor(tiny_folder, FlowGRPO(), mode="lora", gradient_checkpointing=gradient_checkpointing)
        names = list(actor.parameters)
        batch = rollout(actor)
        update(actor, batch, advantages(batch))
        after.append(weights(actor))
    assert torch.equal(*after) and not any("checkpoint" in name for name in names)


def test_skipped_cycles_are_no_new_version(tiny_folder: Path) -> None:
    actor = make_actor(tiny_folder, Exploding(), max_skipped_updates=9)
    batch = rollout(actor)
    update(actor, batch, advantages(batch))
    assert actor.version == actor.num_updates == 0 and actor.num_skips == 1


def test_same_seed_same_weights(tiny_folder: Path) -> None:
    """Rollout and two cycles twice: bit for bit."""
    results = []
    for _ in range(2):
        actor = make_actor(tiny_folder, FlowGRPO(num_updates_per_batch=2), mode="lora")
        for step in range(2):
            batch = rollout(actor)
            update(actor, batch, advantages(batch, seed=step))
        results.append(weights(actor))
    assert torch.equal(*results)
