"""The actor: turns a scored batch into optimiser updates. It knows no algorithm and no model by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from flowrl import config
from flowrl.distributed.checkpointing import checkpoint_blocks
from flowrl.distributed.lora import add_lora, save_adapter, train_fully, trainable
from flowrl.distributed.optimizer import learning_rate, make_optimizer
from flowrl.distributed.snapshots import Snapshot
from flowrl.flow.decay import FlowGRPODecay
from flowrl.flow.noise import Noise
from flowrl.tracking.metrics import Meter
from flowrl.types import (
    Algorithm,
    Conditions,
    DivergedError,
    Policy,
    Samples,
    ScoredGroup,
    TrainBatch,
    Trajectory,
    Velocities,
    Velocity,
)

# Below it all rewards are equal: there is nothing to learn, and weight decay must not act.
MIN_ADVANTAGE_VARIANCE = 1e-6


class Actor:
    """Holds the trainable weights, their optimiser and their snapshots.

    Args:
        policy: the loaded model; its module becomes trainable here, as `settings.mode` says.
        algorithm: the loss.
        settings: the `actor` section.
        noise: keyed source of training noise and of the order of groups.
        total_updates: optimiser steps of the whole run, for the learning-rate schedule.
        meter: receives `train/*`.
        average: keep an exponential average of the weights for evaluation (`settings.ema`).
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        settings: config.Actor,
        noise: Noise,
        total_updates: int,
        meter: Meter,
        *,
        average: bool = False,
    ) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.settings = settings
        self.noise = noise
        self.total_updates = total_updates
        self.meter = meter
        if settings.mode == "full":
            train_fully(policy.module)
        else:
            add_lora(policy.module, settings.lora, policy.lora_targets, seed=noise.generator("lora").initial_seed())
        if settings.gradient_checkpointing:
            checkpoint_blocks(policy.module, policy.blocks)
        self.parameters = trainable(policy.module)
        self.optimizer = make_optimizer(self.parameters.values(), settings.optimizer)
        self.snapshots = {name: Snapshot(self.parameters) for name in algorithm.needs.snapshots}
        for name, decay in algorithm.needs.snapshots.items():
            if decay is None and settings.mode == "lora":
                self.snapshots[name].zero()  # the base without its adapter, warm-started or not
        self.ema = Snapshot(self.parameters) if average else None
        self.ema_decay = FlowGRPODecay(settings.ema.decay)
        self.version = 0  # cycles that changed the weights
        self.num_cycles = 0
        self.num_updates = 0
        self.num_skips = 0
        self._skips_in_a_row = 0

    # ------------------------------------------------------------------------------------------ one cycle

    def update(self, groups: Sequence[ScoredGroup], advantages: Tensor) -> None:
        """One cycle: freeze on the present weights, then `num_updates_per_batch` disjoint updates.

        Args:
            groups: a complete batch.
            advantages: float64 [B], in the order of the groups' samples.

        Raises:
            DivergedError: after `max_skipped_updates` non-finite updates in a row.
        """
        self.num_cycles += 1
        if self._degenerate(advantages):
            return
        samples, conditions = self._gather(groups, advantages)
        samples = self.algorithm.select(samples)  # never empty: advantages that vary are not all zero
        self.meter.count("train/num_samples", len(samples))
        parts = self._split(samples)
        sizes = [len(part) for part in parts]
        noise = self.noise.child("train", self.num_cycles)
        before = self.num_updates
        with torch.no_grad():
            batch = self.algorithm.freeze(Samples.concat(parts), self._velocities(conditions, sizes), noise)
        for size, update in zip(sizes, _slices(batch, sizes), strict=True):
            with torch.no_grad():
                update = self.algorithm.couple(update, self._velocities(conditions, [size]))
            approx_kl = self._step(update, self._velocity(conditions))
            if self.algorithm.target_kl is not None and approx_kl > self.algorithm.target_kl:
                self.meter.count("train/target_kl_stops")
                break
        if self.num_updates > before:
            self.version += 1
            for name, decay in self.algorithm.needs.snapshots.items():
                if decay is not None:
                    self.snapshots[name].blend(decay.at(self.num_updates))
        self._report()

    def _step(self, update: TrainBatch, velocity: Velocity) -> float:
        """One optimiser update over all its micro-batches. Returns the mean `approx_kl` (0 if the loss has none)."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        divergence = torch.zeros_like(total)
        for rows in torch.arange(len(update), device=self.policy.device).split(self.settings.micro_batch_size):
            loss = self.algorithm.loss(update.rows(rows), velocity)
            value = loss.terms.sum() / len(update)
            value.backward()
            total += value.detach()
            divergence += loss.means["approx_kl"].sum() / len(update) if "approx_kl" in loss.means else 0.0
            self.meter.count("train/num_microbatches")
            self.meter.count("train/num_rows", len(rows))
            for name, values in loss.means.items():
                self.meter.mean(f"train/{name}", values)
            for name, values in loss.spreads.items():
                self.meter.spread(f"train/{name}", values)
        self._apply(total)
        return float(divergence)

    def _apply(self, loss: Tensor) -> None:
        """Clip and step, or skip an update whose loss or gradient is not finite."""
        optimizer = self.settings.optimizer
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), optimizer.max_grad_norm)
        if not bool(torch.isfinite(norm) & torch.isfinite(loss)):
            self._skip(f"loss {float(loss):.3g}, gradient norm {float(norm):.3g}")
            return
        self._skips_in_a_row = 0
        rate = learning_rate(optimizer, self.num_updates, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.num_updates += 1
        if self.ema is not None and self.num_updates % self.settings.ema.every == 0:
            self.ema.blend(self.ema_decay.at(self.num_updates))
        self.meter.mean("train/loss", loss)
        self.meter.mean("train/grad_norm", norm)
        self.meter.gauge("train/lr", rate)

    def _skip(self, reason: str) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.num_skips += 1
        self._skips_in_a_row += 1
        if self._skips_in_a_row >= self.settings.max_skipped_updates:
            raise DivergedError(
                f"{self._skips_in_a_row} updates in a row were not finite (the last: {reason}). Lower "
                "actor.optimizer.lr, or raise actor.max_skipped_updates to go on for longer."
            )

    def _degenerate(self, advantages: Tensor) -> bool:
        """All rewards equal: skip the cycle whole, weight decay and momentum included."""
        degenerate = bool(advantages.var(correction=0) < MIN_ADVANTAGE_VARIANCE)
        self.meter.gauge("reward/degenerate", float(degenerate))
        if degenerate:
            self.num_skips += 1
            self._report()
        return degenerate

    def _report(self) -> None:
        self.meter.gauge("train/optimizer_steps", self.num_updates)
        self.meter.gauge("train/optimizer_skips", self.num_skips)
        self.meter.gauge("train/policy_version", self.version)

    # ------------------------------------------------------------------------------------------ batches

    def _gather(self, groups: Sequence[ScoredGroup], advantages: Tensor) -> tuple[Samples, Conditions]:
        """The batch on the device; conditions one row per group."""
        device = self.policy.device
        trajectory = Trajectory.concat([group.sampled.trajectory for group in groups]).to(device)
        first = groups[0].sampled.conditions
        conditions = type(first).concat([group.sampled.conditions for group in groups]).to(device)
        sizes = torch.tensor([len(group.sampled.trajectory) for group in groups])
        rows = torch.arange(len(groups)).repeat_interleave(sizes).to(device)
        return Samples(trajectory, advantages.to(device), rows), conditions

    def _split(self, samples: Samples) -> list[Samples]:
        """Whole groups in a keyed random order, in as many equal parts as there are updates."""
        ids = samples.trajectory.group_ids
        groups = torch.unique(ids)
        groups = groups[self.noise.permutation(len(groups), "order", self.num_cycles).to(groups.device)]
        parts = groups.tensor_split(min(self.algorithm.num_updates_per_batch, len(groups)))
        place = {group: i for i, group in enumerate(groups.tolist())}
        places = [place[group] for group in ids.tolist()]
        ordered = samples.rows(torch.tensor(sorted(range(len(samples)), key=places.__getitem__)))
        counts = [int(torch.isin(ids, part).sum()) for part in parts]
        return [ordered.rows(rows) for rows in torch.arange(len(samples)).split(counts)]

    # ------------------------------------------------------------------------------------------ velocities

    def _velocity(self, conditions: Conditions) -> Velocity:
        def velocity(sample: Tensor, sigma: Tensor, condition_rows: Tensor) -> Tensor:
            return self.policy.velocity(sample, sigma, conditions.rows(condition_rows))

        return velocity

    def _velocities(self, conditions: Conditions, samples_per_update: Sequence[int]) -> Velocities:
        """The cycle's frozen policies, in forwards of exactly the shapes that the updates will use.

        A matmul's rounding depends on its shape: the same rows in the same micro-batches make the first ratio 1.
        """
        live = self._velocity(conditions)

        def frozen(snapshot: Snapshot | None) -> Velocity:
            @torch.no_grad()
            def velocity(sample: Tensor, sigma: Tensor, condition_rows: Tensor) -> Tensor:
                with nullcontext() if snapshot is None else snapshot.applied():
                    parts = [
                        live(sample[rows], sigma[rows], condition_rows[rows])
                        for rows in self._micro_batches(len(sample), samples_per_update)
                    ]
                assert sum(map(len, parts)) == len(sample), "rows that are no whole number per sample"
                return torch.cat(parts)

            return velocity

        return Velocities(frozen(None), {name: frozen(snapshot) for name, snapshot in self.snapshots.items()})

    def _micro_batches(self, num_rows: int, samples_per_update: Sequence[int]) -> Iterator[slice]:
        rows_per_sample = num_rows // sum(samples_per_update)
        start = 0
        for num_samples in samples_per_update:
            end = start + num_samples * rows_per_sample
            for first in range(start, end, self.settings.micro_batch_size):
                yield slice(first, min(first + self.settings.micro_batch_size, end))
            start = end

    # ------------------------------------------------------------------------------------------ whose weights

    def behaviour(self) -> AbstractContextManager[None]:
        """Inside, the module has the weights that rollouts sample with."""
        name = self.algorithm.needs.behaviour
        return nullcontext() if name is None else self.snapshots[name].applied()

    def evaluation(self) -> AbstractContextManager[None]:
        """Inside, the module has the weights that are evaluated, and saved: the average if there is one."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def save(self, folder: Path) -> None:
        """The evaluated weights: an adapter for `pipe.load_lora_weights`, or the whole module."""
        with self.evaluation():
            if self.settings.mode == "lora":
                save_adapter(self.policy.module, folder)
            else:
                self.policy.save(folder)


def _slices(batch: TrainBatch, samples_per_update: Sequence[int]) -> Iterator[TrainBatch]:
    """The rows of each update, in order; a batch has equally many rows of every sample."""
    rows_per_sample = len(batch) // sum(samples_per_update)
    for rows in torch.arange(len(batch)).split([n * rows_per_sample for n in samples_per_update]):
        yield batch.rows(rows)
