"""The main job with several seeds: does the held-out score rise, how long does it take, how much memory?

    python -m benchmarks.main_job --seeds 0 1 2                      # writes benchmarks/results/tiny_ocr.json
    python -m benchmarks.main_job --recipe tiny_ocr_nft --seeds 0    # writes benchmarks/results/tiny_ocr_nft.json
    python -m benchmarks.main_job --seeds 0 --variant ray_2_ranks launcher=ray actor.num_ranks=2

Each seed is a run of the command in a process of its own, as a user starts it. Time and memory count that process and
all its children, from start to report; nothing else should be running.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

SCORE, PERFECT = "eval/heldout/ocr_mean", "eval/heldout/ocr_perfect"
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run every seed, print a line for each and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.main_job")
    parser.add_argument("--recipe", default="tiny_ocr")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--variant", help="part of the file's name, where overrides make another run of it")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<recipe>[_<variant>].json")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    name = "_".join(part for part in (arguments.recipe, arguments.variant) if part)
    results = [run(arguments.recipe, seed, arguments.runs, name, arguments.overrides) for seed in arguments.seeds]
    output = arguments.output or RESULTS / f"{name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report(arguments.recipe, results), indent=1) + "\n")


def run(recipe: str, seed: int, runs: Path, name: str = "", overrides: Sequence[str] = ()) -> dict[str, Any]:
    """One seed: its curve, wall-clock seconds and peak memory. Raises CalledProcessError if the run fails."""
    name = f"{name or recipe}_seed{seed}"
    command = [sys.executable, "-m", "flowrl", f"recipe={recipe}", f"name={name}", f"runs={runs}"]
    command += [f"seed={seed}", f"data.seed={seed}", *overrides]
    began = time.perf_counter()
    process = subprocess.Popen(command)
    peak = PeakMemory(process.pid)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    result = {
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        "peak_memory_gb": round(peak.stop() / 1e9, 2),
        "command": " ".join(["python", *command[1:]]),
        **curves(runs / name / "metrics.jsonl"),
    }
    held_out = result["held_out"]
    print(
        f"seed {seed}: exact {held_out[0][1]:.3f} -> {held_out[-1][1]:.3f}, score {held_out[0][2]:.3f} -> "
        f"{held_out[-1][2]:.3f}, {result['seconds']:.0f} s, {result['peak_memory_gb']} GB"
    )
    return result


def curves(path: Path) -> dict[str, Any]:
    """(step, exact match, score) of the held-out words, and the training reward of every step."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        "held_out": [[r["step"], round(r[PERFECT], 4), round(r[SCORE], 4)] for r in records if SCORE in r],
        "reward": [round(r["reward/mean"], 4) for r in records if "reward/mean" in r],
        "seconds_per_step": [round(r["perf/step_s"], 2) for r in records if "perf/step_s" in r],
    }


class PeakMemory:
    """Largest proportional set size (shared pages counted once) of a process and its descendants; Linux."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Bytes."""
        self._done.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._done.wait(1.0):
            self._peak = max(self._peak, sum(_proportional_bytes(pid) for pid in _family(self._pid)))


def _family(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:  # it ended while we looked
            continue
        found.extend(int(child) for child in children)
    return found


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def report(recipe: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results with what they were measured on."""
    command = " ".join(["python", "-m", "benchmarks.main_job", *sys.argv[1:]])
    about = provenance(command, "diffusers", "transformers", "rapidocr", "onnxruntime")
    return {"recipe": recipe, **about, "runs": results}


if __name__ == "__main__":
    main()
