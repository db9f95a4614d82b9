"""What the replay buffer costs: a heavy group through Ray, and the books of 100,000 groups.

    python -m benchmarks.buffer                    # a minute on a quiet machine; writes benchmarks/results/buffer.json
    python -m benchmarks.buffer --no-transfer-queue

One group of 50 MB goes from the process that has drawn it to one that fetches it, in five ways, in turn and many times:

    bare            ray.put in one actor, ray.get in another: views of shared memory that cannot be written to
    bare_copied     the same and a copy of each array, since what is fetched must be writable
    memory          flowrl's stream from a worker, put and take of `buffer=memory`, fetch in another worker
    queue           kv_put in one worker, kv_batch_get in another: TransferQueue by itself
    transfer_queue  as `memory`, with `buffer=transfer_queue`

All begin with the same tensors in the first process and end when the second has them. The driver waits for each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.provenance import provenance
from flowrl.buffer.ledger import Ledger
from flowrl.buffer.memory import AsItIs, MemoryBuffer
from flowrl.buffer.replay import ReplayBuffer
from flowrl.buffer.transfer_queue import TransferQueueBuffer, transfer_queue
from flowrl.distributed.launch.base import Place, Remote
from flowrl.distributed.launch.ray import Ray
from flowrl.prompts import Prompt
from flowrl.types import Group, Handle, InMemory, SampledGroup, Sampling, ScoredGroup

RESULTS = Path(__file__).parent / "results"
MB = 1_000_000
NUM_SAMPLES = 8


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buffer")
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--transfer-queue", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", type=Path, default=RESULTS / "buffer.json")
    arguments = parser.parse_args()
    with_queue = arguments.transfer_queue and importlib.util.find_spec("transfer_queue") is not None
    busy = os.getloadavg()[0]
    results = {
        "group": heavy_group(arguments.megabytes, arguments.repeats, with_queue),
        "books": books(arguments.groups),
    }
    arguments.output.write_text(json.dumps(report(arguments, results, busy, with_queue), indent=1) + "\n")


def report(arguments: argparse.Namespace, results: dict[str, Any], busy: float, with_queue: bool) -> dict[str, Any]:
    """The results with what they were measured on."""
    command = " ".join(["python", "-m", "benchmarks.buffer", *sys.argv[1:]])
    return {
        **provenance(command, "numpy", "ray", *(("TransferQueue",) if with_queue else ())),
        "load_before": round(busy, 2),
        "megabytes": arguments.megabytes,
        "repeats": arguments.repeats,
        "groups": arguments.groups,
        **results,
    }


# ---------------------------------------------------------------------------------------------- one heavy group


def tensors(megabytes: int) -> dict[str, torch.Tensor]:
    """Like a trajectory: states before and after, the last ones, and text embeddings."""
    parts = {"latents": 0.45, "next_latents": 0.45, "final_latents": 0.05, "embeds": 0.05}
    return {
        name: torch.rand(NUM_SAMPLES, int(share * megabytes * MB / 4 / NUM_SAMPLES)) for name, share in parts.items()
    }


def group(ordinal: int) -> Group:
    """Of one prompt."""
    return Group(ordinal, Prompt(f"p{ordinal}", 'A sign that says "FLOW"'), 0, NUM_SAMPLES)


class Drawer:
    """A worker that has drawn a group."""

    def __init__(self, megabytes: int) -> None:
        self.drawn = tensors(megabytes)

    def draw(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """One item."""
        yield "light", self.drawn

    def queue(self, key: str) -> None:
        """Put it into TransferQueue."""
        transfer_queue().kv_put(key=key, partition_id="bare", fields=self.drawn)


class Reader:
    """A worker that trains on it."""

    def fetch(self, handle: Handle) -> int:
        """Bytes."""
        return sum(value.nbytes for value in handle.fetch().values())

    def queue(self, key: str) -> int:
        """Bytes, from TransferQueue, with its nested tensors unpacked."""
        row = transfer_queue().kv_batch_get(key, "bare")
        transfer_queue().kv_clear(key, "bare")
        return sum(row[name].unbind()[0].nbytes for name in row.keys())  # noqa: SIM118  (a TensorDict)


class Bare:
    """Both ends without flowrl."""

    def __init__(self, megabytes: int) -> None:
        self.arrays = {name: value.numpy() for name, value in tensors(megabytes).items()}

    def put(self) -> list[Any]:
        """The reference in a list, or Ray would send what it refers to."""
        return [ray.put(self.arrays)]

    def get(self, reference: list[Any], copy: bool) -> int:
        """Bytes."""
        found: dict[str, np.ndarray] = ray.get(reference[0])
        held = [array.copy() if copy else array for array in found.values()]
        return sum(array.nbytes for array in held)


def heavy_group(megabytes: int, repeats: int, with_queue: bool) -> dict[str, Any]:
    """Seconds of every way, the first of which warm up."""
    settings = [MemoryBuffer(), *([TransferQueueBuffer()] if with_queue else [])]
    places = [Place("drawer"), Place("reader"), *(place for each in settings for place in each.places())]
    with ExitStack() as closing:
        cluster = closing.enter_context(Ray(num_threads=1).open(places))
        drawer: Remote[Drawer] = cluster.start("drawer", lambda: Drawer(megabytes))
        reader: Remote[Reader] = cluster.start("reader", Reader)
        ways = bare_ways(megabytes)
        for name, each in zip(("memory", "transfer_queue"), settings, strict=False):
            ways[name] = through(closing.enter_context(each.open(cluster)), drawer, reader)
        if with_queue:
            ways["queue"] = queue_alone(drawer, reader)
        seconds = alternate(ways, repeats, expected=drawer_bytes(megabytes))
    bare, copied = (statistics.median(seconds[name]) for name in ("bare", "bare_copied"))
    found = {}
    for name, each in seconds.items():
        median = statistics.median(each)
        found[name] = {
            "milliseconds_median": round(1e3 * median, 2),
            "milliseconds_quartiles": [round(1e3 * q, 2) for q in statistics.quantiles(each, n=4)[::2]],
            "times_bare": round(median / bare, 2),
            "times_bare_copied": round(median / copied, 2),
        }
        print(f"{name:15s} {1e3 * median:7.1f} ms, {median / bare:.2f} x bare, {median / copied:.2f} x bare_copied")
    return found


def drawer_bytes(megabytes: int) -> int:
    """What every way must bring."""
    return sum(value.nbytes for value in tensors(megabytes).values())


def bare_ways(megabytes: int) -> dict[str, Callable[[int], int]]:
    """Two Ray actors of their own."""
    source, sink = (ray.remote(Bare).options(num_cpus=0).remote(megabytes) for _ in range(2))

    def way(copy: bool) -> Callable[[int], int]:
        return lambda number: int(ray.get(sink.get.remote(ray.get(source.put.remote()), copy)))

    return {"bare": way(copy=False), "bare_copied": way(copy=True)}


def through(buffer: ReplayBuffer, drawer: Remote[Drawer], reader: Remote[Reader]) -> Callable[[int], int]:
    """From the worker's stream to the other worker, through the buffer."""
    sampling = Sampling(0, (0,), (1.0, 0.0), "FlowSDE()", 1.0, (16, 64, 64))

    def way(number: int) -> int:
        buffer.submit([group(number)])
        ((_, handle),) = drawer.stream(Drawer.draw)
        buffer.put(ScoredGroup(SampledGroup(group(number), None, sampling, handle), {}))
        (taken,) = buffer.take(1)
        num_bytes = reader.call(Reader.fetch, taken.sampled.drawn).result()
        buffer.trained([number])
        return num_bytes

    return way


