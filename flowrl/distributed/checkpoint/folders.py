"""The folders of checkpoints: how one comes to be, which one counts, and how one goes.

    checkpoints/latest                 text: the name of the newest; for people and tools, flowrl does not read it
    checkpoints/step_0000020/tensors/  the tensor files of all ranks
    checkpoints/step_0000020/*         documents: whatever the caller wants to find again
    checkpoints/step_0000020/manifest.json   every other file with its hash, every tensor with its shape
    checkpoints/step_0000020/COMMITTED       the manifest's hash

A checkpoint is filled in a hidden folder, sealed with COMMITTED, and only then moved to its name; what is removed loses
COMMITTED first. So whatever is killed at whatever moment, a folder that holds COMMITTED is whole, and the folders
themselves say which checkpoint is the newest.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from flowrl.distributed.checkpoint.manifest import TENSORS, CheckpointError, FileRecord, Manifest, TensorSpec
from flowrl.files import (
    is_folder,
    sha256,
    sha256_of,
    size_of,
    sync,
    write_atomic,
    write_synced,
)

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
LATEST = "latest"
READERS = 4
"""Files that are hashed at the same time."""

_STEP = re.compile(r"step_(\d{7,})")
_REPLACED = re.compile(r"\.(step_\d{7,})\.replaced")


@dataclass(frozen=True)
class Committed:
    """A checkpoint that is whole, as `open_checkpoint` found it."""

    path: Path
    step: int
    files: Mapping[str, FileRecord] = field(repr=False)
    keys: Mapping[str, TensorSpec] = field(repr=False)  # of every tensor

    @property
    def tensors(self) -> Path:
        """The folder that `TensorStore.load` and `read_tensors` read."""
        return self.path / TENSORS

    def document(self, name: str) -> bytes:
        """A document's content. Raises CheckpointError if there is none, or not the one that was committed."""
        record = self.files.get(name)
        if record is None or record.is_tensors:
            raise CheckpointError(f"{self.path} holds no {name}.")
        _check_file(self.path, record)
        data = (self.path / name).read_bytes()
        if sha256(data) != record.sha256:
            raise CheckpointError(f"{self.path / name} has been changed: its hash is not the manifest's.")
        return data

    def json(self, name: str) -> Any:
        """A document that is JSON."""
        try:
            return json.loads(self.document(name))
        except ValueError as error:
            raise CheckpointError(f"{self.path / name} is no JSON: {error}.") from error


# ---------------------------------------------------------------------------------------------- opening


def open_checkpoint(path: Path, *, verify: bool) -> Committed:
    """The checkpoint in folder `path`, checked before anything in it is used.

    What is checked: that it was committed; that its manifest is the one committed; that every file is there, is an
    ordinary file inside the folder and has its size; that the tensor files are safetensors with the manifest's keys,
    and that nothing lies beside them.

    Args:
        verify: compare the content of every file with its hash, too: this reads them all.

    Raises CheckpointError, naming the file.
    """
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint {path}.")
    if size_of(path / COMMITTED) is None:
        raise CheckpointError(f"{path} was never committed: it holds no file {COMMITTED}. Use an older checkpoint.")
    manifest = _read_manifest(path)
    for record in manifest.files.values():
        _check_file(path, record)
    _check_tensors(path / TENSORS, manifest)
    if verify:
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(lambda record: _check_content(path, record), manifest.files.values()))
    return Committed(path, manifest.step, manifest.files, manifest.tensors)


