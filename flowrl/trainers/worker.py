"""One rank of the actor: what runs in its process, or in the driver's own under `launcher=inline`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # torch.distributed's, with types

from flowrl.config import Config
from flowrl.device import choose_device, settle_torch
from flowrl.distributed.checkpoint.manifest import TENSORS, CheckpointError, FileRecord, TensorSpec
from flowrl.distributed.checkpoint.tensors import TensorStore
from flowrl.distributed.fsdp import fits_gathered, gathered
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.precision import matrices
from flowrl.distributed.ranks import in_waves, num_ranks
from flowrl.distributed.rendezvous import Address, Backend, connect, join, open_store
from flowrl.distributed.weight_sync.checksum import Checksums
from flowrl.distributed.weight_sync.manifest import Manifest
from flowrl.distributed.weight_sync.sender import Sender
from flowrl.distributed.weight_sync.transports.base import Link
from flowrl.distributed.weight_sync.transports.cuda_ipc import identity
from flowrl.flow.noise import Noise
from flowrl.rollout.checks import checked
from flowrl.rollout.native import NativeEngine
from flowrl.rollout.worker import LEFT_BEHIND
from flowrl.tracking.metrics import Meter, memory_metrics
from flowrl.trainers import placement
from flowrl.trainers.actor import Actor, Progress
from flowrl.trainers.evaluator import evaluation_engine
from flowrl.trainers.shares import Share
from flowrl.trainers.state import Counters, Generators
from flowrl.types import Drawn, Engine, Group, SampledGroup


@dataclass(frozen=True)
class Written:
    """This rank's files of a checkpoint, and the tensors of all ranks."""

    files: list[FileRecord]
    keys: dict[str, TensorSpec]


@dataclass(frozen=True)
class SaveFailed:
    """A rank could not write its part. An answer, not an error: the others have to end theirs before anyone goes on."""

    rank: int
    message: str


