"""How fast weights go from a trainer to an engine: two processes on one GPU, through CUDA IPC.

    python -m benchmarks.publish                          # SD3.5-Medium's size on a GPU; a tiny model without one
    python -m benchmarks.publish --transport broadcast    # two GPUs, NCCL

The model has SD3.5-Medium's published architecture and random weights (`random_sd3`). Every mode is published several
times, with the whole protocol: plan, comparison, transfer, checksums on both sides, commit. Afterwards the engine's own
weights are compared with the trainer's once more, from the module itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import flowrl
from benchmarks.random_sd3 import build_medium
from flowrl.config import LoRA
from flowrl.distributed.launch.base import Cluster, Place, Remote
from flowrl.distributed.launch.spawn import Spawn
from flowrl.distributed.lora import add_lora, train_fully
from flowrl.distributed.weight_sync.checksum import Checksums, verify
from flowrl.distributed.weight_sync.manifest import Manifest, Mode
from flowrl.distributed.weight_sync.publisher import Publisher, Transport
from flowrl.distributed.weight_sync.receiver import Receiver
from flowrl.distributed.weight_sync.sender import Sender
from flowrl.distributed.weight_sync.transports.base import Link
from flowrl.distributed.weight_sync.transports.cuda_ipc import identity
from flowrl.models.policy import JOINT_ATTENTION

RESULTS = Path(__file__).parent / "results"
MODES: tuple[Mode, ...] = ("full", "merged", "lora")
GB = 1e9
TINY = {"num_layers": 4, "num_heads": 4, "text_width": 64, "pooled_width": 64, "num_positions": 16}
RANK = 32


def main() -> None:
    """Measure every mode, print a line for each and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--transport", choices=("cuda_ipc", "broadcast", "object_store"), default="cuda_ipc")
    parser.add_argument("--staging", choices=("device", "host"), default="device")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, as without a GPU")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/publish.json on a GPU, else none")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.device_count() > 0
    results = [measure(mode, arguments, tiny=arguments.tiny or not on_gpu) for mode in arguments.modes]
    output = arguments.output or (RESULTS / "publish.json" if on_gpu else None)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report(arguments, results), indent=1) + "\n")


def measure(mode: Mode, arguments: argparse.Namespace, tiny: bool) -> dict[str, Any]:
    """One mode in two fresh processes."""
    began = time.perf_counter()
    with Spawn().open(places(arguments.transport)) as cluster:
        trainer, engine = start(cluster, mode, arguments, tiny)
        publisher = Publisher(
            [trainer], cast(Transport, arguments.transport), timeout_s=120, retries=0, host="127.0.0.1"
        )
        before = memory(trainer), memory(engine)
        published = [publisher.publish(number, [engine]) for number in range(1, arguments.repeats + 1)]
        after = memory(trainer), memory(engine)
        check(trainer, engine, trainer.call(Trainer.plan, 0).result())
        num_weights = trainer.call(Trainer.num_weights).result()
    seconds = [round(each.seconds, 4) for each in published]
    median = statistics.median(seconds[1:] or seconds)
    size = published[0].num_bytes / GB
    extra = memory_report(before[0], after[0]), memory_report(before[1], after[1])
    print(
        f"{mode:6s}: {published[0].num_tensors} tensors, {size:.3f} GB in {median:.3f} s (first {seconds[0]:.3f} s) = "
        f"{size / median:.1f} GB/s; beside the model: trainer {extra[0]['publication']:.2f} GB, engine "
        f"{extra[1]['publication']:.2f} GB",
        flush=True,
    )
    return {
        "mode": mode,
        "weights": num_weights,
        "tensors": published[0].num_tensors,
        "gigabytes": round(size, 4),
        "seconds": seconds,
        "seconds_median_after_first": round(median, 4),
        "gigabytes_per_second": round(size / median, 2),
        "trainer_memory_gb": extra[0],
        "engine_memory_gb": extra[1],
        "wall_seconds": round(time.perf_counter() - began, 1),
    }


def places(transport: str) -> list[Place]:
    """On one GPU, or with NCCL on two."""
    if torch.cuda.device_count() == 0:
        return [Place("actor-0"), Place("rollout-0")]
    if transport == "broadcast":
        return [Place("actor-0", num_gpus=1), Place("rollout-0", num_gpus=1)]
    return [Place("actor-0", num_gpus=0.5), Place("rollout-0", num_gpus=0.5, beside="actor-0")]


def start(
    cluster: Cluster, mode: Mode, arguments: argparse.Namespace, tiny: bool
) -> tuple[Remote[Trainer], Remote[Engine]]:
    """Both processes, which load at the same time."""
    trainer = cluster.start("actor-0", partial(Trainer, mode, arguments.bucket_mb, tiny))
    engine = cluster.start("rollout-0", partial(Engine, mode, arguments.staging, tiny))
    loading = [trainer.call(Trainer.num_weights), engine.call(Engine.num_weights)]
    for future in loading:
        future.result()
    return trainer, engine


