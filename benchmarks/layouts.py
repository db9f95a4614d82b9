"""Layouts and ways of publishing, whole runs of the command: memory, seconds, and that all of them learn the same.

    python -m benchmarks.layouts --size medium --output benchmarks/results/layouts_h200.json    # one GPU, 6 minutes
    python -m benchmarks.layouts --size small --variants shared_lora standalone_lora             # a CPU will do

The model has random weights and the size of SD3.5 Medium (`medium`); pictures are rewarded for how well they compress,
so that every reward differs. All variants draw the same pictures from the same weights, so that losses and gradient
norms of variants that train the same can be compared line by line.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_sd3 import save_medium

SIZES = {"small": (2, 2, 64), "medium": (24, 24, 512)}  # layers, heads, pixels
LORA = ("actor=lora", "actor.lora.rank=32")
FULL = ("actor=full", "actor.optimizer.lr=1e-6", "actor.gradient_checkpointing=true")
VARIANTS = {
    "shared_lora": (*LORA, "launcher=inline"),
    "shared_full": (*FULL, "launcher=inline"),
    "shared_lora_2_ranks": (*LORA, "launcher=spawn", "actor.num_ranks=2"),
    "colocated_lora": (*LORA, "launcher=spawn", "trainer.layout=colocated"),
    "colocated_merged": (*LORA, "launcher=spawn", "trainer.layout=colocated", "weight_sync.mode=merged"),
    "colocated_full": (*FULL, "launcher=spawn", "trainer.layout=colocated"),
    "standalone_lora": (*LORA, "launcher=spawn", "trainer.layout=standalone"),
    "standalone_full": (*FULL, "launcher=spawn", "trainer.layout=standalone"),
}
SHOWN = ("perf/", "publish/", "train/loss", "train/log_prob_abs_diff", "train/grad_norm", "reward/mean")


def main() -> None:
    """Run the variants in turn and write what they logged."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layouts")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["shared_lora", "colocated_lora"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers, heads, pixels = SIZES[arguments.size]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "prompts.txt").write_text("".join(f'A sign that says "{word}"\n' for word in ("FLOW", "OPEN")))
        parameters = save_medium(Path(folder, "model"), device, layers, heads)
        report: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "command": " ".join(["python", "-m", "benchmarks.layouts", *sys.argv[1:]]),
            "device": torch.cuda.get_device_name(0) if device.type == "cuda" else platform.processor(),
            "versions": {name: version(name) for name in ("torch", "diffusers", "peft")},
            "parameters": parameters,
            "results": [],
        }
        torch.cuda.empty_cache()
        for variant in arguments.variants:
            report["results"].append(run(variant, Path(folder), pixels, arguments.steps))
            print(json.dumps(report["results"][-1]))
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def run(variant: str, folder: Path, pixels: int, steps: int) -> dict[str, Any]:
    """One run. Raises CalledProcessError if it fails."""
    command = [
        *(sys.executable, "-m", "flowrl", "~recipe", "model=sd3", f"model.path={folder / 'model'}"),
        *("model.max_sequence_length=128", "model.dtype=bfloat16", "reward=jpeg_compressibility"),
        *(f"data.train={folder / 'prompts.txt'}", f"trainer.eval.sets.heldout={folder / 'prompts.txt'}"),
        *("reward.num_workers=1", f"name={variant}", f"runs={folder / 'runs'}", "logger=jsonl", "artifacts.every=0"),
        *(f"sampler.height={pixels}", f"sampler.width={pixels}", "sampler.num_steps=6", "sampler/steps=window_tiny"),
        *("data.train_batch_size=2", "data.num_samples_per_prompt=8", "actor.micro_batch_size=8"),
        *(f"trainer.total_steps={steps}", "trainer.eval.every=0", "rollout.batch_size=16", *VARIANTS[variant]),
    ]
    began = time.perf_counter()
    subprocess.run(command, check=True)
    lines = (folder / "runs" / variant / "metrics.jsonl").read_text().splitlines()
    records = [{k: v for k, v in json.loads(line).items() if k.startswith(SHOWN)} for line in lines]
    return {"variant": variant, "seconds": round(time.perf_counter() - began, 1), "steps": records}


if __name__ == "__main__":
    main()
