"""Whole runs of the command: one that generates while it trains, and one that loses a rank."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

from benchmarks.layouts import FULL
from benchmarks.multi_gpu.setting import Bench, Found, say
from benchmarks.multi_gpu.updates import MODES
from flowrl.cli.train import command
from flowrl.distributed.launch.process import WORKER

LOOK_EVERY_S = 0.02
BOUND_S = 30.0  # for a run to end whose rank has been killed
STOPPED_AT_ONCE = 130
MEANS = (
    *("perf/step_s", "perf/wait_s", "perf/update_s", "perf/publish_s", "perf/publication_s", "publish/bytes"),
    *("async/overlap", "async/actor_idle", "async/rollout_idle", "async/staleness_mean", "perf/mem_peak_gb"),
)
"""A publication waits for the worker's present chunk, which counts in `perf/publication_s`; not so in `publish_*`."""

Deed = Callable[[Event], float | None]
"""Done in a thread beside the command; the event says that the command has ended. Returns when it was done."""


@dataclass(frozen=True)
class Ended:
    """How a command came to its end."""

    status: int
    message: str  # what the command itself says on stderr, without notes
    began: float  # of time.monotonic()
    done: float | None  # when the deed was done
    ended: float


def commanded(keys: Sequence[str], deed: Deed) -> Ended:
    """Carry out the command in this process. Raises what the deed raises."""
    log, began, over = sys.stderr, time.monotonic(), Event()
    with ThreadPoolExecutor(1) as beside, redirect_stderr(io.StringIO()) as said, redirect_stdout(log):
        doing = beside.submit(deed, over)
        try:
            status = command(keys)
        finally:
            over.set()
            log.write(said.getvalue())
        ended = time.monotonic()
    lines = said.getvalue().splitlines()
    message = next((line for line in lines if line.startswith("flowrl:")), "")
    return Ended(status, message, began, doing.result(), ended)


def nothing(over: Event) -> None:
    """Let the command come to its end."""


# ---------------------------------------------------------------------------------------------- separate_async


def overlapped(bench: Bench, mode: str) -> Found:
    """With LoRA to its end. Full training would end with a checkpoint of 27 GB, and is stopped at once before."""
    cycles, name = bench.size.num_cycles, f"async_{mode}"
    records = bench.folder / name / "metrics.jsonl"
    whole = mode == "lora"
    total = cycles if whole else 2 * cycles
    keys = bench.keys(
        name,
        *("trainer=separate_async", "trainer.mini_batch_size=2", f"trainer.total_steps={total}"),
        "sampler.num_steps=10",
        *("data.train_batch_size=2", f"data.num_samples_per_prompt={bench.size.num_async}"),
        *(*MODES[mode], "actor.micro_batch_size=16", "sampler.steps.steps=[0,1]", "algorithm/correction=truncated"),
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    end = commanded(keys, nothing if whole else partial(stop_after, records, cycles))
    steps = read(records)[1 : cycles + 1]
    if len(steps) < cycles:
        raise RuntimeError(f"{len(steps)} cycles were made, not {cycles}: {end}")
    means = {key: round(statistics.fmean(step[key] for step in steps[4:-2]), 4) for key in MEANS}
    say(f"{mode}: {len(steps)} cycles, {means}")
    last = steps[-1]
    found_in = ("buffer/trained", "buffer/evicted_", "buffer/in_flight")
    found = sum(value for key, value in last.items() if key.startswith(found_in))
    return {
        "seconds": round(end.ended - end.began, 1),
        "cycles": len(steps),
        "means": means,
        "staleness_max": max(step["async/staleness_max"] for step in steps),
        "checks": {
            "the command ended as it should": end.status == (0 if whole else STOPPED_AT_ONCE),
            "each was published": [step["publish/version"] for step in steps] == list(range(1, cycles + 1)),
            "no transfer failed": not any(step["publish/failures"] for step in steps),
            "all groups are accounted for": last["buffer/submitted"] == found,
        },
    }


def stop_after(records: Path, step: int, over: Event) -> float:
    """Ctrl-C twice: without saving."""
    wait_for(records, step, over)
    for _ in range(2):
        if not over.wait(0.2):
            os.kill(os.getpid(), signal.SIGINT)
    return time.monotonic()


# ---------------------------------------------------------------------------------------------- a rank is killed


def killed(bench: Bench) -> Found:
    """Two ranks, of which the second gets SIGKILL in the middle of its third update."""
    sizes = ("data.train_batch_size=2", "data.num_samples_per_prompt=4", "sampler.steps.steps=[0,1,2,3]")
    keys = bench.keys("killed", *FULL, "actor.num_ranks=2", "actor.micro_batch_size=2", *sizes, model="few_layers")
    end = commanded(keys, partial(kill_in_update, bench.folder / "killed/metrics.jsonl", 3))
    assert end.done is not None
    seconds = end.ended - end.done
    say(f"ended {seconds:.1f} s after the kill, with status {end.status}: {end.message}")
    return {
        "seconds_from_kill_to_end": round(seconds, 2),
        "status": end.status,
        "message": end.message,
        "checks": {
            f"it ended within {BOUND_S:g} s": seconds < BOUND_S,
            "as a failure": end.status == 1,
            "that names the rank and the signal": "actor-1" in end.message and "SIGKILL" in end.message,
            "and left no process behind": not multiprocessing.active_children(),
        },
    }


def kill_in_update(records: Path, step: int, over: Event) -> float:
    """Rank 1, half-way through the update of that step; returns when."""
    last = wait_for(records, step - 1, over)
    over.wait(last["perf/rollout_s"] + last["perf/update_s"] / 2)
    (victim,) = [child for child in multiprocessing.active_children() if child.name == f"{WORKER}-actor-1"]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    return time.monotonic()


# ---------------------------------------------------------------------------------------------- records


def read(records: Path) -> list[dict[str, float]]:
    """Those that are whole: the last line may still be written."""
    lines = records.read_text().splitlines(keepends=True) if records.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for(records: Path, step: int, over: Event) -> dict[str, float]:
    """The record of a step as soon as it is there. Raises RuntimeError if the command ends before."""
    while not over.wait(LOOK_EVERY_S):
        if found := [record for record in read(records) if record["step"] >= step]:
            return found[0]
    raise RuntimeError(f"the command ended before step {step}")
