"""Preflight: everything that is wrong comes at once, each with its path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from flowrl import load_config
from flowrl.config import Config, ConfigError, LoRA, Problem
from flowrl.distributed.lora import ADAPTER_FILES, add_lora
from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.flow.schedule import StaticShift
from flowrl.flow.solvers import Euler
from flowrl.flow.steps import Window
from flowrl.preflight import preflight

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
    assert "step 4" in found(base, sampler__num_steps=3, sampler__steps__high=5)["sampler.steps"]
    cps = {"_target_": "flowrl.flow.dynamics.cps.CPS"}
    last = {"_target_": "flowrl.flow.steps.All", "include_last": True}
    cfg = copy.deepcopy(base)
    OmegaConf.update(cfg, "sampler.dynamics", cps, merge=False)
    OmegaConf.update(cfg, "sampler.steps", last, merge=False)
    assert "cannot be trained" in found(cfg)["sampler.dynamics"]


def test_evaluation_that_samples_like_training_needs_the_steps_too(base: DictConfig) -> None:
    same = {"trainer.eval.dynamics": "same", "trainer.eval.num_steps": 2}
    assert "needs 3 steps" in found(base, **same, sampler__steps__high=None)["trainer.eval.num_steps"]
    assert found(base, trainer__eval__num_steps=2, sampler__steps__high=None) == {}
    assert found(base, **(same | {"trainer.eval.num_steps": 8})) == {}
    cfg = copy.deepcopy(base)
    OmegaConf.update(cfg, "sampler.dynamics", {"_target_": "flowrl.flow.dynamics.cps.CPS"}, merge=False)
    assert (
        "adds no noise"
        in found(cfg, **(same | {"trainer.eval.num_steps": 3, "sampler.steps.high": 3}))["trainer.eval.num_steps"]
    )


@dataclass(frozen=True)
class Objects(FlowSDE):
    """A dynamics that cannot be combined with anything."""

    def problems(self, run: Config) -> list[Problem]:
        return [Problem("sampler.dynamics", f"dislikes {run.name}.")]


@dataclass(frozen=True)
class ObjectsToo(Window):
    """Steps that cannot be combined with anything."""

    def problems(self, run: Config) -> list[Problem]:
        return [Problem("sampler.steps", f"dislike {run.name}.")]


@dataclass(frozen=True)
class ObjectsAsWell(Euler):
    """A solver that cannot be combined with anything."""

    def problems(self, run: Config) -> list[Problem]:
        return [Problem("sampler.solver", f"dislikes {run.name}.")]


@dataclass(frozen=True)
class ObjectsLast(StaticShift):
    """A schedule that cannot be combined with anything."""

    def problems(self, run: Config) -> list[Problem]:
        return [Problem("sampler.schedule", f"dislikes {run.name}.")]


def test_parts_of_the_sampler_object_for_themselves(base: DictConfig) -> None:
    cfg = copy.deepcopy(base)
    parts = {"dynamics": Objects, "steps": ObjectsToo, "solver": ObjectsAsWell, "schedule": ObjectsLast}
    for name, part in parts.items():
        OmegaConf.update(cfg, f"sampler.{name}", {"_target_": f"{HERE}.{part.__name__}"}, merge=False)
    assert set(found(cfg)) == {f"sampler.{name}" for name in parts}


@pytest.mark.parametrize("init", ["gaussian", "orthogonal"])
def test_lora_begins_at_the_base(base: DictConfig, init: str) -> None:
    assert found(base, actor__mode="lora", actor__lora__init=init) == {}
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    before = module(x)
    add_lora(module, LoRA(rank=4, alpha=4.0, init=init), ["0", "1"], seed=0)
    assert torch.allclose(module(x), before, atol=1e-5)


def test_orthogonal_adapters_have_an_even_rank(base: DictConfig) -> None:
    odd = found(base, actor__mode="lora", actor__lora__init="orthogonal", actor__lora__rank=3)
    assert set(odd) == {"actor.lora.rank"}


@pytest.mark.parametrize("name", ADAPTER_FILES)
def test_training_may_begin_from_any_adapter_that_can_be_loaded(base: DictConfig, tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert found(base, actor__mode="lora", actor__lora__warm_start=str(tmp_path)) == {}


def test_lora_settings_count_only_for_lora(base: DictConfig, tmp_path: Path) -> None:
    wrong = {"actor.lora.targets": [], "actor.lora.warm_start": str(tmp_path), "actor.lora.init": "eva"}
    assert set(found(base, actor__mode="lora", **wrong)) == set(wrong)
    assert found(base, actor__mode="full", **{"actor.lora.targets": []}) == {}


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


def test_one_start_for_all_samples_needs_noise_on_the_way(base: DictConfig) -> None:
    cfg = load_config(["algorithm=diffusion_nft", "sampler.same_latent=true"])
    with pytest.raises(ConfigError, match=r"sampler\.same_latent"):
        preflight(cfg)


def test_each_of_several_rewards_needs_its_weight(base: DictConfig) -> None:
    """Also 0, but not one that is alone, and none of an evaluation's own."""
    cfg = copy.deepcopy(base)
    cfg.reward.components = {name: cfg.reward.components.ocr for name in ("ocr", "second")}
    first, second = (f"reward.components.{name}.weight" for name in ("ocr", "second"))
    problems = found(cfg)
    assert set(problems) == {first, second}
    assert "(ocr, second)" in problems[first] and f"Set {first}=1.0" in problems[first]
    assert set(found(cfg, **{first: 0.0})) == {second}
    assert found(cfg, **{first: 0.0, second: -0.5}) == {}
    both = load_config(["reward=[ocr,jpeg_compressibility]"]).reward
    assert found(base, **{"trainer.eval.rewards": both}) == {}


