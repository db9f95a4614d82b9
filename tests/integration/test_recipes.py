"""Every recipe at `debug=tiny`, and every swap of the parts that any recipe can be combined with."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

import flowrl
from flowrl.build import assemble, build
from flowrl.cli.compose import load_config
from flowrl.preflight import preflight
from flowrl.trainers import placement

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
MODELS = sorted(path.stem for path in (ROOT / "configs/model").glob("*.yaml"))
TRAINERS = sorted(path.stem for path in (ROOT / "configs/trainer").glob("*.yaml"))
STOCHASTIC = sorted(path.stem for path in (ROOT / "configs/sampler/dynamics").glob("*.yaml") if path.stem != "ode")


def sizes(name: str) -> list[str]:
    """A short video in few steps where a recipe draws videos."""
    frames, steps = ["sampler.frames=5"], ["sampler.num_steps=6"]
    return {"wan21_ocr_lora": [*frames, *steps], "wan22_5b_dance_hpsv3": frames}.get(name, [])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_two_steps(name: str, tmp_path: Path) -> None:
    overrides = [f"recipe={name}", "debug=tiny", "device=cpu", f"runs={tmp_path}", "logger=jsonl", *sizes(name)]
    flowrl.train(load_config(overrides))
    records = [json.loads(line) for line in (tmp_path / f"{name}_tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(record["train/grad_norm"] > 0 for record in records[1:])


def test_a_miniature_is_of_the_recipes_own_architecture() -> None:
    config = build(load_config(["recipe=wan22_5b_dance_hpsv3", "debug=tiny"]).model, "model")
    assert config.load(torch.device("cpu")).pipeline.config.expand_timesteps, "Wan2.2 TI2V-5B's own"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_rewards_where_its_gpus_are(name: str) -> None:
    """As shipped, on GPUs, and not at tiny size. What users must set themselves is set."""
    files = ["data.train=prompts.txt", "trainer.eval.sets.heldout=prompts.txt"]
    run, problems = assemble(load_config([f"recipe={name}", "device=cuda", *files]))
    assert problems == [] and list(placement.problems(run)) == []


def test_every_swap_passes_preflight() -> None:
    """Model x trainer x dynamics. Each option is composed once; their trees do not overlap. Variants are left out."""
    base = ["recipe=sd35_medium_ocr_lora", "debug=tiny", "algorithm.old_log_prob=rollout"]
    models = [load_config([*base, f"model={name}"]).model for name in MODELS if name != "tiny_sd3"]
    trainers = [load_config([*base, f"trainer={name}"]).trainer for name in TRAINERS]
    options = [load_config([*base, f"sampler/dynamics={name}"]).sampler.dynamics for name in STOCHASTIC]
    dynamics = {option["_target_"]: option for option in options}.values()
    cfg = load_config(base)
    for cfg.model, cfg.trainer, cfg.sampler.dynamics in product(models, trainers, dynamics):
        run = preflight(cfg)
        assert f"{type(run.model).__module__}.{type(run.model).__name__}" == cfg.model["_target_"]
