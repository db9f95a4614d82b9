"""Does `flowrl.trainers.simulation` predict real runs, and what does it say of larger ones?

    python -m benchmarks.async_sim                      # 11 minutes; writes benchmarks/results/async_sim.json
    python -m benchmarks.async_sim --checks computing   # 3 minutes

One short run of `sync` gives the durations; from them all other runs are predicted and then made. Each is a run of the
command with real processes:

    sleeping     rollout workers, the actor and reward workers sleep where they would compute, so that a machine of two
                 cores can have four rollout workers that do not get in each other's way
    computing    tiny_sd3 draws, learns and is read by OCR, one thread for each process. The simulated processes share
                 as many cores as the machine has; the prediction without that is beside it

At last the simulation alone: one setting with 1 to 1,024 rollout workers. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.provenance import provenance
from benchmarks.random_sd3 import save_medium
from flowrl.trainers.simulation import Prediction, Setting, simulate

RESULTS = Path(__file__).parent / "results"
WORDS = ("FLOW", "OPEN", "SALE", "MILK", "TAXI", "STOP", "CAFE", "BOOK")
FIRST = 2  # steps before it warm up
SHOWN = ("step_s", "wait_s", "update_s", "publish_s", "actor_idle", "rollout_idle", "overlap", "staleness_mean")
LOGGED = {
    "sync": {"step_s": "perf/step_s", "wait_s": "perf/rollout_s"},
    "separate_async": {
        "step_s": "perf/step_s",
        "wait_s": "perf/wait_s",
        **{name: f"async/{name}" for name in ("actor_idle", "rollout_idle", "overlap", "staleness_mean")},
    },
}
COMMON = {"update_s": "perf/update_s", "publish_s": "perf/publish_s"}

# SD3.5-Medium's size, 512 x 512, 24 samples a prompt, 10 steps with guidance, half of them trained. Drawing, decoding
# and training take what one H200 was measured at (compiled); the actor has 16 of them, and a rollout worker has one.
LARGE = Setting(
    mode="separate_async",
    num_workers=1,
    num_reward_workers=16,
    batch_size=64,
    num_updates=2,
    full_chunk=1,
    group_s=24 * 10 * 2 / 210 + 24 / 91,
    score_s=24 * 0.02,
    update_s=32 * 24 * 5 * 2 / 81 / 16,
    publish_s=0.8,
)


@dataclass(frozen=True)
class Check:
    """Runs that differ in their schedule alone."""

    name: str
    base: Setting  # of the run that the durations are taken from; it has none yet
    others: tuple[dict[str, Any], ...]  # changes to it
    num_samples: int  # of a prompt
    num_steps: int
    overrides: tuple[str, ...]


def sleeping(folder: Path) -> Check:
    """A chunk takes half a second, an update one, and the processes hardly compute."""
    save_medium(folder / "model", torch.device("cpu"), 2, 2)
    base = Setting(mode="sync", num_workers=1, num_reward_workers=2, batch_size=8, full_chunk=2, group_s=0, update_s=0)
    scorer = "reward.components.jpeg_compressibility.scorer"
    overrides = (
        *("~recipe", "model=sd3", f"model.path={folder / 'model'}", "model.max_sequence_length=16"),
        *("sampler.height=64", "sampler.width=64", "sampler.num_steps=2", "sampler/steps=all"),
        *("actor=lora", "algorithm=flow_grpo_tiny", "algorithm._target_=benchmarks.slow.SlowGRPO"),
        *("rollout.engine._target_=benchmarks.slow.SlowEngine", "+rollout.engine.group_s=0.25"),
        *("reward=jpeg_compressibility", f"{scorer}._target_=benchmarks.slow.SlowJPEG", f"+{scorer}.pause_s=0.15"),
        "+algorithm.pause_s=0.9",
    )
    changes = (
        {"num_workers": 2},
        {"mode": "separate_async"},
        {"mode": "separate_async", "num_workers": 2},
        {"mode": "separate_async", "num_workers": 4},
        {"mode": "separate_async", "num_workers": 2, "num_updates": 2},
        {"mode": "separate_async", "num_workers": 2, "num_warmup_batches": 0, "sync_compatible": True},
    )
    return Check("sleeping", base, changes, 2, 12, overrides)


def computing(folder: Path) -> Check:
    """The main job's model and reward; batches small enough to be short."""
    base = Setting(
        mode="sync", num_workers=1, num_reward_workers=1, batch_size=8, num_updates=2, full_chunk=2, group_s=0,
        update_s=0, num_cores=os.cpu_count(),
    )  # fmt: skip
    changes = (
        {"mode": "separate_async"},
        {"mode": "separate_async", "num_workers": 2},
    )
    return Check("computing", base, changes, 4, 10, ("recipe=tiny_ocr",))


CHECKS = {"sleeping": sleeping, "computing": computing}


