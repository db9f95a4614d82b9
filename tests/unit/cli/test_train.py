"""The command: exit statuses, what is written when, and what a second run of the same name does."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import flowrl
from flowrl.cli.train import command, main
from flowrl.config import Config, ConfigError, Evaluation, Problem
from flowrl.distributed.checkpoint.folders import Committed
from flowrl.rewards.scoring import RewardError
from flowrl.types import DivergedError, LoadError


@dataclass(frozen=True)
class Marker:
    """A trainer that only leaves a file, or ends another way, before or after its first metrics."""

    end: str = "well"
    total_steps: int = 3
    layout: str = "shared"
    eval: Evaluation = field(default_factory=Evaluation)

    def fit(self, run: Config, start: Committed | None) -> signal.Signals | None:
        if self.end == "load error":
            raise LoadError("there is no such model.")
        if self.end == "config error":
            raise ConfigError(Problem("sampler.height", "must be a multiple of 16, got 20."))
        if self.end == "early":
            raise KeyboardInterrupt
        (run.run_dir / "metrics.jsonl").write_text('{"step": 0}\n')
        if self.end == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.end == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.end == "elsewhere":
            Path("/no/such/file").read_bytes()
        if self.end == "odd" and run.seed % 2:
            raise RewardError("ocr", f"seed {run.seed}", "OSError: no disk")
        if self.end == "late":
            raise KeyboardInterrupt
        if self.end == "reward error":
            error = RewardError("ocr", "prompt 'p1'", "OSError: no disk")
            error.add_note("Traceback of the worker")
            raise error
        if self.end == "diverged":
            raise DivergedError("5 updates in a row were not finite.")
        if self.end == "bug":
            raise ZeroDivisionError("somewhere")
        (run.run_dir / "fitted").write_text(str(run.seed))
        return {"stopped": signal.SIGINT, "terminated": signal.SIGTERM}.get(self.end)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run in an empty working folder, with `Marker` for a trainer."""
    home = tmp_path / "home"
    option = home / "trainer" / "marker.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(f"_target_: {__name__}.Marker\nend: well\neval: {{sets: {{}}}}\n")
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.txt").write_text('say "A"\n')
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    files = [f"data.train={tmp_path / 'train.txt'}", f"trainer.eval.sets.heldout={tmp_path / 'heldout.txt'}"]
    return [
        "--config-dir",
        str(home),
        "~recipe",
        "trainer=marker",
        "data=prompts",
        "data.target=quoted",
        *files,
        *SIZES,
    ]


SIZES = ["data.train_batch_size=2", "data.num_samples_per_prompt=2", "sampler/steps=all"]


def test_a_run_leaves_its_record(base: list[str], tmp_path: Path) -> None:
    assert command([*base, "seed=3"]) == 0
    folder = Path("runs/run")
    assert (folder / "fitted").read_text() == "3"
    assert OmegaConf.load(folder / "config.yaml").seed == 3
    record = json.loads((folder / "run.json").read_text())
    assert record["started"] <= record["finished"]
    assert record["versions"]["flowrl"] == flowrl.__version__ and record["versions"]["torch"]
    assert record["data"].keys() == {str(tmp_path / "train.txt"), str(tmp_path / "heldout.txt")}
    assert [path.name for path in Path().iterdir()] == ["runs"], "nothing beside the run folder"


