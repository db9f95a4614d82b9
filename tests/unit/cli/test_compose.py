"""Composition: what is found, what is refused and in which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowrl import load_config
from flowrl.build import build_run
from flowrl.cli.compose import choices, load_sweep
from flowrl.cli.explain import closest
from flowrl.cli.help import help_text
from flowrl.config import ConfigError

HEADER = "# @package _global_\n"


def refusal(*overrides: str, config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, config_dir)
    return str(caught.value)


def option(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return folder


def test_a_run_is_called_like_its_recipe() -> None:
    cfg = load_config()
    assert (cfg.recipe, cfg.name) == ("tiny_ocr", "tiny_ocr")
    assert load_config(["name=mine", "debug=tiny"]).name == "mine"
    assert load_config(["debug=tiny"]).name == "tiny_ocr_tiny", "what is tried does not take the folder of the run"
    assert refusal("debug=[tiny,short]") == "debug: takes one option. Set debug=tiny or debug=short."
    cfg = load_config(["~recipe"])
    assert (cfg.recipe, cfg.name) == (None, "run")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sed=1", "data.sed: there is no such key. Did you mean data.seed? Keys there: seed, "),
        ("actor.optimiser.lr=1", "actor.optimiser: there is no such key. Did you mean actor.optimizer? "),
        ("sampler.dynamics.noise=1", "Did you mean sampler.dynamics.noise_level?"),
        ("modl=tiny_sd3", "modl: there is no such key. Did you mean model? Keys: "),
        ("data.seed=abc", "data.seed: Value 'abc' of type 'str' could not be converted to Integer."),
        ("model=tiny_sd4", "model: there is no 'tiny_sd4'. Did you mean model=tiny_sd3? There are: tiny_sd3, "),
        ("recipe=tiny", "recipe: there is no 'tiny'. Did you mean recipe=tiny_ocr? There are: tiny_ocr"),
        ("sampler/steps=windw", "sampler/steps: there is no 'windw'. Did you mean sampler/steps=window? "),
        ("recipe=null", "to leave it out write ~group"),
        ("data.seed=1,2", "data.seed: has several values: 1,2. To run each, add -m."),
        ("data.seed", "data.seed: cannot be read as an override. Write key=value"),
        ("trainer=colocate_async", "trainer: colocate_async is not offered: generation and training would compete for"),
        ("trainer=fully_async", "trainer: there is no 'fully_async'. Set trainer=separate_async."),
        ("hydra.run.dir=x", "hydra.run.dir=x: settings of Hydra itself have no effect here."),
        ("data.seed=[1", "data.seed=[1: cannot be read as an override."),
    ],
)
def test_refusals_name_the_path_and_what_to_write(override: str, message: str) -> None:
    assert message in refusal(override)


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("key", ["drop_incomplete_groups=true", "max_incomplete_group_refill_rounds=2"])
def test_keys_of_the_other_trainer_are_refused_with_the_reason(key: str, plus: str) -> None:
    overrides = ["trainer=separate_async", "trainer.mini_batch_size=8", f"{plus}trainer.{key}"]
    with pytest.raises(ConfigError, match=rf"trainer\.{key.split('=')[0]}: is for trainer=sync: separate_async always"):
        build_run(load_config(overrides))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "sed: 1\n", "recipe/mine.yaml: sed: there is no such key. Did you mean seed? "),
        (HEADER + "data: {sed: 1}\n", "recipe/mine.yaml: data.sed: there is no such key. Did you mean data.seed? "),
        (
            HEADER + "seed: abc\n",
            "recipe/mine.yaml: seed: Value 'abc' of type 'str' could not be converted to Integer.",
        ),
        (HEADER + "defaults: [override /model: tiny_sd4]\n", "model: there is no 'tiny_sd4'. Did you mean"),
        (HEADER + "seed: [\n", "mine.yaml:3: is not YAML"),
        ("seed: 1\n", "recipe/mine.yaml: sets keys of the root but lacks the header for it. Begin it with: # @package"),
        ("defaults: [override /model: sd3]\nseed: 1\n", "recipe/mine.yaml: sets keys of the root but lacks the header"),
    ],
)
def test_faults_of_a_recipe_name_its_file(tmp_path: Path, text: str, message: str) -> None:
    folder = option(tmp_path, "recipe/mine", text)
    assert message in refusal("recipe=mine", config_dir=folder)


def test_a_data_option_without_header_says_so(tmp_path: Path) -> None:
    folder = option(tmp_path, "data/mine", "data: {train: a.txt}\n")
    assert "data/mine.yaml: sets keys of the root but lacks the header" in refusal("data=mine", config_dir=folder)


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "it's mine, all"
    option(
        folder, "recipe/mine", HEADER + "# Slower.\ndefaults: [tiny_ocr, _self_]\nactor: {optimizer: {lr: 5.0e-5}}\n"
    )
    cfg = load_config(["recipe=mine"], folder)
    assert (cfg.name, cfg.actor.optimizer.lr, cfg.sampler.height) == ("mine", 5e-5, 32)
    assert re.search("^  mine +Slower.$", help_text(folder), re.MULTILINE)


def test_a_folder_that_is_not_there_or_hides_a_shipped_option(tmp_path: Path) -> None:
    assert "--config-dir: there is no folder" in refusal(config_dir=tmp_path / "none")
    folder = option(tmp_path, "recipe/tiny_ocr", HEADER)
    assert "holds options that flowrl has: recipe/tiny_ocr.yaml" in refusal(config_dir=folder)


def test_sweeps_are_products_with_folders_of_their_own() -> None:
    points = load_sweep(["algorithm.clip_range=1e-4,1e-3", "seed=0,1", "data.seed=7"])
    assert [(p.algorithm.clip_range, p.seed, p.data.seed) for p in points] == [
        (1e-4, 0, 7),
        (1e-4, 1, 7),
        (1e-3, 0, 7),
        (1e-3, 1, 7),
    ]
    assert points[0].name == "tiny_ocr/algorithm.clip_range=0.0001,seed=0"
    assert [p.name for p in load_sweep(["name=a,b"])] == ["a", "b"]
    assert [p.name for p in load_sweep(["sampler/dynamics=cps,flow_sde"])] == [
        "tiny_ocr/sampler.dynamics=cps",
        "tiny_ocr/sampler.dynamics=flow_sde",
    ]
    assert [p.seed for p in load_sweep(["seed=range(3)"])] == [0, 1, 2]
    assert [p.recipe for p in load_sweep(["recipe=glob(tiny_ocr)"])] == ["tiny_ocr"]
    with pytest.raises(ConfigError, match="cannot sweep over an interval"):
        load_sweep(["seed=interval(0, 1)"])


def test_help_names_every_option_with_its_description() -> None:
    page = help_text()
    for choice in choices():
        assert choice.description, f"{choice.group}/{choice.name}.yaml needs a comment that says what it is"
        assert f"{choice.name} " in page and choice.description in page
    assert max(map(len, page.splitlines())) <= 140


def test_the_closest_name_comes_first() -> None:
    assert closest("windw", ["all", "window", "fixed"]) == ("window", ["window", "all", "fixed"])
    assert closest("xyz", ["b", "a"]) == (None, ["a", "b"])
