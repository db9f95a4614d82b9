"""Prompt files in: everything that a run reads from one. `flowrl.data.schema` says what its rows may hold.

Nothing in a file is passed over in silence but blank lines: a file with faults is refused, with all of them by line.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from flowrl.data.rows import Fault, LineFault, PromptFileError, Row, fingerprint, refuse_change
from flowrl.data.schema import MEDIA, TARGETS, checked_rows, sample_id, target_of
from flowrl.prompts import Prompt

__all__ = ["TARGETS", "Fault", "PromptFileError", "fingerprint", "load_prompts"]


def load_prompts(path: str, target: str = "none") -> tuple[Prompt, ...]:
    """The prompts of a file, in its order; repeated prompts are kept, and so are weighted.

    A prompt without an `id` of its own gets one from its content: the same line has the same id in every file, and
    twice in one file if it stands there twice. Whoever asks for a file again is given the same prompts, as long as its
    bytes are the same: checks of a run and the run itself read it once.

    Args:
        path: an ordinary path, or `pkg://PACKAGE/path` for a file inside an installed package.
        target: where `Prompt.target` comes from. "quoted": the first quoted text of the prompt; every prompt must have
            one. "field": the field `target`, which every prompt must have. "none": the field if it is there.

    Raises:
        PromptFileError: with every fault of the file, or if it changes while it is being read.
        ValueError: for an unknown `target`.
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}; got {target!r}")
    if Path(path).suffix == ".txt" and target == "field":
        raise PromptFileError(path, [Fault("a text file has no target field: use .jsonl, or target=quoted")])
    return _prompts(path, target, fingerprint(path))


@lru_cache(maxsize=16)  # more than a run has files
def _prompts(path: str, target: str, content: str) -> tuple[Prompt, ...]:
    """See `load_prompts`; `content` is the fingerprint of what the file holds now."""
    faults: list[Fault] = []
    prompts: list[Prompt] = []
    with _no_collection():
        for number, row in checked_rows(path, faults):
            try:
                prompts.append(_prompt(row, target))
            except LineFault as fault:
                faults.extend(Fault(message, number) for message in fault.messages)
    refuse_change(path, content)  # else these prompts would be kept for a content that they do not have
    if faults:
        raise PromptFileError(path, faults)
    return tuple(prompts)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without looking for garbage: there are no cycles in what is read, and searching all of it costs a fifth more."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _prompt(row: Row, target: str) -> Prompt:
    """Raises LineFault if it is not one that flowrl can draw."""
    conditioned = [name for name in MEDIA if name in row]
    if conditioned:
        raise LineFault(f"has {conditioned[0]!r}: generation conditioned on {conditioned[0]} is not supported")
    return Prompt(
        id=sample_id(row),
        text=row["prompt"],
        target=target_of(row, target),
        negative=row.get("negative_prompt", ""),
        metadata=row.get("metadata", {}),
    )
