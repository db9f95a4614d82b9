"""`.csv` and `.tsv` files, which `prepare` reads besides data files."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from flowrl.data.rows import TABLES, Fault, Row, decoded_lines, open_data, read_rows


def table_rows(path: str, faults: list[Fault], columns: Sequence[str] = ()) -> Iterator[tuple[int, Row]]:
    """As `read_rows`, of tables too. Every cell is a string; an empty one is as good as none.

    A table is what Python's `csv` takes for one: its first line names the columns, and a cell with separators, line
    ends or quotes in it is between double quotes, each of those inside doubled. A row has the number of its first line.
    """
    if Path(path).suffix not in TABLES:
        yield from read_rows(path, faults, columns)
        return
    with open_data(path) as file:
        rows = _cells(file, TABLES[Path(path).suffix], faults)
        _, header = next(rows, (0, []))
        names = [name.strip() for name in header]
        if not all(names) or len(set(names)) < len(names):
            faults.append(Fault(f"must name each column in its first line, and none twice; got {', '.join(names)}"))
            return
        for number, cells in rows:
            if len(cells) == len(names):
                yield number, {name: cell for name, cell in zip(names, cells, strict=True) if cell}
            else:
                faults.append(Fault(f"has {len(cells)} cells, but the first line {len(names)}", number))


def _cells(file: IO[bytes], delimiter: str, faults: list[Fault]) -> Iterator[tuple[int, list[str]]]:
    """Number of the first line, and cells, of every row but blank lines and what cannot be read."""
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
            faults.append(Fault(f"is not a row of a table: {error}", first))
            continue
        if cells and broken.isdisjoint(range(first, reader.line_num + 1)):
            yield first, cells
