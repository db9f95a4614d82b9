"""Hydra's and OmegaConf's errors in flowrl's words: the path, what is wrong, what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import fields

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from flowrl.build import ELSEWHERE
from flowrl.config import Config, ConfigError, Problem

# "In 'recipe/mine': ConfigKeyError raised while composing config:\n<message>\n    full_key: data.sed ..."
_IN_FILE = re.compile(
    r"In '(?P<file>[^']+)': \w+ raised while composing config:\n(?P<message>.*)\n\s+full_key: (?P<key>\S+)"
)
_SEVERAL = re.compile(r"(Ambiguous value for argument|Sweep parameters) '(?P<key>[^=]+)=(?P<values>.*)'")
_WRONG_PACKAGE = re.compile(r"In '(?P<file>[^']+)': Could not override '[^']*@")


_ASYNC = "Set trainer=separate_async."
NOT_OFFERED: dict[tuple[str, str], tuple[str, str]] = {
    ("trainer", "colocate_async"): (
        "colocate_async is not offered: generation and training would compete for the same GPUs at the same time.",
        "Set trainer=separate_async (at the same time, on GPUs of their own) or trainer.layout=colocated (on the same "
        "GPUs, in turns).",
    ),
    ("trainer", "async"): ("there is no 'async'.", _ASYNC),
    ("trainer", "fully_async"): ("there is no 'fully_async'.", _ASYNC),
}
"""Options that other projects have or announce, by group and name: why not, and what to set instead."""


def explain(error: Exception) -> ConfigError:
    """The `ConfigError` that says what `error`, raised while composing, means to the user."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return ConfigError(_unknown_option(error))
    if isinstance(cause, OmegaConfBaseException):
        return ConfigError(_omegaconf(cause))
    if isinstance(error, OverrideParseException):
        return ConfigError(_unreadable_override(error))
    if isinstance(error, yaml.MarkedYAMLError):
        return ConfigError(_broken_yaml(error))
    return ConfigError(_composition(str(error)))


def closest(name: str, candidates: Iterable[str]) -> tuple[str | None, list[str]]:
    """The candidate that `name` was probably meant to be, and all of them, the likeliest first."""
    names = sorted(candidates)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return (near[0] if near else None), [*near, *(other for other in names if other not in near)]


def _unknown_option(error: MissingConfigException) -> Problem:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if (group, name) in NOT_OFFERED:
        return Problem(group, *NOT_OFFERED[group, name])
    best, names = closest(name, error.options or [])
    if not names:
        return Problem(group or name, f"there is no {error.missing_cfg_file!r}.")
    guess = f"Did you mean {group}={best}? " if best else ""
    return Problem(group, f"there is no {name!r}.", f"{guess}There are: {', '.join(names)}.")


def _omegaconf(error: OmegaConfBaseException) -> Problem:
    path = str(error.full_key or error.key or "configuration")
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        parent = error.parent_node
        return _unknown_key(path, [str(key) for key in parent] if isinstance(parent, DictConfig) else [])
    return Problem(path, _first_line(str(error)))


def _unknown_key(path: str, keys: list[str]) -> Problem:
    if path in ELSEWHERE:
        return Problem(path, *ELSEWHERE[path])
    parent, _, name = path.rpartition(".")
    best, names = closest(name, [key for key in keys if key not in ("hydra", "_target_")])
    guess = f"Did you mean {parent + '.' if parent else ''}{best}? " if best else ""
    return Problem(path, "there is no such key.", f"{guess}{'Keys there' if parent else 'Keys'}: {', '.join(names)}.")


def _unreadable_override(error: OverrideParseException) -> Problem:
    hint = "Write key=value, and quote values with spaces or special characters: \"key='a, b'\"."
    return Problem(error.override, "cannot be read as an override.", hint)


def _broken_yaml(error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark
    where = "configuration" if mark is None else f"{mark.name}:{mark.line + 1}"
    return Problem(where, f"is not YAML: {error.problem}.")


def _composition(message: str) -> Problem:
    """What Hydra says in words alone: an error inside a file of a group, or anything else."""
    several = _SEVERAL.match(message)
    if several is not None:
        key, values = several["key"], several["values"]
        hint = f"To run each, add -m. For a list write {key}=[{values}], for a text \"{key}='{values}'\"."
        return Problem(key, f"has several values: {values}.", hint)
    wrong_package = _WRONG_PACKAGE.search(message)
    if wrong_package is not None:
        return _no_header(wrong_package["file"])
    if message.startswith("Config group override must be"):
        return Problem("configuration", "a group is chosen by name: group=NAME; to leave it out write ~group.")
    found = _IN_FILE.search(message)
    if found is None:
        return Problem("configuration", " ".join(message.split()))
    file, key = found["file"], found["key"]
    group = file.rpartition("/")[0]
    roots = {f.name for f in fields(Config)}
    if key == group or (key.startswith(f"{group}.") and key.removeprefix(f"{group}.").split(".")[0] in roots):
        return _no_header(file)
    if " not in " in found["message"]:
        problem = _unknown_key(key, _schema_keys(key))
        return Problem(f"{file}.yaml: {problem.path}", problem.message, problem.hint)
    return Problem(f"{file}.yaml: {key}", _first_line(found["message"]))


def _no_header(file: str) -> Problem:
    return Problem(
        f"{file}.yaml", "sets keys of the root but lacks the header for it.", "Begin it with: # @package _global_"
    )


def _schema_keys(path: str) -> list[str]:
    parent = path.rpartition(".")[0]
    schema = OmegaConf.structured(Config)
    node = OmegaConf.select(schema, parent) if parent else schema
    return [str(key) for key in node] if isinstance(node, DictConfig) else []


def _first_line(message: str) -> str:
    line = message.strip().splitlines()[0]
    return line if line.endswith(".") else f"{line}."
