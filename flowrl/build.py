"""The one function that turns configuration nodes into objects, and a whole configuration into a `Config`.

Nodes with a `_target_` dotpath become the objects they name; fixed sections become the dataclasses of `config`. This
module knows no other part of flowrl, nor Hydra.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING as REQUIRED
from dataclasses import Field, fields, is_dataclass, make_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from flowrl.config import Config, ConfigError, Problem

T = TypeVar("T")
FAILED = object()  # stands for a part that could not be built
_REFILL = (
    "is for trainer=sync: separate_async always evicts a group that cannot be drawn, and draws another in its place.",
    "Leave it out; trainer.max_failed_rollouts_in_a_row says how many may fail.",
)
ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "trainer.drop_incomplete_groups": _REFILL,
    "trainer.max_incomplete_group_refill_rounds": _REFILL,
}
"""Keys of one option that are looked for in another: what is wrong there, and what to do."""


def build_run(cfg: DictConfig) -> Config:
    """The typed `Config` of a composed configuration, components built. All faults come as one `ConfigError`."""
    run, problems = assemble(cfg)
    if problems:
        raise ConfigError(*problems)
    return run


def assemble(cfg: DictConfig) -> tuple[Config, list[Problem]]:
    """`build_run` for those who have more to check: a `Config`, and the faults.

    For what is at fault the `Config` has the schema's default, or None if there is none.
    """
    problems: list[Problem] = []
    return _build_fields(Config, _plain(cfg, ""), "", problems), problems


def _build_fields(schema: type[T], tree: Any, path: str, problems: list[Problem]) -> T:
    """A section dataclass from its plain tree: nested sections recurse, everything else is a leaf or a component."""
    arguments: dict[str, Any] = {}
    hints = get_type_hints(schema)
    known = {f.name: f for f in fields(schema)}  # type: ignore[arg-type]
    for key in tree.keys() - known.keys():  # `+key=value` gets them past Hydra
        problems.append(_unknown(f"{path}.{key}" if path else key, known, schema))
    for f in known.values():
        where = f"{path}.{f.name}" if path else f.name
        if is_dataclass(hints[f.name]):
            arguments[f.name] = _build_fields(hints[f.name], tree[f.name], where, problems)
        else:
            value = _build(tree[f.name], where, problems)
            arguments[f.name] = _default(f) if value is FAILED else value
    return schema(**arguments)


def _default(f: Field[Any]) -> Any:
    if f.default_factory is not REQUIRED:
        return f.default_factory()
    return None if f.default is REQUIRED or f.default == MISSING else f.default


def build(node: Any, path: str, expected: type[T] | tuple[type, ...] = object) -> T:  # type: ignore[assignment]
    """The object that `node` describes: `_target_` is a dotpath to a dataclass, the other keys are its fields.

    Children with a `_target_` are built first. Keys and types are checked against the dataclass, so a misspelt key or
    a wrong type is a `ConfigError` with its path; several faults in one node come together.
    """
    problems: list[Problem] = []
    value = _build(_plain(node, path) if isinstance(node, DictConfig | ListConfig) else node, path, problems)
    if not problems and not isinstance(value, expected):
        names = " or ".join(c.__name__ for c in (expected if isinstance(expected, tuple) else (expected,)))
        problems.append(Problem(path, f"must be a {names}, got {_describe(value)}.", f"Set {path}._target_ to one."))
    if problems:
        raise ConfigError(*problems)
    return value  # type: ignore[no-any-return]


def _plain(node: DictConfig | ListConfig, path: str) -> Any:
    try:
        return OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(Problem(str(error.full_key or path), str(error).splitlines()[0])) from error


def _build(value: Any, path: str, problems: list[Problem]) -> Any:
    """The object, or `FAILED` once the reasons are in `problems`."""
    if value == "???":
        problems.append(Problem(path, "must be set.", f"Set {path}=..."))
        return FAILED
    if isinstance(value, list):
        items = [_build(item, f"{path}[{i}]", problems) for i, item in enumerate(value)]
        return FAILED if FAILED in items else items
    if not isinstance(value, Mapping):
        return value
    children = {key: _build(item, f"{path}.{key}", problems) for key, item in value.items() if key != "_target_"}
    if "_target_" not in value:
        return FAILED if FAILED in children.values() else children
    target = _locate(value["_target_"], path, problems)
    return FAILED if target is None else _construct(target, children, path, problems)


def _locate(dotpath: str, path: str, problems: list[Problem]) -> type | None:
    """The dataclass at `dotpath`; importing it is what registers it."""
    module_name, _, name = str(dotpath).rpartition(".")
    try:
        target = vars(importlib.import_module(module_name))[name]
    except (ImportError, KeyError, ValueError) as error:
        hint = "Is the module on PYTHONPATH and the name spelt as in the file?"
        problems.append(Problem(f"{path}._target_", f"cannot import {dotpath!r} ({error}).", hint))
        return None
    if not (isinstance(target, type) and is_dataclass(target)) or inspect.isabstract(target):
        problems.append(
            Problem(f"{path}._target_", f"{dotpath!r} must be a concrete dataclass, got {_describe(target)}.")
        )
        return None
    return target


def _construct(target: type, children: dict[str, Any], path: str, problems: list[Problem]) -> Any:
    known = {f.name: f for f in fields(target) if f.init}
    faults = [_unknown(f"{path}.{key}", known, target) for key in children if key not in known]
    for f in known.values():
        if f.default is REQUIRED and f.default_factory is REQUIRED and f.name not in children:
            faults.append(Problem(f"{path}.{f.name}", f"is required by {target.__name__}."))
    arguments = {
        key: FAILED if item is FAILED else _checked(target, key, item, path, faults)
        for key, item in children.items()
        if key in known
    }
    problems.extend(faults)
    if faults or FAILED in arguments.values():
        return FAILED
    try:
        return target(**arguments)
    except ValueError as error:
        problems.append(Problem(path, str(error)))
        return FAILED


def _checked(target: type, key: str, item: Any, path: str, faults: list[Problem]) -> Any:
    """`item` converted to the type that `target` declares for `key`; objects (built children) pass as they are."""
    hint = get_type_hints(target)[key]
    section = _section(hint)
    if section is not None and isinstance(item, Mapping):
        return _construct(section, dict(item), f"{path}.{key}", faults)
    if _holds_objects(item):
        return item
    try:
        schema = OmegaConf.structured(make_dataclass(target.__name__, [(key, _as_list(hint))]))
    except ValidationError:
        return item  # an annotation that OmegaConf does not know: the component's own business
    try:
        schema[key] = item
        value = schema[key]
    except OmegaConfBaseException as error:
        faults.append(Problem(f"{path}.{key}", f"{str(error).splitlines()[0]}."))
        return FAILED
    if isinstance(value, float) and not math.isfinite(value):
        faults.append(Problem(f"{path}.{key}", f"must be a finite number, got {value}."))
        return FAILED
    return OmegaConf.to_object(value) if isinstance(value, DictConfig | ListConfig) else value


def _section(hint: Any) -> type | None:
    """The dataclass that the hint `Section` or `Section | None` names."""
    kinds = (
        [kind for kind in get_args(hint) if kind is not NoneType] if get_origin(hint) in (Union, UnionType) else [hint]
    )
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and is_dataclass(kinds[0]) else None


def _as_list(hint: Any) -> Any:
    """OmegaConf knows lists, not other sequences."""
    return list[get_args(hint)[0]] if get_origin(hint) in (Sequence, tuple) else hint  # type: ignore[misc]


def _holds_objects(item: Any) -> bool:
    if isinstance(item, Mapping):
        return any(_holds_objects(value) for value in item.values())
    if isinstance(item, list | tuple):
        return any(_holds_objects(value) for value in item)
    return not isinstance(item, str | int | float | bool | None)


def _unknown(path: str, known: Mapping[str, Any], target: type) -> Problem:
    if path in ELSEWHERE:
        return Problem(path, *ELSEWHERE[path])
    return Problem(path, f"is not a field of {target.__name__}.", f"Fields: {', '.join(known)}.")


def _describe(value: Any) -> str:
    return type(value).__name__ if not isinstance(value, type) else value.__name__
