"""Prompt files: one prompt a line (`.txt`), or one JSON object a line (`.jsonl`).

The fields of a JSON object are `prompt`, and if wanted `target`, `negative_prompt`, `metadata` (an object) and `id`;
`null` in one of those is as good as leaving it out.
Nothing in a file is passed over in silence but blank lines: a file with faults is refused, with all of them by line.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from flowrl.data.targets import first_quoted
from flowrl.prompts import Prompt

PACKAGE_SCHEME = "pkg://"
TARGETS = ("none", "quoted", "field")
SUFFIXES = (".txt", ".jsonl")
OPTIONAL = ("target", "negative_prompt", "metadata", "id")
FIELDS = ("prompt", *OPTIONAL)


@dataclass(frozen=True)
class Fault:
    """What is wrong with one line of a prompt file, or, without a line, with the file."""

    message: str
    line: int | None = None


class PromptFileError(ValueError):
    """A prompt file that cannot be used: all its faults, and a message that names the first `shown` of them."""

    shown = 20

    def __init__(self, path: str, faults: list[Fault]) -> None:
        self.path = path
        self.faults = tuple(faults)
        lines = self.report()
        hidden = len(lines) - self.shown
        more = [f"... and {hidden} more; `python -m data_process inspect {path}` lists them all"] if hidden > 0 else []
        super().__init__("\n".join(lines[: self.shown] + more))

    def report(self) -> list[str]:
        """One `file:line: message` per fault, in the order of the lines."""
        return [f"{self.path}{'' if f.line is None else f':{f.line}'}: {f.message}" for f in self.faults]


def load_prompts(path: str, target: str = "none") -> list[Prompt]:
    """The prompts of a file, in its order; repeated prompts are kept, and so are weighted.

    A prompt without an `id` of its own gets one from its content: the same line has the same id in every file, and
    twice in one file if it stands there twice.

    Args:
        path: an ordinary path, or `pkg://PACKAGE/path` for a file inside an installed package.
        target: where `Prompt.target` comes from. "quoted": the first quoted text of the prompt; every prompt must have
            one. "field": the JSON field, which every prompt must have. "none": the JSON field if it is there.

    Raises:
        PromptFileError: with every fault of the file.
        ValueError: for an unknown `target`.
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}; got {target!r}")
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise PromptFileError(path, [Fault(f"must end in {' or '.join(SUFFIXES)}, got {suffix!r}")])
    if suffix == ".txt" and target == "field":
        raise PromptFileError(path, [Fault("a text file has no target field: use .jsonl, or target=quoted")])
    faults: list[Fault] = []
    prompts: list[Prompt] = []
    explicit_ids: dict[str, int] = {}
    for number, line in _lines(_read(path), faults):
        try:
            row = {"prompt": line.strip()} if suffix == ".txt" else _json_row(line)
            prompts.append(_prompt(row, target))
            _check_id(row, number, explicit_ids)
        except _LineFault as fault:
            faults.extend(Fault(message, number) for message in fault.messages)
        except RecursionError:
            faults.append(Fault("is nested too deeply", number))
    if not prompts and not faults:
        faults.append(Fault("holds no prompt"))
    if faults:
        raise PromptFileError(path, sorted(faults, key=lambda fault: fault.line or 0))
    return prompts


def fingerprint(path: str) -> str:
    """SHA-256 of the file's bytes, in hexadecimal. Raises PromptFileError if it cannot be read."""
    return hashlib.sha256(_read(path)).hexdigest()


class _LineFault(Exception):
    def __init__(self, *messages: str) -> None:
        self.messages = messages


def _read(path: str) -> bytes:
    try:
        return _locate(path).read_bytes()
    except OSError as error:
        raise PromptFileError(path, [Fault(error.strerror or str(error))]) from error


def _locate(path: str) -> Traversable:
    if not path.startswith(PACKAGE_SCHEME):
        return Path(path).expanduser()
    package, _, rest = path.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.submodule_search_locations is None:  # the latter: a module of one file
        raise PromptFileError(path, [Fault(f"there is no package {package!r}")])
    return resources.files(package).joinpath(rest)


