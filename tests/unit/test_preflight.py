"""Preflight: everything that is wrong comes at once, each with its path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from omegaconf import DictConfig, OmegaConf

from flowrl import load_config
from flowrl.config import Config
from flowrl.preflight import preflight
from tests.support.faults import found, sound

HERE = __name__


def schema_paths(schema: type = Config, path: str = "") -> Iterator[str]:
    """Every key of the fixed sections."""
    for name, hint in get_type_hints(schema).items():
        if is_dataclass(hint) and isinstance(hint, type):
            yield from schema_paths(hint, f"{path}{name}.")
        else:
            yield f"{path}{name}"


@dataclass(frozen=True)
class NotAComponent:
    pass


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    return sound(tmp_path_factory.mktemp("prompts"))


def test_a_sound_configuration_is_built(base: DictConfig) -> None:
    assert isinstance(preflight(base), Config)
    assert not list(Path(base.runs).glob("*/")), "nothing is written"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sampler.num_steps", 0),
        ("sampler.guidance_scale", -1.0),
        ("sampler.frames", 5),  # of a model that draws pictures
        ("sampler.fps", 0.0),
        ("sampler.fps", 1e9),
        ("model.path", "./no/such/folder"),
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
        ("rollout.gather", "sometimes"),
        ("rollout.num_workers", 0),
        ("rollout.num_workers", 2),  # of layout shared
        ("rollout.on_death", "restart"),  # of layout shared
        ("actor.num_ranks", 0),
        ("actor.num_ranks", 2),  # in one process
        ("actor.master_dtype", "float16"),
        ("actor.fsdp.reduce_dtype", "float64"),
        ("actor.fsdp.load_wave_size", 0),
        ("actor.fsdp.cpu_offload", True),  # of one rank
        ("weight_sync.mode", "delta"),
        ("weight_sync.transport", "rdma"),
        ("weight_sync.wire_dtype", "float16"),
        ("weight_sync.bucket_mb", 0),
        ("weight_sync.timeout_s", 0.0),
        ("rollout.batch_size", 0),
        ("reward.timeout_s", 0.0),
        ("reward.load_timeout_s", 0.0),
        ("reward.num_workers", -1),
        ("reward.runtime", "gpu"),
        ("reward.num_gpus_per_worker", 2.0),  # of workers without any
        ("rollout.output", "pixels"),
        ("rollout.output", "latent"),  # of a scorer that wants pictures
        ("actor.lora.init", "banana"),
        ("actor.lora.init", "pissa"),
        ("actor.lora.init", "olora"),
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
        ("trainer.max_incomplete_group_refill_rounds", 0),
        ("rollout.report_stuck_s", 0.0),
        ("reward.report_stuck_s", float("inf")),
        ("trainer.layout", "elsewhere"),
    ],
)
def test_impossible_values_are_named(base: DictConfig, key: str, value: Any) -> None:
    if key == "reward.components":
        base = copy.deepcopy(base)
        base.reward.components = {}
    if key.startswith("actor.lora"):
        base = copy.deepcopy(base)
        base.actor.mode = "lora"
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
        "launcher",
        "rollout.engine",
    ],
)
def test_a_component_of_the_wrong_kind_is_named(base: DictConfig, path: str) -> None:
    cfg = copy.deepcopy(base)
    OmegaConf.update(cfg, path, {"_target_": f"{HERE}.NotAComponent"}, merge=False, force_add=True)
    assert "NotAComponent()" in found(cfg)[path]
    OmegaConf.update(cfg, path, None, merge=False)
    assert path == "sampler.schedule" or "got None" in found(cfg)[path]


def test_what_is_inside_a_component_may_not_be_missing(base: DictConfig) -> None:
    assert set(found(base, algorithm__advantages=None)) == {"algorithm"}
    nft = load_config(["algorithm=diffusion_nft", f"runs={base.runs}"])
    assert "decay" in found(nft, algorithm__decay=None)["algorithm"]
    assert set(found(base, reward__components__ocr=None)) == {"reward.components.ocr"}
    assert set(found(base, logger__components__jsonl=None)) == {"logger.components.jsonl"}


@pytest.mark.parametrize("path", sorted(set(schema_paths()) - {"recipe"}))
def test_a_value_that_is_yet_to_be_set_is_said_once(base: DictConfig, path: str) -> None:
    cfg = copy.deepcopy(base)
    OmegaConf.update(cfg, path, "???")
    assert found(cfg)[path] == f"{path}: must be set. Set {path}=..."


def test_rewards_and_loggers_of_the_wrong_kind_are_named(base: DictConfig) -> None:
    wrong = {"_target_": f"{HERE}.NotAComponent"}
    problems = found(
        base,
        reward__components__mine=wrong,
        logger__components__mine=wrong,
        trainer__eval__rewards={"components": {"mine": wrong}},
    )
    assert set(problems) == {
        "reward.components.mine",
        "logger.components.mine",
        "trainer.eval.rewards.components.mine",
    }


def test_evaluation_may_have_rewards_of_its_own_checked_like_trainings(base: DictConfig) -> None:
    chosen = ["+reward@trainer.eval.rewards=jpeg_compressibility", "+trainer.eval.rewards.num_workers=1"]
    rewards = preflight(load_config([*chosen, f"runs={base.runs}"])).trainer.eval.rewards
    assert set(rewards.components) == {"jpeg_compressibility"} and (rewards.num_workers, rewards.retries) == (1, 2)
    assert set(found(base, trainer__eval__rewards={})) == {"trainer.eval.rewards.components"}
    wrong = {**load_config(chosen).trainer.eval.rewards, "num_workers": -1, "retries": -1, "timeout_s": 0.0}
    names = {f"trainer.eval.rewards.{name}" for name in ("num_workers", "retries", "timeout_s")}
    assert set(found(base, trainer__eval__rewards=wrong)) == names


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


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("algorithm.kl_coef", {"algorithm.kl_coef": float("nan")}),
        ("algorithm.adv_clip_max", {"algorithm.adv_clip_max": float("inf")}),
        ("launcher.num_threads", {"launcher.num_threads": 100_000}),
        ("sampler.num_steps", {"sampler.num_steps": 2**70}),
        ("trainer.eval.num_steps", {"trainer.eval.num_steps": 2**70}),
        ("data.train_batch_size", {"data.train_batch_size": 2**70}),
        ("reward.timeout_s", {"reward.timeout_s": 1e12}),
        ("reward.load_timeout_s", {"reward.load_timeout_s": 1e12}),
        ("reward.components", {"reward.components.ocr.weight": 0.0}),
        ("actor.lora.warm_start", {"actor.mode": "full", "actor.lora.warm_start": "anywhere"}),
    ],
)
def test_what_would_go_wrong_in_silence_or_crash(base: DictConfig, path: str, changes: dict[str, Any]) -> None:
    cfg = copy.deepcopy(base)
    for name, value in changes.items():
        OmegaConf.update(cfg, name, value)
    assert path in found(cfg)


@pytest.mark.parametrize("name", ["/etc/precious", "../../out", "", ".hidden", "[/b]", "a/b"])
def test_names_that_would_become_paths_or_markup(base: DictConfig, name: str) -> None:
    cfg = copy.deepcopy(base)
    cfg.trainer.eval.sets = {name: cfg.data.train}
    assert "trainer.eval.sets" in found(cfg)