def queue_alone(drawer: Remote[Drawer], reader: Remote[Reader]) -> Callable[[int], int]:
    """TransferQueue's own calls in both workers."""

    def way(number: int) -> int:
        drawer.call(Drawer.queue, str(number)).result()
        return reader.call(Reader.queue, str(number)).result()

    return way


def alternate(ways: dict[str, Callable[[int], int]], repeats: int, expected: int) -> dict[str, list[float]]:
    """Every way in each round, so that whatever else the machine does falls on all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 3):
        for name, way in ways.items():
            began = time.perf_counter()
            num_bytes = way(number)
            if number >= 3:
                seconds[name].append(time.perf_counter() - began)
            assert num_bytes == expected, f"{name} brought {num_bytes} bytes of {expected}"
    return seconds


# ---------------------------------------------------------------------------------------------- the books


def books(num_groups: int, repeats: int = 2000) -> dict[str, Any]:
    """Microseconds of each call with so many groups pending, and then finished."""
    found = {}
    for state in ("pending", "finished"):
        buffer = ReplayBuffer(Ledger(), AsItIs())
        buffer.submit(group(ordinal) for ordinal in range(num_groups))
        if state == "finished":
            for ordinal in range(num_groups):
                buffer.put(scored(ordinal))
        found[state] = calls(buffer, num_groups, repeats)
        slowest = max(found[state].items(), key=lambda item: item[1]["p99"])
        print(f"{num_groups} {state}: p99 of the slowest call, {slowest[0]}: {slowest[1]['p99']} us", flush=True)
        found[state] |= whole(buffer)
    return found


def scored(ordinal: int) -> ScoredGroup:
    """Without anything heavy; a new version of the weights every 100 groups."""
    sampling = Sampling(ordinal // 100, (0,), (1.0, 0.0), "FlowSDE()", 1.0, (16, 64, 64))
    return ScoredGroup(SampledGroup(group(ordinal), None, sampling, InMemory(None)), {})


def calls(buffer: ReplayBuffer, num_groups: int, repeats: int) -> dict[str, Any]:
    """Microseconds of every call on one group, while the others wait."""
    spent: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        spent.setdefault(name, []).append(1e6 * (time.perf_counter() - began))
        return result

    for number in range(repeats):
        new, lost = group(num_groups + 2 * number), group(num_groups + 2 * number + 1)
        result = scored(new.ordinal)
        timed("submit", lambda new=new, lost=lost: buffer.submit([new, lost]))
        timed("begin", lambda new=new: buffer.begin(new.ordinal))
        timed("fail", lambda new=new: buffer.fail(new.ordinal, "worker died"))
        timed("retry", lambda new=new: buffer.retry(new.ordinal))
        timed("put", lambda result=result: buffer.put(result))
        (taken,) = timed("take", lambda: buffer.take(1))
        ordinal = taken.sampled.group.ordinal
        timed("release", lambda ordinal=ordinal: buffer.release([ordinal]))
        buffer.take(1)
        timed("trained", lambda ordinal=ordinal: buffer.trained([ordinal]))
        timed("evict", lambda lost=lost: buffer.evict(lost.ordinal, "stale"))
        timed("room", lambda: buffer.room(1))
        timed("accounting", buffer.accounting)
    return {
        name: {
            "median": round(statistics.median(times), 1),
            "p99": round(statistics.quantiles(times, n=100)[-1], 1),
            "max": round(max(times), 1),
        }
        for name, times in spent.items()
    }


def whole(buffer: ReplayBuffer) -> dict[str, float]:
    """Milliseconds of what concerns all groups: a checkpoint, a resume."""
    began = time.perf_counter()
    state = buffer.state_dict()
    saved = time.perf_counter()
    resumed = ReplayBuffer(Ledger(), AsItIs())
    resumed.load_state_dict(state)
    loaded = time.perf_counter()
    resumed.pending()
    listed = time.perf_counter()
    return {
        "state_dict_ms": round(1e3 * (saved - began), 1),
        "load_state_dict_ms": round(1e3 * (loaded - saved), 1),
        "pending_ms": round(1e3 * (listed - loaded), 1),
    }


if __name__ == "__main__":
    from benchmarks.buffer import main as by_name  # workers look classes up by their module's name

    by_name()
