"""Layout colocated where the order of places says nothing about who shares a GPU with whom."""

from __future__ import annotations

import os
from dataclasses import replace

from benchmarks import publish
from benchmarks.layouts import FULL
from benchmarks.multi_gpu.setting import Arranged, Bench, Found, say
from benchmarks.multi_gpu.updates import collected, updated
from flowrl.distributed.launch.base import gather
from flowrl.distributed.launch.placement import visible_gpus
from flowrl.distributed.weight_sync.checksum import Checksums, verify
from flowrl.distributed.weight_sync.manifest import Manifest
from flowrl.distributed.weight_sync.sender import Sender
from flowrl.distributed.weight_sync.transports.cuda_ipc import identity, match
from flowrl.rollout.worker import RolloutWorker
from flowrl.trainers.rollouts import SeparateRollouts
from flowrl.trainers.stages import Stages, open_stages
from flowrl.trainers.worker import ActorWorker

NUM_CYCLES = 3
SHOWN = ("publish/version", "publish/bytes", "perf/publication_s")


def colocated(bench: Bench) -> Found:
    """Engine 0 sees the GPUs in reverse: it shares one with rank 1, and engine 1 shares the other with rank 0."""
    first, last = [*visible_gpus(), "", ""][:2]
    ranks = {"actor-0": first, "actor-1": last}
    engines = {"rollout-0": f"{last},{first}", "rollout-1": f"{first},{last}"}
    keys = ("trainer.layout=colocated", "actor.num_ranks=2", *FULL, "actor.micro_batch_size=8")
    sizes = ("data.train_batch_size=2", "data.num_samples_per_prompt=4", "sampler.steps.steps=[0,1]")
    run = bench.run("colocated", *keys, *sizes, model="few_layers")
    run = replace(run, launcher=Arranged(visible=ranks | engines))
    published = []
    with open_stages(run, 1000, None) as stages:
        rollouts = stages.rollouts
        assert isinstance(rollouts, SeparateRollouts)
        seen = processes(stages, rollouts)
        routes = match([seen[name]["device"] for name in ranks], [seen[name]["device"] for name in engines])
        say(f"{seen}; engines are served by ranks {routes}")
        for _ in range(NUM_CYCLES):
            updated(stages, *collected(stages, run))
            rollouts.publish(stages.actor.version)
            metrics = stages.meter.collect()
            published.append({name: metrics[name] for name in SHOWN})
        compare(stages, rollouts)
        say(f"both engines hold the ranks' weights: {published[-1]}")
    versions = [each["publish/version"] for each in published]
    checks = {"every version was published": versions == list(range(1, NUM_CYCLES + 1))}
    if bench.device == "cuda":
        checks["by CUDA IPC"] = rollouts.publisher.transport == "cuda_ipc"
        checks["engines are matched by UUID"] = routes == (1, 0)
    transport = rollouts.publisher.transport
    return {"transport": transport, "processes": seen, "routes": routes, "published": published, "checks": checks}


def processes(stages: Stages, rollouts: SeparateRollouts) -> dict[str, dict[str, str]]:
    """By name of the place, which GPUs its process sees and which one it computes on."""
    actors, engines = stages.actor.workers, rollouts.workers
    names = [*(worker.name for worker in actors), *rollouts.names]
    found = [*gather(actors, sees, [()] * len(actors)), *gather(engines, sees, [()] * len(engines))]
    return dict(zip(names, found, strict=True))


def sees(worker: ActorWorker | RolloutWorker) -> dict[str, str]:
    """The same of one process."""
    device = worker.device if isinstance(worker, ActorWorker) else worker.receiver.device
    return {"visible": os.environ["CUDA_VISIBLE_DEVICES"], "device": identity(device)}


def compare(stages: Stages, rollouts: SeparateRollouts) -> None:
    """Raises TransferError unless the engines' modules hold what the ranks' modules do."""
    actors, engines = stages.actor.workers, rollouts.workers
    manifest = actors[0].call(ActorWorker.plan, stages.actor.version).result()
    gather(engines, RolloutWorker.wake, [()] * len(engines))
    sent = gather(actors, digests, [(manifest,)] * len(actors))
    held = gather(engines, digests, [(manifest,)] * len(engines))
    verify(manifest, sent, dict(zip(rollouts.names, held, strict=True)))


def digests(worker: ActorWorker | RolloutWorker, manifest: Manifest) -> Checksums:
    """Of what the module holds; all ranks must be asked."""
    if isinstance(worker, ActorWorker):
        return publish.digests_of(worker.sender, manifest)
    policy = worker.policy
    return publish.digests_of(Sender(policy.module, "full", wire_dtype=policy.dtype, device=policy.device), manifest)
