"""Real worker processes for tests: started once, and given another run again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import flowrl
from flowrl.config import Config
from flowrl.distributed.fsdp import full_tensor
from flowrl.distributed.launch.base import Cluster, Launcher, gather
from flowrl.flow.noise import Noise
from flowrl.preflight import preflight
from flowrl.tracking.metrics import Meter
from flowrl.trainers.fleet import ActorFleet
from flowrl.trainers.placement import actor_places, rollout_places
from flowrl.trainers.worker import ActorWorker
from flowrl.types import SampledGroup, ScoredGroup
from tests.support import tiny

TOTAL_UPDATES = 10


def configure(folder: Path, *overrides: str) -> Config:
    """A small run of the random model in `folder`, on the CPU."""
    common = [
        "debug=short",
        "device=cpu",
        f"model.path={folder}",
        "model.max_sequence_length=0",
        "reward=jpeg_compressibility",
        "reward.num_workers=0",
        "sampler.num_steps=4",
        "sampler/dynamics=flow_sde",
        "algorithm=flow_grpo",
        "logger=jsonl",
        "launcher=spawn",
        "data.train_batch_size=4",
        "data.num_samples_per_prompt=4",
    ]
    return preflight(flowrl.load_config([*common, *overrides]))


def adopt(worker: ActorWorker, run: Config) -> None:
    """Become a rank of another run, in the same process."""
    torch.manual_seed(worker.rank)  # whatever is global must not matter
    worker.run = run
    worker.meter = Meter()
    worker.engine = None
    worker.load()


def weights(worker: ActorWorker) -> dict[str, Tensor]:
    """The trained weights, whole; all ranks must be asked."""
    return {name: full_tensor(p).cpu().clone() for name, p in worker.actor.parameters.items()}


def averages(worker: ActorWorker) -> dict[str, Tensor]:
    """The snapshots and the average, whole; all ranks must be asked."""
    ema = {} if worker.actor.ema is None else {"ema": worker.actor.ema}
    found = {**worker.actor.snapshots, **ema}
    return {f"{s}.{name}": full_tensor(v).cpu().clone() for s, snap in found.items() for name, v in snap.values.items()}


class Ranks:
    """The ranks of a cluster that stays."""

    def __init__(self, cluster: Cluster, run: Config) -> None:
        self.cluster = cluster
        self.workers = [
            cluster.start(place.name, partial(ActorWorker, run, TOTAL_UPDATES, rank))
            for rank, place in enumerate(actor_places(run))
        ]
        if len(self.workers) > 1:
            address = self.workers[0].call(ActorWorker.host).result()
            gather(self.workers, ActorWorker.join, [(address,)] * len(self.workers))

    def fleet(self, run: Config) -> ActorFleet:
        """Of a fresh model."""
        self.all(adopt, run)
        return ActorFleet(self.workers, run.algorithm, Noise.of(run.seed), Meter())

    def all(self, function: object, *arguments: object) -> list:  # type: ignore[type-arg]
        """The same on every rank."""
        return gather(self.workers, function, [arguments] * len(self.workers))  # type: ignore[arg-type]


@contextmanager
def ranks(launcher: Launcher, run: Config) -> Iterator[Ranks]:
    """Processes for the actor, and places for the rollout workers that `run` asks for."""
    with launcher.open([*actor_places(run), *rollout_places(run)]) as cluster:
        yield Ranks(cluster, run)


def scored(drawn: Sequence[SampledGroup]) -> list[ScoredGroup]:
    """In the order of their ordinals, with a reward that any picture has."""
    return tiny.brightness(sorted(drawn, key=lambda sampled: sampled.group.ordinal))


def advantages(batch: Sequence[ScoredGroup], seed: int = 0) -> Tensor:
    """Any: brightness hardly varies in a random model."""
    count = sum(group.sampled.group.num_samples for group in batch)
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
