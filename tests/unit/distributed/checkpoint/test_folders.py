"""Checkpoints as folders: made whole, found, replaced, removed; and what is wrong with one is said."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flowrl.distributed.checkpoint.folders import COMMITTED, MANIFEST, Committed, Folders, open_checkpoint
from flowrl.distributed.checkpoint.manifest import CheckpointError, FileRecord, Manifest, TensorSpec
from flowrl.distributed.checkpoint.tensors import TensorStore, read_tensors
from tests.unit.distributed.checkpoint.support import CPU, save, state_of, value_in


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def tensor_file(checkpoint: Committed) -> Path:
    [file] = checkpoint.tensors.iterdir()
    return file


def seal(path: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Change a manifest as someone who knows how: with the hash that belongs to it."""
    content = json.loads((path / MANIFEST).read_text())
    change(content)
    (path / MANIFEST).write_text(json.dumps(content))
    (path / COMMITTED).write_text(hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest())


# ---------------------------------------------------------------------------------------------- a whole life


def test_what_is_committed_is_found_again(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert Folders(root).newest() is None and Folders(root).committed() == [] and Folders(root).steps() == []
    made = save(root, 20, state_of(2.0), "2.0")
    assert made == Folders(root).newest() == open_checkpoint(root / "step_0000020", verify=True)
    assert (root / "latest").read_text() == "step_0000020\n"
    assert names(root) == {"latest", "step_0000020"}
    assert names(made.path) == {"tensors", "state.json", MANIFEST, COMMITTED}
    assert made.step == 20 and made.document("state.json") == b'{"label": "2.0"}'
    assert made.keys["weights.layer.bias"] == TensorSpec((3,), "bfloat16")
    assert value_in(made.path) == 2.0


def test_the_newest_is_that_of_the_highest_step(tmp_path: Path) -> None:
    for step in (9, 10_000_000, 100):
        save(tmp_path, step, state_of(1.0))
    newest = Folders(tmp_path).newest()
    assert newest is not None and newest.step == 10_000_000
    assert Folders(tmp_path).steps() == [c.step for c in Folders(tmp_path).committed()] == [9, 100, 10_000_000]


def test_uncommitted_folders_and_strangers_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, state_of(1.0))
    (save(tmp_path, 2, state_of(2.0)).path / COMMITTED).unlink()
    (tmp_path / "step_0000003").touch()
    (tmp_path / "step_0000004").symlink_to(tmp_path / "step_0000001")
    (tmp_path / "step_best").mkdir()
    newest = Folders(tmp_path).newest()
    assert newest is not None and newest.step == 1
    with pytest.raises(CheckpointError, match=r"step_0000002 was never committed: .* Use an older checkpoint"):
        open_checkpoint(tmp_path / "step_0000002", verify=False)


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    save(tmp_path, 1, state_of(1.0), "1.0")
    again = save(tmp_path, 1, state_of(2.0), "2.0")
    assert value_in(again.path) == 2.0 and names(tmp_path) == {"latest", "step_0000001"}


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    left = folders.begin(1)
    (left / "tensors" / "part").write_bytes(b"x")
    fresh = folders.begin(1)
    assert not left.exists() and list((fresh / "tensors").iterdir()) == []
    assert fresh.name.startswith(".") and folders.steps() == []


def test_one_moved_aside_whose_successor_never_came_is_the_newest(tmp_path: Path) -> None:
    path = save(tmp_path, 5, state_of(5.0), "5.0").path
    path.rename(tmp_path / ".step_0000005.replaced")
    newest = Folders(tmp_path).newest()
    assert newest is not None and value_in(newest.path) == 5.0
    Folders(tmp_path).begin(6)
    assert value_in(path) == 5.0


def test_rotation_keeps_what_it_is_told_and_the_newest(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, state_of(1.0))
    (tmp_path / "step_0000002" / COMMITTED).unlink()
    folders = Folders(tmp_path)
    folders.rotate([1, 2, 4])
    assert folders.steps() == [1, 4, 5]
    assert names(tmp_path) == {"latest", "step_0000001", "step_0000004", "step_0000005"}
    folders.rotate([])
    assert folders.steps() == [5]


