"""What all parts have in common: how much of everything, and where workers run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_sd3 import overrides, save_medium
from flowrl import load_config
from flowrl.config import Config
from flowrl.distributed.launch.base import Cluster, Place
from flowrl.distributed.launch.placement import share_of_cores
from flowrl.distributed.launch.spawn import Spawn, SpawnCluster
from flowrl.preflight import preflight

Found = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    layers: int
    few_layers: int  # of the model for parts that are not about speed
    heads: int
    pixels: int
    num_samples: int  # of each of four prompts, replayed in four steps, in one update
    micro_batch: Mapping[str, int]  # by mode
    stride: Mapping[str, int]  # every so many-th weight is compared
    num_async: int  # samples of each of two prompts, replayed in two steps, in one asynchronous cycle
    num_timed: int  # updates, after the first
    num_cycles: int = 20


SIZES = {
    "tiny": Size(2, 1, 2, 64, 2, {"lora": 8, "full": 8}, {"lora": 1, "full": 1}, 2, 2),
    "medium": Size(24, 4, 24, 512, 12, {"lora": 24, "full": 32}, {"lora": 1, "full": 113}, 8, 3),
}


@dataclass(frozen=True)
class Bench:
    """What every part is given."""

    size: Size
    device: str  # cuda | cpu
    folder: Path

    def keys(self, name: str, *more: str, model: str = "whole") -> list[str]:
        """Overrides of a run; the last of a kind counts."""
        return [
            *overrides(self.folder / model, self.folder / "prompts.txt", self.size.pixels),
            *("reward.num_workers=0", "launcher=spawn", f"device={self.device}", f"runs={self.folder}", f"name={name}"),
            *("sampler.num_steps=6", "sampler/steps=fixed", "algorithm.num_updates_per_batch=1"),
            *("trainer.total_steps=1000", "trainer.eval.every=0", "checkpoint.every=0", "actor.fsdp.load_wave_size=2"),
            *("actor.timeout_s=120", "rollout.timeout_s=120", "weight_sync.timeout_s=60", "rollout.batch_size=16"),
            *more,
        ]

    def run(self, name: str, *more: str, model: str = "whole") -> Config:
        """The same, checked and built."""
        return preflight(load_config(self.keys(name, *more, model=model)))


def models(bench: Bench) -> Found:
    """Write what the other parts read."""
    device, size = torch.device(bench.device), bench.size
    (bench.folder / "prompts.txt").write_text("".join(f'A sign "{word}"\n' for word in ("FLOW", "OPEN", "GO", "UP")))
    layers = {"whole": size.layers, "few_layers": size.few_layers}
    parameters = {name: save_medium(bench.folder / name, device, count, size.heads) for name, count in layers.items()}
    return {"parameters": parameters}


def say(text: str) -> None:
    """With the time of day, since several processes write to one screen."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


@dataclass(frozen=True)
class Arranged(Spawn):
    """`launcher=spawn`, but every place sees the GPUs that it is told to, and computes on the first."""

    visible: Mapping[str, str] = field(default_factory=dict)  # CUDA_VISIBLE_DEVICES, by place

    @contextmanager
    def open(self, places: Sequence[Place]) -> Iterator[Cluster]:
        """See `Spawn`."""
        threads = {"OMP_NUM_THREADS": str(share_of_cores(len(places)))}
        environments = {p.name: {"CUDA_VISIBLE_DEVICES": self.visible[p.name], **threads} for p in places}
        cluster = SpawnCluster(environments, self.start_timeout_s)
        try:
            yield cluster
        finally:
            cluster.close()
