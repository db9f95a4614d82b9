"""How anybody's text looks in an error: one short line, of which a terminal shows every character as it is."""

from __future__ import annotations

import html
import re

HIDDEN = re.compile(r"<(script|style)\b.*?(?:</\1[^<>]*>|\Z)|<!--.*?(?:-->|\Z)", re.IGNORECASE | re.DOTALL)
TAG = re.compile(r"<[^<>]*>")


def excerpt(text: str, length: int = 200) -> str:
    """The beginning of `text`, at most `length` characters; of a page in HTML, of what a browser would show of it."""
    if text.lstrip().startswith("<"):
        text = html.unescape(TAG.sub(" ", HIDDEN.sub(" ", text))).strip() or text
    line = " ".join(text.split())
    return shortened("".join(c if c.isprintable() else "\ufffd" for c in line[: length + 1]), length)


def shortened(text: str, length: int = 200) -> str:
    """At most `length` characters of `text`."""
    return text if len(text) <= length else text[: length - 1] + "…"