def test_the_same_run_again_is_finished(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command(base)
    (Path("runs/run") / "fitted").unlink()
    assert command(base) == 0
    assert "finished. Start another with name=" in capsys.readouterr().out
    assert not (Path("runs/run") / "fitted").exists()
    assert command([*base, "name=other"]) == 0 and Path("runs/other/fitted").exists()


def test_other_settings_or_prompts_under_the_same_name_are_refused(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(base)
    assert command([*base, "seed=1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:4] == [
        "  name: runs/run holds a run with other settings:",
        "    setting  there  now",
        "    seed     0      1",
    ]
    (tmp_path / "train.txt").write_text('say "B"\n')
    assert command(base) == 2
    assert "content of data.train  " in capsys.readouterr().err


def test_what_decides_no_number_may_change(base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where files lie, how the run is computed, what is kept of it."""
    command(base)
    moved = (tmp_path / "train.txt").rename(tmp_path / "moved.txt")
    free = ["logger=jsonl", "actor.micro_batch_size=1", "checkpoint.every=3", "device=cpu", "artifacts.keep=9"]
    assert command([*base, f"data.train={moved}", *free]) == 0
    assert "finished" in capsys.readouterr().out
    assert command([*base, f"data.train={moved}", "resume=never"]) == 0, "there is nothing to resume"


def test_more_steps_of_a_finished_run_are_the_same_run_unless_its_rate_comes_down(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command([*base, "+trainer.total_steps=3"])
    assert command([*base, "+trainer.total_steps=4"]) == 2
    assert "total_steps: is 4, but runs/run is finished, and its checkpoints are gone." in capsys.readouterr().err
    command([*base, "name=cosine", "actor.optimizer.schedule=cosine", "+trainer.total_steps=3"])
    assert command([*base, "name=cosine", "actor.optimizer.schedule=cosine", "+trainer.total_steps=4"]) == 2
    assert "trainer.total_steps  3" in capsys.readouterr().err


@pytest.mark.parametrize(("end", "status", "said"), [("stopped", 0, "stopped."), ("terminated", 143, "terminated.")])
def test_a_run_that_was_asked_to_stop_has_its_own_statuses(
    base: list[str], capsys: pytest.CaptureFixture[str], end: str, status: int, said: str
) -> None:
    assert command([*base, f"trainer.end={end}"]) == status
    assert capsys.readouterr().err.strip().splitlines() == [f"flowrl: {said}", BEGUN]
    assert json.loads(Path("runs/run/run.json").read_text())["finished"] is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nowhere", "must be auto, never or a folder, got 'nowhere'."),
        ("''", "must be auto, never or a folder, got ''."),
        ("..", ".. was never committed"),
        ("runs/run", "must be a checkpoint of another run"),
    ],
)
def test_resume_must_name_a_checkpoint(
    base: list[str], capsys: pytest.CaptureFixture[str], value: str, said: str
) -> None:
    assert command([*base, f"resume={value}"]) == 2
    assert f"resume: {said}" in capsys.readouterr().err


def test_interruption_exits_with_130_and_is_not_taken_for_an_end(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*base, "trainer.end=late"]) == 130
    assert capsys.readouterr().err.strip().splitlines() == ["flowrl: interrupted.", BEGUN]
    assert command([*base, "trainer.end=late", "resume=never"]) == 2
    assert "resume: is never" in capsys.readouterr().err
    assert command([*base, "trainer.end=late", "seed=1"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_a_run_that_ended_before_its_first_metrics_does_not_stand_in_the_way(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*base, "trainer.end=early"]) == 130
    assert command([*base, "trainer.end=load error"]) == 2
    assert command(base) == 0


BEGUN = "runs/run holds no checkpoint yet; the same command starts anew."


@pytest.mark.parametrize(
    ("end", "status", "lines"),
    [
        ("load error", 2, ["flowrl: there is no such model.", BEGUN]),
        (
            "config error",
            2,
            [
                "flowrl: 1 problem in the configuration.",
                "  sampler.height: must be a multiple of 16, got 20.",
                BEGUN,
            ],
        ),
        (
            "reward error",
            1,
            [
                "flowrl: reward component 'ocr' failed on prompt 'p1': OSError: no disk",
                "Traceback of the worker",
                BEGUN,
            ],
        ),
        ("diverged", 1, ["flowrl: 5 updates in a row were not finite.", BEGUN]),
    ],
)
def test_errors_of_the_run_are_one_sentence_and_what_is_left(
    base: list[str], capsys: pytest.CaptureFixture[str], end: str, status: int, lines: list[str]
) -> None:
    assert command([*base, f"trainer.end={end}"]) == status
    assert capsys.readouterr().err.splitlines() == lines


def test_sigterm_ends_a_run_as_an_interruption_does(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flowrl", *base, "trainer.end=sigterm"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert end.value.code == 143
    assert capsys.readouterr().err.splitlines() == ["flowrl: terminated.", BEGUN]


HOLD = """
import fcntl, sys
lock = open("runs/run/.lock", "ab")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["early", "late"], ids=["before its first metrics", "after them"])
def test_a_folder_that_another_process_writes_is_left_alone(
    base: list[str], capsys: pytest.CaptureFixture[str], end: str
) -> None:
    command([*base, f"trainer.end={end}"])
    capsys.readouterr()
    written = Path("runs/run/run.json").read_bytes()
    other = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert command([*base, "seed=1"]) == 2
        other.communicate()
    assert "name: runs/run is being written by another process. Set name=" in capsys.readouterr().err
    assert Path("runs/run/run.json").read_bytes() == written


@pytest.mark.parametrize("file", ["run.json", "contract.json"])
@pytest.mark.parametrize("content", ["{", "[1]\n: :", None, "\udcff"])
def test_a_folder_whose_record_cannot_be_read(
    base: list[str], capsys: pytest.CaptureFixture[str], file: str, content: str | None
) -> None:
    command(base)
    path = Path("runs/run", file)
    if content is not None:
        path.write_text(content, encoding="utf-8", errors="surrogateescape")
    elif file == "contract.json":
        path.unlink()
    else:
        path.write_text("{}")
    assert command(base) == 2
    assert "name: runs/run holds no readable run. Remove the folder, or choose" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        (["name=file"], "File exists"),
        ([f"name={'n' * 300}"], "File name too long"),
        (["trainer.end=full"], "No space left on device"),
    ],
)
def test_a_run_folder_that_cannot_be_written(
    base: list[str], capsys: pytest.CaptureFixture[str], overrides: list[str], cause: str
) -> None:
    Path("runs").mkdir()
    Path("runs/file").touch()
    assert command([*base, *overrides]) == 1
    error = capsys.readouterr().err
    assert error.startswith("flowrl: the run folder runs/") and f" cannot be used: {cause}." in error


def test_other_errors_of_files_keep_their_traceback(base: list[str]) -> None:
    with pytest.raises(FileNotFoundError, match="/no/such/file"):
        command([*base, "trainer.end=elsewhere"])


def test_other_errors_keep_their_traceback(base: list[str]) -> None:
    with pytest.raises(ZeroDivisionError, match="somewhere"):
        command([*base, "trainer.end=bug"])


def test_a_sweep_looks_into_the_run_folders_before_the_first_begins(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command([*base, "name='run/seed=1'", "seed=1", "data.seed=5"])
    assert command([*base, "-m", "seed=0,1"]) == 2
    assert "run/seed=1: name: runs/run/seed=1 holds a run with other settings" in capsys.readouterr().err
    assert not Path("runs/run/seed=0").exists()


def test_configuration_errors_exit_with_2_and_write_nothing(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*base, "data.train_batch_size=3", "actor.optimizer.lr=-1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flowrl: 2 problems in the configuration; nothing was started.\n")
    assert "  data.train_batch_size: " in error and "  actor.optimizer.lr: " in error
    assert not list(Path().iterdir())


def test_a_sweep_checks_every_point_before_the_first_begins(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*base, "-m", "seed=0,1", "data.train_batch_size=2,3"]) == 2
    error = capsys.readouterr().err
    assert "2 problems" in error and "run/seed=1,data.train_batch_size=3: data.train_batch_size: must be" in error
    assert not list(Path().iterdir())


def test_a_sweep_runs_its_points_in_turn(base: list[str]) -> None:
    assert command([*base, "-m", "seed=0,1"]) == 0
    assert [Path(f"runs/run/seed={seed}/fitted").read_text() for seed in (0, 1)] == ["0", "1"]


def test_points_of_a_sweep_need_folders_of_their_own(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*base, "-m", "name=a,b", "seed=0,1"]) == 2
    error = capsys.readouterr().err
    assert "2 problems" in error and "name: several runs of the sweep would share runs/a. Leave name out" in error
    assert not list(Path().iterdir())


