"""Two ranks against one: the same update, and how much faster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.layouts import FULL, LORA
from benchmarks.multi_gpu.setting import Arranged, Bench, Found, say
from flowrl.config import Config
from flowrl.distributed.fsdp import full_tensor
from flowrl.distributed.launch.base import gather
from flowrl.distributed.launch.placement import visible_gpus
from flowrl.rewards.combine import batch_advantages
from flowrl.tracking.metrics import memory_metrics
from flowrl.trainers.stages import Stages, open_stages
from flowrl.trainers.worker import ActorWorker
from flowrl.types import ScoredGroup

MODES = {"lora": LORA, "full": FULL}
# AdamW's first step is the sign of the gradient, and rounding would show as changes of sign. With an eps that dwarfs
# the gradient it is the gradient itself.
LINEAR = ("actor.optimizer.lr=0.02", "actor.optimizer.eps=1e-3", "actor.optimizer.weight_decay=0")
TOLERANCE = 2**-7  # of an update, by its norm: bfloat16 keeps 8 bits. Or twice what other micro-batches make, if more
AIM = 1.8  # times the throughput of one GPU, with two


def update(bench: Bench, mode: str) -> Found:
    """One batch on one rank, on two, and on one in smaller micro-batches, which shows what rounding alone comes to."""
    size = bench.size
    micro, sizes = size.micro_batch[mode], (4, size.num_samples)
    common = [*MODES[mode], *LINEAR, f"actor.micro_batch_size={micro}", "sampler.steps.steps=[0,1,2,3]"]
    common += [f"data.train_batch_size={sizes[0]}", f"data.num_samples_per_prompt={sizes[1]}"]
    one_run, two_run = bench.run("one", *common), bench.run("two", *common, "actor.num_ranks=2")
    other_run = bench.run("other", *common, f"actor.micro_batch_size={micro // 2}")
    last = (visible_gpus() or [""])[-1]  # where there is room beside rank 1
    other_run = replace(other_run, launcher=Arranged(visible={"actor-0": last}))
    with opened(one_run, two_run, other_run) as (one, two, other):
        say("all models are loaded")
        batch, advantages = collected(one, one_run)
        agreed = agreement({"one": one, "two": two, "other": other}, batch, advantages, size.stride[mode])
        say(f"first update of {len(advantages)} samples: {agreed}")
        rates = {name: rate(each, batch, advantages, size.num_timed) for name, each in (("one", one), ("two", two))}
    speedup = rates["one"]["median_s"] / rates["two"]["median_s"]
    difference = agreed["difference"]
    checks = {"the update is the same": difference["two"] <= max(TOLERANCE, 2 * difference["other"])}
    if bench.device == "cuda":
        checks[f"two are {AIM} times as fast as one"] = speedup >= AIM
    shape = {"samples": len(advantages), "rows": 4 * len(advantages), "micro_batch": micro}
    return {**shape, "agreement": agreed, "ranks": rates, "speedup": round(speedup, 3), "checks": checks}


@contextmanager
def opened(*runs: Config) -> Iterator[list[Stages]]:
    """All at once: to load takes longest."""
    with ExitStack() as closing, ThreadPoolExecutor(len(runs)) as threads:
        yield list(threads.map(closing.enter_context, [open_stages(run, 1000, None) for run in runs]))


def collected(stages: Stages, run: Config) -> tuple[list[ScoredGroup], Tensor]:
    """A batch, drawn and scored, and its advantages. The handles are good in every process of this host."""
    drawn = stages.rollouts.generate(stages.data.take(stages.data.batch_size), 0)
    batch = sorted(stages.rewards.stream(drawn), key=lambda scored: scored.sampled.group.ordinal)
    return batch, batch_advantages(batch, run.reward.weights, run.algorithm.advantages)


def agreement(fleets: dict[str, Stages], batch: Sequence[ScoredGroup], advantages: Tensor, stride: int) -> Found:
    """The first update of each, by what it does to the weights, compared with that of the first fleet."""
    starts = [trained(stages, stride) for stages in fleets.values()]
    assert all(torch.equal(start, starts[0]) for start in starts), "they begin with different weights"
    metrics = {name: updated(stages, batch, advantages)[1] for name, stages in fleets.items()}
    expected, *others = (trained(stages, stride).sub_(starts[0]) for stages in fleets.values())
    differences = (float((moved - expected).norm() / expected.norm()) for moved in others)
    shown = ("loss", "grad_norm", "ratio_min", "ratio_max")
    return {
        "measured": f"|change - change by one rank| / |change by one rank|, over every {stride}. trained weight",
        "num_weights": len(expected),
        "difference": dict(zip(list(fleets)[1:], differences, strict=True)),
        "metrics": {name: {key: found[f"train/{key}"] for key in shown} for name, found in metrics.items()},
    }


def updated(stages: Stages, batch: Sequence[ScoredGroup], advantages: Tensor) -> tuple[float, dict[str, float]]:
    """Seconds, and what the ranks have logged, for which they wait for their GPUs."""
    began = time.perf_counter()
    stages.actor.update(batch, advantages)
    metrics = stages.actor.metrics()
    return time.perf_counter() - began, metrics


def rate(stages: Stages, batch: Sequence[ScoredGroup], advantages: Tensor, times: int) -> Found:
    """Of updates after the first; and the memory of every rank."""
    workers = stages.actor.workers
    seconds = [updated(stages, batch, advantages)[0] for _ in range(times)]
    median = statistics.median(seconds)
    found = {
        "seconds": [round(each, 3) for each in seconds],
        "median_s": round(median, 3),
        "samples_per_s": round(len(advantages) / median, 2),
        "peak_gb": gather(workers, peak_gb, [()] * len(workers)),
    }
    say(f"{len(workers)} ranks: {found}")
    return found


def trained(stages: Stages, stride: int) -> Tensor:
    """Every `stride`-th trained weight, in one row."""
    workers = stages.actor.workers
    return gather(workers, weights, [(stride,)] * len(workers))[0]


def weights(worker: ActorWorker, stride: int) -> Tensor:
    """The same of one rank; all must be asked."""
    parameters = sorted(worker.actor.parameters.items())
    return torch.cat([full_tensor(parameter).flatten()[::stride].float().cpu() for _, parameter in parameters])


def peak_gb(worker: ActorWorker) -> float:
    """The most that the rank's process has held, in 10^9 bytes."""
    return round(memory_metrics(worker.device)["perf/mem_peak_gb"], 2)
