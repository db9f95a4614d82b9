"""Files of rows, read one at a time: `.txt` (a prompt a line), `.jsonl` (a JSON object a line) and `.parquet`.

What cannot be read is a fault with its line, and reading goes on: whoever reads sees all of them. In a parquet file,
which has no lines, the number is the row's, from 1.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO, Any

from flowrl import strict_json
from flowrl.prompts import MAX_DEPTH, is_too_deep

PACKAGE_SCHEME = "pkg://"
SUFFIXES = (".txt", ".jsonl", ".parquet")
TABLES = {".csv": ",", ".tsv": "\t"}
"""What `data_process prepare` reads besides, and what stands between two cells."""
BATCH = 10_000  # rows of a parquet file that are in memory at once
CHANGED = "changed while it was being read"
SHOWN = 20  # lines of equal faults, and of all faults where they are not asked for

Row = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """What is wrong with one line of a prompt file, or, without a line, with the file."""

    message: str
    line: int | None = None
    spreads: bool = False  # other lines may have been misread because of this one

    @property
    def is_of_file(self) -> bool:
        """Whether leaving one line out would not mend it."""
        return self.line is None or self.spreads


class LineFault(Exception):
    """What is wrong with the line that is being looked at."""

    def __init__(self, *messages: str) -> None:
        self.messages = messages


class PromptFileError(ValueError):
    """A prompt file that cannot be used: all its faults, and a message that names the first of them."""

    def __init__(self, path: str, faults: Sequence[Fault]) -> None:
        self.path = path
        self.faults = tuple(sorted(faults, key=lambda fault: fault.line or 0))
        lines = self.report()
        hidden = len(lines) - SHOWN
        more = [f"... and {hidden} more"] if hidden > 0 else []
        if len(lines) < len(self.faults) or hidden > 0:
            more.append(f"`python -m data_process inspect --all {path}` lists every one")
        super().__init__("\n".join(lines[:SHOWN] + more))

    def report(self, *, every: bool = False) -> list[str]:
        """`file:line: message` of each fault, in the order of the lines.

        Of more than 20 that say the same the first stands for all, unless `every` one is wanted.
        """
        times = {} if every else Counter(fault.message for fault in self.faults)
        many = {message: count for message, count in times.items() if count > SHOWN}
        told: set[str] = set()
        lines = []
        for fault in self.faults:
            if fault.message in told:
                continue
            place = self.path if fault.line is None else f"{self.path}:{fault.line}"
            also = ""
            if fault.message in many:
                told.add(fault.message)
                also = f" (and {many[fault.message] - 1:,} times more; --all lists them)"
            lines.append(f"{place}: {fault.message}{also}")
        return lines


def read_rows(path: str, faults: list[Fault], columns: Sequence[str] = ()) -> Iterator[tuple[int, Row]]:
    """Number and content of every row but blank lines; what is wrong is appended to `faults`.

    Args:
        path: an ordinary path, or `pkg://PACKAGE/path` for a file inside an installed package.
        faults: of this file.
        columns: of a parquet file, those to read if it has them: columns of pictures are large. Empty: all.

    Raises:
        PromptFileError: if the file cannot be opened or read, or its name ends in none of `SUFFIXES`.
    """
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        message = f"must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, got {suffix!r}"
        table = "; `python -m data_process prepare` makes such a file of it" if suffix in TABLES else ""
        raise PromptFileError(path, [Fault(message + table)])
    with open_data(path) as file:
        if suffix == ".parquet":
            yield from _parquet_rows(file, faults, columns)
            return
        for number, line in _lines(file, faults):
            try:
                yield number, {"prompt": line.strip()} if suffix == ".txt" else _json_row(line)
            except LineFault as fault:
                faults.extend(Fault(message, number) for message in fault.messages)


def fingerprint(path: str) -> str:
    """SHA-256 of the file's bytes, in hexadecimal. Raises PromptFileError if it cannot be read."""
    with open_data(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def refuse_change(path: str, before: str) -> None:
    """Raises PromptFileError if `fingerprint` of the file is no longer what it was before it was read."""
    if fingerprint(path) != before:
        raise PromptFileError(path, [Fault(CHANGED)])


@contextmanager
def open_data(path: str) -> Iterator[IO[bytes]]:
    """The file at an ordinary or `pkg://` path. Raises PromptFileError if it cannot be opened, or read in the block."""
    try:
        with _opened(path) as file:
            yield file
    except OSError as error:  # which does not name the file, if reading failed
        raise PromptFileError(path, [Fault(error.strerror or str(error))]) from error


def _opened(path: str) -> IO[bytes]:
    place = _locate(path)
    try:
        return place.open("rb")
    except ValueError as error:  # a NUL in it
        raise PromptFileError(path, [Fault(f"cannot be a path: {error}")]) from error


def _locate(path: str) -> Traversable:
    if not path.startswith(PACKAGE_SCHEME):
        try:
            return Path(path).expanduser()
        except RuntimeError as error:
            raise PromptFileError(path, [Fault(f"there is no home folder {Path(path).parts[0]!r}")]) from error
    package, _, rest = path.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.submodule_search_locations is None:  # the latter: a module of one file
        raise PromptFileError(path, [Fault(f"there is no package {package!r}")])
    return resources.files(package).joinpath(rest)


# ------------------------------------------------------------------------------------------------ text and JSON


def decoded_lines(file: IO[bytes], faults: list[Fault]) -> Iterator[tuple[int, str, bool]]:
    """Number and text of every line, and whether all of it is UTF-8; what is not is a fault.

    Only \\n ends a line: U+2028 may be part of a prompt.
    """
    for number, raw in enumerate(file, start=1):
        if number == 1:
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                faults.append(Fault("is UTF-16; save it as UTF-8"))
                return
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        try:
            yield number, raw.decode("utf-8"), True
        except UnicodeDecodeError as error:
            byte = raw[error.start]
            faults.append(Fault(f"byte 0x{byte:02x} in column {error.start + 1} is not UTF-8 (Latin-1?)", number))
            yield number, raw.decode("utf-8", "replace"), False


def _lines(file: IO[bytes], faults: list[Fault]) -> Iterator[tuple[int, str]]:
    """Number and text of every line but blank ones."""
    for number, line, is_whole in decoded_lines(file, faults):
        text = line.rstrip(" \t\r\n")
        if is_whole and text and not text.isspace():
            yield number, text


def _json_row(line: str) -> Row:
    row = parse_json(line)
    if not isinstance(row, dict):
        raise LineFault(f'must be a JSON object such as {{"prompt": "..."}}, got {json_type(row)}')
    return row


def parse_json(text: str) -> Any:
    """As `strict_json` does, and not nested deeper than other processes can be told. Raises LineFault."""
    try:
        value = strict_json.parse(text)
    except strict_json.JSONFault as fault:
        raise LineFault(str(fault)) from fault
    if text.count("[") + text.count("{") > MAX_DEPTH and is_too_deep(value):
        raise LineFault(f"is nested more than {MAX_DEPTH} deep")
    return value


def json_type(value: Any) -> str:
    """What a value is called in messages."""
    if isinstance(value, bool):
        return "a boolean"
    names = {type(None): "null", str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


# ---------------------------------------------------------------------------------------------------- parquet


def _parquet_rows(file: IO[bytes], faults: list[Fault], columns: Sequence[str]) -> Iterator[tuple[int, Row]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file)
        names = table.schema_arrow.names
        twice = sorted({name for name in names if names.count(name) > 1})
        wanted = [name for name in names if name in columns] if columns else names
        if twice or not wanted:
            what = f"the column {twice[0]!r} twice" if twice else f"no column {' or '.join(map(repr, columns))}"
            faults.append(Fault(f"has {what}; columns: {', '.join(names)}"))
            return
        deep = {name for name in wanted if _is_deep(table.schema_arrow.field(name).type)}
        first = 1
        for batch in table.iter_batches(batch_size=BATCH, columns=wanted):
            for number, row in _batch_rows(batch, first, faults, {"maps_as_pydicts": "strict"} if deep else {}):
                try:
                    yield number, row | {name: _dense(row[name]) for name in deep} if deep else row
                except LineFault as fault:
                    faults.extend(Fault(message, number) for message in fault.messages)
            first += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        faults.append(Fault(f"is not a whole parquet file: {str(error).splitlines()[0]}"))


def column_names(path: str) -> list[str]:
    """Of a parquet file; none of any other, or of one that cannot be read. Raises PromptFileError as `open_data`."""
    if Path(path).suffix != ".parquet":
        return []
    import pyarrow
    from pyarrow.parquet import read_schema

    with open_data(path) as file:
        try:
            names: list[str] = read_schema(file).names
        except (pyarrow.ArrowException, OSError):  # `read_rows` says what is wrong
            return []
    return names


def _batch_rows(batch: Any, first: int, faults: list[Fault], options: Row) -> Iterator[tuple[int, Row]]:
    """Rows of a record batch, in Python's types. Without `options` it is four times as fast."""
    try:
        yield from enumerate(batch.to_pylist(**options), start=first)
    except (ValueError, KeyError, OverflowError):  # which row is it?
        for place in range(batch.num_rows):
            try:
                yield from enumerate(batch.slice(place, 1).to_pylist(**options), start=first + place)
            except UnicodeDecodeError:
                faults.append(Fault("holds bytes that are not UTF-8", first + place))
            except KeyError:
                faults.append(Fault("holds a map with a key twice", first + place))
            except (ValueError, OverflowError) as error:
                faults.append(Fault(f"holds a value that Python cannot: {error}", first + place))


def _is_deep(kind: Any) -> bool:
    """Whether a column of this Arrow type holds objects, or lists of anything but strings."""
    from pyarrow import types

    return types.is_nested(kind) and not (types.is_list(kind) and types.is_string(kind.value_type))


def _dense(value: Any) -> Any:
    """Without nulls in objects: in a column of objects every row has every key. Raises LineFault if it is not JSON."""
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise LineFault(f"holds an object with the key {wrong[0]!r:.50}, which JSON cannot")
        return {key: _dense(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_dense(entry) for entry in value]
    if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
        raise LineFault(f"holds {value!r:.50}, which JSON cannot")
    return value
