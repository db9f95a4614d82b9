"""JSON that anybody may have written, read strictly: what would be another value elsewhere is refused."""

from __future__ import annotations

import json
import re
import sys
from typing import Any, NoReturn

_HALF = re.compile("[\ud800-\udfff]")


class JSONFault(ValueError):
    """What is wrong with a text, as a sentence of which it is the subject."""


def parse(text: str) -> Any:
    """No key twice, no NaN, no half of a character (U+D800 to U+DFFF). Raises JSONFault."""
    try:
        value = _DECODER.decode(text)
        half = _HALF.search(json.dumps(value, ensure_ascii=False)) if "\\ud" in text or "\\uD" in text else None
    except json.JSONDecodeError as error:
        raise JSONFault(f"is not JSON: {error.msg} in column {error.colno}") from error
    except RecursionError as error:
        raise JSONFault("is nested too deeply") from error
    except JSONFault:
        raise
    except ValueError as error:  # Python refuses to read it
        raise JSONFault(f"holds an integer of more than {sys.get_int_max_str_digits()} digits") from error
    if half:
        raise JSONFault(f"holds U+{ord(half[0]):04X}, which is not text")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise JSONFault(f"has {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _no_number(name: str) -> NoReturn:
    raise JSONFault(f"holds {name}, which is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)
