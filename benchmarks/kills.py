"""Runs that are killed at random moments, again and again, and must end as if nothing had happened.

    python -m benchmarks.kills

Each variant is run once undisturbed. Then the same command is given again and again and killed with SIGKILL after a
random time, until it comes to its end; metrics, weights, the optimiser, snapshots and every counter are compared bit
for bit with the undisturbed run. What the main thread was doing when it was killed is in the report.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import time
from collections import Counter
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
    began = time.monotonic()
    assert until_end(start(_command(model, here, "undisturbed", variant))) == 0
    whole = time.monotonic() - began
    kills: list[dict[str, Any]] = []
    num_runs = 0
    while len(kills) < num_kills:
        name = f"killed-{num_runs}"
        arguments = _command(model, here, name, variant)
        while (kill := _killed(arguments, here / name, chance.uniform(0.3, whole))) is not None:
            kills.append(kill)
        num_runs += 1
        assert_same(here / "runs" / name, here / "runs/undisturbed", STEPS)
    places = Counter(kill["doing"] for kill in kills)
    return {"kills": len(kills), "runs": num_runs, "undisturbed_s": whole, "killed_while": dict(places.most_common())}


def _command(model: Path, here: Path, name: str, variant: str) -> list[str]:
    return command(model, here, name, "trainer.eval.every=2", "checkpoint.every=1", *VARIANTS[variant])


def _killed(arguments: list[str], watched: Path, after_s: float) -> dict[str, Any] | None:
    """None if the run ended before it could be killed."""
    process = start(arguments, watched)
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
