"""What a million prompts cost: the tools of `data_process` and the loader of a run, each in a process on one core.

    python -m benchmarks.data_process                # some minutes; writes benchmarks/results/data_process.json

The prompts are 3 to 20 random words and a quoted target; one in twenty is a copy of another in capitals. `wall_s`
includes the start of Python; `cpu_s` is what the process computed, which is less where other work runs beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

RESULTS = Path(__file__).parent / "results"
LOAD = "import sys; from flowrl.data.prompts import load_prompts; print(len(load_prompts(sys.argv[1], 'quoted')))"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_process")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=RESULTS / "data_process.json")
    arguments = parser.parse_args()
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        source = write_prompts(Path(folder) / "prompts.txt", arguments.prompts)
        results = {name: measured(name, command) for name, command in commands(source).items()}
    command = " ".join(["python", "-m", "benchmarks.data_process", *sys.argv[1:]])
    report = {
        **provenance(command, "pyarrow"),
        "load_before": round(busy, 2),
        "prompts": arguments.prompts,
        "results": results,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def write_prompts(path: Path, count: int) -> Path:
    """The same ones every time."""
    numbers = random.Random(0)
    words = [f"word{n}" for n in range(20_000)]
    lines: list[str] = []
    for n in range(count):
        if n % 20 == 19:
            lines.append(lines[-1].upper())
        else:
            lines.append(f'{" ".join(numbers.choices(words, k=numbers.randint(3, 20)))} "SIGN {n % 5000}"')
    path.write_text("\n".join(lines))
    return path


def commands(source: Path) -> dict[str, list[str]]:
    """In the order of their need for each other's files."""
    folder = source.parent
    tool = ["-m", "data_process"]
    split = ["--eval-size", "2048", "--eval-subset-sizes", "64", "256"]
    found: dict[str, list[str]] = {}
    for suffix in ("jsonl", "parquet"):
        made, out = str(folder / f"all.{suffix}"), folder / suffix
        files = ["--train", str(out / f"train.{suffix}"), "--eval", str(out / f"eval.{suffix}")]
        found |= {
            f"prepare {suffix}": [*tool, "prepare", "--source", "ocr", "--input", str(source), "--output", made],
            f"curate {suffix}": [*tool, "curate", "--input", made, "--out-dir", str(out), "--format", suffix, *split],
            f"inspect {suffix}": [*tool, "inspect", *files, "--target", "quoted", "--task", "t2i"],
            f"load {suffix}": ["-c", LOAD, files[1]],
        }
    return found


def measured(name: str, command: Sequence[str]) -> dict[str, Any]:
    """Seconds and peak memory of one process."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, preexec_fn=one_core)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    assert status == 0, f"{name} failed"
    result = {
        "wall_s": round(wall, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_memory_mb": round(used.ru_maxrss / 1024),
    }
    print(name, result, flush=True)
    return result


def one_core() -> None:
    """Of those that this process may use."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


if __name__ == "__main__":
    main()
