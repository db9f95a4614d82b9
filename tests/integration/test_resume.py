"""Runs that are killed, and go on: processes that end by SIGKILL, against one that nobody disturbed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

import flowrl
from flowrl.config import ConfigError
from flowrl.distributed.checkpoint.folders import Folders
from flowrl.distributed.checkpoint.manifest import CheckpointError
from tests.support import tiny
from tests.support.killing import assert_same, kill_when, num_lines, records, start, until_end
from tests.support.runs import STEPS, command


def lethal(folder: Path, here: Path, name: str) -> list[str]:
    """A run with triggers that kill it in the rollout and in an update."""
    scorer = "reward.components.jpeg_incompressibility.scorer"
    return command(
        folder,
        here,
        name,
        *(f"{scorer}._target_=tests.support.killing.LethalReward", f"+{scorer}.trigger={here / 'rollout'}"),
        *("algorithm._target_=tests.support.killing.LethalGRPO", f"+algorithm.trigger={here / 'update'}"),
    )


def test_killed_at_three_places_it_ends_as_if_nothing_had_happened(tiny_folder: Path, tmp_path: Path) -> None:
    """In the rollout, in an update and while a checkpoint is written; metrics, weights and state bit for bit."""
    assert until_end(start(lethal(tiny_folder, tmp_path, "undisturbed"))) == 0, "with as many threads as the others"
    arguments, run_dir = lethal(tiny_folder, tmp_path, "killed"), tmp_path / "runs/killed"
    for place, after in (("rollout", 1), ("update", 4)):
        process = start(arguments)
        while num_lines(run_dir) <= after:
            time.sleep(0.001)
        (tmp_path / place).touch()
        assert until_end(process) == -signal.SIGKILL
    checkpoints = run_dir / "checkpoints"
    whole = sorted(path.name for path in checkpoints.glob("step_*"))
    process = start(arguments)
    assert kill_when(process, lambda: any(checkpoints.glob(".step_*.saving"))) == -signal.SIGKILL
    assert sorted(path.name for path in checkpoints.glob("step_*")) == whole, "the one that was being written"
    assert until_end(start(arguments)) == 0
    assert_same(run_dir, tmp_path / "runs/undisturbed", STEPS)
    assert not list(checkpoints.glob(".*")), "what the kills left is gone"


def test_a_finished_run_goes_on_with_more_steps(tiny_folder: Path, tmp_path: Path) -> None:
    """Bit for bit the longer run, and with other settings not at all."""
    constant = "actor.optimizer.schedule=constant"
    longer = flowrl.train(flowrl.load_config(command(tiny_folder, tmp_path, "longer", constant)))
    arguments = command(tiny_folder, tmp_path, "extended", constant)
    short = flowrl.train(flowrl.load_config([*arguments, "trainer.total_steps=3"]))
    before = (short / "metrics.jsonl").read_bytes()
    assert flowrl.train(flowrl.load_config([*arguments, "trainer.total_steps=3"])) == short
    assert (short / "metrics.jsonl").read_bytes() == before, "finished"

    for overrides, named in ((["actor.optimizer.lr=2e-3"], "actor.optimizer.lr"), (["seed=3"], "seed")):
        with pytest.raises(ConfigError, match=named):
            flowrl.train(flowrl.load_config([*arguments, *overrides]))
    with pytest.raises(ConfigError, match="resume: is never"):
        flowrl.train(flowrl.load_config([*arguments, "resume=never"]))

    flowrl.train(flowrl.load_config(arguments))
    # the shorter run evaluated its last step, which the longer one does not
    assert records(short)[-1] == records(longer)[-1]
    assert [record["step"] for record in records(short)] == list(range(STEPS + 1))


def test_ctrl_c_saves_the_step_and_the_same_command_goes_on(tiny_folder: Path, tmp_path: Path) -> None:
    """Also between two checkpoints that were due."""
    arguments, run_dir = command(tiny_folder, tmp_path, "stopped"), tmp_path / "runs/stopped"
    process = start([*arguments, "checkpoint.every=0"])
    while num_lines(run_dir) < 2:
        time.sleep(0.001)
    os.kill(process.pid or 0, signal.SIGINT)
    assert until_end(process) == 1, "KeyboardInterrupt, since this is not the command line"
    done = num_lines(run_dir) - 1
    assert 1 <= done < STEPS and (run_dir / f"checkpoints/step_{done:07d}/COMMITTED").exists()
    assert json.loads((run_dir / "run.json").read_text())["finished"] is None
    flowrl.train(flowrl.load_config(arguments))
    assert [record["step"] for record in records(run_dir)] == list(range(STEPS + 1))


@pytest.mark.campaign
def test_ctrl_c_while_generation_overlaps_loses_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    """Groups in flight are drawn again; every group is trained once."""
    free = ("trainer=separate_async", "trainer.mini_batch_size=2", "launcher=spawn", "algorithm.old_log_prob=rollout")
    arguments, run_dir = command(tiny_folder, tmp_path, "free", *free, "artifacts.every=1"), tmp_path / "runs/free"
    arguments.append("artifacts.keep=99")
    process = start(arguments)
    while num_lines(run_dir) < 3:
        time.sleep(0.001)
    os.kill(process.pid or 0, signal.SIGINT)
    assert until_end(process) == 1
    assert until_end(start(arguments)) == 0
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["buffer/trained"] == last["buffer/submitted"] == 2 * STEPS and last["buffer/in_flight"] == 0
    trained = [path.name for path in (run_dir / "artifacts/rollouts").glob("*/*")]
    assert len(trained) == len(set(trained)) == 2 * STEPS


def test_a_damaged_checkpoint_is_passed_over(tiny_folder: Path, tmp_path: Path) -> None:
    """One bit of a tensor: the one before it is taken, and the run ends as it would have."""
    arguments = command(tiny_folder, tmp_path, "damaged", "actor.optimizer.schedule=constant")
    run_dir = flowrl.train(flowrl.load_config([*arguments, "trainer.total_steps=4"]))
    shard = next((run_dir / "checkpoints/step_0000004/tensors").iterdir())
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    flowrl.train(flowrl.load_config([*arguments, "trainer.total_steps=5"]))
    assert json.loads((run_dir / "run.json").read_text())["resumed_from"] == 2
    assert [record["step"] for record in records(run_dir)] == list(range(6))
    assert len(list((run_dir / "checkpoints").glob("step_0000004.damaged.*"))) == 1
    assert Folders(run_dir / "checkpoints").steps() == [4, 5], "and the damaged one did not count"
    with pytest.raises(ConfigError, match="has gone 5 steps already"):
        (run_dir / "run.json").write_text((run_dir / "run.json").read_text().replace('"finished": "', '"was": "'))
        record = json.loads((run_dir / "run.json").read_text())
        (run_dir / "run.json").write_text(json.dumps(record | {"finished": None}))
        flowrl.train(flowrl.load_config([*arguments, "trainer.total_steps=4"]))


def test_a_run_goes_on_only_with_its_own_base_model(tiny_folder: Path, tmp_path: Path) -> None:
    """Which is known by its content: it may lie elsewhere, and a new run may begin from the checkpoint of another."""
    constant = "actor.optimizer.schedule=constant"
    run_dir = flowrl.train(flowrl.load_config(command(tiny_folder, tmp_path, "run", constant, "trainer.total_steps=1")))
    other, moved = tiny.save_random_folder(tmp_path / "other", seed=1), tmp_path / "moved"
    with pytest.raises(CheckpointError, match="another base model"):
        flowrl.train(flowrl.load_config(command(other, tmp_path, "run", constant)))
    shutil.copytree(tiny_folder, moved)
    branch = command(moved, tmp_path, "branch", f"resume={run_dir}", constant, "trainer.total_steps=2")
    assert [record["step"] for record in records(flowrl.train(flowrl.load_config(branch)))] == [2]
    shutil.rmtree(tmp_path / "runs/branch/checkpoints")
    record = json.loads((tmp_path / "runs/branch/run.json").read_text())
    (tmp_path / "runs/branch/run.json").write_text(json.dumps(record | {"finished": None}))
    with pytest.raises(ConfigError, match="Set resume="):  # killed before its first checkpoint, say
        flowrl.train(flowrl.load_config([word for word in branch if not word.startswith("resume=")]))
    with pytest.raises(ConfigError, match="checkpoint of another run"):
        flowrl.train(flowrl.load_config(command(moved, tmp_path, "new", f"resume={tmp_path / 'runs/new'}", constant)))
