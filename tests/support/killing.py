"""Whole runs in processes of their own, to be killed: by one of their own parts at a chosen place, or from outside."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

import numpy as np

from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.distributed.checkpoint.tensors import read_tensors
from flowrl.prompts import Prompt
from flowrl.rewards.jpeg import JPEGIncompressibility
from flowrl.types import Loss, TrainBatch, Velocity

NOT_COMPARED = ("perf/", "async/actor_idle", "async/rollout_idle", "async/overlap", "async/queue_depth")
IMPORTS = ["flowrl.trainers.sync", "flowrl.trainers.separate_async", "flowrl.cli.train", "tests.support.killing"]


def pull(trigger: str) -> None:
    """Kill this process if there is a file `trigger`, which is removed first: it works once."""
    if os.path.exists(trigger):
        os.unlink(trigger)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class LethalReward(JPEGIncompressibility):
    """JPEG size; kills its process after the first group that it scores once it is armed."""

    trigger: str

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B]."""
        scores = super().score(images, prompts)
        pull(self.trigger)
        return scores


@dataclass(frozen=True, kw_only=True)
class LethalGRPO(FlowGRPO):
    """FlowGRPO; kills its process between the forward and the backward of an update once it is armed."""

    trigger: str

    def loss(self, micro: TrainBatch, velocity: Velocity) -> Loss:
        """FlowGRPO's."""
        loss = super().loss(micro, velocity)
        pull(self.trigger)
        return loss


def start(overrides: Sequence[str], watched: Path | None = None) -> BaseProcess:
    """The command, with everything imported already: a process forked from a server that has done nothing else.

    With a file `watched` to write it to, `doing` says what it did last.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    process = context.Process(target=train, args=(tuple(overrides), watched))
    process.start()
    return process


def train(overrides: tuple[str, ...], watched: Path | None) -> None:
    """What the process does."""
    import flowrl

    if watched is not None:
        threading.Thread(target=_watch, args=(watched, threading.get_ident()), daemon=True).start()
    flowrl.train(flowrl.load_config(list(overrides)))


def _watch(watched: Path, thread: int) -> None:
    """Write down, a thousand times a second, in which functions of flowrl a thread is."""
    with watched.open("w+b") as file:
        file.truncate(256)
        with mmap.mmap(file.fileno(), 256) as shown:
            while True:
                names = [frame.f_code.co_name for frame in _frames(sys._current_frames().get(thread))]
                names = names[names.index("fit") + 1 :] if "fit" in names else names
                shown[:] = " > ".join(names[:3]).encode()[:256].ljust(256)
                time.sleep(0.001)


def _frames(frame: FrameType | None) -> list[FrameType]:
    """The outermost first, of flowrl's own functions."""
    found: list[FrameType] = []
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("flowrl."):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def doing(watched: Path) -> str:
    """In which functions, from a trainer's `fit` inwards, a process was when it was killed."""
    return watched.read_bytes().decode().strip() if watched.exists() else ""


def until_end(process: BaseProcess, timeout_s: float = 120) -> int:
    """Its exit code: -9 if it was killed."""
    process.join(timeout_s)
    assert process.exitcode is not None, "the run did not end"
    return process.exitcode


def kill_when(process: BaseProcess, happens: Callable[[], bool], timeout_s: float = 120) -> int:
    """Kill it as soon as that is so; its exit code, 0 if it came to its end first."""
    deadline = time.monotonic() + timeout_s
    while process.is_alive() and time.monotonic() < deadline:
        if happens():
            process.kill()
            break
        time.sleep(0.0005)
    return until_end(process)


def num_lines(run_dir: Path) -> int:
    """Steps that are logged, the evaluation before the first included."""
    metrics = run_dir / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def records(run_dir: Path) -> list[dict[str, float]]:
    """Of every step, without what differs from run to run."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(NOT_COMPARED)} for line in lines]


def assert_same(run_dir: Path, other: Path, step: int) -> None:
    """Metrics, summary and everything that a checkpoint holds, bit for bit."""
    for found, expected in zip(records(run_dir), records(other), strict=True):
        assert found == expected, f"step {expected['step']}"
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run_dir, other)]
    assert summaries[0]["before"] == summaries[1]["before"] and summaries[0]["after"] == summaries[1]["after"]
    assert (run_dir / "before_after.png").read_bytes() == (other / "before_after.png").read_bytes()
    folders = [folder / "checkpoints" / f"step_{step:07d}" for folder in (run_dir, other)]
    tensors, same = (read_tensors(folder / "tensors", "") for folder in folders)
    assert tensors.keys() == same.keys()
    assert all(tensors[key].equal(same[key]) for key in tensors)
    states = [json.loads((folder / "state.json").read_text()) for folder in folders]
    assert all(state["journal"].pop("seconds") > 0 for state in states)
    assert states[0] == states[1]