def _lines(data: bytes, faults: list[Fault]) -> Iterator[tuple[int, str]]:
    """Number and text of every line but blank ones. Only \\n and \\r\\n end a line: U+2028 may be part of a prompt."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        faults.append(Fault("is UTF-16; save it as UTF-8"))
        return
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            line = raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            byte = raw[error.start]
            faults.append(Fault(f"byte 0x{byte:02x} in column {error.start + 1} is not UTF-8 (Latin-1?)", number))
            continue
        if line.strip():
            yield number, line


def _json_row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise _LineFault(f"is not JSON: {error.msg} in column {error.colno}") from error
    except ValueError as error:  # Python refuses to read it
        raise _LineFault(f"holds an integer of more than {sys.get_int_max_str_digits()} digits") from error
    if not isinstance(row, dict):
        raise _LineFault(f'must be a JSON object such as {{"prompt": "..."}}, got {_json_type(row)}')
    return {name: value for name, value in row.items() if value is not None or name not in OPTIONAL}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise _LineFault(f"has {next(name for name in names if names.count(name) > 1)!r} twice")
    return row


def _prompt(row: dict[str, Any], target: str) -> Prompt:
    """The prompt of one line; raises `_LineFault` with everything that is wrong with it."""
    messages = _field_faults(row)
    if messages:
        raise _LineFault(*messages)
    text, declared = row["prompt"], row.get("target")
    return Prompt(
        id=str(row["id"]) if "id" in row else _content_id(row),
        text=text,
        target=_quoted(text, declared) if target == "quoted" else _declared(declared, required=target == "field"),
        negative=row.get("negative_prompt", ""),
        metadata=row.get("metadata", {}),
    )


def _field_faults(row: dict[str, Any]) -> list[str]:
    messages = []
    if "images" in row:
        messages.append("has 'images': generation conditioned on images is not supported")
    for name in sorted(row.keys() - {*FIELDS, "images"}):
        messages.append(f"has an unknown field {name!r}; fields: {', '.join(FIELDS)}. Others belong into metadata")
    if "prompt" not in row:
        messages.append("has no 'prompt'")
    for name in ("prompt", "target", "negative_prompt"):
        if name in row and not isinstance(row[name], str):
            messages.append(f"{name!r} must be a string, got {_json_type(row[name])}")
        elif name in row:
            messages.extend(_text_faults(name, row[name]))
    if not isinstance(row.get("metadata", {}), dict):
        messages.append(f"'metadata' must be an object, got {_json_type(row['metadata'])}")
    if "id" in row and (not isinstance(row["id"], str | int) or isinstance(row["id"], bool) or row["id"] == ""):
        messages.append(f"'id' must be a non-empty string or an integer, got {_json_type(row['id'])}")
    elif isinstance(row.get("id"), str):
        messages.extend(_character_faults("id", row["id"]))
    return messages


def _text_faults(name: str, text: str) -> list[str]:
    if name != "negative_prompt" and not text.strip():
        return [f"{name!r} is empty"]
    return _character_faults(name, text)


def _character_faults(name: str, text: str) -> list[str]:
    bad = next((c for c in text if (c < " " and c not in "\t\n") or "\ud800" <= c <= "\udfff"), None)
    return [] if bad is None else [f"{name!r} holds U+{ord(bad):04X}, which is not text"]


def _quoted(text: str, declared: str | None) -> str:
    quoted = first_quoted(text)
    if quoted is None:
        raise _LineFault(f"has no quoted text, which data.target=quoted needs: {text}")
    if not quoted.strip():
        raise _LineFault(f"quotes an empty text: {text}")
    if declared not in (None, quoted):
        raise _LineFault(f"quotes {quoted!r} but its target is {declared!r}: set data.target=field, or remove one")
    return quoted


def _declared(declared: str | None, *, required: bool) -> str | None:
    if declared is None and required:
        raise _LineFault("has no 'target', which data.target=field needs")
    return declared


def _content_id(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def _check_id(row: Mapping[str, Any], number: int, seen: dict[str, int]) -> None:
    if "id" not in row:
        return
    first = seen.setdefault(str(row["id"]), number)
    if first != number:
        raise _LineFault(f"has the id {str(row['id'])!r} of line {first}")


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    names = {type(None): "null", str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]
