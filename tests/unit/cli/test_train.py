"""The command: exit statuses, what is written when, and what a second run of the same name does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import flowrl
from flowrl.cli.train import command
from flowrl.config import Config, ConfigError, Evaluation, Problem
from flowrl.rewards.scoring import RewardError
from flowrl.trainers.actor import DivergedError
from flowrl.types import LoadError


@dataclass(frozen=True)
class Marker:
    """A trainer that only leaves a file, or ends another way, before or after its first metrics."""

    end: str = "well"
    eval: Evaluation = field(default_factory=Evaluation)

    def fit(self, run: Config) -> None:
        if self.end == "load error":
            raise LoadError("there is no such model.")
        if self.end == "config error":
            raise ConfigError(Problem("sampler.height", "must be a multiple of 16, got 20."))
        if self.end == "early":
            raise KeyboardInterrupt
        (run.run_dir / "metrics.jsonl").write_text('{"step": 0}\n')
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
    assert "runs/run holds a run with other settings (seed: 0 there, 1 now). Set name=" in capsys.readouterr().err
    (tmp_path / "train.txt").write_text('say "B"\n')
    assert command(base) == 2
    assert "other prompts" in capsys.readouterr().err


def test_interruption_exits_with_130_and_is_not_taken_for_an_end(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*base, "trainer.end=late"]) == 130
    assert capsys.readouterr().err.strip().splitlines() == ["flowrl: interrupted.", BROKEN_OFF]
    assert command([*base, "trainer.end=late"]) == 2
    assert "broken off; it cannot be resumed. Set name=" in capsys.readouterr().err


def test_a_run_that_ended_before_its_first_metrics_does_not_stand_in_the_way(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*base, "trainer.end=early"]) == 130
    assert command([*base, "trainer.end=load error"]) == 2
    assert command(base) == 0


BEGUN = "runs/run holds only the run's configuration; the same command starts anew."
BROKEN_OFF = "runs/run holds what was written; a run cannot be resumed: set name=... or remove the folder."


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
                BROKEN_OFF,
            ],
        ),
        ("diverged", 1, ["flowrl: 5 updates in a row were not finite.", BROKEN_OFF]),
    ],
)
def test_errors_of_the_run_are_one_sentence_and_what_is_left(
    base: list[str], capsys: pytest.CaptureFixture[str], end: str, status: int, lines: list[str]
) -> None:
    assert command([*base, f"trainer.end={end}"]) == status
    assert capsys.readouterr().err.splitlines() == lines


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
