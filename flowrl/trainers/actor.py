"""The actor: turns a scored batch into optimiser updates. It knows no algorithm and no model by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flowrl import config
from flowrl.distributed.checkpointing import checkpoint_blocks
from flowrl.distributed.fsdp import assert_writable, clip_grad_norm, full_state, shard
from flowrl.distributed.lora import add_lora, save_adapter, train_fully, trainable
from flowrl.distributed.offload import Offloader, training_state
from flowrl.distributed.optimizer import learning_rate, make_optimizer, moments, num_steps, set_num_steps
from flowrl.distributed.ranks import num_ranks, sum_over_ranks
from flowrl.distributed.snapshots import Snapshot
from flowrl.flow.decay import FlowGRPODecay
from flowrl.flow.noise import Noise
from flowrl.tracking.metrics import Meter
from flowrl.trainers.shares import Part, Share
from flowrl.trainers.state import Counters
from flowrl.types import (
    Algorithm,
    Conditions,
    DivergedError,
    Drawn,
    Loss,
    Policy,
    Samples,
    TrainBatch,
    Trajectory,
    Velocities,
    Velocity,
)


class Progress(NamedTuple):
    """Where training stands after a cycle."""

    version: int  # cycles that changed the weights
    num_updates: int
    num_skips: int  # updates that were not finite


class Actor:
    """Holds the trainable weights, their optimiser and their snapshots.

    Args:
        policy: the loaded model; its module becomes trainable here, as `settings.mode` says.
        algorithm: the loss.
        settings: the `actor` section.
        noise: keyed source of training noise and of an adapter's first weights.
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
        self._prepare(policy.module)
        self.parameters = trainable(policy.module)
        self.optimizer = make_optimizer(policy.module, settings.optimizer)
        self.snapshots = {name: Snapshot(policy.module) for name in algorithm.needs.snapshots}
        for name, decay in algorithm.needs.snapshots.items():
            if decay is None and settings.mode == "lora":
                self.snapshots[name].zero()  # the base without its adapter, warm-started or not
        self.ema = Snapshot(policy.module) if average else None
        self.ema_decay = FlowGRPODecay(settings.ema.decay)
        self.version = 0  # cycles that changed the weights
        self.num_updates = 0
        self.num_skips = 0
        self._skips_in_a_row = 0
        self._offloader = Offloader(policy.device)

    def _prepare(self, module: nn.Module) -> None:
        """Adapters, checkpointing, shards: in this order parameter names stay as they are."""
        settings, policy = self.settings, self.policy
        if settings.mode == "full":
            train_fully(module, getattr(torch, settings.master_dtype))
        else:
            seed = self.noise.generator("lora").initial_seed()
            add_lora(module, settings.lora, policy.lora_targets, seed=seed)
        if settings.gradient_checkpointing:
            checkpoint_blocks(module, policy.blocks)
        if num_ranks() > 1:
            mesh = init_device_mesh(policy.device.type, (num_ranks(),))
            named = settings.fsdp.param_dtype
            dtype = getattr(torch, named) if named else policy.dtype
            shard(module, policy.blocks, mesh, settings.fsdp, dtype)
        else:
            module.to(policy.device)

    # ------------------------------------------------------------------------------------------ one cycle

    def update(self, share: Share) -> Progress:
        """One cycle: freeze on the present weights, then one update for each of the share's parts.

        Raises:
            DivergedError: after `max_skipped_updates` non-finite updates in a row.
        """
        samples, conditions = self._gather(share)
        sizes = [len(part) for part in share.parts]
        self.meter.count("train/num_samples", sum(len(part) - part.num_fillers for part in share.parts))
        noise = self.noise.child("train", share.cycle)
        before = self.num_updates
        with torch.no_grad():
            batch = self.algorithm.freeze(samples, self._velocities(conditions, sizes), noise)
        for part, update in zip(share.parts, _slices(batch, sizes), strict=True):
            with torch.no_grad():
                update = self.algorithm.couple(update, self._velocities(conditions, [len(part)]))
            approx_kl = self._step(part, update, self._velocity(conditions))
            if self.algorithm.target_kl is not None and approx_kl > self.algorithm.target_kl:
                self.meter.gauge("train/target_kl_stops", 1.0)
                break
        if self.num_updates > before:
            self.version += 1
            for name, decay in self.algorithm.needs.snapshots.items():
                if decay is not None:
                    self.snapshots[name].blend(decay.at(self.num_updates))
        return Progress(self.version, self.num_updates, self.num_skips)

    def _step(self, part: Part, update: TrainBatch, velocity: Velocity) -> float:
        """One optimiser update over all its micro-batches. Returns the mean `approx_kl` (0 if the loss has none)."""
        self.optimizer.zero_grad(set_to_none=True)
        rows_per_sample = len(update) // len(part)
        num_rows = rows_per_sample * part.num_samples
        num_real = rows_per_sample * (len(part) - part.num_fillers)
        totals = torch.zeros(2, dtype=torch.float64, device=self.policy.device)  # loss, approx_kl
        for rows in torch.arange(len(update), device=self.policy.device).split(self.settings.micro_batch_size):
            loss = self.algorithm.loss(update.rows(rows), velocity)
            real = slice(max(0, min(len(rows), num_real - int(rows[0]))))
            value = loss.terms[real].sum() / num_rows
            value.backward()
            totals[0] += value.detach()
            if "approx_kl" in loss.means:
                totals[1] += loss.means["approx_kl"][real].sum() / num_rows
            self._observe(loss, real)
        totals = sum_over_ranks(totals)
        self._apply(totals[0])
        return float(totals[1])

    def _observe(self, loss: Loss, real: slice) -> None:
        self.meter.count("train/num_microbatches")
        self.meter.count("train/num_rows", len(loss.terms[real]))
        for name, values in loss.means.items():
            self.meter.mean(f"train/{name}", values[real])
        for name, values in loss.spreads.items():
            self.meter.spread(f"train/{name}", values[real])

    def _apply(self, loss: Tensor) -> None:
        """Clip and step, or skip an update whose loss or gradient is not finite. All ranks see the same numbers."""
        optimizer = self.settings.optimizer
        norm = clip_grad_norm(self.parameters.values(), optimizer.max_grad_norm)
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

    def _gather(self, share: Share) -> tuple[Samples, Conditions]:
        """The share's samples on the device, part after part; conditions one row per group."""
        device = self.policy.device
        groups: list[Drawn] = [handle.fetch() for handle in share.groups]
        trajectory = Trajectory.concat([group.trajectory for group in groups])
        conditions = type(groups[0].conditions).concat([group.conditions for group in groups]).to(device)
        places = np.concatenate([part.groups for part in share.parts])
        starts = np.cumsum([0] + [len(group.trajectory) for group in groups])
        rows = torch.from_numpy(starts[places] + np.concatenate([part.slots for part in share.parts]))
        advantages = torch.from_numpy(np.concatenate([part.advantages for part in share.parts]))
        return Samples(
            trajectory.rows(rows).to(device), advantages.to(device), torch.from_numpy(places).to(device)
        ), conditions

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

    # ------------------------------------------------------------------------------------------ checkpoints

    def state_tensors(self) -> dict[str, Tensor]:
        """What training has made and goes on with, by name, sharing memory; of a sharded module, this rank's slices.

        Trained weights, the optimiser's moments, the average, and every snapshot. A frozen base is not among it.
        """
        assert_writable(self.policy.module)
        state = {f"weights.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        averages = moments(self.optimizer, self.parameters)
        state |= {f"optimizer.{name}": average for name, average in averages.items()}
        snapshots = {f"snapshots.{name}": snapshot for name, snapshot in self.snapshots.items()}
        for kind, snapshot in (snapshots | ({} if self.ema is None else {"ema": self.ema})).items():
            state |= {f"{kind}.{name}": value for name, value in snapshot.values.items()}
        return state

    def counters(self) -> Counters:
        """The rest of it. The same on all ranks."""
        steps = num_steps(self.optimizer, self.parameters)
        return Counters(self.version, self.num_updates, self.num_skips, self._skips_in_a_row, steps)

    def restore(self, counters: Counters) -> None:
        """Go on from there, once `state_tensors` have been filled."""
        self.version, self.num_updates, self.num_skips = counters.version, counters.num_updates, counters.num_skips
        self._skips_in_a_row = counters.skips_in_a_row
        set_num_steps(self.optimizer, self.parameters, counters.optimizer_steps)

    # ------------------------------------------------------------------------------------------ device memory

    def offload(self) -> None:
        """Free the device: parameters, optimiser state and snapshots wait on the host. Raises OffloadError."""
        self.optimizer.zero_grad(set_to_none=True)
        snapshots = self.snapshots | ({} if self.ema is None else {"ema": self.ema})
        self._offloader.offload(training_state(self.policy.module, self.optimizer, snapshots))

    def reload(self) -> None:
        """Take everything back. Raises OffloadError, naming the tensor for which there is no room."""
        self._offloader.reload()

    # ------------------------------------------------------------------------------------------ whose weights

    def behaviour(self) -> AbstractContextManager[None]:
        """Inside, the module has the weights that rollouts sample with."""
        name = self.algorithm.needs.behaviour
        return nullcontext() if name is None else self.snapshots[name].applied()

    def evaluation(self) -> AbstractContextManager[None]:
        """Inside, the module has the weights that are evaluated, and saved: the average if there is one."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def save(self, folder: Path) -> None:
        """The evaluated weights: an adapter for `pipe.load_lora_weights`, or the whole module. All ranks must call."""
        with self.evaluation():
            if self.settings.mode == "lora":
                save_adapter(self.policy.module, folder)
            else:
                self.policy.save(folder, full_state(self.policy.module))


def _slices(batch: TrainBatch, samples_per_update: Sequence[int]) -> Iterator[TrainBatch]:
    """The rows of each update, in order; a batch has equally many rows of every sample."""
    rows_per_sample = len(batch) // sum(samples_per_update)
    for rows in torch.arange(len(batch)).split([n * rows_per_sample for n in samples_per_update]):
        yield batch.rows(rows)
