"""All parts in turn.

    python -m benchmarks.multi_gpu                            # two GPUs, at most 9 minutes
    python -m benchmarks.multi_gpu --size tiny --device cpu   # the same on a CPU with gloo: 3 minutes

The model has the size of SD3.5 Medium and random weights. Every part runs in a process of its own that has a time
limit, and the report is written after each of them, so that one that fails or hangs leaves the numbers of the others.

    colocated   two ranks, and two engines that see the GPUs in different orders, each on another's GPU
    killed      the command, whose second rank is killed in the middle of a step
    publish_*   weights from one GPU to another by NCCL, compared once more in both modules
    update_*    two ranks (FSDP2) against one: the same update, and how much faster
    async_*     the command with `trainer=separate_async`, one GPU to train and one to draw
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import publish
from benchmarks.multi_gpu.commands import killed, overlapped
from benchmarks.multi_gpu.crossed import colocated
from benchmarks.multi_gpu.setting import SIZES, Bench, Found, models, say
from benchmarks.multi_gpu.updates import update
from benchmarks.provenance import provenance
from flowrl.distributed.weight_sync.manifest import Mode

MARGIN_S = 20.0  # less than that is not enough for any part
FORK = multiprocessing.get_context("fork")  # everything is imported already, and nothing of CUDA has begun
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",  # NVLink multicast, which not every host grants
    "OMP_WAIT_POLICY": "PASSIVE",
}


@dataclass(frozen=True)
class Part:
    """What is measured, and for how long at most."""

    measure: Callable[[Bench], Found]
    limit_s: float


def publication(bench: Bench, mode: Mode) -> Found:
    """Five versions, and the comparison after them, which raises if anything differs."""
    arguments = argparse.Namespace(transport="broadcast", staging="device", bucket_mb=512, repeats=5)
    return publish.measure(mode, arguments, tiny=bench.size is SIZES["tiny"])


PARTS = {
    "models": Part(models, 90),
    "colocated": Part(colocated, 90),
    "killed": Part(killed, 80),
    "publish_full": Part(partial(publication, mode="full"), 60),
    "publish_lora": Part(partial(publication, mode="lora"), 60),
    "update_lora": Part(partial(update, mode="lora"), 130),
    "update_full": Part(partial(update, mode="full"), 150),
    "async_lora": Part(partial(overlapped, mode="lora"), 130),
    "async_full": Part(partial(overlapped, mode="full"), 150),
}


def main() -> None:
    """Exits with 1 if a part failed, or found what should not be."""
    names = [name for name in PARTS if name != "models"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.multi_gpu")
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--limit-s", type=float, default=520.0, help="for all of it")
    parser.add_argument("--output", type=Path, help="default: multi_gpu.json in $OUT, or else in benchmarks/results")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit_s
    os.environ |= ENVIRONMENT | ({"CUDA_VISIBLE_DEVICES": ""} if arguments.device == "cpu" else {})
    output = arguments.output or Path(os.environ.get("OUT", publish.RESULTS), "multi_gpu.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "-m", "benchmarks.multi_gpu", *sys.argv[1:]])
    report = {**about(command), "size": asdict(SIZES[arguments.size]), "parts": {}}
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(SIZES[arguments.size], arguments.device, Path(folder))
        for name in ("models", *arguments.parts):
            found = report["parts"][name] = attempt(name, PARTS[name], bench, deadline)
            output.write_text(json.dumps(report, indent=1) + "\n")
            wrong = [f"{name}: {what}" for what in faults(found)]
            say("; ".join(wrong or [f"{name} is as it should be"]) + f" ({found['wall_s']} s)")
            failures += wrong
    say("\n  ".join(["failures:", *failures]) if failures else f"all is as it should be: {output}")
    sys.exit(1 if failures else 0)


def about(command: str) -> dict[str, Any]:
    """Which asks CUDA for its name: elsewhere."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(provenance, command, "diffusers", "peft").result()


def faults(found: Found) -> list[str]:
    """Of a part that failed, why; of one that did not, what does not hold."""
    if "error" in found:
        return [found["error"]]
    return [f"not so: {check}" for check, holds in found.get("checks", {}).items() if not holds]


def attempt(name: str, part: Part, bench: Bench, deadline: float) -> Found:
    """What a part has found, or how it failed."""
    began = time.monotonic()
    limit_s = min(part.limit_s, deadline - began)
    if limit_s < min(MARGIN_S, part.limit_s):
        return {"wall_s": 0.0, "error": "no time was left"}
    result, log = bench.folder / f"{name}.json", bench.folder / f"{name}.log"
    process = FORK.Process(target=alone, args=(part, bench, limit_s, result, log), name=name)
    process.start()
    try:
        process.join(limit_s)
    finally:
        late = process.exitcode is None
        if late and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)  # its workers end with it
            process.join()
    wall = {"wall_s": round(time.monotonic() - began, 1)}
    if result.exists():
        found: Found = json.loads(result.read_text())
        return wall | found
    tail = log.read_text(errors="replace")[-20000:]  # the frame in which it hangs comes before those that led there
    print(tail[-4000:], flush=True)
    error = f"took longer than {limit_s:.0f} s" if late else f"ended with exit code {process.exitcode}"
    return wall | {"error": error, "log": tail}


def alone(part: Part, bench: Bench, limit_s: float, result: Path, log: Path) -> None:
    """In the process of a part. What is written to stderr is only shown if it fails."""
    os.setsid()
    sys.stderr = log.open("w", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    faulthandler.enable(sys.stderr)
    faulthandler.dump_traceback_later(0.97 * limit_s, file=sys.stderr)
    result.write_text(json.dumps(part.measure(bench)))


if __name__ == "__main__":
    main()
