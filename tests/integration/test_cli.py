"""`python -m flowrl` as a process, from another directory: statuses, words, and what it does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def flowrl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "flowrl", *arguments)


def test_help_is_readable_and_loads_no_torch(tmp_path: Path) -> None:
    result = run(tmp_path, "-X", "importtime", "-m", "flowrl", "--help")
    assert result.returncode == 0
    assert "usage: python -m flowrl" in result.stdout
    for line in ("  tiny_ocr ", "    flow_grpo ", "    ocr ", "  sampler/dynamics"):
        assert line in result.stdout
    assert " torch\n" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.sed=1"], "data.sed: there is no such key. Did you mean data.seed?"),
        (
            ["actor.optimizer.lr=fast"],
            "actor.optimizer.lr: Value 'fast' of type 'str' could not be converted to Float.",
        ),
        (["recipe=tiny_ocrr"], "recipe: there is no 'tiny_ocrr'. Did you mean recipe=tiny_ocr?"),
        (["sampler.dynamics.noise_level=x", "data.train_batch_size=7"], "2 problems in the configuration"),
    ],
)
def test_configuration_errors_exit_with_2_without_a_traceback(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = flowrl(tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr and "Traceback" not in result.stderr and result.stdout == ""
    assert not list(tmp_path.iterdir())


def test_unknown_flags_exit_with_2(tmp_path: Path) -> None:
    result = flowrl(tmp_path, "--cfgg", "job")
    assert result.returncode == 2 and "unrecognized arguments: --cfgg" in result.stderr


PROBE = """
import json, sys, time
import flowrl
began = time.perf_counter()
from flowrl.preflight import preflight
import torch
loaded = time.perf_counter()
preflight(flowrl.load_config())
heavy = {"diffusers", "transformers", "peft", "ray", "wandb", "onnxruntime", "rapidocr"} & sys.modules.keys()
print(json.dumps([sorted(heavy), torch.cuda.is_initialized(), time.perf_counter() - loaded]))
"""


def test_preflight_is_quick_and_loads_nothing_heavier_than_torch(tmp_path: Path) -> None:
    result = run(tmp_path, "-c", PROBE)
    assert result.returncode == 0, result.stderr
    heavy, cuda, seconds = json.loads(result.stdout)
    assert heavy == [] and not cuda
    assert seconds < 5
