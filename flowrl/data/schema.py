"""What a row of a prompt file may hold; docs/data.md is its description for users.

    prompt            what to draw
    target            what a reward looks for, for OCR the text to be read
    negative_prompt   what guidance leads away from
    images, videos    files that the prompt is about; paths are relative to the data file
    metadata          an object; `task` and `sample_id` have a meaning, the rest is the user's
    id                as `metadata.sample_id`

Only `prompt` must be there, and null is as good as leaving any other field out.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flowrl.data.chat import CHAT_FIELDS, from_chat, is_chat
from flowrl.data.rows import Fault, LineFault, Row, column_names, json_type, parse_json, read_rows
from flowrl.data.targets import first_quoted

TARGETS = ("none", "quoted", "field")
MEDIA = ("images", "videos")
OPTIONAL = ("target", "negative_prompt", *MEDIA, "metadata", "id")
FIELDS = ("prompt", *OPTIONAL)
TASKS: dict[str, tuple[str, ...]] = {"t2i": (), "t2v": (), "i2i": ("images",), "i2v": ("images",), "v2v": ("videos",)}
"""The media that a row of each task must have; it may have no others."""

Ids = dict[str, tuple[str, int]]
"""Where each id that was written down has been seen: file and line."""

_ENCODE = json.JSONEncoder(sort_keys=True).encode
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f]")
_UNSEEN = re.compile(  # what Unicode calls default-ignorable, control characters and marks of annotations
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_DOUBLE = re.compile(  # what Unicode calls quotation marks, double primes, ornaments
    "[\u00ab\u00bb\u02ba\u201c-\u201f\u2033\u2036\u275d\u275e\u2760\u2e42\u300c-\u300f\u301d-\u301f\ufe41-\ufe44\uff02\uff62\uff63"
    "\U0001f676-\U0001f678]"
)
_SINGLE = re.compile("[\u00b4\u02b9\u02bb\u02bc\u2018-\u201b\u2032\u2035\u2039\u203a\u275b\u275c\u275f\uff07\uff40]")


def plain(row: Row) -> Row:
    """The row without nulls and empty lists of media, its metadata an object, a chat prompt turned into text."""
    if is_chat(row):
        row = from_chat(row)
    if not all(row.values()):
        row = {name: value for name, value in row.items() if value or not _is_absent(name, value)}
    metadata = row.get("metadata")
    if isinstance(metadata, str):  # as flowrl writes it into parquet files, which have no free-form objects
        try:
            row["metadata"] = parse_json(metadata)
        except LineFault as fault:
            raise LineFault(*(f"'metadata' {message}" for message in fault.messages)) from fault
    return row


def _is_absent(name: str, value: Any) -> bool:
    return name != "prompt" if value is None else value == [] and name in MEDIA


def checked_rows(
    path: str,
    faults: list[Fault],
    ids: Ids | None = None,
    convert: Callable[[Row], Row] = plain,
    read: Callable[[str, list[Fault]], Iterator[tuple[int, Row]]] | None = None,
) -> Iterator[tuple[int, Row]]:
    """Number and content of every sound row of a file; whatever is wrong with the others is appended to `faults`.

    Args:
        path, faults: see `read_rows`.
        ids: of files that belong together, in which no id may be twice; of this file alone if None.
        convert: makes a row of this schema of what was read; raises LineFault if it cannot. `plain` by default.
        read: reads the file. `known_rows` by default.
    """
    ids = {} if ids is None else ids
    empty = True
    for number, found in (read or known_rows)(path, faults):
        empty = False
        try:
            row = convert(found)
            _check(row)
            _check_id(row, path, number, ids)
        except LineFault as fault:
            faults.extend(Fault(message, number) for message in fault.messages)
        else:
            yield number, row
    if empty and not faults:
        faults.append(Fault("holds no prompt"))


def known_rows(path: str, faults: list[Fault]) -> Iterator[tuple[int, Row]]:
    """`read_rows` without columns that no row may have: each is a fault of the file, and not of every row."""
    columns = column_names(path)
    known = (*FIELDS, *CHAT_FIELDS)
    faults.extend(Fault(_unknown(name, "column")) for name in columns if name not in known)
    if columns and "prompt" not in columns:
        faults.append(Fault(f"has no column 'prompt'; columns: {', '.join(columns)}"))
        return
    yield from read_rows(path, faults, known)


def sample_id(row: Row) -> str:
    """What a sample is known by: its `id`, its `metadata.sample_id`, or else a hash of its content."""
    written = written_id(row)
    return content_id(row) if written is None else written


def written_id(row: Row) -> str | None:
    """`id` or `metadata.sample_id`, if the row has one."""
    found = row.get("id")
    if found is None and "metadata" in row:
        found = row["metadata"].get("sample_id")
    return None if found is None else str(found)


def content_id(row: Row) -> str:
    """16 hexadecimal digits of the SHA-256 of all that a row holds: the same in every file, at every place."""
    text = _ENCODE(row) if len(row) > 1 else f'{{"prompt": {_ENCODE(row["prompt"])}}}'  # the same, but much faster
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def content_key(row: Row) -> bytes:
    """Equal for rows that ask for the same: by their normalised prompts and their media, in any order."""
    media = sorted(path for name in MEDIA for path in row.get(name, ()))
    return hashlib.sha256("\0".join([normalised(row["prompt"]), *media]).encode()).digest()[:16]


def normalised(text: str) -> str:
    """The text without what makes no difference: case, white space, forms of one character, kinds of quotes.

    But for quotes and white space this is Unicode's NFKC_Casefold.
    """
    if not (text.isascii() and text.isprintable()):
        text = _plain_quotes(_UNSEEN.sub("", text))  # NFKC makes two signs of some quotes, and quotes of other signs
        text = _plain_quotes(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()))
    return " ".join(text.casefold().replace("`", "'").replace("''", '"').split())


def _plain_quotes(text: str) -> str:
    return _SINGLE.sub("'", _DOUBLE.sub('"', text))


def target_of(row: Row, rule: str, wanted_by: str = "data.target=quoted") -> str | None:
    """The target by a rule of `TARGETS`. Raises LineFault if the row has none that the rule wants."""
    declared = row.get("target")
    if rule == "quoted":
        return _quoted(row["prompt"], declared, wanted_by)
    if declared is None and rule == "field":
        raise LineFault("has no 'target', which data.target=field needs")
    return declared


def _quoted(text: str, declared: str | None, wanted_by: str) -> str:
    quoted = first_quoted(text)
    if quoted is None:
        raise LineFault(f"has no quoted text, which {wanted_by} needs: {_shortened(text)}")
    if not quoted.strip():
        raise LineFault(f"quotes an empty text: {_shortened(text)}")
    if declared not in (None, quoted):
        raise LineFault(f"quotes {quoted!r} but its target is {declared!r}: set data.target=field, or remove one")
    return quoted


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


# --------------------------------------------------------------------------------------------------- checks


def _check(row: Row) -> None:
    """Raises LineFault with everything that is wrong with the row."""
    messages = [message for name, value in row.items() for message in _CHECKS.get(name, _no_field)(name, value)]
    if "prompt" not in row:
        messages.append("has no 'prompt'")
    if messages:
        raise LineFault(*messages)


def _no_field(name: str, value: Any) -> Sequence[str]:
    return [_unknown(name, "field")]


def _unknown(name: str, what: str) -> str:
    remedy = f"`python -m data_process prepare --metadata-keys {name}` puts it"
    return f"has an unknown {what} {name!r}; {what}s: {', '.join(FIELDS)}. Others belong into metadata, where {remedy}"


def _text_faults(name: str, text: Any) -> Sequence[str]:
    if not isinstance(text, str):
        return [f"{name!r} must be a string, got {json_type(text)}"]
    if name != "negative_prompt" and (not text or text.isspace()):
        return [f"{name!r} is empty"]
    bad = None if text.isprintable() else _NOT_TEXT.search(text)
    return [f"{name!r} holds U+{ord(bad[0]):04X}, which is not text"] if bad else ()


def _media_faults(name: str, paths: Any) -> Sequence[str]:
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        return [f"{name!r} must be a list of paths, got {json_type(paths)}"]
    return [message for path in paths for message in _text_faults(name, path)]


def _metadata_faults(name: str, metadata: Any) -> Sequence[str]:
    if not isinstance(metadata, dict):
        return [f"{name!r} must be an object, got {json_type(metadata)}"]
    task = metadata.get("task")
    if task is not None and not isinstance(task, str):
        return [f"'metadata.task' must be a string, got {json_type(task)}"]
    found = metadata.get("sample_id")
    return () if found is None else _id_faults("metadata.sample_id", found)


def _id_faults(name: str, value: Any) -> Sequence[str]:
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        return [f"{name!r} must be a non-empty string or an integer, got {json_type(value)}"]
    return _text_faults(name, str(value))


_CHECKS: Mapping[str, Callable[[str, Any], Sequence[str]]] = {
    **dict.fromkeys(("prompt", "target", "negative_prompt"), _text_faults),
    **dict.fromkeys(MEDIA, _media_faults),
    "metadata": _metadata_faults,
    "id": _id_faults,
}


def _check_id(row: Row, path: str, number: int, ids: Ids) -> None:
    written = written_id(row)
    if written is None:
        return
    other = row.get("metadata", {}).get("sample_id")
    if other is not None and str(other) != written:
        raise LineFault(f"has the id {written!r} but the metadata.sample_id {str(other)!r}: remove one")
    place = ids.setdefault(written, (path, number))
    if place != (path, number):
        where = f"line {place[1]}" if place[0] == path else f"{place[0]}:{place[1]}"
        raise LineFault(f"has the id {written!r} of {where}")