def check(trainer: Remote[Trainer], engine: Remote[Engine], manifest: Manifest) -> None:
    """What lies in the engine's module now is what the trainer has published."""
    expected, found = trainer.call(Trainer.digests, manifest), engine.call(Engine.digests, manifest)
    verify(manifest, [expected.result()], {engine.name: found.result()})


# ---------------------------------------------------------------------------------------------- in the processes


def build(seed: int, tiny: bool) -> tuple[nn.Module, torch.device]:
    """A bfloat16 transformer with random weights, on the GPU if there is one."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(seed)
    with torch.device(device):
        module = build_medium(**TINY) if tiny else build_medium()
    return nn.Module.to(module, torch.bfloat16).requires_grad_(False), device


def adapt(module: nn.Module, seed: int) -> None:
    """Rank 32 on the attention projections, and no identity."""
    add_lora(module, LoRA(rank=RANK, alpha=2 * RANK), JOINT_ATTENTION, seed=seed)
    for name, parameter in module.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=1e-2)


class Process:
    """What both have in common."""

    module: nn.Module
    device: torch.device

    def num_weights(self) -> int:
        """Of the model without adapter."""
        return sum(p.numel() for name, p in self.module.named_parameters() if ".lora_" not in name)

    def memory(self) -> dict[str, float]:
        """GB that tensors take now, and the most that they have taken since the last call."""
        if self.device.type == "cpu":
            return {"allocated": 0.0, "peak": 0.0}
        torch.cuda.synchronize(self.device)
        found = {
            "allocated": torch.cuda.memory_allocated(self.device) / GB,
            "peak": torch.cuda.max_memory_allocated(self.device) / GB,
        }
        torch.cuda.reset_peak_memory_stats(self.device)
        return found

    def device_identity(self) -> str:
        """For the transport."""
        return identity(self.device)


class Trainer(Process):
    """Rank 0 of 1: float32 masters in full training, else a bfloat16 base with a float32 adapter."""

    def __init__(self, mode: Mode, bucket_mb: int, tiny: bool) -> None:
        self.module, self.device = build(0, tiny)
        if mode == "full":
            train_fully(self.module)
        else:
            adapt(self.module, seed=0)
        self.sender = Sender(
            self.module,
            mode,
            wire_dtype=torch.bfloat16,
            bucket_bytes=bucket_mb * 1_000_000,
            device=self.device,
        )

    def plan(self, version: int) -> Manifest:
        """See `Sender`."""
        return self.sender.plan(version)

    def send(self, manifest: Manifest, link: Link | None) -> Checksums | None:
        """See `Sender`."""
        return self.sender.send(manifest, link)

    def leave(self, manifest: Manifest) -> Iterator[tuple[Checksums, Tensor]]:
        """See `Sender`."""
        return self.sender.stream(manifest, on_host=True)

    def digests(self, manifest: Manifest) -> Checksums:
        """Of what it publishes."""
        return digests_of(self.sender, manifest)


class Engine(Process):
    """With other weights to begin with."""

    def __init__(self, mode: Mode, staging: str, tiny: bool) -> None:
        self.mode = mode
        self.module, self.device = build(1, tiny)
        if mode == "lora":
            adapt(self.module, seed=1)
        self.receiver = Receiver(self.module, device=self.device, staging=staging)

    def expect(self, manifest: Manifest) -> None:
        """See `Receiver`."""
        self.receiver.expect(manifest)

    def receive(self, manifest: Manifest, link: Link, engine: int) -> Checksums:
        """See `Receiver`."""
        return self.receiver.receive(manifest, link, engine)

    def commit(self) -> int:
        """See `Receiver`."""
        self.receiver.commit()
        return self.receiver.version

    def drop(self) -> None:
        """See `Receiver`."""
        self.receiver.drop()

    def digests(self, manifest: Manifest) -> Checksums:
        """Of what the module holds: it is published to nobody."""
        own: Mode = "lora" if self.mode == "lora" else "full"
        sender = Sender(self.module, own, wire_dtype=torch.bfloat16, device=self.device)
        return digests_of(sender, manifest)


def digests_of(sender: Sender, manifest: Manifest) -> Checksums:
    """Bucket by bucket."""
    total = Checksums.none(manifest)
    for share, _ in sender.stream(manifest, on_host=False):
        total += share
    return total


# ---------------------------------------------------------------------------------------------- report


def memory(remote: Remote[Any]) -> dict[str, float]:
    """See `Process.memory`."""
    return remote.call(Process.memory).result()


def memory_report(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The model; what publications took beside it at most; and what is left of that."""
    return {
        "model": round(before["allocated"], 3),
        "publication": round(max(0.0, after["peak"] - before["allocated"]), 3),
        "left_behind": round(after["allocated"] - before["allocated"], 3),
    }


def report(arguments: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results with what they were measured on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {', '.join(gpus) or 'no GPU'}",
        "versions": {
            "python": platform.python_version(),
            "flowrl": flowrl.__version__,
            "cuda": torch.version.cuda,
            **{name: version(name) for name in ("torch", "diffusers", "peft")},
        },
        "transport": arguments.transport,
        "staging": arguments.staging,
        "bucket_mb": arguments.bucket_mb,
        "results": results,
    }


if __name__ == "__main__":
    main()
