"""Composition: from overrides such as `recipe=tiny_ocr data.seed=3` to one configuration, or to each point of a sweep.

`configs/train.yaml` and its groups are Hydra's search path, the shipped recipes are the group `recipe` of its
ConfigStore, and the dataclass `flowrl.config.Config` is the schema of the root. A user's own folder (`--config-dir`)
may add options to every group, recipes included.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from flowrl.cli.explain import explain
from flowrl.config import Config, ConfigError, Problem

PRIMARY = "train"


def load_config(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> DictConfig:
    """The configuration that `python -m flowrl OVERRIDES` would run.

    Args:
        overrides: in Hydra's grammar: "recipe=NAME", "model=NAME", "data.seed=3", "+eval.sets.mine=words.txt" ...
        config_dir: a folder of one's own with groups such as `recipe/` or `model/`, beside those of flowrl.

    Raises:
        ConfigError: for a key that does not exist, a wrong type, an unknown option of a group, a broken file.
    """
    with _hydra(config_dir):
        return _compose(list(overrides), config_dir)


def load_sweep(overrides: Sequence[str], config_dir: str | Path | None = None) -> list[DictConfig]:
    """Every point of a sweep: the product of all comma lists, `range`, `glob` and `choice` among the overrides.

    Points get folders of their own: the swept values follow the name, as in `tiny_ocr/algorithm.clip_range=0.0001`.
    """
    with _hydra(config_dir) as hydra:
        parser = OverridesParser.create(config_loader=hydra.config_loader())
        parsed = parser.parse_overrides(list(overrides))
        swept = [override for override in parsed if override.is_sweep_override()]
        fixed = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
        points = []
        for values in itertools.product(*(_values(override) for override in swept)):
            cfg = _compose([*fixed, *values], config_dir)
            if values and not any(override.key_or_group == "name" for override in swept):
                cfg.name = f"{cfg.name}/{','.join(values).replace('/', '.')}"
            points.append(cfg)
        return points


def _values(override: Override) -> list[str]:
    if not override.is_discrete_sweep():
        problem = Problem(override.get_key_element(), "cannot sweep over an interval.", "List its values: a,b,c.")
        raise ConfigError(problem)
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _compose(overrides: list[str], config_dir: str | Path | None) -> DictConfig:
    for override in overrides:
        if override.lstrip("+~").startswith(("hydra.", "hydra/")):
            hint = "Leave it out; `runs` and `name` say where a run goes."
            raise ConfigError(Problem(override, "settings of Hydra itself have no effect here.", hint))
        if override.startswith("debug=["):
            raise ConfigError(Problem("debug", "takes one option.", "Set debug=tiny or debug=short."))
    extra = [] if config_dir is None else [f"hydra.searchpath=['file://{_escaped(config_dir)}']"]
    cfg = compose(PRIMARY, [*extra, *overrides], return_hydra_config=True)
    recipe, debug = (cfg.hydra.runtime.choices.get(group) for group in ("recipe", "debug"))
    with open_dict(cfg):
        del cfg["hydra"]
    cfg.recipe = recipe
    if OmegaConf.is_interpolation(cfg, "name"):
        # No recipe after `~recipe`, or a list of several. What is tried leaves its folder's name to the run itself.
        cfg.name = (recipe or "run") + (f"_{debug}" if debug else "")
    return cfg


def _escaped(folder: str | Path) -> str:
    return str(Path(folder).resolve()).replace("\\", "\\\\").replace("'", "\\'")


@contextmanager
def _hydra(config_dir: str | Path | None) -> Iterator[GlobalHydra]:
    """Hydra ready to compose; its errors, and those of the files that it reads, leave as `ConfigError`."""
    if config_dir is not None:
        _check_folder(Path(config_dir))
    register()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(shipped("configs")), job_name="flowrl"):
            yield GlobalHydra.instance()
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise explain(error) from error


def _check_folder(folder: Path) -> None:
    """A user's options stand beside those of flowrl; Hydra would pass over one of two of the same name in silence."""
    if not folder.is_dir():
        raise ConfigError(Problem("--config-dir", f"there is no folder {str(folder)!r}."))
    twice = _options(folder).keys() & shipped_options().keys()
    if twice:
        names = ", ".join(f"{group}/{name}.yaml" for group, name in sorted(twice))
        raise ConfigError(Problem("--config-dir", f"{folder} holds options that flowrl has: {names}.", "Rename them."))


# ---------------------------------------------------------------------------------------------- what is shipped


def shipped(name: str) -> Path:
    """The folder of flowrl's `configs` or `recipes`: inside the installed package, or beside it in a bare checkout."""
    spec = importlib.util.find_spec(f"flowrl.{name}")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).resolve().parents[2] / name


@cache
def register() -> None:
    """Give Hydra the schema and the shipped recipes, once in a process: to read them takes as long as to compose."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config, provider="flowrl")
    for file in sorted(shipped("recipes").glob("*.yaml")):
        # Files lose their `# @package _global_` header when they are loaded here.
        store.store(group="recipe", name=file.stem, node=OmegaConf.load(file), package="_global_", provider="flowrl")


@dataclass(frozen=True)
class Choice:
    """One option of a group, with the first line of its file's header comment."""

    group: str
    name: str
    description: str


def choices(config_dir: str | Path | None = None) -> list[Choice]:
    """Every option of every group, recipes included, shipped or in the user's folder."""
    files = shipped_options() | ({} if config_dir is None else _options(Path(config_dir)))
    return [Choice(*option, description(file)) for option, file in sorted(files.items())]


def shipped_options() -> dict[tuple[str, str], Path]:
    """The file of each shipped option, by group and name."""
    recipes = {("recipe", file.stem): file for file in shipped("recipes").glob("*.yaml")}
    return recipes | _options(shipped("configs"))


def _options(root: Path) -> dict[tuple[str, str], Path]:
    return {(file.parent.relative_to(root).as_posix(), file.stem): file for file in root.glob("*/**/*.yaml")}


def description(file: Path) -> str:
    """The first comment line that is not a Hydra header, up to the end of its sentence."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            return line.lstrip("# ").rstrip()
    return ""
