"""The actor as the driver sees it: all of its ranks as one."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.distributed.checkpoint.manifest import FileRecord, TensorSpec
from flowrl.distributed.launch.base import Remote, gather, merge
from flowrl.flow.noise import Noise
from flowrl.tracking.metrics import Meter
from flowrl.trainers.shares import deal
from flowrl.trainers.state import Counters, Generators
from flowrl.trainers.worker import ActorWorker
from flowrl.types import Algorithm, Group, Handle, SampledGroup, ScoredGroup

# Below it all rewards are equal: there is nothing to learn, and weight decay must not act.
MIN_ADVANTAGE_VARIANCE = 1e-6


class ActorFleet:
    """Deals batches out to the ranks, which update together. It holds no weights and no trajectory."""

    def __init__(
        self, workers: Sequence[Remote[ActorWorker]], algorithm: Algorithm, noise: Noise, meter: Meter
    ) -> None:
        self.workers = workers
        self.algorithm = algorithm
        self.noise = noise
        self.meter = meter
        self.version = 0  # cycles that changed the weights
        self.num_cycles = 0
        self.num_updates = 0
        self.num_degenerate = 0
        self._num_skips = 0

    def update(self, batch: Sequence[ScoredGroup], advantages: Tensor) -> None:
        """One cycle on a complete batch; `advantages` float64 [B] in the order of the groups' samples.

        Raises:
            DivergedError: after `actor.max_skipped_updates` non-finite updates in a row.
        """
        self.num_cycles += 1
        degenerate = bool(advantages.var(correction=0) < MIN_ADVANTAGE_VARIANCE)
        self.meter.gauge("reward/degenerate", float(degenerate))
        if degenerate:  # skip the cycle whole, weight decay and momentum included
            self.num_degenerate += 1
        else:
            shares = deal(batch, advantages, self.algorithm, self.noise, self.num_cycles, len(self.workers))
            progress = gather(self.workers, ActorWorker.update, [(share,) for share in shares])[0]
            self.version, self.num_updates, self._num_skips = progress
        self.meter.gauge("train/optimizer_steps", self.num_updates)
        self.meter.gauge("train/optimizer_skips", self._num_skips + self.num_degenerate)
        self.meter.gauge("train/policy_version", self.version)

    def generate(self, groups: Sequence[Group], rollout_id: int, version: int) -> Iterator[SampledGroup]:
        """Every group, in order of arrival, drawn by the ranks with their own modules (layout shared)."""
        shares = self._in_step(groups)
        streams = [
            worker.stream(ActorWorker.generate, share, rollout_id, version)
            for worker, share in zip(self.workers, shares, strict=True)
        ]
        return _once(merge(streams))

    def evaluate(self, groups: Sequence[Group]) -> Iterator[SampledGroup]:
        """Every group, in order of arrival, drawn with the weights and the sampler of evaluations."""
        shares = self._in_step(groups)
        streams = [
            worker.stream(ActorWorker.evaluate, share, self.version)
            for worker, share in zip(self.workers, shares, strict=True)
        ]
        return _once(merge(streams))

    def metrics(self) -> dict[str, float]:
        """What the ranks have collected since the last call."""
        return gather(self.workers, ActorWorker.collect, [()] * len(self.workers))[0]

    def save(self, folder: Path) -> None:
        """The weights that are evaluated, into an existing folder. Raises OSError if rank 0 does not see it, too."""
        gather(self.workers, ActorWorker.save, [(folder.absolute(),)] * len(self.workers))
        if not any(folder.iterdir()):
            message = "rank 0 wrote the weights elsewhere: its host does not share this folder. Set runs=SHARED_FOLDER"
            raise OSError(errno.ENOENT, message, str(folder))

    # ------------------------------------------------------------------------------------------ checkpoints

    def fingerprint(self) -> str:
        """Of the model as it was loaded."""
        return self.workers[0].call(ActorWorker.fingerprint).result()

    def checkpoint(self, folder: Path, background: bool) -> dict[str, Any]:
        """Begin to write all tensors into `folder`; returns the rest of the state, for JSON."""
        arguments = [(folder.absolute(), background)] * len(self.workers)
        states = gather(self.workers, ActorWorker.checkpoint, arguments)
        return {
            "version": self.version,
            "num_cycles": self.num_cycles,
            "num_updates": self.num_updates,
            "num_degenerate": self.num_degenerate,
            "num_skips": self._num_skips,
            "counters": asdict(states[0][0]),
            "generators": [generators.plain() for _, generators in states],
        }

    def written(self, wait: bool) -> tuple[list[FileRecord], dict[str, TensorSpec]] | None:
        """All files and tensors once all ranks have written theirs; None before. Raises what has failed."""
        found = gather(self.workers, ActorWorker.written, [(wait,)] * len(self.workers))
        written = [own for own in found if own is not None]
        if len(written) < len(found):
            return None
        return [record for files, _ in written for record in files], written[0][1]

    def restore(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Go on from what `checkpoint` saved, on any number of ranks. Raises CheckpointError."""
        counters, saved = Counters(**state["counters"]), [Generators.of(plain) for plain in state["generators"]]
        own = saved if len(saved) == len(self.workers) else [None] * len(self.workers)
        gather(self.workers, ActorWorker.restore, [(folder.absolute(), counters, each) for each in own])
        self.version, self.num_cycles, self.num_updates = state["version"], state["num_cycles"], state["num_updates"]
        self.num_degenerate, self._num_skips = state["num_degenerate"], state["num_skips"]

    # ------------------------------------------------------------------------------------------ device memory

    def offload(self) -> None:
        """Give the GPUs away: parameters and optimiser state go to the host until `reload`."""
        gather(self.workers, ActorWorker.offload, [()] * len(self.workers))

    def reload(self) -> None:
        """Take them back."""
        gather(self.workers, ActorWorker.reload, [()] * len(self.workers))

    def _in_step(self, groups: Sequence[Group]) -> list[list[Group]]:
        """Equally many groups for every rank, since sharded forwards are collectives: some may be drawn twice."""
        num_ranks = len(self.workers)
        padded = [*groups, *(groups[i % len(groups)] for i in range(-len(groups) % num_ranks))]
        return [padded[rank::num_ranks] for rank in range(num_ranks)]


def _once(drawn: Iterator[tuple[SampledGroup, Handle]]) -> Iterator[SampledGroup]:
    """Each group once, with the handle of what was drawn: both drawings of a group are the same."""
    seen: set[int] = set()
    for sampled, handle in drawn:
        if sampled.group.ordinal not in seen:
            seen.add(sampled.group.ordinal)
            yield replace(sampled, drawn=handle)
