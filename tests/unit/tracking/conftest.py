"""A run folder as a run of sixty steps leaves it."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from flowrl.tracking.loggers.base import RunInfo
from flowrl.tracking.pictures import before_after_sheet
from flowrl.tracking.summary import Summary
from flowrl.tracking.tracker import Tracker
from flowrl.tracking.video import video_suffix

STEPS = 60
WORDS = ["FLOW", "MOON", "TREE", "STAR", "BIRD", "KITE", "LAMP", "FROG", "HILL", "WIND", "ROSE", "SNOW"]
CONFIG = """\
name: tiny_ocr
seed: 0
algorithm:
  _target_: flowrl.algorithms.flow_grpo.FlowGRPO
  clip_range: 0.001
data:
  train: "<prompts & words>"
  train_batch_size: 8
"""
FACTS = {
    "name": "tiny_ocr",
    "command": "python -m flowrl recipe=tiny_ocr",
    "started": "2026-01-01T12:00:00+00:00",
    "finished": None,
    "versions": {"python": "3.11.7", "torch": "2.13.0", "ray": None},
    "commit": "0123456789abcdef",
    "data": {"train.txt": "77aa", "heldout.txt": "55bb"},
}


def flat_video(*shades: int) -> np.ndarray:
    """uint8 [F, 32, 80, 3], a frame of each grey value."""
    return np.array(shades, np.uint8)[:, None, None, None] * np.ones((32, 80, 3), np.uint8)


@pytest.fixture(params=[".mp4", ".gif"])
def film_suffix(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What videos are written as, with the packages of the extra `video` and without."""
    if request.param == ".gif":
        monkeypatch.setitem(sys.modules, "imageio", None)
    elif not all(map(importlib.util.find_spec, ("imageio", "imageio_ffmpeg"))):
        pytest.skip('pip install -e ".[video]"')
    video_suffix.cache_clear()
    yield request.param
    video_suffix.cache_clear()


def sign(word: str, noise: float, rng: np.random.Generator) -> np.ndarray:
    """A word on a coloured sign, uint8 [32, 80, 3], under Gaussian noise."""
    canvas = Image.new("RGB", (80, 32), tuple(int(c) for c in rng.integers(40, 200, 3)))
    ImageDraw.Draw(canvas).text((40, 16), word, fill="white", font=ImageFont.load_default(22), anchor="mm")
    return (np.asarray(canvas) + rng.normal(0, noise, (32, 80, 3))).clip(0, 255).astype(np.uint8)


def step_metrics(step: int, rng: np.random.Generator) -> dict[str, float]:
    """Curves such as a run that learns draws."""
    rise = 1 - math.exp(-step / 18)
    ratio = rng.normal(0, 4e-4 * (1 + rise))
    return {
        "reward/mean": 0.42 + 0.48 * rise + rng.normal(0, 0.03),
        "reward/ocr_mean": 0.42 + 0.48 * rise,
        "reward/group_std_mean": 0.3 - 0.15 * rise + rng.normal(0, 0.01),
        "reward/zero_std_ratio": max(0.0, 0.4 * rise + rng.normal(0, 0.05)),
        "train/loss": -1e-4 * rise + rng.normal(0, 2e-5),
        "train/clip_fraction": 0.12 + 0.1 * rise + rng.normal(0, 0.02),
        "train/ratio_mean": 1 + ratio / 10,
        "train/ratio_min": 1 - abs(ratio) - 1e-3,
        "train/ratio_max": 1 + abs(ratio) + 1e-3,
        "train/log_prob_abs_diff": 3e-4 * math.exp(rng.normal(0, 0.3)),
        "train/kl": 0.002 * rise,
        "train/grad_norm": 0.4 + abs(rng.normal(0, 0.1)),
        "train/lr": 3e-4,
        "perf/rollout_s": 3.1 + rng.normal(0, 0.1),
        "perf/update_s": 3.9 + rng.normal(0, 0.2),
        "perf/step_s": 7.2 + rng.normal(0, 0.2),
        "perf/rollout_samples_per_s": 20.6,
        "perf/mem_allocated_gb": 1.4,
        "perf/mem_peak_gb": 1.9,
    }


def evaluation(step: int) -> dict[str, float]:
    rise = 1 - math.exp(-step / 18)
    return {"eval/heldout/ocr_mean": 0.55 + 0.38 * rise, "eval/heldout/ocr_perfect": 0.33 + 0.53 * rise}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run, written by the same code that writes a real one."""
    folder, rng = tmp_path / "tiny_ocr", np.random.default_rng(0)
    with Tracker() as tracker:
        tracker.start(RunInfo(name="tiny_ocr", run_dir=folder, total_steps=STEPS, config_yaml=CONFIG))
        tracker.log(0, evaluation(0))
        for step in range(1, STEPS + 1):
            tracker.log(step, step_metrics(step, rng) | (evaluation(step) if step % 10 == 0 else {}))
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "run.json").write_text(json.dumps(FACTS))
    Summary(before=evaluation(0), after=evaluation(STEPS), steps=STEPS, seconds=461.0).write(folder)
    before = np.stack([sign(word, 90, rng) for word in WORDS])
    after = np.stack([sign(word, 6, rng) for word in WORDS])
    scores = rng.random((2, len(WORDS))).tolist()
    before_after_sheet(before, after, WORDS, scores[0], [1.0] * 8 + scores[1][8:]).save(folder / "before_after.png")
    return folder
