"""`prepare`: a published data set in, one file in flowrl's schema out."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from data_process.inputs import Inputs, data_files
from data_process.media import relocated
from data_process.output import METADATA, alone, describe, described, new_data_files, ordered, refuse_own_input
from data_process.refused import Refused
from data_process.sources import SOURCES, Conversion, chosen
from data_process.tables import table_rows
from flowrl.data.rows import SUFFIXES, TABLES, column_names
from flowrl.data.schema import TASKS

DESCRIPTION = """\
Turn prompts of a published form into one data file, every row with a task and an id. A file with faults is refused with
all of them by line, unless they are to be dropped. `metadata.json` beside the output says what it was made of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    sources = "; ".join(f"{name}: {source.what}" for name, source in SOURCES.items())
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, or folders of files")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".jsonl or .parquet")
    own = "package.module.NAME: a Source of your own"
    parser.add_argument("--source", default="prompts", metavar="NAME", help=f"{sources}; {own} (default: prompts)")
    parser.add_argument("--task", choices=TASKS, default="t2i", help="of rows that name none (default: t2i)")
    parser.add_argument("--prompt-key", metavar="NAME", help="the field or column with the prompt")
    parser.add_argument("--metadata-keys", nargs="+", default=[], metavar="NAME", help="fields to keep as metadata")
    parser.add_argument("--name", help="ids are NAME_HASH (default: the source's name)")
    parser.add_argument("--drop-faulty", action="store_true", help="leave faulty rows out, show and count them")


def run(arguments: argparse.Namespace) -> None:
    """Carry it out. Raises Refused, PromptFileError or OSError; then nothing has changed."""
    source = chosen(arguments.source, arguments.prompt_key, tuple(arguments.metadata_keys))
    name = arguments.name or arguments.source.rpartition(".")[2]
    conversion = Conversion(source, arguments.source, name, arguments.task)
    files = data_files(arguments.input, (*SUFFIXES, *TABLES))
    inputs = Inputs(files, conversion, partial(table_rows, columns=source.columns()), arguments.all)
    output: Path = arguments.output
    refuse_own_input([output], inputs.files)
    with alone(output.parent):
        described(output.parent)
        with new_data_files([output]) as (writer,):
            for file, _, row in inputs.rows():
                writer.write(relocated(ordered(row), file, output.parent))
            _refuse_faults(inputs, arguments.drop_faulty)
            inputs.refuse_changes()
            inputs.refuse_nothing(writer.count)
            left_out = _left_out(inputs, conversion)
            _refuse_absent(arguments.metadata_keys, conversion, left_out)
        describe({output: _description(arguments, inputs, left_out, writer.count)})
    for line in inputs.report():
        print(f"dropped {line}")
    if left_out:
        print(f"left out: {', '.join(left_out)} (--metadata-keys keeps what it names)")
    print(f"{output}: {writer.count} prompts; what they are made of: {output.parent / METADATA}")


def _refuse_faults(inputs: Inputs, drop_faulty: bool) -> None:
    if inputs.has_faulty_files():
        inputs.refuse_faults()
    if not drop_faulty and inputs.num_faulty():
        raise Refused([*inputs.report(), "nothing is written; --drop-faulty would leave such rows out"])


def _left_out(inputs: Inputs, conversion: Conversion) -> list[str]:
    """Fields of rows that have no place in the schema, and columns that have not even been read."""
    known = conversion.source.columns()
    unread = {name for file in inputs.files for name in column_names(file) if name not in known}
    return sorted(conversion.left_out | unread)


def _refuse_absent(wanted: list[str], conversion: Conversion, left_out: list[str]) -> None:
    absent = [name for name in wanted if name not in conversion.kept]
    if absent:
        others = f"; other fields are: {', '.join(left_out)}" if left_out else ""
        raise Refused([f"--metadata-keys: no row has a field {name!r}{others}" for name in absent])


def _description(arguments: argparse.Namespace, inputs: Inputs, left_out: list[str], count: int) -> dict[str, object]:
    return {
        "command": "prepare",
        "rows": count,
        "source": arguments.source,
        "inputs": inputs.hashes,
        "task": arguments.task,
        "dropped": {"faulty": inputs.num_faulty()},
        "fields_left_out": left_out,
    }