class ActorWorker:
    """The policy, its optimiser, and the engines that sample with the policy's own module.

    Nothing is loaded before `load`. All ranks must be asked for the same things in the same order: what they do with
    sharded weights are collectives.
    """

    store: TCPStore  # of rank 0, where the others met
    device: torch.device
    actor: Actor
    judge: NativeEngine
    sender: Sender
    checkpoints: TensorStore
    base: str  # fingerprint of the model as it was loaded

    def __init__(self, run: Config, total_updates: int, rank: int) -> None:
        self.run = run
        self.total_updates = total_updates
        self.rank = rank
        self.meter = Meter()
        self.engine: Engine | None = None  # opened when it is first asked to draw, or with the model in layout shared

    # ------------------------------------------------------------------------------------------ beginning

    def host(self) -> Address:
        """Rank 0: open the store in which the ranks meet."""
        self.store, address = open_store(self.run.actor.timeout_s)
        return address

    def join(self, address: Address) -> None:
        """Form the group of the ranks. All must be asked at once."""
        settings, on_gpu = self.run.actor, choose_device(self.run).type == "cuda"
        store = self.store if self.rank == 0 else connect(address, settings.timeout_s)
        backend: Backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        join(store, self.rank, settings.num_ranks, backend, settings.timeout_s)

    def load(self) -> None:
        """Read the model, make it trainable, and spread it over the ranks."""
        run, evaluation = self.run, self.run.trainer.eval
        settle_torch(run, f"actor-{self.rank}")
        self.device = choose_device(run)
        noise = Noise.of(run.seed)
        with in_waves(run.actor.fsdp.load_wave_size):
            policy = run.model.load(self.device)
            self.base = policy.fingerprint() if self.rank == 0 else ""
            self.actor = Actor(
                policy, run.algorithm, run.actor, noise, self.total_updates, self.meter, average=evaluation.use_ema
            )
        sync = run.weight_sync
        self.sender = Sender(
            policy.module,
            placement.publication_mode(run),
            wire_dtype=getattr(torch, sync.wire_dtype) if sync.wire_dtype else policy.dtype,
            rounded=matrices(policy.module, policy.blocks),
            bucket_bytes=sync.bucket_mb * 1_000_000,
            device=self.device,
            rank=self.rank,
        )
        self.checkpoints = TensorStore(self.device, run.actor.timeout_s)
        self.checkpoints.reserve(self.actor.state_tensors())
        self.judge = evaluation_engine(run, policy)
        if run.trainer.layout == "shared":  # now, since opening may draw from a global generator
            self.engine = run.rollout.engine.open(run, policy)

    # ------------------------------------------------------------------------------------------ drawing

    def generate(self, groups: Sequence[Group], rollout_id: int, version: int) -> Iterator[tuple[SampledGroup, Drawn]]:
        """The groups drawn with the weights that rollouts sample with, and what is to be trained on beside each."""
        if self.engine is None:
            self.engine = self.run.rollout.engine.open(self.run, self.actor.policy)
        self.engine.publish(version)
        with self.actor.behaviour(), self._whole(groups):
            for sampled in checked(self.engine, groups, rollout_id, self.run, self.actor.policy, version):
                yield replace(sampled, drawn=LEFT_BEHIND), sampled.drawn.fetch()

    def evaluate(self, groups: Sequence[Group], version: int) -> Iterator[tuple[SampledGroup, Drawn | None]]:
        """The groups drawn with the weights and the sampler of evaluations. Rollout 0: no step is drawn anew.

        Latents come along if they are to be scored or kept (`artifacts.trajectories`).
        """
        self.judge.publish(version)
        components = (self.run.trainer.eval.rewards or self.run.reward).components
        scored = any(component.sees_latents for component in components.values())
        with self.actor.evaluation(), self._whole(groups):
            for sampled in self.judge.generate(groups, rollout_id=0):
                kept = sampled.drawn.fetch() if scored or self.run.artifacts.trajectories else None
                yield replace(sampled, drawn=LEFT_BEHIND), kept

    def _whole(self, groups: Sequence[Group]) -> AbstractContextManager[None]:
        """All blocks gathered once instead of in every forward, if there is room or the settings say so.

        What `groups` ask for is encoded before: text encoders and all weights need not have room at the same time.
        """
        policy, gather = self.actor.policy, self.run.rollout.gather
        if num_ranks() == 1 or gather == "never":
            return nullcontext()
        policy.encode([group.prompt for group in groups], self.run.sampler.guidance_scale)  # and keep it in the cache
        if gather == "always" or fits_gathered(policy.module, self.device):
            return gathered(policy.module)
        return nullcontext()

    # ------------------------------------------------------------------------------------------ training

    def update(self, share: Share) -> Progress:
        """One cycle."""
        return self.actor.update(share)

    def collect(self) -> dict[str, float]:
        """The metrics of all ranks since the last call."""
        for name, value in memory_metrics(self.device).items():
            self.meter.worst(name, value)
        return self.meter.collect()

    def save(self, folder: Path) -> None:
        """Rank 0 writes the weights that are evaluated."""
        self.actor.save(folder)

    def offload(self) -> None:
        """Parameters and optimiser state go to the host, and the device is free."""
        self.actor.offload()
        self.meter.worst("perf/mem_offloaded_gb", memory_metrics(self.device)["perf/mem_allocated_gb"])

    def reload(self) -> None:
        """They come back."""
        self.actor.reload()

    # ------------------------------------------------------------------------------------------ checkpoints

    def fingerprint(self) -> str:
        """Rank 0: of the model as it was loaded."""
        return self.base

    def checkpoint(self, folder: Path, background: bool) -> tuple[Counters, Generators]:
        """Begin to write this rank's tensors into `folder`; what they are now is saved, whatever training does."""
        self.checkpoints.save(self.actor.state_tensors(), folder / TENSORS, background=background)
        return self.actor.counters(), Generators.now(self.device)

    def written(self, wait: bool) -> Written | SaveFailed | None:
        """What has become of this rank's part; None while it is being written."""
        try:
            files = self.checkpoints.written(wait=wait)
        except (OSError, CheckpointError) as error:
            return SaveFailed(self.rank, str(error))
        return None if files is None else Written(files, self.checkpoints.keys)

    def restore(self, folder: Path, counters: Counters) -> None:
        """Fill the tensors from `folder`; every rank reads what is its own. Raises CheckpointError."""
        self.checkpoints.load(self.actor.state_tensors(), folder)
        self.actor.restore(counters)

    def restore_generators(self, generators: Generators) -> None:
        """Last of all: what is opened and warmed may draw."""
        generators.restore(self.device)

    # ------------------------------------------------------------------------------------------ publication

    def plan(self, version: int) -> Manifest:
        """See `Sender.plan`."""
        return self.sender.plan(version)

    def send(self, manifest: Manifest, link: Link | None) -> Checksums | None:
        """Send the weights that rollouts sample with. See `Sender.send`."""
        with self.actor.behaviour():
            return self.sender.send(manifest, link)

    def leave(self, manifest: Manifest) -> Iterator[tuple[Checksums, Tensor]]:
        """The same, bucket by bucket, for the launcher to keep. See `Sender.stream`."""
        with self.actor.behaviour():
            yield from self.sender.stream(manifest, on_host=not isinstance(self.run.launcher, Inline))

    def device_identity(self) -> str:
        """What other processes on the rank's device call it, too."""
        return identity(self.device)
