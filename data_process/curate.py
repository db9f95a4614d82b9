"""`curate`: data files in, without duplicates and split for training and evaluation out."""

from __future__ import annotations

import argparse
import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_process.inputs import Inputs, data_files
from data_process.media import asked, missing, relocated
from data_process.output import (
    FORMATS,
    METADATA,
    alone,
    describe,
    described,
    new_data_files,
    ordered,
    refuse_own_input,
)
from data_process.refused import Refused
from flowrl.data.rows import Fault, LineFault, Row
from flowrl.data.schema import MEDIA, sample_id, written_id

DESCRIPTION = """\
Drop duplicates (prompts that are equal but for case, white space, kinds of quotes and what cannot be seen, with equal
media), apply filters, and split by a hash of each sample's id: the same rows are chosen in any order of the input, on
any machine."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "pickapic": {
        "prefix": "pickapic_",
        "min_prompt_words": 6,
        "eval_size": 2048,
        "eval_subset_sizes": [64, 256],
        "check_media": False,
    }
}
DEFAULTS: Mapping[str, Any] = {
    "prefix": "",
    "min_prompt_words": 0,
    "max_prompt_chars": None,
    "eval_size": None,
    "eval_fraction": None,
    "eval_subset_sizes": [],
    "check_media": True,
}
EVAL_FRACTION = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, or folders of files")
    add("--out-dir", type=Path, required=True, metavar="DIR", help="gets PREFIXtrain, PREFIXeval and PREFIXevalK files")
    add("--format", choices=FORMATS, default="jsonl", help="of the output (default: jsonl)")
    add("--preset", choices=PRESETS, help=f"other defaults: {_presets()}")
    add("--prefix", help="of the names of the output files")
    add("--min-prompt-words", type=int, metavar="N", help="drop prompts of fewer words, by white space")
    add("--max-prompt-chars", type=int, metavar="N", help="drop prompts of more characters")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--eval-size", type=int, metavar="N", help="exactly so many prompts for evaluation; 0: no split")
    size.add_argument("--eval-fraction", type=float, metavar="F", help=f"about this share (default: {EVAL_FRACTION})")
    add("--eval-subset-sizes", type=int, nargs="*", metavar="K", help="also the first K of the evaluation prompts")
    add("--check-media", action=argparse.BooleanOptionalAction, help="drop rows whose media are missing (default)")
    add("--show-dropped", action="store_true", help="list what is dropped by file and line, and why")


def _presets() -> str:
    return "; ".join(
        f"{name}: {', '.join(f'{key}={value}' for key, value in preset.items())}" for name, preset in PRESETS.items()
    )


@dataclass(frozen=True)
class Filters:
    """Which rows are dropped, and why."""

    min_prompt_words: int
    max_prompt_chars: int | None
    check_media: bool

    def reason(self, row: Row, file: str) -> str | None:
        """The reason to drop a row of a file, if there is one."""
        if self.min_prompt_words and len(row["prompt"].split()) < self.min_prompt_words:
            return "too_few_words"
        if self.max_prompt_chars is not None and len(row["prompt"]) > self.max_prompt_chars:
            return "too_long"
        return "missing_media" if self.check_media and missing(row, file) else None


@dataclass
class Selection:
    """The rows that stay: of those that ask for the same, the one with the shortest and then first id.

    Args:
        has_places: remember where every row is, for `dropped`.
    """

    has_places: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    _nameless: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # with media, by the hash that is their id
    _best: dict[bytes, tuple[int, str, int]] = field(default_factory=dict)  # length of the id, id, number of the row
    _places: dict[int, str] = field(default_factory=dict)
    _reasons: dict[int, str | bytes] = field(default_factory=dict)  # bytes: the key of the row that stays instead

    def add(self, row: Row, file: str, line: int, number: int) -> None:
        """Row `number` of the input. Raises LineFault if another row, without an id as well, would have the same."""
        if self.has_places:
            self._places[number] = f"{file}:{line}"
        key, identity = asked(row, file), sample_id(row)
        if written_id(row) is None and any(name in row for name in MEDIA):
            other, place = self._nameless.setdefault(identity, (key, f"{file}:{line}"))
            if other != key:
                raise LineFault(f"has the prompt and the paths of {place}, which mean other files there: give both ids")
        candidate = (len(identity), identity, number)
        found = self._best.setdefault(key, candidate)
        if found is not candidate:
            self._best[key], worse = sorted((found, candidate))
            self._drop(worse[2], "duplicate", key)

    def drop(self, file: str, line: int, number: int, reason: str) -> None:
        """Do not take a row into account."""
        if self.has_places:
            self._places[number] = f"{file}:{line}"
        self._drop(number, reason, reason)

    def _drop(self, number: int, reason: str, why: str | bytes) -> None:
        self.counts[reason] += 1
        if self.has_places:
            self._reasons[number] = why

    def dropped(self) -> Iterator[str]:
        """Where each row that was dropped is, and why, in the order of the input."""
        for number, why in sorted(self._reasons.items()):
            reason = why if isinstance(why, str) else f"duplicate of {self._places[self._best[why][2]]}"
            yield f"{self._places[number]}: {reason}"

    def summary(self) -> str:
        """How many rows were dropped for each reason."""
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.counts.items())) or "nothing"

    def split(self, size: int | None, fraction: float) -> tuple[set[int], dict[int, bytes]]:
        """Numbers of the rows for training, and of those for evaluation with the hashes that order them."""
        hashes = {number: hashlib.sha256(identity.encode()).digest() for _, identity, number in self._best.values()}
        if size is None:
            chosen = {number: digest for number, digest in hashes.items() if _share(digest) < fraction}
        else:
            chosen = dict(heapq.nsmallest(size, hashes.items(), key=lambda item: item[1]))
        return hashes.keys() - chosen.keys(), chosen


def run(arguments: argparse.Namespace) -> None:
    """Carry it out. Raises Refused, PromptFileError or OSError; then nothing has changed."""
    settings = _settings(arguments)
    folder: Path = arguments.out_dir
    names = ["train", *(["eval"] if settings["eval_size"] != 0 else [])]
    names += [f"eval{size}" for size in settings["eval_subset_sizes"]]
    paths = [folder / f"{settings['prefix']}{name}.{arguments.format}" for name in names]
    inputs = Inputs(data_files(arguments.input), every_fault=arguments.all)
    refuse_own_input(paths, inputs.files)
    filters = Filters(settings["min_prompt_words"], settings["max_prompt_chars"], settings["check_media"])
    selection = Selection(arguments.show_dropped)
    with alone(folder):
        described(folder)
        _select(selection, inputs, filters)
        train, evaluation = selection.split(settings["eval_size"], settings["eval_fraction"] or EVAL_FRACTION)
        _check_sizes(settings, len(train), len(evaluation), selection.summary())
        counts = _write(inputs, train, evaluation, paths, settings["eval_subset_sizes"])
        about = {
            "command": "curate",
            "inputs": inputs.hashes,
            "settings": {name: value for name, value in settings.items() if name != "prefix"},
            "dropped": dict(sorted(selection.counts.items())),
        }
        describe({path: {"rows": count, **about} for path, count in zip(paths, counts, strict=True)})
    for line in selection.dropped():
        print(line)
    for path, count in zip(paths, counts, strict=True):
        print(f"{path}: {count} prompts")
    hint = " (--show-dropped lists them)" if selection.counts and not arguments.show_dropped else ""
    print(f"dropped {selection.summary()}{hint}; the same in {folder / METADATA}")


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command says, else the preset, else the default. Raises Refused for sizes that cannot be."""
    given = {name: value for name, value in vars(arguments).items() if name in DEFAULTS and value is not None}
    settings = {**DEFAULTS, **PRESETS.get(arguments.preset, {}), **given}
    if "eval_fraction" in given:
        settings["eval_size"] = None
    size, fraction = settings["eval_size"], settings["eval_fraction"]
    words, characters = settings["min_prompt_words"], settings["max_prompt_chars"]
    if words < 0:
        raise Refused([f"--min-prompt-words must not be negative, got {words}"])
    if characters is not None and characters < 1:
        raise Refused([f"--max-prompt-chars must be at least 1, got {characters}"])
    if size is not None and size < 0:
        raise Refused([f"--eval-size must not be negative, got {size}"])
    if fraction is not None and not 0 < fraction < 1:
        raise Refused([f"--eval-fraction must be between 0 and 1, got {fraction}; to have no split, --eval-size 0"])
    subsets = settings["eval_subset_sizes"] = sorted(settings["eval_subset_sizes"])
    if len(set(subsets)) < len(subsets) or any(k < 1 for k in subsets):
        raise Refused([f"--eval-subset-sizes must be different and at least 1, got {subsets}"])
    if Path(settings["prefix"]).name != settings["prefix"]:
        raise Refused([f"--prefix is the beginning of a file's name, not a folder; got {settings['prefix']!r}"])
    return settings


