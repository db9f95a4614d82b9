"""Preflight: settings that do not go together, named by the parts of a run that they concern."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from tests.support.faults import found, sound

HERE = __name__
SCORERS = "tests.unit.rewards.scorers"
SPAWN = "flowrl.distributed.launch.spawn.Spawn"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    return sound(tmp_path_factory.mktemp("prompts"))


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
