"""The command lines of flowrl's tools: `key=value` arguments, typed by a dataclass, and errors of one sentence."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flowrl.cli.explain import closest
from flowrl.config import ConfigError, Problem

T = TypeVar("T")
HELP = ("-h", "--help", "help")
TEXTS = (str, str | None)
CONFIG_DIR = "--config-dir"


class Failure(Exception):
    """The end of a tool that could not do its work: what to say. The exit status is 1."""


def option(about: str, default: Any = MISSING, *, choices: Sequence[str] = ()) -> Any:
    """A field of a tool's dataclass: what `-h` says of it, its default (without one it must be set), its values."""
    return field(default=default, metadata={"about": about, "choices": tuple(choices)})


@dataclass(frozen=True)
class Tool:
    """One command: `python -m flowrl.cli.<name> key=value ...`.

    Args:
        name: of its module.
        about: what it does, above the list of keys.
        schema: a dataclass whose fields are `option`s of the types str, int, float, bool, or one of them or None.
        carry_out: does it, given an object of the schema. Called with no heavy library imported.
    """

    name: str
    about: str
    schema: type
    carry_out: Callable[[Any], None]

    def main(self) -> None:
        """Carry out the process's command line and exit."""
        sys.exit(self.command(sys.argv[1:]))

    def command(self, arguments: Sequence[str]) -> int:
        """The exit status. 0; 1: it failed; 2: the arguments or what they name are at fault; 130: it was stopped."""
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported; see flowrl.cli.train
        if any(argument in HELP for argument in arguments):
            print(self.usage())
            return 0
        try:
            self._guarded(self.settings(spelt(arguments)))
        except ConfigError as error:
            print(self._complaint(error), file=sys.stderr)
            return 2
        except Failure as failure:
            print(f"{self.name}: {failure}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"\n{self.name}: interrupted.", file=sys.stderr)
            return 130
        return 0

    def settings(self, arguments: Sequence[str]) -> Any:
        """What `carry_out` is given. Raises ConfigError."""
        return parse(self.schema, arguments)

    def usage(self) -> str:
        """The page of `-h`: every key with its default and one line about it."""
        entries = [(f"{f.name}={_default(f)}", _about(f)) for f in fields(self.schema)]
        width = max(len(entry) for entry, _ in entries)
        lines = [f"  {entry:<{width}}  {about}" for entry, about in entries]
        return "\n".join([f"usage: python -m flowrl.cli.{self.name} key=value ...", "", self.about, "", *lines])

    def _guarded(self, settings: Any) -> None:
        """Carry it out; what fails in a way that we know of becomes ConfigError or Failure."""
        from flowrl.distributed.checkpoint.manifest import CheckpointError
        from flowrl.rewards.scoring import RewardError
        from flowrl.types import DivergedError, LoadError

        try:
            self.carry_out(settings)
        except LoadError as error:
            raise ConfigError(_of_path(str(error))) from error
        except (CheckpointError, RewardError, DivergedError) as error:
            raise Failure("\n".join([str(error), *vars(error).get("__notes__", ())])) from error

    def _complaint(self, error: ConfigError) -> str:
        count = len(error.problems)
        lines = [f"  {problem}".replace("\n", "\n    ") for problem in error.problems]
        return "\n".join([f"{self.name}: {count} problem{'s' if count > 1 else ''}.", *lines])


def below(settings: Any, bounds: Mapping[str, float]) -> list[Problem]:
    """Numbers under their bound, or not finite; null passes."""
    values = {name: (vars(settings)[name], low) for name, low in bounds.items()}
    return [
        Problem(name, f"must be at least {low}, got {value}.")
        for name, (value, low) in values.items()
        if value is not None and not (math.isfinite(value) and value >= low)
    ]


def spelt(arguments: Sequence[str]) -> list[str]:
    """`--config-dir FOLDER`, as `python -m flowrl` has it, is `config_dir=FOLDER` to tools."""
    result, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == CONFIG_DIR and rest:
            argument = f"config_dir={rest.pop(0)}"
        elif argument.startswith(f"{CONFIG_DIR}="):
            argument = f"config_dir={argument.partition('=')[2]}"
        result.append(argument)
    return result


def parse(schema: type[T], arguments: Sequence[str]) -> T:
    """The settings that `key=value` arguments give. Raises ConfigError with everything that is wrong with them."""
    node = OmegaConf.structured(schema)
    known = {f.name: f for f in fields(schema)}  # type: ignore[arg-type]
    hints = get_type_hints(schema)
    problems = [problem for argument in arguments for problem in _set(node, hints, argument)]
    faulty = {problem.path for problem in problems}
    for name, f in known.items():
        if name in faulty:
            continue
        if OmegaConf.is_missing(node, name):
            problems.append(Problem(name, f"must be set: {f.metadata['about']}.", f"Write {name}=..."))
        elif f.metadata["choices"] and node[name] not in (None, *f.metadata["choices"]):
            problems.append(Problem(name, f"must be {' or '.join(f.metadata['choices'])}, got {node[name]!r}."))
    if problems:
        raise ConfigError(*problems)
    settings = OmegaConf.to_object(node)
    assert isinstance(settings, schema)
    return settings


def _set(node: DictConfig, hints: Mapping[str, Any], argument: str) -> Iterator[Problem]:
    """Put one argument into the settings, or say what is wrong with it."""
    key, equals, text = argument.partition("=")
    if key not in hints:
        best, names = closest(key, hints)
        guess = f"Did you mean {best}? " if best else ""
        yield Problem(key, "there is no such key.", f"{guess}Keys: {', '.join(names)}.")
    elif not equals:
        yield Problem(key, "has no value.", f"Write {key}=...")
    else:
        try:
            # A text is what was typed: colons, brackets, digits, dollars and all.
            literal = hints[key] in TEXTS and text != "null"
            node[key] = text.replace("${", r"\${") if literal else yaml.safe_load(text)
        except yaml.YAMLError:
            yield Problem(key, f"cannot be read: {text!r}.")
        except OmegaConfBaseException as error:
            yield Problem(key, f"{str(error).splitlines()[0]}.")


def _default(f: Field[Any]) -> str:
    if f.default == MISSING:
        return "..."
    return f.default if isinstance(f.default, str) else json.dumps(f.default)


def _about(f: Field[Any]) -> str:
    choices = " | ".join(f.metadata["choices"])
    return f"{f.metadata['about']}: {choices}" if choices else str(f.metadata["about"])


def _of_path(message: str) -> Problem:
    """A LoadError's sentence begins with the key that it is about: `model.path=...: what is wrong`."""
    path, _, rest = message.partition(": ")
    return Problem(path, rest) if rest else Problem("model", message)


@contextmanager
def own_names(prefix: str) -> Iterator[None]:
    """Keys of a tool, where what it calls speaks of a run's: `sampler.height` is `height`."""
    try:
        yield
    except ConfigError as error:
        problems = (Problem(p.path.removeprefix(prefix), p.message, p.hint) for p in error.problems)
        raise ConfigError(*problems) from error


@contextmanager
def new_folder(out: str) -> Iterator[Path]:
    """Yields an empty folder to fill, which appears as `out` when the block ends, or not at all.

    Raises:
        ConfigError: there is something of that name.
        Failure: it cannot be written.
    """
    from safetensors import SafetensorError

    from flowrl.files import atomic_folder

    path = Path(out)
    _refuse_existing(path)
    try:
        with atomic_folder(path, f"{secrets.token_hex(4)}.") as partial:  # another export may have the same name
            try:
                yield partial
                _refuse_existing(path)  # that somebody else made meanwhile
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)  # it may be large; and the error that counts is another
                raise
    except OSError as error:
        if error.filename is not None and not _lies_in(path.parent, str(error.filename)):
            raise
        raise Failure(f"out={out} cannot be written: {error.strerror or error}.") from error
    except SafetensorError as error:  # which writes files of its own
        raise Failure(f"out={out} cannot be written: {error}") from error


def _lies_in(folder: Path, file: str) -> bool:
    return Path(file).absolute().is_relative_to(folder.absolute())


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise ConfigError(Problem("out", f"{path} exists, and nothing is overwritten.", "Choose another folder."))
