"""Data files out: all files of a command whole and in place, or none; and `metadata.json`, which says what they are."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import flowrl
from data_process.refused import Refused
from flowrl.data.rows import BATCH, Row
from flowrl.data.schema import FIELDS, MEDIA, sample_id
from flowrl.files import new_file, sha256_of, sync, write_atomic

FORMATS = ("jsonl", "parquet")
METADATA = "metadata.json"
LOCK = ".data_process.lock"


class RowWriter:
    """Writes rows to one file and counts them."""

    def __init__(self, write: Callable[[Row], object]) -> None:
        self.count = 0
        self._write = write

    def write(self, row: Row) -> None:
        """The next row."""
        self._write(row)
        self.count += 1


@contextmanager
def _jsonl_writer(path: Path) -> Iterator[RowWriter]:
    """One JSON object a line."""
    with new_file(path) as file:
        yield RowWriter(lambda row: file.write(_ENCODE(row).encode() + b"\n"))


@contextmanager
def _parquet_writer(path: Path) -> Iterator[RowWriter]:
    """Columns of strings and lists of strings; metadata as JSON text, since its keys differ from row to row."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    types = {name: pyarrow.list_(pyarrow.string()) if name in MEDIA else pyarrow.string() for name in _COLUMNS}
    schema = pyarrow.schema(list(types.items()))
    rows: list[Row] = []

    def flush() -> None:
        table.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=schema))
        rows.clear()

    def write(row: Row) -> None:
        rows.append(row | {"metadata": _ENCODE(row["metadata"])})
        if len(rows) == BATCH:
            flush()

    with new_file(path) as file, ParquetWriter(file, schema) as table:
        yield RowWriter(write)
        if rows:
            flush()


def _writer(path: Path, suffix: str) -> AbstractContextManager[RowWriter]:
    return _parquet_writer(path) if suffix == ".parquet" else _jsonl_writer(path)


@contextmanager
def new_data_files(paths: Sequence[Path]) -> Iterator[list[RowWriter]]:
    """A writer for each path (`.jsonl` or `.parquet`). If the block raises, no file of these names has changed.

    Raises OSError, naming the first of them, if a disk is full or a folder cannot be written to. One of the block that
    names another file is raised as it is.
    """
    others: OSError | None = None
    partials = {path: path.with_name(f".{path.name}.partial") for path in paths}
    with ExitStack() as leftovers:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
            leftovers.callback(partial.unlink, missing_ok=True)
        try:
            with ExitStack() as files:
                writers = [files.enter_context(_writer(partial, path.suffix)) for path, partial in partials.items()]
                try:
                    yield writers
                except OSError as error:
                    others = error if error.filename is not None else None  # writing to an open file names none
                    raise
            for path, partial in partials.items():
                partial.replace(path)
            for folder in {path.parent for path in paths}:
                sync(folder)
        except OSError as error:  # which names what nobody has asked for
            if others is not None:
                raise others from None
            raise OSError(error.errno, error.strerror, str(paths[0])) from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make the folder and keep other commands from writing into it, for the block or the life of the process.

    If the block raises, folders that were made for it are gone again. Raises Refused if another command writes there.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder):
            yield
    except BaseException:
        with suppress(OSError):  # somebody else has use for one
            for path in made:
                path.rmdir()
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder / LOCK
    try:
        file = path.open("ab")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
        except BlockingIOError:
            is_mine = False
        if not is_mine:  # or it is that of a command which has just ended
            raise Refused([f"{folder}: another command is writing into this folder; wait until it has ended"])
        try:
            yield
        finally:
            path.unlink()


def refuse_own_input(outputs: Sequence[Path], inputs: Sequence[str]) -> None:
    """Raises Refused if a command would write over what it reads, or write a file of an unknown form."""
    read = {Path(file).resolve() for file in inputs}
    faults = [f"{path}: is read, and would be written over" for path in outputs if path.resolve() in read]
    faults += [f"{path}: must end in .{' or .'.join(FORMATS)}" for path in outputs if path.suffix[1:] not in FORMATS]
    faults += [f"{path}: is a folder" for path in outputs if path.is_dir()]
    if faults:
        raise Refused(faults)


def ordered(row: Row) -> Row:
    """The row as it is written: fields in the order of the schema, `metadata` with the task and the id before the rest.

    Keys of objects are sorted, so that rows which hold the same are written alike.
    """
    metadata = row.get("metadata", {})
    first = {"task": metadata.get("task"), "sample_id": sample_id(row)}
    rest = _sorted({name: value for name, value in metadata.items() if name not in first})
    row = row | {"metadata": {name: value for name, value in first.items() if value is not None} | rest}
    return {name: row[name] for name in _COLUMNS if name in row}


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(entry) for entry in value] if isinstance(value, list) else value


# --------------------------------------------------------------------------------------------- metadata.json


def described(folder: Path) -> dict[str, Any]:
    """What the folder's `metadata.json` says of each file. Raises Refused if it is not one of ours."""
    file = folder / METADATA
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise Refused([f"{file}: is not JSON: {error}"]) from error
    if not isinstance(found, dict) or not all(
        isinstance(entry, dict) and "sha256" in entry for entry in found.values()
    ):
        raise Refused([f"{file}: is not a metadata.json of these tools; move it away or choose another folder"])
    return found


def describe(files: Mapping[Path, Mapping[str, Any]]) -> None:
    """Add to `metadata.json` what each of these files, all of one folder, is. Other files' entries stay."""
    (folder,) = {path.parent for path in files}
    entries = {
        path.name: {**what, "sha256": sha256_of(path), "flowrl": flowrl.__version__} for path, what in files.items()
    }
    text = json.dumps(described(folder) | entries, indent=1, ensure_ascii=False)
    write_atomic(folder / METADATA, text.encode() + b"\n")


_COLUMNS = tuple(name for name in FIELDS if name != "id")
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
