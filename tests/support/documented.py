"""The names of metrics that `docs/metrics.md` explains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
PREFIX = re.compile(r"^### `(\w+/)`")
BRACES = re.compile(r"\{([\w,]+)\}")


def undocumented(names: Iterable[str], **placeholders: Sequence[str]) -> list[str]:
    """Those of `names` that no table of the page has.

    `placeholders` say what `<component>`, `<set>` and the like stand for in this run: `component=["ocr"]`. One that is
    not given stands for nothing.
    """
    known = set(_filled(PAGE.read_text(encoding="utf-8"), placeholders))
    return sorted(set(names) - known)


def _filled(page: str, placeholders: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Every full name: the heading's prefix before each quoted name in the first column of its table."""
    prefix = None
    for line in page.splitlines():
        if line.startswith("#"):
            heading = PREFIX.match(line)
            prefix = heading[1] if heading else None
        elif prefix is not None and line.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
                for plain in _expanded(name):
                    yield from (prefix + full for full in _with(plain, placeholders))


def _expanded(name: str) -> list[str]:
    """`a_{b,c}` is `a_b` and `a_c`."""
    found = BRACES.search(name)
    if found is None:
        return [name]
    return [n for part in found[1].split(",") for n in _expanded(name[: found.start()] + part + name[found.end() :])]


def _with(name: str, placeholders: Mapping[str, Sequence[str]]) -> Iterator[str]:
    keys = re.findall(r"<(\w+)>", name)
    for values in product(*(placeholders.get(key, ()) for key in keys)):
        full = name
        for key, value in zip(keys, values, strict=True):
            full = full.replace(f"<{key}>", value)
        yield full