def _select(selection: Selection, inputs: Inputs, filters: Filters) -> None:
    """The first reading of the input."""
    for number, (file, line, row) in enumerate(inputs.rows()):
        reason = filters.reason(row, file)
        if reason is not None:
            selection.drop(file, line, number, reason)
            continue
        try:
            selection.add(row, file, line, number)
        except LineFault as fault:
            inputs.faults[file].extend(Fault(message, line) for message in fault.messages)
    inputs.refuse_faults()


def _check_sizes(settings: Mapping[str, Any], num_train: int, num_eval: int, dropped: str) -> None:
    size, found = settings["eval_size"], num_train + num_eval
    if found == 0:
        raise Refused([f"no prompt is left: dropped {dropped}"])
    if size is not None and size > num_eval:
        raise Refused([f"--eval-size is {size}, but only {found} prompts are left"])
    if size != 0 and num_eval == 0:
        raise Refused([f"none of {found} prompts falls into the evaluation set: set --eval-size"])
    if num_train == 0:
        raise Refused([f"no prompt is left to train on: {found} in all, {num_eval} for evaluation"])
    if any(k > num_eval for k in settings["eval_subset_sizes"]):
        raise Refused(
            [f"--eval-subset-sizes {settings['eval_subset_sizes']}: the evaluation set has {num_eval} prompts"]
        )


def _write(
    inputs: Inputs, train: set[int], evaluation: Mapping[int, bytes], paths: list[Path], subsets: list[int]
) -> list[int]:
    """The second reading: training rows in their order, evaluation rows by their hashes. How many are in each file."""
    folder, kept = paths[0].parent, list[tuple[bytes, Row]]()
    with new_data_files(paths) as writers:
        for number, (file, row) in enumerate(inputs.again()):
            if number in train:
                writers[0].write(relocated(ordered(row), file, folder))
            elif number in evaluation:
                kept.append((evaluation[number], relocated(ordered(row), file, folder)))
        kept.sort(key=lambda item: item[0])
        for writer, size in zip(writers[1:], [len(kept), *subsets], strict=False):
            for _, row in kept[:size]:
                writer.write(row)
        inputs.refuse_changes()
    return [writer.count for writer in writers]


def _share(digest: bytes) -> float:
    """The hash as a number from 0 to 1."""
    return int.from_bytes(digest[:8]) / 2**64
