"""`inspect`: everything that is wrong with data files, by file and line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_process.inputs import data_files
from data_process.media import asked, check_media, check_task
from data_process.output import METADATA, described
from data_process.refused import Refused
from flowrl.data.rows import PACKAGE_SCHEME, Fault, LineFault, PromptFileError, Row, fingerprint, refuse_change
from flowrl.data.schema import MEDIA, TARGETS, TASKS, checked_rows, sample_id, target_of, written_id

DESCRIPTION = """\
Check prompt files: encoding, fields, tasks, targets, placeholders against media, media, and whether evaluation
prompts are among those for training. Faults are printed with file and line; then the exit status is 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help=".txt, .jsonl or .parquet; an ordinary path or pkg://PACKAGE/path")
    add("--train", nargs="+", default=[], metavar="FILE", help="files that are trained on")
    add("--eval", nargs="+", default=[], metavar="FILE", help="files no prompt of which may be among those")
    add("--target", choices=TARGETS, default="none", help="what data.target will be (default: none)")
    add("--task", choices=TASKS, help="the task that every row must have")
    add("--check-media", action=argparse.BooleanOptionalAction, default=True, help="that media are there (default)")
    add("--decode-media", action="store_true", help="decode every picture and video to its end")


@dataclass
class Summary:
    """What a file holds."""

    target: str
    count: int = 0
    shortest: int = sys.maxsize
    longest: int = 0
    targets: int = 0
    with_media: int = 0
    ids: set[str] = field(default_factory=set)

    def add(self, row: Row) -> None:
        """One more row."""
        length = len(row["prompt"])
        self.count += 1
        self.shortest, self.longest = min(self.shortest, length), max(self.longest, length)
        self.targets += self.target == "quoted" or "target" in row
        self.with_media += any(name in row for name in MEDIA)
        self.ids.add(sample_id(row))

    def __str__(self) -> str:
        media = f", {self.with_media} with media (no model of flowrl takes any)" if self.with_media else ""
        return (
            f"{self.count} prompts of {self.shortest} to {self.longest} characters, "
            f"{self.count - len(self.ids)} repeated, {self.targets} with a target{media}"
        )


@dataclass
class HeldOut:
    """Prompts of the evaluation files, the ids that are written there, and where they are."""

    prompts: dict[bytes, str] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)

    def add(self, row: Row, file: str, number: int) -> None:
        """One more row."""
        self.prompts.setdefault(asked(row, file), f"{file}:{number}")
        written = written_id(row)
        if written is not None:
            self.ids.setdefault(written, f"{file}:{number}")

    def check(self, row: Row, file: str) -> None:
        """Raises LineFault if a row to be trained on is one of them."""
        place = self.prompts.get(asked(row, file))
        if place is not None:
            raise LineFault(f"has the prompt of {place}, an evaluation file")
        written = written_id(row)
        place = None if written is None else self.ids.get(written)
        if place is not None:
            raise LineFault(f"has the id {written!r} of {place}, an evaluation file")


@dataclass
class Inspection:
    """Files one after the other, those for evaluation before those for training."""

    arguments: argparse.Namespace
    held_out: HeldOut = field(default_factory=HeldOut)

    def faulty(self, file: str, role: str) -> bool:
        """Print what the file holds or what is wrong with it; whether anything is."""
        faults: list[Fault] = []
        summary = Summary(self.arguments.target)
        try:
            found = fingerprint(file)
            for number, row in checked_rows(file, faults):
                summary.add(row)
                for check in self._checks(row, file, role):
                    try:
                        check()
                    except LineFault as fault:
                        faults.extend(Fault(message, number) for message in fault.messages)
                if role == "eval":
                    self.held_out.add(row, file, number)
            refuse_change(file, found)
            faults += _changed(file, found)
        except PromptFileError as error:
            faults += error.faults
        if faults:
            print("\n".join(PromptFileError(file, faults).report(every=self.arguments.all)))
            return True
        print(f"{file}: {summary}\nsha256 {found}")
        return False

    def _checks(self, row: Row, file: str, role: str) -> Iterator[Callable[[], object]]:
        """Each raises LineFault if the row does not pass."""
        asked = self.arguments
        yield lambda: target_of(row, asked.target)
        yield lambda: check_task(row, asked.task)
        if asked.check_media or asked.decode_media:
            yield lambda: check_media(row, file, asked.decode_media)
        if role == "train":
            yield lambda: self.held_out.check(row, file)


def run(arguments: argparse.Namespace) -> int:
    """Carry it out and return the exit status."""
    roles = {role: data_files(getattr(arguments, role)) for role in ("eval", "train", "files")}
    if not any(roles.values()):
        raise Refused(["name the files to inspect"])
    inspection = Inspection(arguments)
    return int(any([inspection.faulty(file, role) for role, files in roles.items() for file in files]))


def _changed(file: str, found: str) -> Sequence[Fault]:
    """A fault if the file is not what the `metadata.json` beside it says."""
    if file.startswith(PACKAGE_SCHEME):
        return []
    entry = described(Path(file).parent).get(Path(file).name)
    if entry is None or entry["sha256"] == found:
        return []
    return [Fault(f"is not the file that {METADATA} describes (sha256 {entry['sha256']}): prepare or curate it anew")]
