"""Files for the tools, and what they say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from data_process.__main__ import command


def jsonl(path: Path, rows: Iterable[object]) -> Path:
    """A file with one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def tool(*arguments: object) -> int:
    """The exit status of a command."""
    return command([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """The lines that a command says when it refuses."""
    capsys.readouterr()
    assert tool(*arguments) == 1
    said = capsys.readouterr()
    return (said.out + said.err).splitlines()


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
