"""The actor as the driver sees it: all of its ranks as one."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Concatenate, TypeVar

from torch import Tensor

from flowrl.distributed.checkpoint.manifest import CheckpointError
from flowrl.distributed.launch.base import Remote, gather, merge
from flowrl.distributed.launch.stuck import reporting
from flowrl.flow.noise import Noise
from flowrl.tracking.metrics import Meter
from flowrl.trainers.shares import deal
from flowrl.trainers.state import Counters, Generators
from flowrl.trainers.worker import ActorWorker, SaveFailed, Written
from flowrl.types import Algorithm, Group, Handle, SampledGroup, ScoredGroup

R = TypeVar("R")

# Below it all rewards are equal: there is nothing to learn, and weight decay must not act.
MIN_ADVANTAGE_VARIANCE = 1e-6


class ActorFleet:
    """Deals batches out to the ranks, which update together. It holds no weights and no trajectory."""

    def __init__(
        self,
        workers: Sequence[Remote[ActorWorker]],
        algorithm: Algorithm,
        noise: Noise,
        meter: Meter,
        report_stuck_s: float = 300.0,
    ) -> None:
        self.workers = workers
        self.report_stuck_s = report_stuck_s
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
            progress = self._each("update", ActorWorker.update, [(share,) for share in shares])[0]
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
        return self._all("collect metrics", ActorWorker.collect)[0]

    def save(self, folder: Path) -> None:
        """The weights that are evaluated, into an existing folder. Raises OSError if rank 0 does not see it, too."""
        self._all("save the weights", ActorWorker.save, folder.absolute())
        if not any(folder.iterdir()):
            message = "rank 0 wrote the weights elsewhere: its host does not share this folder. Set runs=SHARED_FOLDER"
            raise OSError(errno.ENOENT, message, str(folder))

    # ------------------------------------------------------------------------------------------ checkpoints

    def fingerprint(self) -> str:
        """Of the model as it was loaded."""
        return self.workers[0].call(ActorWorker.fingerprint).result()

    def checkpoint(self, folder: Path, background: bool) -> dict[str, Any]:
        """Begin to write all tensors into `folder`; returns the rest of the state, for JSON."""
        states = self._all("begin a checkpoint", ActorWorker.checkpoint, folder.absolute(), background)
        return {
            "version": self.version,
            "num_cycles": self.num_cycles,
            "num_updates": self.num_updates,
            "num_degenerate": self.num_degenerate,
            "num_skips": self._num_skips,
            "counters": asdict(states[0][0]),
            "generators": [asdict(generators) for _, generators in states],
        }

    def written(self, wait: bool) -> Written | None:
        """The files of all ranks once they are written; None before.

        Raises CheckpointError if a rank has failed, and then no rank writes any more.
        """
        found = self._all("write a checkpoint", ActorWorker.written, wait)
        failed = [own for own in found if isinstance(own, SaveFailed)]
        if failed:
            self._all("end writing", ActorWorker.written, True)
            raise CheckpointError(f"rank {failed[0].rank}: {failed[0].message}")
        written = [own for own in found if isinstance(own, Written)]
        if len(written) < len(found):
            return None
        return Written([record for own in written for record in own.files], written[0].keys)

    def restore(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Go on from what `checkpoint` saved, on any number of ranks. Raises CheckpointError."""
        self._all("read a checkpoint", ActorWorker.restore, folder.absolute(), Counters(**state["counters"]))
        self.version, self.num_cycles, self.num_updates = state["version"], state["num_cycles"], state["num_updates"]
        self.num_degenerate, self._num_skips = state["num_degenerate"], state["num_skips"]

    def restore_generators(self, state: Mapping[str, Any]) -> None:
        """The rest of it, when all else is ready; if the number of ranks has changed, nobody's state fits anybody."""
        saved = [Generators(**plain) for plain in state["generators"]]
        if len(saved) == len(self.workers):
            self._each("go on", ActorWorker.restore_generators, [(own,) for own in saved])

    # ------------------------------------------------------------------------------------------ device memory

    def offload(self) -> None:
        """Give the GPUs away: parameters and optimiser state go to the host until `reload`."""
        self._all("leave the device", ActorWorker.offload)

    def reload(self) -> None:
        """Take them back."""
        self._all("return to the device", ActorWorker.reload)

    def _all(self, doing: str, method: Callable[Concatenate[ActorWorker, ...], R], *arguments: Any) -> list[R]:
        """`method` on every rank with the same arguments; `doing` is what is said if it takes long."""
        return self._each(doing, method, [arguments] * len(self.workers))

    def _each(
        self, doing: str, method: Callable[Concatenate[ActorWorker, ...], R], arguments: Sequence[tuple[Any, ...]]
    ) -> list[R]:
        """The same with every rank's own arguments."""
        who = "actor-0" if len(self.workers) == 1 else f"the {len(self.workers)} ranks of the actor"
        with reporting(self.report_stuck_s, lambda: f"{who} {doing}"):
            return gather(self.workers, method, arguments)

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
