"""The files that a command reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path

from data_process.refused import Refused
from flowrl.data.rows import CHANGED, PACKAGE_SCHEME, SUFFIXES, Fault, LineFault, PromptFileError, Row, fingerprint
from flowrl.data.schema import Ids, checked_rows, known_rows, plain


def data_files(paths: Iterable[str], suffixes: Sequence[str] = SUFFIXES) -> list[str]:
    """The files themselves, and those in folders, by name.

    Raises Refused for a folder without any, and for a file that is named twice, whatever it is called.
    """
    found: list[str] = []
    for path in paths:
        if not Path(path).is_dir():
            found.append(path)
            continue
        inside = sorted(str(file) for file in Path(path).iterdir() if file.suffix in suffixes and file.is_file())
        if not inside:
            raise Refused([f"{path}: is a folder without {', '.join(suffixes)} files"])
        found += inside
    names: dict[str, list[str]] = {}
    for file in found:
        names.setdefault(file if file.startswith(PACKAGE_SCHEME) else realpath(file), []).append(file)
    twice = [" and ".join(dict.fromkeys(same)) for same in names.values() if len(same) > 1]
    if twice:
        raise Refused([f"{same}: is named twice" for same in twice])
    return found


@dataclass
class Inputs:
    """Files that are read as one, row by row, and everything that is wrong with them.

    Each is hashed as it is when work begins, so that what is written can say what it was made of.
    """

    files: Sequence[str]
    convert: Callable[[Row], Row] = plain
    read: Callable[[str, list[Fault]], Iterator[tuple[int, Row]]] = known_rows
    every_fault: bool = False  # is reported by a line of its own
    hashes: dict[str, str] = field(init=False)
    faults: dict[str, list[Fault]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.hashes = {file: fingerprint(file) for file in self.files}

    def rows(self) -> Iterator[tuple[str, int, Row]]:
        """File, line and content of every sound row."""
        self.faults = {file: [] for file in self.files}
        ids: Ids = {}
        for file in self.files:
            for number, row in checked_rows(file, self.faults[file], ids, self.convert, self.read):
                yield file, number, row

    def again(self) -> Iterator[tuple[str, Row]]:
        """File and content of the same rows, for a second reading after one that has found nothing wrong."""
        for file in self.files:
            for _, row in self.read(file, []):
                try:
                    yield file, self.convert(row)
                except LineFault as fault:
                    raise Refused([f"{file}: {CHANGED}"]) from fault

    def num_faulty(self) -> int:
        """Rows that are wrong."""
        return sum(len({fault.line for fault in faults}) for faults in self.faults.values())

    def report(self) -> list[str]:
        """A line for each fault, or for many that say the same."""
        return [
            line
            for file, faults in self.faults.items()
            for line in PromptFileError(file, faults).report(every=self.every_fault)
        ]

    def refuse_faults(self) -> None:
        """Raises Refused if anything is wrong."""
        if any(self.faults.values()):
            raise Refused(self.report())

    def has_faulty_files(self) -> bool:
        """Whether anything is wrong that does not concern one line alone."""
        return any(fault.is_of_file for faults in self.faults.values() for fault in faults)

    def refuse_changes(self) -> None:
        """Raises Refused if a file is not what it was when work began."""
        changed = [file for file, before in self.hashes.items() if fingerprint(file) != before]
        if changed:
            raise Refused([f"{file}: {CHANGED}" for file in changed])

    def refuse_nothing(self, count: int) -> None:
        """Raises Refused if no row is left."""
        if count == 0:
            raise Refused([*self.report(), f"{', '.join(self.files)}: no prompt is left"])
