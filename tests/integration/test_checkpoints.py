"""What a run saves, what it keeps of it, and what becomes of it on another number of ranks."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import flowrl
from flowrl.config import Config, ConfigError
from flowrl.distributed.checkpoint.folders import Committed, Folders, open_checkpoint
from flowrl.distributed.checkpoint.manifest import CheckpointError
from flowrl.distributed.checkpoint.tensors import read_tensors
from flowrl.preflight import preflight
from flowrl.trainers.stages import open_stages
from flowrl.trainers.state import Generators
from tests.support.killing import num_lines, start, until_end
from tests.support.runs import command


def load(folder: Path, here: Path, name: str, *overrides: str) -> Config:
    return preflight(flowrl.load_config(command(folder, here, name, *overrides)))


def test_the_newest_the_regular_and_the_best_stay(tiny_folder: Path, tmp_path: Path) -> None:
    run_dir = flowrl.train(
        flowrl.load_config(
            command(
                tiny_folder,
                tmp_path,
                "run",
                *("trainer.total_steps=7", "trainer.eval.every=1", "checkpoint.every=1", "checkpoint.keep_last=2"),
                *("checkpoint.keep_every=4", "checkpoint.keep_best=reward/mean", "checkpoint.background=false"),
            )
        )
    )
    rewards = [json.loads(line).get("reward/mean") for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    best = max(range(1, 8), key=lambda step: rewards[step])
    assert Folders(run_dir / "checkpoints").steps() == sorted({4, 6, 7, best})
    assert json.loads((run_dir / "checkpoints/step_0000007/run.json").read_text())["versions"]["torch"]
    assert (run_dir / "checkpoints/latest").read_text().strip() == "step_0000007"


def test_a_metric_that_does_not_exist_is_refused_before_anything_is_lost(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Its evaluations give eval/heldout/jpeg_incompressibility_mean"):
        flowrl.train(flowrl.load_config(command(tiny_folder, tmp_path, "run", "checkpoint.keep_best=eval/ocr")))


def test_saves_that_fail_are_counted_and_the_last_one_must_not(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Something is in the way of the folder, as a disk that is full would be."""
    in_the_way = tmp_path / "runs/run/checkpoints"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("")
    arguments = command(tiny_folder, tmp_path, "run", "trainer.total_steps=4", "checkpoint.every=2")
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="step 4 could not be saved"):
        flowrl.train(flowrl.load_config(arguments))
    assert "step 2 could not be saved, training goes on" in caplog.text
    last = json.loads((in_the_way.parent / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 4 and last["perf/checkpoint_failures"] == 1

    arguments = command(tiny_folder, tmp_path, "run", "trainer.total_steps=4", "checkpoint.every=1")
    arguments.append("checkpoint.max_failures=2")
    with pytest.raises(CheckpointError, match="step 2 could not be saved"):
        flowrl.train(flowrl.load_config(arguments))
    in_the_way.unlink()
    last = command(tiny_folder, tmp_path, "misspelt", "checkpoint.every=0", "checkpoint.keep_best=eval/ocr")
    with pytest.raises(ConfigError, match="no metric of this run"):
        flowrl.train(flowrl.load_config(last))
    assert num_lines(tmp_path / "runs/misspelt") == 2, "after the first step, not after the last"
    assert flowrl.train(flowrl.load_config(arguments)) == in_the_way.parent, "the same command starts anew"


@pytest.mark.campaign
@pytest.mark.parametrize("actor", ["lora", "full"])
def test_two_ranks_one_and_two_again_hold_the_same_bits(tiny_folder: Path, tmp_path: Path, actor: str) -> None:
    """DiffusionNFT's old policy and the average among them; the remaining steps are done."""
    settings = (f"actor={actor}", "algorithm=diffusion_nft", "actor.lora.rank=4", "trainer.total_steps=1")
    settings += ("actor.optimizer.schedule=constant",)
    two = ("launcher=spawn", "actor.num_ranks=2")
    assert until_end(start(command(tiny_folder, tmp_path, "run", *settings, *two))) == 0
    saved = open_checkpoint(tmp_path / "runs/run/checkpoints/step_0000001", verify=True)
    tensors = read_tensors(saved.tensors, "")
    assert {key.split(".")[0] for key in tensors} == {"weights", "optimizer", "snapshots", "ema"}
    assert ("lora" in "".join(tensors)) == (actor == "lora") and any(value.any() for value in tensors.values())

    on_one = _saved_again(load(tiny_folder, tmp_path, "run", *settings), saved, tmp_path / "one")
    on_two = _saved_again(load(tiny_folder, tmp_path, "run", *settings, *two), on_one, tmp_path / "two")
    for other in (on_one, on_two):
        found = read_tensors(other.tensors, "")
        assert found.keys() == tensors.keys()
        assert all(found[key].equal(tensors[key]) and found[key].dtype == tensors[key].dtype for key in tensors)
        assert other.json("state.json")["counters"] == saved.json("state.json")["actor"]["counters"]

    flowrl.train(flowrl.load_config(command(tiny_folder, tmp_path, "run", *settings, "trainer.total_steps=2")))
    assert num_lines(tmp_path / "runs/run") == 3


def _saved_again(run: Config, checkpoint: Committed, root: Path) -> Committed:
    """What the run's actor saves right after it has loaded `checkpoint`."""
    folders = Folders(root)
    with open_stages(run, 1, checkpoint) as stages:
        folder = folders.begin(checkpoint.step)
        actor = stages.actor.checkpoint(folder, background=True)
        written = stages.actor.written(wait=True)
        assert written is not None
    documents = {
        "state.json": json.dumps(checkpoint.json("state.json") | {"actor": actor} | actor).encode(),
        "contract.json": checkpoint.document("contract.json"),
    }
    return folders.commit(checkpoint.step, folder, documents, written.files, written.keys)


def test_the_global_generators_go_on(tiny_folder: Path, tmp_path: Path) -> None:
    """Those that flowrl does not draw from, but somebody's engine or scorer may; seeded in deterministic runs."""
    run = load(tiny_folder, tmp_path, "run", "trainer.total_steps=1")
    run_dir = flowrl.train(flowrl.load_config(command(tiny_folder, tmp_path, "run", "trainer.total_steps=1")))
    saved = open_checkpoint(run_dir / "checkpoints/step_0000001", verify=True)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with open_stages(run, 1, saved):
        (now,) = gather_states()
    assert now == saved.json("state.json")["actor"]["generators"][0]
    assert before[0].equal(torch.get_rng_state()) and before[1:] == (
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


def gather_states() -> list[dict[str, object]]:
    """Of this process, as JSON gives them back."""
    return [json.loads(json.dumps(asdict(Generators.now(torch.device("cpu")))))]
