"""What a checkpoint costs: how long training waits, and how long writing, hashing and reading take beside it.

    python -m benchmarks.checkpoint --size medium --output benchmarks/results/checkpoint_h200.json  # one GPU, 3 minutes
    python -m benchmarks.checkpoint --size tiny                                                     # a CPU will do

The state has the names and shapes of SD3.5 Medium and random values: `full` is float32 weights and AdamW's two moments,
`lora` the same of adapters of rank 32. `medium` needs 27 GB of the GPU's memory, of the host's, and of the disk; half
of that again is good to have. Every state is saved twice in the same `TensorStore`, which has allocated its copy on the
host beside the training; matrices are multiplied meanwhile, to see what writing takes from a training that goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.provenance import provenance
from benchmarks.random_sd3 import build_medium
from flowrl.distributed.checkpoint.folders import Committed, Folders, open_checkpoint
from flowrl.distributed.checkpoint.tensors import TensorStore
from flowrl.models.policy import JOINT_ATTENTION

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 4, "num_heads": 4, "text_width": 64, "pooled_width": 64, "num_positions": 16},
    "medium": {},
}
MODES = ("full", "lora")
RANK = 32
TIMEOUT_S = 60.0
RESERVING_S = {"cuda": 20.0, "cpu": 0.1}  # of training before the first save
GB = 1e9

T = TypeVar("T")


def main() -> None:
    """Measure both states and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    command = " ".join(["python", "-m", "benchmarks.checkpoint", *sys.argv[1:]])
    report = provenance(command, "safetensors") | {"size": arguments.size, "states": {}}
    for mode in arguments.modes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            report["states"][mode] = measure(state_of(mode, arguments.size, device), device, Path(folder))
        print(mode, json.dumps(report["states"][mode], indent=1), flush=True)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def state_of(mode: str, size: str, device: torch.device) -> dict[str, Tensor]:
    """Random values for everything that training has to find again."""
    with torch.device("meta"):
        module = build_medium(**SIZES[size])
    state = {}
    for name, shape in shapes_of(module, mode).items():
        state[f"weights.{name}"] = torch.randn(shape, device=device)
        state[f"optimizer.{name}.exp_avg"] = torch.randn(shape, device=device)
        state[f"optimizer.{name}.exp_avg_sq"] = torch.randn(shape, device=device)
        state[f"optimizer.{name}.step"] = torch.tensor(1.0)
    return state


def shapes_of(module: nn.Module, mode: str) -> dict[str, tuple[int, ...]]:
    """Of what is trained."""
    if mode == "full":
        return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    adapted = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear) and n.endswith(JOINT_ATTENTION)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in adapted.items():
        shapes[f"{name}.lora_A.default.weight"] = (RANK, layer.in_features)
        shapes[f"{name}.lora_B.default.weight"] = (layer.out_features, RANK)
    return shapes


def measure(state: dict[str, Tensor], device: torch.device, folder: Path) -> dict[str, Any]:
    """Two saves and a load that is compared bit for bit."""
    folders, store, train = Folders(folder), TensorStore(device, TIMEOUT_S), training(device)
    train()
    second = time.perf_counter() + 1.0
    alone = steps_per_second(train, lambda: time.perf_counter() < second)
    store.reserve(state)
    reserved = time.perf_counter() + RESERVING_S[device.type]
    reserving = steps_per_second(train, lambda: time.perf_counter() < reserved)
    saves = []
    for step in (1, 2):
        if step == 2:
            shutil.rmtree(folders.path(1))  # the disk need not hold two
        saves.append(save(state, step, folders, store, train))
    del store  # and its copy on the host
    path = folders.path(2)
    opened, open_s = timed(lambda: open_checkpoint(path, verify=False))
    _, verify_s = timed(lambda: open_checkpoint(path, verify=True))
    found, load_s = load(opened, state, device)
    assert all(torch.equal(found[key], value) for key, value in state.items())
    return {
        "tensors": len(state),
        "gigabytes": round(sum(value.nbytes for value in state.values()) / GB, 3),
        "stall_s": [each["stall_s"] for each in saves],
        "saves": saves,
        "training_steps_per_s_alone": round(alone, 1),
        "training_steps_per_s_while_reserving": round(reserving, 1),
        "open_s": round(open_s, 3),
        "verify_s": round(verify_s, 3),
        "load_s": round(load_s, 3),
    }


def save(
    state: dict[str, Tensor], step: int, folders: Folders, store: TensorStore, train: Callable[[], None]
) -> dict[str, Any]:
    """One save, beside a training that goes on as soon as it may."""
    folder = folders.begin(step)
    synchronize()
    _, stall_s = timed(lambda: store.save(state, folder / "tensors", background=True))
    started = time.perf_counter()
    rate = steps_per_second(train, lambda: store.written(wait=False) is None)
    write_s = time.perf_counter() - started
    files = store.written(wait=True) or []
    _, commit_s = timed(lambda: folders.commit(step, folder, {}, files, store.keys))
    return {
        "stall_s": round(stall_s, 4),
        "write_sync_and_hash_s": round(write_s, 3),
        "commit_s": round(commit_s, 3),
        "files": len(files),
        "gigabytes_written": round(sum(file.num_bytes for file in files) / GB, 3),
        "training_steps_per_s_meanwhile": round(rate, 1),
    }


def load(opened: Committed, state: dict[str, Tensor], device: torch.device) -> tuple[dict[str, Tensor], float]:
    """Into fresh tensors."""
    fresh = {key: torch.zeros_like(value) for key, value in state.items()}
    store = TensorStore(device, TIMEOUT_S)
    _, seconds = timed(lambda: store.load(fresh, opened.tensors))
    return fresh, seconds


def training(device: torch.device) -> Callable[[], None]:
    """One step of something that keeps the device busy for milliseconds, launched kernel by kernel."""
    width = 2048 if device.type == "cuda" else 128
    matrix = torch.randn(width, width, device=device)

    def step() -> None:
        value = matrix
        for _ in range(100):
            value = torch.tanh(value @ matrix)
        synchronize()

    return step


def steps_per_second(train: Callable[[], None], go_on: Callable[[], bool]) -> float:
    """As long as `go_on` says so."""
    started, number = time.perf_counter(), 0
    while go_on():
        train()
        number += 1
    return number / (time.perf_counter() - started)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and its seconds, with the device's work included."""
    synchronize()
    started = time.perf_counter()
    result = work()
    synchronize()
    return result, time.perf_counter() - started


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