def main() -> None:
    """Check, sweep, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_sim")
    parser.add_argument("--checks", nargs="*", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--output", type=Path, default=RESULTS / "async_sim.json", help="keeps its other checks")
    arguments = parser.parse_args()
    report: dict[str, Any] = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    for name in arguments.checks:
        about = provenance(f"python -m benchmarks.async_sim --checks {name}", "numpy")
        about["load_before"] = round(os.getloadavg()[0], 2)
        with tempfile.TemporaryDirectory() as folder:
            report[name] = about | check(CHECKS[name](Path(folder)), Path(folder))
    report["sweep"] = sweep(LARGE)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------- against real runs


def check(case: Check, folder: Path) -> dict[str, Any]:
    """Durations of the first run, and for each of the others what was predicted and what came."""
    measured, score_s = run(case, case.base, folder, "base")
    known = calibrated(case.base, measured, score_s, case.num_steps)
    print(f"{case.name}: {shown(measured)}", flush=True)
    rows = [compare(case, replace(known, **changes), changes, folder) for changes in case.others]
    names = ("group_s", "score_s", "update_s", "publish_s")
    durations = {name: round(float(vars(known)[name]), 4) for name in names}
    return {"base": asdict(case.base), "measured": rounded(measured), "durations": durations, "others": rows}


def calibrated(base: Setting, measured: dict[str, float], score_s: float, num_steps: int) -> Setting:
    """`base` with the durations with which it takes as long as it did; drawing is found by bisection."""
    timed = replace(
        base, score_s=score_s, update_s=measured["update_s"] / base.num_updates, publish_s=measured["publish_s"]
    )
    low, high = 0.0, measured["wait_s"]
    while high - low > 1e-5 * measured["wait_s"]:
        middle = (low + high) / 2
        too_long = simulate(replace(timed, group_s=middle), num_steps).wait_s > measured["wait_s"]
        low, high = (low, middle) if too_long else (middle, high)
    return replace(timed, group_s=low)


def compare(case: Check, setting: Setting, changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Predict, run, print."""
    predicted = expected(setting, case.num_steps)
    measured, _ = run(case, setting, folder, "_".join(f"{value}" for value in changes.values()))
    error = predicted["step_s"] / measured["step_s"] - 1
    row: dict[str, Any] = {"changes": changes, "error_step_s": round(error, 3)}
    row |= {"predicted": rounded(predicted), "measured": rounded(measured)}
    if setting.num_cores is not None:
        alone = expected(replace(setting, num_cores=None), case.num_steps)
        row["predicted_with_a_device_each"] = rounded(alone)
    print(f"  {changes}: {error:+.1%}\n    predicted {shown(predicted)}\n    measured  {shown(measured)}", flush=True)
    return row


def expected(setting: Setting, num_steps: int) -> dict[str, float]:
    """Of the steps that count."""
    steps = simulate(setting, num_steps).steps
    means = vars(Prediction.of(steps, *counted(setting, num_steps)))
    return {name: means[name] for name in (*LOGGED[setting.mode], *COMMON)}


def run(case: Check, setting: Setting, folder: Path, name: str) -> tuple[dict[str, float], float]:
    """Means of a real run, and the seconds to score a group. Raises CalledProcessError if it fails."""
    (folder / "prompts.txt").write_text("".join(f'A sign that says "{word}"\n' for word in WORDS))
    prompts = folder / "prompts.txt"
    command = [
        *(sys.executable, "-m", "flowrl", *case.overrides, *schedule(setting, case)),
        *("launcher=spawn", "launcher.num_threads=1", "device=cpu", "logger=jsonl", "artifacts.every=0"),
        "checkpoint.every=0",
        *(f"data.train={prompts}", f"trainer.eval.sets.heldout={prompts}", "trainer.eval.every=0"),
        *(f"runs={folder / 'runs'}", f"name={name}"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    first, end = counted(setting, case.num_steps)
    records = [json.loads(line) for line in lines][1:][first:end]  # without step 0, which only evaluates
    means = {
        name: float(np.mean([record[logged] for record in records]))
        for name, logged in (LOGGED[setting.mode] | COMMON).items()
    }
    return means, float(np.mean([record["perf/score_s"] / record["reward/num_groups"] for record in records]))


def counted(setting: Setting, num_steps: int) -> tuple[int, int]:
    """First step and end: without those in which the pipeline fills, or empties."""
    lead = setting.num_warmup_batches if setting.mode == "separate_async" else 0
    return FIRST + lead, num_steps - lead


def schedule(setting: Setting, case: Check) -> list[str]:
    """The run's own words for it."""
    words = {
        "trainer": setting.mode,
        "trainer.total_steps": case.num_steps,
        "data.train_batch_size": setting.batch_size,
        "data.num_samples_per_prompt": case.num_samples,
        "algorithm.num_updates_per_batch": setting.num_updates,
        "rollout.batch_size": setting.full_chunk * case.num_samples,
        "rollout.num_workers": setting.num_workers,
        "reward.num_workers": setting.num_reward_workers,
    }
    if setting.mode == "sync":
        words["trainer.layout"] = "standalone"
    else:
        words |= {
            "trainer.mini_batch_size": setting.rollout_size,
            "trainer.parameter_sync_step": setting.num_updates,
            "trainer.num_warmup_batches": setting.num_warmup_batches,
            "trainer.max_staleness": setting.max_staleness,
            "trainer.sync_compatible": str(setting.sync_compatible).lower(),
        }
    return [f"{key}={value}" for key, value in words.items()]


# ---------------------------------------------------------------------------------------------- 1 to 1,024 workers


def sweep(setting: Setting) -> dict[str, Any]:
    """Both modes by the number of rollout workers."""
    rows = []
    for num_workers in (2**power for power in range(11)):
        for mode in ("sync", "separate_async"):
            began = time.perf_counter()
            found = simulate(replace(setting, mode=mode, num_workers=num_workers))
            seconds = time.perf_counter() - began
            means = rounded({name: vars(found)[name] for name in SHOWN})
            rows.append({"num_workers": num_workers, "mode": mode, **means, "simulated_in_s": round(seconds, 2)})
            print(rows[-1], flush=True)
    return {"setting": asdict(setting), "rows": rows}


def rounded(values: dict[str, float]) -> dict[str, float]:
    """For reading."""
    return {name: round(value, 3) + 0.0 for name, value in values.items()}


def shown(values: dict[str, float], names: Sequence[str] = SHOWN) -> str:
    """On one line."""
    return ", ".join(f"{name} {values[name]:.2f}" for name in names if name in values)


if __name__ == "__main__":
    main()
