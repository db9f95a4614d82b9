"""`python -m flowrl` as a process, from another directory: statuses, words, and what it does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str, environment: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
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


BEFORE_TORCH = """
import os, sys
import flowrl
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch comes with", os.environ.get("OMP_WAIT_POLICY"))
sys.meta_path.insert(0, Watch())
try:
    flowrl.train(flowrl.load_config(["data.train_batch_size=7"]))
except ValueError as error:
    print(error)
"""


def test_train_settles_threads_before_torch_comes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    result = run(tmp_path, "-c", BEFORE_TORCH, environment=environment)
    assert result.stdout.startswith("torch comes with PASSIVE\ndata.train_batch_size: must be a multiple")


UNGUARDED = """
import sys
import flowrl
flowrl.train(flowrl.load_config(sys.argv[1:]))
"""


def test_a_script_that_is_not_guarded_is_told_so(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    small = ["reward=jpeg_compressibility", "reward.num_workers=1", "debug=short", f"model.path={tiny_folder}"]
    result = run(tmp_path, "script.py", *small, "trainer.eval.sets={}")
    assert result.returncode == 1
    assert 'put that under `if __name__ == "__main__":`' in result.stderr
    assert "failed on starting: the worker ended with exit code 1. A worker imports the main script" in result.stderr
    assert not list(tmp_path.glob("runs/*/final"))


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


def test_a_reader_that_has_seen_enough_causes_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "flowrl", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