def test_everything_is_on_the_disk_before_it_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that a power cut cannot break: files, their names, the seal, the new name, the marker."""
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert path == tmp_path or path.name != COMMITTED or path.stat().st_size > 0
        synced.append("temp" if path.name.endswith(".saving") else path.name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save(tmp_path, 1, state_of(1.0))
    sealed = synced.index(COMMITTED)
    assert synced[:sealed] == [
        tmp_path.name,  # of `begin`
        "rank_00000_000.safetensors",
        "state.json",
        MANIFEST,
        "tensors",
        "temp",
    ]
    assert synced[sealed:] == [COMMITTED, "temp", tmp_path.name, ".latest.partial", tmp_path.name]


# ---------------------------------------------------------------------------------------------- damaged and hostile


def test_a_tensor_file_cut_short(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1, state_of(1.0))
    file = tensor_file(checkpoint)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"rank_00000_000.safetensors has \d+ bytes, not the \d+ written"):
        Folders(tmp_path).newest()


def test_a_flipped_bit(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1, state_of(1.0))
    data = bytearray(tensor_file(checkpoint).read_bytes())
    data[-3] ^= 1
    tensor_file(checkpoint).write_bytes(data)
    open_checkpoint(checkpoint.path, verify=False)
    with pytest.raises(CheckpointError, match=r"rank_00000_000.safetensors is corrupt"):
        open_checkpoint(checkpoint.path, verify=True)


def test_a_document_that_was_changed(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1, state_of(1.0), "a")
    (checkpoint.path / "state.json").write_text('{"label": "b"}')
    with pytest.raises(CheckpointError, match=r"state.json has been changed"):
        open_checkpoint(checkpoint.path, verify=False).json("state.json")
    with pytest.raises(CheckpointError, match=r"state.json is corrupt"):
        open_checkpoint(checkpoint.path, verify=True)
    (checkpoint.path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state.json has 1 bytes, not the 14 written"):
        open_checkpoint(checkpoint.path, verify=False)


def test_a_document_that_is_not_there(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1, state_of(1.0))
    for name in ("contract.json", "../latest", COMMITTED, "tensors/rank_00000_000.safetensors"):
        with pytest.raises(CheckpointError, match="holds no"):
            checkpoint.document(name)
    (checkpoint.path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state.json is missing"):
        open_checkpoint(checkpoint.path, verify=False)


def test_a_document_that_is_no_json(tmp_path: Path) -> None:
    folders, store = Folders(tmp_path), TensorStore(CPU, 10.0)
    temp = folders.begin(1)
    store.save(state_of(1.0), temp / "tensors", background=False)
    checkpoint = folders.commit(1, temp, {"config.yaml": b"{a"}, store.written(wait=True) or [], store.keys)
    with pytest.raises(CheckpointError, match=r"config.yaml is no JSON"):
        checkpoint.json("config.yaml")


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_manifest_that_is_not_the_committed_one(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path, 1, state_of(1.0)).path
    if damage == "cut":
        os.truncate(path / MANIFEST, 40)
    elif damage == "changed":
        (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes().replace(b'"step": 1', b'"step": 2'))
    else:
        (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json is (missing|not the one that was committed)"):
        open_checkpoint(path, verify=False)


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "tensors/../../outside", "a/b", "", ".metadata", "a\0b"])
def test_a_manifest_cannot_leave_the_folder(tmp_path: Path, path: str) -> None:
    folder = save(tmp_path / "root", 1, state_of(1.0)).path
    (tmp_path / "root" / "outside").write_bytes(b"secret")
    seal(folder, lambda content: content["files"][0].update(path=path))
    with pytest.raises(CheckpointError, match=r"manifest.json: .* is no path of a file in a checkpoint"):
        open_checkpoint(folder, verify=True)


@pytest.mark.parametrize("what", ["document", "tensors", "folder", "seal", "manifest"])
def test_links_are_not_followed(tmp_path: Path, what: str) -> None:
    checkpoint = save(tmp_path, 1, state_of(1.0))
    places = {
        "document": checkpoint.path / "state.json",
        "tensors": tensor_file(checkpoint),
        "folder": checkpoint.tensors,
        "seal": checkpoint.path / COMMITTED,
        "manifest": checkpoint.path / MANIFEST,
    }
    places[what].rename(tmp_path / "elsewhere")
    places[what].symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"missing|never committed"):
        open_checkpoint(checkpoint.path, verify=True)


def test_a_pipe_does_not_hang_the_reader(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1, state_of(1.0))
    (checkpoint.path / "state.json").unlink()
    os.mkfifo(checkpoint.path / "state.json")
    with pytest.raises(CheckpointError, match=r"state.json is missing, or no ordinary file"):
        open_checkpoint(checkpoint.path, verify=True)


class Planted:
    """Executes something when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.victim),)


@pytest.mark.parametrize("name", [".metadata", "a.pt", "__0_0.distcp", "planted.safetensors"])
def test_a_planted_pickle_executes_nothing(tmp_path: Path, name: str) -> None:
    checkpoint = save(tmp_path / "root", 1, state_of(1.0), "1.0")
    victim = tmp_path / "victim"
    planted = tmp_path / "planted"
    torch.save(Planted(victim), planted)
    (checkpoint.path / name).write_bytes(planted.read_bytes())
    assert value_in(checkpoint.path) == 1.0  # it lies where nobody looks
    (checkpoint.tensors / name).write_bytes(planted.read_bytes())
    with pytest.raises(CheckpointError, match=f"{name} does not belong there"):
        open_checkpoint(checkpoint.path, verify=False)
    if name.endswith(".safetensors"):
        with pytest.raises(CheckpointError, match=r"planted.safetensors is no whole safetensors file"):
            read_tensors(checkpoint.tensors, "")
    else:
        assert read_tensors(checkpoint.tensors, "").keys() == state_of(1.0).keys()
    assert not victim.exists()
    torch.load(planted, weights_only=False)
    assert victim.exists(), "the plant itself does not work"


