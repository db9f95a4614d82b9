"""Runs that are killed at random moments, again and again, and must end as if nothing had happened.

    python -m benchmarks.kills

Each variant is run once undisturbed. Then the same command is given again and again and killed with SIGKILL after a
random time, most often one that begins with its first step, until it comes to its end; metrics, weights, the optimiser,
snapshots and every counter are compared bit for bit with the undisturbed run. What the main thread was doing when it
was killed is in the report.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from tests.support import tiny
from tests.support.killing import assert_same, doing, start, until_end
from tests.support.runs import STEPS, command

ASYNC = (
    *("trainer=separate_async", "trainer.mini_batch_size=2", "trainer.num_warmup_batches=0", "trainer.max_staleness=0"),
    "trainer.sync_compatible=true",
)
STEP = {"_collect", "update", "publish", "_evaluate", "evaluated", "trained", "log", "after", "finish", "steps"}
EARLY = 0.2  # share of the kills that may come while the run still loads
VARIANTS: dict[str, tuple[str, ...]] = {
    "inline": (),
    "inline, standalone, LoRA, DiffusionNFT": ("trainer.layout=standalone", "actor=lora", "algorithm=diffusion_nft"),
    "spawn, 2 ranks": ("launcher=spawn", "actor.num_ranks=2"),
    "separate_async, sync_compatible, spawn": (*ASYNC, "launcher=spawn"),
}


def run(variant: str, num_kills: int, seed: int, here: Path) -> dict[str, Any]:
    """At least so many kills, spread over as many runs as that takes. Raises AssertionError for a run that differs."""
    model = tiny.save_random_folder(here / "sd3")
    chance = random.Random(seed)
    loading, stepping = _undisturbed(_command(model, here, "undisturbed", variant), here / "undisturbed")
    kills: list[dict[str, Any]] = []
    num_runs = 0
    while len(kills) < num_kills:
        name = f"killed-{num_runs}"
        arguments = _command(model, here, name, variant)
        while True:
            early = chance.random() < EARLY
            after_s = chance.uniform(0.0, loading if early else stepping)
            if (kill := _killed(arguments, here / name, after_s, anywhere=early)) is None:
                break
            kills.append(kill)
        num_runs += 1
        assert_same(here / "runs" / name, here / "runs/undisturbed", STEPS)
    places = Counter(kill["doing"] for kill in kills)
    times = {"undisturbed_s": {"loading": round(loading, 1), "steps": round(stepping, 1)}}
    return {"kills": len(kills), "runs": num_runs, **times, "killed_while": dict(places.most_common())}


def _command(model: Path, here: Path, name: str, variant: str) -> list[str]:
    return command(model, here, name, "trainer.eval.every=2", "checkpoint.every=1", *VARIANTS[variant])


def _undisturbed(arguments: list[str], watched: Path) -> tuple[float, float]:
    """Seconds until the first step, or the evaluation before it, and from then on."""
    began = time.monotonic()
    process = start(arguments, watched)
    _wait_for_steps(process, watched)
    loaded = time.monotonic()
    assert until_end(process) == 0
    return loaded - began, time.monotonic() - loaded


def _wait_for_steps(process: BaseProcess, watched: Path) -> None:
    while process.exitcode is None and doing(watched).split(" > ")[0] not in STEP:
        process.join(0.005)


def _killed(arguments: list[str], watched: Path, after_s: float, *, anywhere: bool) -> dict[str, Any] | None:
    """None if the run ended before it could be killed. Time counts from the first step, or (`anywhere`) the start."""
    watched.unlink(missing_ok=True)
    process = start(arguments, watched)
    if not anywhere:
        _wait_for_steps(process, watched)
    process.join(after_s)
    if process.exitcode is None:
        process.kill()
        process.join()
    if process.exitcode == 0:
        return None
    assert process.exitcode == -signal.SIGKILL, f"the run failed by itself: exit code {process.exitcode}"
    return {"after_s": after_s, "doing": doing(watched)}


def main() -> None:
    """All variants, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=12, help="for each variant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kills.json"))
    arguments = parser.parse_args()
    report = provenance("python -m benchmarks.kills", "diffusers", "peft") | {"steps": STEPS, "variants": {}}
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as here:
            report["variants"][variant] = run(variant, arguments.kills, arguments.seed, Path(here))
        print(variant, json.dumps(report["variants"][variant]), flush=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
