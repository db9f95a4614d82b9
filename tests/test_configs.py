"""Every YAML composes and builds, lists every knob, and misspelt keys and wrong types are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from flowrl import load_config
from flowrl.build import assemble
from flowrl.cli.compose import choices
from flowrl.config import Config, ConfigError
from flowrl.preflight import preflight

ROOT = Path(__file__).parents[1]
OPTIONS = [(choice.group, choice.name) for choice in choices() if choice.group not in ("recipe", "debug")]
RECIPES = [choice.name for choice in choices() if choice.group == "recipe"]
DEBUG = [choice.name for choice in choices() if choice.group == "debug"]
MODELS = [name for group, name in OPTIONS if group == "model"]
ALGORITHMS = [name for group, name in OPTIONS if group == "algorithm"]
TINY = "flowrl.models.sd3.SD3"  # of the option that varies another
DEFAULT = load_config()
PLAIN = OmegaConf.to_container(DEFAULT, resolve=True)


def faults(cfg: DictConfig) -> list[str]:
    """What is wrong, other than values that only a user can give."""
    return [str(problem) for problem in assemble(cfg)[1] if problem.message != "must be set."]


def components(tree: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node with a `_target_`, with its path."""
    if isinstance(tree, Mapping):
        if "_target_" in tree:
            yield path, dict(tree)
        for key, child in tree.items():
            yield from components(child, f"{path}.{key}" if path else key)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from leaves(child, f"{path}.{key}" if path else key)
    else:
        yield path, tree


def assert_lists_every_knob(node: Mapping[str, Any], schema: type, path: str) -> None:
    names = {f.name for f in fields(schema) if f.init}
    assert set(node) - {"_target_"} == names, f"{path}: the YAML and {schema.__name__} differ"
    for name, hint in get_type_hints(schema).items():
        if is_dataclass(hint) and isinstance(node.get(name), Mapping):
            assert_lists_every_knob(node[name], hint, f"{path}.{name}")


@pytest.mark.parametrize(("group", "name"), OPTIONS, ids=["/".join(option) for option in OPTIONS])
def test_every_option_builds_and_lists_every_knob(group: str, name: str) -> None:
    cfg = load_config(["~recipe", f"{group}={name}"])
    assert faults(cfg) == []
    for path, node in components(OmegaConf.to_container(cfg)):
        if path.startswith(group.replace("/", ".")):
            assert_lists_every_knob(node, get_class(node["_target_"]), path)


def filled(cfg: DictConfig) -> DictConfig:
    """With what only a user can give."""
    for path in ("model.path", "data.train", "trainer.eval.sets.heldout"):
        section, _, name = path.rpartition(".")
        if OmegaConf.is_missing(OmegaConf.select(cfg, section), name):
            OmegaConf.update(cfg, path, OmegaConf.select(DEFAULT, path))
    return cfg


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_passes_preflight(name: str) -> None:
    assert preflight(filled(load_config([f"recipe={name}"]))).recipe == name


@pytest.mark.parametrize("name", DEBUG)
def test_every_debug_option_passes_preflight(name: str) -> None:
    preflight(load_config([f"debug={name}"]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_models_can_be_swapped_under_any_recipe(recipe: str) -> None:
    """A recipe says of its model only what can be said of all; one swap is composed, each with another model."""
    says = OmegaConf.load(ROOT / "recipes" / f"{recipe}.yaml").get("model", {})
    for name in MODELS:
        target = OmegaConf.load(ROOT / "configs/model" / f"{name}.yaml").get("_target_", TINY)
        model = get_class(target)
        assert set(says) <= {f.name for f in fields(model)}, f"model={name} under recipe={recipe}"
    model = MODELS[RECIPES.index(recipe) % len(MODELS)]
    assert faults(load_config([f"recipe={recipe}", f"model={model}"])) == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_can_be_swapped_under_the_default_recipe(algorithm: str) -> None:
    assert faults(load_config([f"algorithm={algorithm}"])) == []


def test_rewards_compose() -> None:
    cfg = load_config(["reward=[ocr,jpeg_compressibility]"])
    assert set(cfg.reward.components) == {"ocr", "jpeg_compressibility"}
    assert faults(cfg) == []


PARENTS = {path.rpartition(".")[0]: path for path, _ in leaves(PLAIN) if "_target_" not in path}


@pytest.mark.parametrize("path", PARENTS.values(), ids=lambda path: str(path))
def test_misspelt_keys_are_refused(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([f"{path}_=1"])
    (problem,) = caught.value.problems
    assert problem.path == f"{path}_" and f"Did you mean {path}?" in problem.hint


NUMBERS = [path for path, value in leaves(PLAIN) if isinstance(value, int | float)]


@pytest.mark.parametrize("path", NUMBERS)
def test_words_for_numbers_are_refused(path: str) -> None:
    cfg = copy.deepcopy(DEFAULT)
    try:
        OmegaConf.update(cfg, path, "word")
    except ValueError as error:  # a section: the schema refuses at once
        assert path in str(error)
        return
    assert any(problem.path == path for problem in assemble(cfg)[1])


def test_the_schema_is_what_is_composed() -> None:
    assert set(DEFAULT) == {f.name for f in fields(Config)}
