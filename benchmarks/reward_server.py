"""How many pictures a reward server takes, how long each request waits, and what a flood does to it.

    python -m benchmarks.reward_server     # a minute on a quiet machine; writes benchmarks/results/reward_server.json

A real `python -m flowrl.cli.serve_reward` with a scorer that does next to nothing, and a client in this process, on one
machine, over its loopback:

    throughput  a number of connections, each of which asks again as soon as it is answered, with 1, 8 or 32 pictures of
                64 x 64 in a request
    client      the same through flowrl's own client, from the threads of one reward worker
    flood       1000 requests at the same moment, ten times, to a queue of 50 and a scorer that takes 20 ms a batch: who
                is answered, with what, and how much memory the server and its scorer have afterwards
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.provenance import provenance
from flowrl.prompts import Prompt
from flowrl.rewards import wire
from flowrl.rewards.transport import Server

RESULTS = Path(__file__).parent / "results"
SIZE = 64
HEADERS = {"content-type": wire.CONTENT_TYPE, wire.VERSION_HEADER: wire.VERSION}
OPTION = """\
components:
  trivial:
    _target_: flowrl.rewards.combine.Component
    weight: 1.0
    scorer:
      _target_: benchmarks.reward_server.Trivial
      seconds: 0.0
"""


@dataclass(frozen=True, kw_only=True)
class Trivial:
    """One pixel of each picture, after some `seconds`."""

    seconds: float = 0.0

    def load(self) -> None:
        """There is nothing to load."""

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """In [0, 1]."""
        time.sleep(self.seconds)
        return images[:, 0, 0, 0] / 255


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_server")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement of throughput")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=RESULTS / "reward_server.json")
    arguments = parser.parse_args()
    busy = os.getloadavg()[0]
    found: dict[str, Any] = {}
    with serving("queue_size=100") as (port, _):
        found["throughput"] = [
            asyncio.run(throughput(port, num, arguments.connections, arguments.seconds)) for num in (1, 8, 32)
        ]
        found["client"] = own_client(port, 8, arguments.seconds)
    with serving("queue_size=50", "reward.components.trivial.scorer.seconds=0.02") as (port, pid):
        found["flood"] = [asyncio.run(flood(port, arguments.requests, pid)) for _ in range(arguments.rounds)]
    command = " ".join(["python", "-m", "benchmarks.reward_server", *sys.argv[1:]])
    packages = ("fastapi", "uvicorn", "httptools", "uvloop", "numpy", "safetensors", "httpx2")
    report = {**provenance(command, *packages), "load_before": round(busy, 2), **found}
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[int, int]]:
    """The port and the process of a server with `Trivial`."""
    with tempfile.TemporaryDirectory() as folder:
        option = Path(folder) / "reward" / "trivial.yaml"
        option.parent.mkdir()
        option.write_text(OPTION)
        command = [sys.executable, "-m", "flowrl.cli.serve_reward", "reward=trivial", f"config_dir={folder}", "port=0"]
        with subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            try:
                port = next(int(m[1]) for line in server.stderr if (m := re.search(r"running on .*:(\d+)", line)))
                Server(url=f"http://127.0.0.1:{port}").connect().wait("/healthz")
                yield port, server.pid
            finally:
                server.terminate()


# ---------------------------------------------------------------------------------------------- the load


def request(num: int, seed: int = 0) -> bytes:
    """A whole HTTP request with `num` pictures."""
    images = np.random.default_rng(seed).integers(0, 256, (num, SIZE, SIZE, 3), np.uint8)
    prompts = [Prompt(f"p{index}", "a photograph of a cat on a sofa") for index in range(num)]
    body = wire.encode(images, prompts)
    lines = [f"POST {wire.PATH} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in HEADERS.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes, num: int) -> int:
    """The status of the answer; 200 only for one with all scores."""
    writer.write(message)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = re.search(r"content-length: (\d+)", head)
    assert length is not None
    answer = json.loads(await reader.readexactly(int(length[1])))
    status = int(head.split()[1])
    if status == 200:
        wire.read_scores(answer, num)
    return status


async def throughput(port: int, num: int, connections: int, seconds: float) -> dict[str, Any]:
    """Requests of `num` pictures over `connections`, for some `seconds`."""
    times: list[float] = []
    message = request(num)

    async def client(until: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < until:
            before = time.perf_counter()
            assert await ask(reader, writer, message, num) == 200
            times.append(time.perf_counter() - before)
        writer.close()

    await asyncio.gather(*(client(time.perf_counter() + 1) for _ in range(connections)))  # warms up
    times.clear()
    started = time.perf_counter()
    await asyncio.gather(*(client(started + seconds) for _ in range(connections)))
    return figures(times, num, connections, time.perf_counter() - started)


def own_client(port: int, num: int, seconds: float) -> dict[str, Any]:
    """The same with what `reward=http` asks with."""
    server = Server(url=f"http://127.0.0.1:{port}", concurrency=8)
    body = wire.encode(np.zeros((num, SIZE, SIZE, 3), np.uint8), [Prompt("p", "a cat")] * num)
    times: list[float] = []
    until = time.perf_counter() + seconds

    def client(_: int) -> None:
        while time.perf_counter() < until:
            before = time.perf_counter()
            wire.read_scores(connection.post(wire.PATH, body, HEADERS, 10**6), num)
            times.append(time.perf_counter() - before)

    with server.connect() as connection:
        started = time.perf_counter()
        connection.map(client, range(server.concurrency))
    return figures(times, num, server.concurrency, time.perf_counter() - started)


def figures(times: Sequence[float], num: int, connections: int, seconds: float) -> dict[str, Any]:
    """What they come to."""
    hundredths = statistics.quantiles(times, n=100)
    found = {
        "pictures_per_request": num,
        "connections": connections,
        "requests": len(times),
        "pictures_per_second": round(len(times) * num / seconds),
        "requests_per_second": round(len(times) / seconds),
        "milliseconds_p50": round(1e3 * hundredths[49], 1),
        "milliseconds_p99": round(1e3 * hundredths[98], 1),
    }
    print(found)
    return found


async def flood(port: int, num_requests: int, pid: int) -> dict[str, Any]:
    """All at once, each over a connection of its own."""
    message = request(1)
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num_requests)]
    started = time.perf_counter()
    statuses = await asyncio.gather(*(ask(*connection, message, 1) for connection in connections))
    seconds = time.perf_counter() - started
    for _, writer in connections:
        writer.close()
    server = psutil.Process(pid)
    memory = [round(process.memory_info().rss / 1e6, 1) for process in (server, *scorers(server))]
    answers = {str(status): number for status, number in sorted(Counter(statuses).items())}
    found = {"answers": answers, "seconds": round(seconds, 2), "megabytes": memory}
    print(found)
    return found


def scorers(server: psutil.Process) -> list[psutil.Process]:
    """Its child, without the resource tracker of multiprocessing."""
    return [child for child in server.children() if "spawn_main" in " ".join(child.cmdline())]


if __name__ == "__main__":
    main()