def test_a_listed_pickle_is_no_tensor_file(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "root", 1, state_of(1.0))
    torch.save(Planted(tmp_path / "victim"), tensor_file(checkpoint))
    data = tensor_file(checkpoint).read_bytes()
    listed = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal(checkpoint.path, lambda content: content["files"][1].update(listed))
    with pytest.raises(CheckpointError, match=r"rank_00000_000.safetensors is no whole safetensors file"):
        open_checkpoint(checkpoint.path, verify=True)
    assert not (tmp_path / "victim").exists()


def test_a_manifest_with_other_tensors_than_the_files(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state_of(1.0)).path
    seal(path, lambda content: content["tensors"].update(more={"shape": [1], "dtype": "float32"}))
    with pytest.raises(CheckpointError, match=r"do not hold the manifest's tensors: more\."):
        open_checkpoint(path, verify=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "it is no manifest"),
        ("{}", "it is no manifest"),
        ('{"format": 2}', "its format is 2, and this version reads 1"),
        ('{"format": 1, "step": 1, "files": [{}], "tensors": {}}', "it is no manifest"),
        ('{"format": 1, "step": 1, "files": [], "tensors": {"a": {"shape": "x"}}}', "it is no manifest"),
        ("[" * 100_000, "it is no manifest"),
    ],
)
def test_a_manifest_of_another_kind(content: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Manifest.parse(content.encode())


def test_a_manifest_comes_back_as_it_was() -> None:
    files = {"state.json": FileRecord("state.json", 0, "0" * 64)}
    manifest = Manifest(3, files, {"b": TensorSpec((), "float32"), "a": TensorSpec((2, 0), "int64")})
    assert Manifest.parse(manifest.dump()) == manifest
    assert list(json.loads(manifest.dump())["tensors"]) == ["a", "b"]


# ---------------------------------------------------------------------------------------------- disks that refuse


def test_a_rank_whose_files_are_not_there_commits_nothing(tmp_path: Path) -> None:
    folders, store = Folders(tmp_path), TensorStore(CPU, 10.0)
    temp = folders.begin(1)
    store.save(state_of(1.0), temp / "tensors", background=False)
    files = store.written(wait=True) or []
    ghost = FileRecord("tensors/rank_00001_000.safetensors", 100, "0" * 64)
    with pytest.raises(CheckpointError, match=r"rank_00001_000.safetensors is missing"):
        folders.commit(1, temp, {}, [*files, ghost], store.keys)
    with pytest.raises(CheckpointError, match=r"rank_00000_000.safetensors does not belong there"):
        folders.commit(1, temp, {}, [], store.keys)
    with pytest.raises(CheckpointError, match="'a/b' is no path of a file"):
        folders.commit(1, temp, {"a/b": b""}, files, store.keys)
    assert folders.newest() is None


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The system lets nobody in this process write a larger file: a full disk as far as the writer can tell."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_room_for_the_tensors(tmp_path: Path) -> None:
    """The error names the file, the checkpoint before stays the newest, and the same store saves again."""
    save(tmp_path, 1, state_of(1.0), "1.0")
    store, folders = TensorStore(CPU, 10.0), Folders(tmp_path)
    temp = folders.begin(2)
    with largest_file(10_000):
        store.save(state_of(2.0, size=10_000), temp / "tensors", background=True)
        with pytest.raises(OSError, match="File too large") as raised:
            store.written(wait=True)
    assert raised.value.filename == str(temp / "tensors" / "rank_00000_000.safetensors")
    newest = folders.newest()
    assert newest is not None and value_in(newest.path) == 1.0
    temp = folders.begin(2)
    store.save(state_of(2.0), temp / "tensors", background=True)
    documents = {"state.json": b'{"label": "2.0"}'}
    assert value_in(folders.commit(2, temp, documents, store.written(wait=True) or [], store.keys).path) == 2.0


def test_a_disk_without_room_for_the_documents(tmp_path: Path) -> None:
    save(tmp_path, 1, state_of(1.0), "1.0")
    store, folders = TensorStore(CPU, 10.0), Folders(tmp_path)
    temp = folders.begin(2)
    store.save(state_of(2.0), temp / "tensors", background=False)
    with largest_file(10_000), pytest.raises(OSError, match=r"File too large.*buffer\.json"):
        folders.commit(2, temp, {"buffer.json": b" " * 20_000}, store.written(wait=True) or [], store.keys)
    newest = folders.newest()
    assert newest is not None and value_in(newest.path) == 1.0


def test_a_folder_that_may_not_be_written() -> None:
    """As another user if the tests run as root, whom permissions do not bind."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(PermissionError, match=f"{folder}"):
            Folders(folder / "checkpoints").begin(1)
        with pytest.raises(PermissionError, match=f"{folder}"):
            Folders(folder).begin(1)
    finally:
        if root:
            os.seteuid(0)
        folder.rmdir()
