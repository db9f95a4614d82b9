"""Targets: the text that a prompt asks to be written in the picture."""

from __future__ import annotations

import re

STRAIGHT = re.compile('"([^"]*)"')
CURLY = re.compile("\u201c([^\u201d]*)\u201d")


def first_quoted(text: str) -> str | None:
    """The text between the first pair of straight double quotes, else of curly ones; None without a pair.

    It is given as it stands, spaces included; an empty pair gives "". Single quotes are apostrophes, not quotes, and
    one straight quote alone (5" high) is not a pair.
    """
    found = STRAIGHT.search(text) or CURLY.search(text)
    return found.group(1) if found else None