def test_a_run_that_fails_does_not_end_the_sweep(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*base, "-m", "seed=0,1,2", "trainer.end=odd"]) == 1
    error = capsys.readouterr().err
    assert "failed on seed 1: OSError: no disk" in error
    assert error.endswith("flowrl: 1 of 3 runs failed:\n  run/seed=1\n")
    assert Path("runs/run/seed=2/fitted").exists()


def test_a_fault_of_the_code_ends_a_sweep(base: list[str]) -> None:
    with pytest.raises(ZeroDivisionError, match="somewhere"):
        command([*base, "-m", "seed=0,1", "trainer.end=bug"])


def test_the_configuration_is_printed_resolved(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*base, "--cfg", "job", "seed=5"]) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert (printed.seed, printed.name) == (5, "run")
    assert not list(Path().iterdir())


def test_flags_may_stand_anywhere(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["seed=1", "--cfg", "job", "data.seed=2", *base]) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert (printed.seed, printed.data.seed) == (1, 2)


def test_from_python(base: list[str]) -> None:
    cfg = flowrl.load_config(base[2:], config_dir=base[1])
    cfg.seed = 9
    folder = flowrl.train(cfg)
    assert (folder, (folder / "fitted").read_text()) == (Path("runs/run"), "9")
    cfg.data.train_batch_size = 5
    with pytest.raises(ConfigError, match="must be a multiple"):
        flowrl.train(cfg)
