"""`.csv` and `.tsv` files, which `prepare` reads besides data files."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from flowrl.data.rows import TABLES, Fault, Row, decoded_lines, open_data, read_rows


def table_rows(path: str, faults: list[Fault], columns: Sequence[str] = ()) -> Iterator[tuple[int, Row]]:
    """As `read_rows`, of tables too. Every cell is a string; an empty one is as good as none.

    A table is what Python's `csv` takes for one: its first line names the columns, and a cell with separators, line
    ends or quotes in it is between double quotes, each of those inside doubled. A row has the number of its first line.

    A quote that is missing or too many makes one row of many, or of parts of several: where quotes are wrong, or a row
    of several lines has not as many cells as columns, the fault is one of the file. So is one of the first line.
    """
    if Path(path).suffix not in TABLES:
        yield from read_rows(path, faults, columns)
        return
    with open_data(path) as file:
        rows = _cells(file, TABLES[Path(path).suffix], faults)
        header = next(rows, None)
        if header is None or any(fault.spreads for fault in faults):  # the latter: this is not the first line
            return
        names = [name.strip() for name in header.cells]
        if not (all(names) and len(set(names)) == len(names) and header.is_whole and header.num_lines == 1):
            got = ", ".join(names).replace("\n", "\\n")
            faults.append(Fault(f"must name each column in its first line, and none twice; got {got:.200}"))
            return
        for row in rows:
            if len(row.cells) != len(names):
                message = f"has {len(row.cells)} cells, but the first line {len(names)}"
                faults.append(Fault(message, row.first, spreads=row.num_lines > 1))
            elif row.is_whole:
                yield row.first, {name: cell for name, cell in zip(names, row.cells, strict=True) if cell}


class _Cells(NamedTuple):
    """A row as it stands in the file."""

    first: int  # line
    num_lines: int
    cells: list[str]
    is_whole: bool  # UTF-8


def _cells(file: IO[bytes], delimiter: str, faults: list[Fault]) -> Iterator[_Cells]:
    """Every row but blank lines and those with wrong quotes."""
    broken: set[int] = set()

    def text() -> Iterator[str]:
        for number, line, is_whole in decoded_lines(file, faults):
            if not is_whole:
                broken.add(number)
            yield line

    reader = csv.reader(text(), delimiter=delimiter, strict=True)
    while True:
        first = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lines = f" (up to line {reader.line_num})" if reader.line_num > first else ""
            faults.append(Fault(f"is not a row of a table: {error}{lines}", first, spreads=True))
            cells = []
        if cells:
            is_whole = broken.isdisjoint(range(first, reader.line_num + 1))
            yield _Cells(first, reader.line_num + 1 - first, cells, is_whole)
