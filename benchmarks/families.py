"""One complete FlowGRPO step of every family at its published size, on one GPU: does it fit, and where does time go?

    python -m benchmarks.families --output benchmarks/results/families_h200.json     # one GPU of 140 GB, 5 minutes
    python -m benchmarks.families --size tiny --output /tmp/families.json            # does the benchmark work? on a CPU

Weights are random, so there is nothing to download and nothing to learn; they are as large and as slow as the real
ones, text encoders and autoencoder included. Each family runs in a process of its own through the command's own code,
with a shipped recipe on which one GPU, fewer samples and a reward that needs no weights are set.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import flowrl
from benchmarks.provenance import provenance

CASES: dict[str, tuple[str, ...]] = {
    "Qwen-Image": ("recipe=qwen_image_ocr_lora", "actor.micro_batch_size=4", "data.num_samples_per_prompt=2"),
    "FLUX.1-dev": (
        *("recipe=qwen_image_ocr_lora", "model=flux", "sampler.guidance_scale=1.0"),
        "sampler/dynamics=flow_sde_flux",
        *("actor.micro_batch_size=4", "data.num_samples_per_prompt=4"),
    ),
    "Wan2.1-T2V-1.3B": (
        *("recipe=wan21_ocr_lora", "sampler/steps=window", "sampler.steps.size=4", "sampler.steps.high=10"),
        *("actor.micro_batch_size=2", "data.num_samples_per_prompt=2"),
    ),
    "SD3.5-Medium": ("recipe=sd35_medium_ocr_kl", "data.num_samples_per_prompt=8"),
}
ONE_GPU = (
    *("model.init=random", "launcher=inline", "actor.num_ranks=1", "data.train_batch_size=2", "rollout.batch_size=8"),
    *("reward=jpeg_compressibility", "reward.num_workers=0", "logger=jsonl", "checkpoint.every=0", "artifacts.every=0"),
    *("data.train=pkg://flowrl/assets/tiny_words/few.txt", "trainer.eval.num_steps=2", "trainer.eval.every=0"),
    *("trainer.eval.sets.heldout=pkg://flowrl/assets/tiny_words/few.txt", "trainer.total_steps=1"),
)
TINY = ("model.size=tiny", "sampler.height=64", "sampler.width=64", "actor.lora.rank=2")


def main() -> None:
    """Run the families in turn and write what they logged."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    import diffusers  # noqa: F401 - once, for all the processes that are forked from this one
    import transformers  # noqa: F401

    command = " ".join(["python", "-m", "benchmarks.families", *sys.argv[1:]])
    written: dict[str, Any] = {"results": dict.fromkeys(arguments.cases, "not reached")}
    for name in arguments.cases:
        overrides = [*CASES[name], *ONE_GPU, *(TINY if arguments.size == "tiny" else ())]
        with tempfile.TemporaryDirectory() as runs:
            process = multiprocessing.get_context("fork").Process(target=measure, args=(overrides, runs, command))
            process.start()
            process.join()
            report = json.loads((Path(runs) / "report.json").read_text())
        if process.exitcode:
            report["failed"] = f"exit status {process.exitcode}"
        written |= report.pop("made_with")
        written["results"][name] = report
        print(name, json.dumps(report), flush=True)
        arguments.output.write_text(json.dumps(written, indent=1) + "\n")


def measure(overrides: list[str], runs: str, command: str) -> None:
    """One run, in this process, which alone touches CUDA; leaves `report.json` in `runs`."""
    import torch

    made_with = provenance(command, "diffusers", "transformers", "peft")
    file = Path(runs) / "report.json"
    file.write_text(json.dumps({"made_with": made_with, "overrides": overrides}))
    began = time.perf_counter()
    run = flowrl.load_config([*overrides, f"runs={runs}", "name=run"])
    flowrl.train(run)
    records = [json.loads(line) for line in (Path(runs) / "run" / "metrics.jsonl").read_text().splitlines()]
    shown = {k: v for k, v in records[-1].items() if k.startswith(("perf/", "train/", "reward/mean"))}
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    report = {
        "made_with": made_with,
        "overrides": overrides,
        "seconds": round(time.perf_counter() - began, 1),
        "peak_memory_gib": None if peak is None else round(peak, 1),
        "last_step": shown,
    }
    file.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
