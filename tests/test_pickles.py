"""Nothing in the project unpickles a file: whoever wrote it could execute anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("flowrl", "data_process", "benchmarks")  # tests plant pickles themselves, to see them refused
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))

NEVER = {
    "pickle.load",
    "cloudpickle.load",
    "dill.load",
    "joblib.load",
    "torch.jit.load",
    "pandas.read_pickle",
    "yaml.load",
}
"""They read files, and execute what those say. `pickle.loads` reads what flowrl's own processes tell each other."""

UNLESS = {
    "torch.load": ("weights_only", True),
    "torch.hub.load_state_dict_from_url": ("weights_only", True),
    "torch.hub.load": ("trust_repo", False),
}
WITHOUT = {"numpy.load": "allow_pickle", "np.load": "allow_pickle"}


def unsafe(source: str) -> Iterator[str]:
    """Every call in `source` that would unpickle a file."""
    tree = ast.parse(source)
    names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            written = ast.unparse(node.func)
            called = names.get(written, written)
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            name, value = UNLESS.get(called, ("", None))
            if called in NEVER or (name and given.get(name) is not value) or given.get(WITHOUT.get(called, "")):
                yield f"line {node.lineno}: {called}"


def test_no_file_is_unpickled() -> None:
    found = [f"{file.relative_to(ROOT)}, {call}" for file in FILES for call in unsafe(file.read_text(encoding="utf-8"))]
    assert len(FILES) > 150 and found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.load(path)", ["line 1: torch.load"]),
        ("torch.load(path, weights_only=False)", ["line 1: torch.load"]),
        ("torch.load(path, weights_only=True)", []),
        ("from torch import load\nload(path)", ["line 2: torch.load"]),
        ("from pickle import load as read\nread(file)", ["line 2: pickle.load"]),
        ("pickle.loads(data)", []),
        ("np.load(path)", []),
        ("np.load(path, allow_pickle=True)", ["line 1: np.load"]),
        ("yaml.safe_load(text)", []),
        ("yaml.load(text, Loader=yaml.Loader)", ["line 1: yaml.load"]),
    ],
)
def test_what_would_be_found(source: str, found: list[str]) -> None:
    assert list(unsafe(source)) == found
