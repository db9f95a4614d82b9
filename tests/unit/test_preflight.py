"""Preflight: everything that is wrong comes at once, each with its path."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from flowrl import load_config
from flowrl.config import Config, ConfigError
from flowrl.preflight import preflight

HERE = __name__


@dataclass(frozen=True)
class NotAComponent:
    pass


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    """A configuration without faults, on two prompt files of its own."""
    folder = tmp_path_factory.mktemp("prompts")
    for name in ("train", "heldout"):
        (folder / f"{name}.txt").write_text('say "A"\nsay "B"\n')
    files = [f"data.train={folder / 'train.txt'}", f"trainer.eval.sets.heldout={folder / 'heldout.txt'}"]
    return load_config(["data=prompts", "data.target=quoted", *files, f"runs={folder}"])


def found(base: DictConfig, **values: Any) -> dict[str, str]:
    """Problems by path, for dotted keys written with `__`."""
    cfg = copy.deepcopy(base)
    for key, value in values.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    try:
        preflight(cfg)
    except ConfigError as error:
        return {problem.path: str(problem) for problem in error.problems}
    return {}


def test_a_sound_configuration_is_built(base: DictConfig) -> None:
    assert isinstance(preflight(base), Config)
    assert not list(Path(base.runs).glob("*/")), "nothing is written"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sampler.num_steps", 0),
        ("sampler.guidance_scale", -1.0),
        ("data.train_batch_size", 0),
        ("actor.lora.rank", 0),
        ("actor.lora.alpha", 0.0),
        ("actor.optimizer.lr", 0.0),
        ("actor.optimizer.lr", float("nan")),
        ("actor.optimizer.lr", float("inf")),
        ("actor.optimizer.betas", [0.9]),
        ("actor.optimizer.betas", [0.9, 1.0]),
        ("actor.optimizer.min_lr", 1.0),
        ("actor.optimizer.schedule", "cosin"),
        ("actor.ema.decay", 1.0),
        ("actor.mode", "dora"),
        ("rollout.engine", "sglang"),
        ("rollout.batch_size", 0),
        ("reward.timeout_s", 0.0),
        ("reward.num_workers", -1),
        ("launcher.kind", "slurm"),
        ("device", "gpu"),
        ("data.target", "quote"),
        ("name", ""),
        ("name", "../elsewhere"),
        ("name", "/absolute"),
        ("data.train", "no-such-file.txt"),
        ("reward.components", {}),
        ("trainer.eval.every", -1),
        ("trainer.eval.num_steps", 0),
        ("trainer.eval.dynamics", "sde"),
        ("trainer.eval.sets.other", "no-such-file.txt"),
        ("trainer.total_steps", 0),
        ("trainer.layout", "colocated"),
    ],
)
def test_impossible_values_are_named(base: DictConfig, key: str, value: Any) -> None:
    if key == "reward.components":
        base = copy.deepcopy(base)
        base.reward.components = {}
    problems = found(base, **{key: value})
    assert set(problems) == {key}


@pytest.mark.parametrize(
    "path",
    [
        "model",
        "sampler.dynamics",
        "sampler.steps",
        "sampler.solver",
        "sampler.schedule",
        "algorithm",
        "trainer",
        "buffer",
    ],
)
def test_a_component_of_the_wrong_kind_is_named(base: DictConfig, path: str) -> None:
    cfg = copy.deepcopy(base)
    OmegaConf.update(cfg, path, {"_target_": f"{HERE}.NotAComponent"}, merge=False, force_add=True)
    assert "NotAComponent()" in found(cfg)[path]


def test_rewards_and_loggers_of_the_wrong_kind_are_named(base: DictConfig) -> None:
    wrong = {"_target_": f"{HERE}.NotAComponent"}
    problems = found(
        base,
        reward__components__mine=wrong,
        logger__components__mine=wrong,
        trainer__eval__rewards={"mine": wrong},
    )
    assert set(problems) == {
        "reward.components.mine",
        "logger.components.mine",
        "trainer.eval.rewards.mine",
    }


def test_batches_that_do_not_divide_show_the_equation_and_what_would(base: DictConfig) -> None:
    problems = found(base, data__train_batch_size=7, algorithm__num_updates_per_batch=3)
    assert problems["data.train_batch_size"] == (
        "data.train_batch_size: must be a multiple of algorithm.num_updates_per_batch: 7 / 3 = 2.333 prompts in each "
        "update. Set data.train_batch_size=6 or 9, or algorithm.num_updates_per_batch=1 or 7."
    )
    assert (
        "Set data.train_batch_size=3,"
        in found(base, data__train_batch_size=2, algorithm__num_updates_per_batch=3)["data.train_batch_size"]
    )


def test_one_sample_of_a_prompt_has_nothing_to_be_compared_with(base: DictConfig) -> None:
    assert set(found(base, data__num_samples_per_prompt=1)) == {"data.num_samples_per_prompt"}


def test_steps_must_exist_and_be_trainable(base: DictConfig) -> None:
    assert "step 4" in found(base, sampler__num_steps=3)["sampler.steps"]
    cps = {"_target_": "flowrl.flow.dynamics.cps.CPS"}
    last = {"_target_": "flowrl.flow.steps.All", "include_last": True}
    cfg = copy.deepcopy(base)
    OmegaConf.update(cfg, "sampler.dynamics", cps, merge=False)
    OmegaConf.update(cfg, "sampler.steps", last, merge=False)
    assert "cannot be trained" in found(cfg)["sampler.dynamics"]


def test_the_average_must_exist_to_be_evaluated(base: DictConfig) -> None:
    problems = found(base, actor__ema__enabled=False, trainer__eval__use_ema=True)
    assert "actor.ema.enabled=true" in problems["trainer.eval.use_ema"]


def test_lora_settings_count_only_for_lora(base: DictConfig, tmp_path: Path) -> None:
    wrong = {"actor.lora.targets": [], "actor.lora.warm_start": str(tmp_path)}
    assert set(found(base, actor__mode="lora", **wrong)) == set(wrong)
    assert found(base, actor__mode="full", **wrong) == {}


def test_components_object_for_themselves(base: DictConfig, tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("no target\n")
    problems = found(base, data__target="none", data__train=str(plain))
    assert set(problems) == {"data.target"} and "OCR" in problems["data.target"]


def test_faults_of_prompt_files_name_their_lines(base: DictConfig, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text('say "A"\nsay nothing\nsay ""\n')
    message = found(base, data__train=str(file))["data.train"]
    assert f"{file}:2: " in message and f"{file}:3: " in message


def test_a_run_folder_that_cannot_be_made(base: DictConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in found(base, runs=str(tmp_path / "file"))["runs"]


def test_everything_comes_together(base: DictConfig) -> None:
    problems = found(
        base,
        model__pth="x",
        sampler__dynamics__noise_level="abc",
        data__train_batch_size=7,
        actor__optimizer__lr=-1.0,
        data__train="no-such-file.txt",
        trainer__eval__every=-1,
    )
    assert set(problems) == {
        "model.pth",
        "sampler.dynamics.noise_level",
        "data.train_batch_size",
        "actor.optimizer.lr",
        "data.train",
        "trainer.eval.every",
    }
