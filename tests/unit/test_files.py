"""Killed at any moment, a file or a folder is the old one or the new one."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrl.files import atomic_folder, remove_folder, write_atomic

WRITER = """
import sys, itertools
from pathlib import Path
from flowrl.files import atomic_folder, write_atomic
root = Path(sys.argv[1])
print("ready", flush=True)
for i in itertools.count():
    content = str(i).encode() * 200_000
    write_atomic(root / "file", content)
    with atomic_folder(root / "folder") as folder:
        for name in "abcdefgh":
            (folder / name).write_bytes(content[:100_000])
"""


def kill_while_writing(program: str, root: Path, seconds: float) -> None:
    """Run `program` and SIGKILL it `seconds` after it has begun to write."""
    process = subprocess.Popen([sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("seconds", [0.03, 0.071, 0.153, 0.31])
def test_a_kill_leaves_nothing_half_written(tmp_path: Path, seconds: float) -> None:
    kill_while_writing(WRITER, tmp_path, seconds)
    if (tmp_path / "file").exists():
        content = (tmp_path / "file").read_bytes()
        number = content[: len(content) // 200_000]
        assert content == number * 200_000
    if (tmp_path / "folder").exists():
        parts = [path.read_bytes() for path in sorted((tmp_path / "folder").iterdir())]
        assert len(parts) == 8 and len(set(parts)) == 1 and len(parts[0]) == 100_000
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "new").write_text("")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["new"]
    assert not list(tmp_path.glob(".folder.*"))


def test_a_block_that_raises_keeps_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(target) as folder:
        (folder / "a").write_text("new")
        raise RuntimeError
    assert (target / "a").read_text() == "old"
    with atomic_folder(target) as folder:
        assert not list(folder.iterdir())


def test_write_atomic_replaces(tmp_path: Path) -> None:
    for content in (b"long content", b"new"):
        write_atomic(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, durable: bool) -> None:
    """What a full disk has taken of it would keep the disk full."""
    path = tmp_path / "file"
    write_atomic(path, b"old", durable=durable)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError):
            write_atomic(path, b"new" * 1000, "mark.", durable=durable)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


def test_remove_folder(tmp_path: Path) -> None:
    for name in ("seen", ".hidden.partial"):
        (tmp_path / name / "inside").mkdir(parents=True)
        remove_folder(tmp_path / name)
    assert not list(tmp_path.iterdir())
