"""Trainers and engines of a small real module, which is all that a publication touches; and faults to be injected."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flowrl.config import LoRA
from flowrl.distributed.lora import add_lora
from flowrl.distributed.weight_sync.checksum import Checksums
from flowrl.distributed.weight_sync.manifest import Manifest, Mode
from flowrl.distributed.weight_sync.receiver import Receiver
from flowrl.distributed.weight_sync.sender import Filling, Sender
from flowrl.distributed.weight_sync.source import named_tensors, origins
from flowrl.distributed.weight_sync.transports.base import Inlet, Link
from flowrl.distributed.weight_sync.transports.cuda_ipc import identity

CPU = torch.device("cpu")
BUCKET_BYTES = 4096  # smaller than some tensors, larger than others
TARGETS = ["up", "down"]


class Block(nn.Module):
    """Odd sizes, two dtypes, and buffers that are and are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 61)
        self.norm = nn.LayerNorm(61)
        self.down = nn.Linear(61, 13, bias=False)
        self.register_buffer("positions", torch.randn(7))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("cache", torch.randn(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)))


def make_module(seed: int, lora: bool = False, rank: int = 3, alpha: float = 6.0) -> nn.Module:
    """Two blocks; an adapter, if any, is not the identity."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = nn.Sequential(Block(), Block())
        if lora:
            add_lora(module, LoRA(rank=rank, alpha=alpha), TARGETS, seed=seed)
            for name, parameter in module.named_parameters():
                if "lora_" in name:
                    nn.init.normal_(parameter)
    return module


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """All that could be published, by name."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(module).items()}


def strike(fault: str) -> None:
    """What can happen to a party in the middle of a transfer."""
    match fault:
        case "raise":
            raise MemoryError("no room for bucket 1")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(2)


class FaultySender(Sender):
    """Goes wrong before the second bucket, if a test asks for it."""

    fault = ""

    def _gather(self, manifest: Manifest) -> Iterator[Filling]:
        for bucket, content in enumerate(super()._gather(manifest)):
            if bucket == 1:
                strike(self.fault)
            yield content


class Trainer:
    """Rank `rank`."""

    def __init__(self, mode: Mode, rank: int = 0, wire_dtype: torch.dtype | None = None) -> None:
        self.module = make_module(0, lora=mode != "full")
        self.rank = rank
        self.sender = FaultySender(
            self.module, mode, wire_dtype=wire_dtype, bucket_bytes=BUCKET_BYTES, device=CPU, rank=rank
        )

    def inject(self, fault: str) -> None:
        """Into every publication from now on."""
        self.sender.fault = fault

    def join(self, port: int, rank: int, num_ranks: int) -> None:
        """The other ranks."""
        store = TCPStore("127.0.0.1", port, is_master=False)
        timeout = timedelta(seconds=30)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)

    def part(self) -> None:
        """The other ranks."""
        dist.destroy_process_group()

    def shard(self) -> None:
        """Over all ranks."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.module:
            fully_shard(block, mesh=mesh)
        fully_shard(self.module, mesh=mesh)

    def weights(self) -> dict[str, Tensor]:
        return snapshot(self.module)

    def values(self) -> dict[str, Tensor]:
        """What is to be published."""
        return {name: o.value(o.dtype) for name, o in origins(self.module, self.sender.mode).items()}

    def plan(self, version: int) -> Manifest:
        return self.sender.plan(version)

    def send(self, manifest: Manifest, link: Link | None) -> Checksums | None:
        return self.sender.send(manifest, link)

    def leave(self, manifest: Manifest) -> Iterator[tuple[Checksums, Tensor]]:
        return self.sender.stream(manifest, on_host=True)

    def device_identity(self) -> str:
        return identity(CPU)


class Engine:
    """Its receiver, with a fault if a test asks for one."""

    def __init__(self, lora: bool = False, staging: str = "device") -> None:
        self.module = make_module(1, lora)
        self.receiver = Receiver(self.module, device=CPU, staging=staging, version=0)
        self.fault = ""

    def weights(self) -> dict[str, Tensor]:
        return snapshot(self.module)

    def version(self) -> int:
        return self.receiver.version

    def inject(self, fault: str) -> None:
        """Into the second bucket of the next publication."""
        self.fault = fault

    def expect(self, manifest: Manifest) -> None:
        self.receiver.expect(manifest)

    def receive(self, manifest: Manifest, link: Link, engine: int) -> Checksums:
        fault, self.fault = self.fault, ""
        return self.receiver.receive(manifest, Faulty(link, fault) if fault else link, engine)

    def commit(self) -> int:
        self.receiver.commit()
        return self.receiver.version

    def drop(self) -> None:
        self.receiver.drop()

    def device_identity(self) -> str:
        return identity(CPU)


@dataclass(frozen=True)
class Faulty(Link):
    """A link whose engine side goes wrong."""

    link: Link
    fault: str

    def outlet(self, rank: int, manifest: Manifest, device: torch.device) -> None:
        return None

    def inlet(self, engine: int, manifest: Manifest, device: torch.device) -> Inlet:
        return FaultyInlet(self.link.inlet(engine, manifest, device), self.fault)


@dataclass(frozen=True)
class FaultyInlet:
    inlet: Inlet
    fault: str

    def open(self) -> None:
        self.inlet.open()

    def receive(self, bucket: int, into: Tensor) -> None:
        self.inlet.receive(bucket, into)
        if bucket == 1 and self.fault == "flip":
            into[40] ^= 1
        elif bucket == 1:
            strike(self.fault)

    def finish(self) -> None:
        self.inlet.finish()

    def close(self, reason: str | None) -> None:
        self.inlet.close(reason)