def _read_manifest(path: Path) -> Manifest:
    if size_of(path / MANIFEST) is None:
        raise CheckpointError(f"{path / MANIFEST} is missing.")
    data = (path / MANIFEST).read_bytes()
    if (path / COMMITTED).read_bytes().strip() != sha256(data).encode():
        raise CheckpointError(f"{path / MANIFEST} is not the one that was committed: it was cut short or changed.")
    try:
        return Manifest.parse(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from error


def _check_file(path: Path, record: FileRecord) -> None:
    size = size_of(path / record.path)
    if size is None:
        raise CheckpointError(f"{path / record.path} is missing, or no ordinary file.")
    if size != record.num_bytes:
        raise CheckpointError(f"{path / record.path} has {size:,} bytes, not the {record.num_bytes:,} written.")


def _check_content(path: Path, record: FileRecord) -> None:
    if sha256_of(path / record.path) != record.sha256:
        raise CheckpointError(f"{path / record.path} is corrupt: its hash is not the manifest's.")


def _check_tensors(folder: Path, manifest: Manifest) -> None:
    if not is_folder(folder):
        raise CheckpointError(f"{folder} is missing, or no ordinary folder.")
    unlisted = sorted(f.name for f in folder.iterdir() if f"{TENSORS}/{f.name}" not in manifest.files)
    if unlisted:
        raise CheckpointError(f"{folder / unlisted[0]} does not belong there: the manifest does not list it.")
    found = {key for r in manifest.files.values() if r.is_tensors for key in tensor_keys(folder.parent / r.path)}
    if not found or found != manifest.tensors.keys():
        wrong = ", ".join(sorted(found ^ manifest.tensors.keys())[:3]) or "no tensor at all"
        raise CheckpointError(f"{folder}: the files do not hold the manifest's tensors: {wrong}.")


def tensor_keys(file: Path) -> list[str]:
    """The keys in a safetensors file, from its header. Raises CheckpointError if it is none."""
    try:
        with safe_open(file, framework="numpy") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{file} is no whole safetensors file: {error}.") from error


# ---------------------------------------------------------------------------------------------- the folders of a run


class Folders:
    """The checkpoints in one folder. One process writes them, one at a time; any may read."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies once it is committed."""
        return self.root / f"step_{step:07d}"

    def begin(self, step: int) -> Path:
        """A fresh hidden folder to fill, with a folder `tensors` in it. What killed saves have left is removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._clear()
        temp = self.root / f".{self.path(step).name}.{secrets.token_hex(4)}.saving"
        (temp / TENSORS).mkdir(parents=True)
        return temp

    def commit(
        self,
        step: int,
        temp: Path,
        documents: Mapping[str, bytes],
        files: Sequence[FileRecord],
        keys: Mapping[str, TensorSpec],
    ) -> Committed:
        """Seal what `begin` gave, give it its name, and let `latest` point at it.

        Args:
            temp: filled with the tensor files of all ranks.
            documents: by name.
            files: what `TensorStore.written` said, of all ranks.
            keys: what `TensorStore.keys` says.

        Raises CheckpointError if the tensor files are not those of `files`; OSError if the disk is full.
        """
        texts = [FileRecord(name, len(data), sha256(data)) for name, data in documents.items()]
        manifest = Manifest(step, {record.path: record for record in [*texts, *files]}, dict(keys))
        for record in files:
            _check_file(temp, record)
        _check_tensors(temp / TENSORS, manifest)
        for name, data in documents.items():
            write_synced(temp / name, data)
        write_synced(temp / MANIFEST, manifest.dump())
        sync(temp / TENSORS)
        sync(temp)
        write_synced(temp / COMMITTED, sha256(manifest.dump()).encode() + b"\n")
        sync(temp)
        path = self._rename(temp, self.path(step))
        write_atomic(self.root / LATEST, f"{path.name}\n".encode())
        return Committed(path, step, manifest.files, manifest.tensors)

    def steps(self) -> list[int]:
        """Of the committed checkpoints, in order; they are not opened."""
        return sorted(step for step, path in self._found() if _is_sealed(path))

    def committed(self) -> list[Committed]:
        """All checkpoints that were committed, the oldest first. Raises CheckpointError for one that is broken."""
        return [open_checkpoint(path, verify=False) for _, path in sorted(self._found()) if _is_sealed(path)]

    def newest_first(self) -> list[Path]:
        """The committed checkpoints, not opened: for who would rather go on from an older one than from none."""
        return [path for _, path in sorted(self._found(), reverse=True) if _is_sealed(path)]

    def newest(self) -> Committed | None:
        """The committed checkpoint of the highest step; uncommitted ones are passed over.

        Raises CheckpointError if it is broken: to go on from an older one is for the user to decide.
        """
        sealed = [(step, path) for step, path in self._found() if _is_sealed(path)]
        return open_checkpoint(max(sealed)[1], verify=False) if sealed else None

    def set_aside(self, path: Path) -> Path:
        """A checkpoint that is damaged gets a name that does not count; it is for people to look at, and to remove."""
        aside = path.with_name(f"{path.name.lstrip('.')}.damaged.{secrets.token_hex(4)}")
        path.rename(aside)
        sync(self.root)
        return aside

    def rotate(self, keep: Sequence[int]) -> None:
        """Remove the checkpoints of all other steps, and what was never committed; the newest always stays."""
        stay = {*keep, *self.steps()[-1:]}
        for step, path in list(self._found()):
            if step not in stay or not _is_sealed(path):
                _remove(path)

    def _found(self) -> Iterator[tuple[int, Path]]:
        """Committed or not. One that was moved aside counts as long as nothing has taken its place."""
        if not self.root.is_dir():
            return
        for path in self.root.iterdir():
            name = path.name
            if (aside := _REPLACED.fullmatch(name)) and not (self.root / aside[1]).exists():
                name = aside[1]
            if (match := _STEP.fullmatch(name)) and path.is_dir():  # or a link to one, on a larger disk
                yield int(match[1]), path

    def _clear(self) -> None:
        for path in self.root.glob(".step_*"):
            aside = _REPLACED.fullmatch(path.name)
            if aside and not (self.root / aside[1]).exists():
                path.rename(self.root / aside[1])  # killed just before its successor came
            elif is_folder(path):
                _remove(path)
        sync(self.root)

    def _rename(self, temp: Path, path: Path) -> Path:
        aside = self.root / f".{path.name}.replaced"
        if path.exists():
            path.rename(aside)
        temp.rename(path)
        sync(self.root)
        if aside.exists():
            _remove(aside)
        return path


def _is_sealed(path: Path) -> bool:
    return size_of(path / COMMITTED) is not None


def _remove(path: Path) -> None:
    """The seal first: no half of a checkpoint ever looks whole. Of what is no folder, the name alone."""
    if not is_folder(path):
        path.unlink()
        return
    (path / COMMITTED).unlink(missing_ok=True)
    sync(path)
    shutil.rmtree(path)
