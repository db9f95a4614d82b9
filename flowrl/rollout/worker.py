"""A process that only samples: layouts colocated and standalone. Its weights come by publication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from flowrl.config import Config
from flowrl.device import choose_device, settle_torch
from flowrl.distributed.lora import add_lora
from flowrl.distributed.precision import compute_as_trained
from flowrl.distributed.weight_sync.checksum import Checksums
from flowrl.distributed.weight_sync.manifest import Manifest
from flowrl.distributed.weight_sync.receiver import Receiver
from flowrl.distributed.weight_sync.transports.base import Link
from flowrl.distributed.weight_sync.transports.cuda_ipc import identity
from flowrl.rollout.checks import checked
from flowrl.types import Drawn, Engine, Group, InMemory, Policy, SampledGroup

LEFT_BEHIND = InMemory(None)  # stands in a group whose `Drawn` travels beside it


class RolloutWorker:
    """An engine with a policy of its own, and the receiving side of publications. Nothing is loaded before `load`.

    Args:
        run: the configuration.
        name: of its place.
        mode: in which weights will be published: "lora" asks for an adapter like the trainer's.
    """

    policy: Policy
    engine: Engine
    receiver: Receiver

    def __init__(self, run: Config, name: str, mode: str) -> None:
        self.run = run
        self.name = name
        self.mode = mode

    def load(self) -> None:
        """Read the model. What it samples with before the first publication is of no version: it refuses to."""
        run = self.run
        settle_torch(run, self.name)
        device = choose_device(run)
        self.policy = run.model.load(device)
        if self.mode == "lora":
            add_lora(self.policy.module, run.actor.lora, self.policy.lora_targets, seed=0)
        elif self.mode == "full":
            compute_as_trained(self.policy.module, self.policy.blocks, getattr(torch, run.actor.master_dtype))
        self.policy.module.requires_grad_(False).to(device)
        self.engine = run.rollout.engine.open(run, self.policy)
        self.receiver = Receiver(self.policy.module, device=device, staging=run.weight_sync.staging, version=None)

    # ------------------------------------------------------------------------------------------ drawing

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[tuple[SampledGroup, Drawn]]:
        """The groups in their order, as asked for or refused, and what is to be trained on beside each.

        Raises EngineError (see `checked`), and PublishError while the weights are of no version.
        """
        version = self.receiver.version
        for sampled in checked(self.engine, groups, rollout_id, self.run, self.policy, version):
            yield replace(sampled, drawn=LEFT_BEHIND), sampled.drawn.fetch()

    def sleep(self) -> None:
        """Free the device until `wake`."""
        self.engine.sleep()

    def wake(self) -> None:
        """Take the device again."""
        self.engine.wake()

    # ------------------------------------------------------------------------------------------ weights

    def expect(self, manifest: Manifest) -> None:
        """Does it fit? See `Receiver.expect`."""
        self.receiver.expect(manifest)

    def receive(self, manifest: Manifest, link: Link, engine: int) -> Checksums:
        """Stage a version. See `Receiver.receive`."""
        return self.receiver.receive(manifest, link, engine)

    def commit(self) -> int:
        """Sample with what was staged from now on. Returns its version."""
        self.receiver.commit()
        self.engine.publish(self.receiver.version)
        return self.receiver.version

    def device_identity(self) -> str:
        """What other processes on the worker's device call it, too."""
        return identity(self.receiver.device)

    def drop(self) -> None:
        """Stay with the old version."""
        self.receiver.drop()
