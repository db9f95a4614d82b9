"""What is told of an error, and what is not."""

from __future__ import annotations


class ExplainedError(Exception):
    """An error whose sentence says all: its readers get no traceback, also when another process raised it."""