@pytest.mark.parametrize(
    ("output", "scorers", "refused"),
    [
        ("image", ["Brightness"], False),
        ("both", ["Brightness"], False),
        ("latent", ["Brightness"], True),
        ("image", ["Energy"], True),
        ("latent", ["Energy"], False),
        ("both", ["Energy"], False),
        ("both", ["Brightness", "Energy"], False),
        ("latent", ["Brightness", "Energy"], True),
        ("image", ["Brightness", "Energy"], True),
    ],
)
def test_every_reward_is_given_what_it_looks_at(
    base: DictConfig, output: str, scorers: list[str], refused: bool
) -> None:
    cfg = copy.deepcopy(base)
    cfg.reward.components = {
        name.lower(): {
            "_target_": "flowrl.rewards.combine.Component",
            "weight": 1.0,
            "scorer": {"_target_": f"{SCORERS}.{name}"},
        }
        for name in scorers
    }
    assert set(found(cfg, rollout__output=output)) == ({"rollout.output"} if refused else set())


def test_evaluation_has_pictures_and_latents(base: DictConfig) -> None:
    """Whatever training keeps."""
    latent = {"_target_": "flowrl.rewards.combine.Component", "scorer": {"_target_": f"{SCORERS}.Energy"}}
    cfg = copy.deepcopy(base)
    cfg.trainer.eval.rewards = {"components": {"energy": latent}}
    assert found(cfg) == {}
    cfg.trainer.eval.rewards = copy.deepcopy(base.reward)
    cfg.reward.components = {"energy": latent}
    assert found(cfg, rollout__output="latent") == {}


SCORERS = "tests.unit.rewards.scorers"
SPAWN = "flowrl.distributed.launch.spawn.Spawn"


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("actor.num_ranks", {"actor.num_ranks": 3}),  # 16 / 2 x 8 = 64 samples in each update
        ("weight_sync.mode", {"trainer.layout": "standalone", "weight_sync.mode": "lora"}),  # of full training
        ("weight_sync.mode", {"trainer.layout": "colocated", "weight_sync.mode": "merged"}),
        ("weight_sync.mode", {"trainer.layout": "standalone", "weight_sync.mode": "full", "actor.mode": "lora"}),
        ("weight_sync.transport", {"trainer.layout": "standalone", "weight_sync.transport": "cuda_ipc"}),
        ("rollout.on_death", {"trainer.layout": "colocated", "rollout.on_death": "restart"}),
        ("rollout.num_workers", {"trainer.layout": "colocated", "rollout.num_workers": 2}),
        ("actor.fsdp.cpu_offload", {"actor.num_ranks": 2, "actor.mode": "lora", "actor.fsdp.cpu_offload": True}),
    ],
)
def test_what_workers_cannot_do_is_named(base: DictConfig, key: str, values: dict[str, Any]) -> None:
    base = copy.deepcopy(base)
    base.launcher = {"_target_": SPAWN}
    assert set(found(base, **values)) == {key}


@pytest.mark.parametrize(
    "values",
    [
        {"actor.num_ranks": 2},
        {"actor.num_ranks": 4, "actor.mode": "lora", "trainer.layout": "colocated"},
        {"trainer.layout": "standalone", "rollout.num_workers": 3, "rollout.on_death": "restart"},
        {"trainer.layout": "standalone", "actor.mode": "lora", "weight_sync.mode": "merged"},
        {"trainer.layout": "standalone", "weight_sync.transport": "object_store"},
        {"actor.num_ranks": 2, "actor.fsdp.cpu_offload": True},
    ],
)
def test_what_workers_can_do_passes(base: DictConfig, values: dict[str, Any]) -> None:
    base = copy.deepcopy(base)
    base.launcher = {"_target_": SPAWN}
    assert found(base, **values) == {}


def test_the_hint_for_ranks_names_numbers_that_divide(base: DictConfig) -> None:
    base = copy.deepcopy(base)
    base.launcher = {"_target_": SPAWN}
    problem = found(base, **{"actor.num_ranks": 3})["actor.num_ranks"]
    for hinted in ({"actor.num_ranks": 2}, {"actor.num_ranks": 4}):
        assert found(base, **hinted) == {}
    assert "2 or 4" in str(problem) and "data.num_samples_per_prompt=9" in str(problem)
    assert found(base, **{"actor.num_ranks": 3, "data.num_samples_per_prompt": 9}) == {}
