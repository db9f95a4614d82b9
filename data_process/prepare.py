"""`prepare`: a published data set in, one file in flowrl's schema out."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_process.inputs import Inputs, data_files
from data_process.media import relocated
from data_process.output import METADATA, describe, described, new_data_files, ordered, refuse_own_input
from data_process.sources import SOURCES, Conversion, chosen
from flowrl.data.schema import TASKS

DESCRIPTION = """\
Turn prompts of a published form into one data file, every row with a task and an id. A file with faults is refused with
all of them by line, unless they are to be dropped. `metadata.json` beside the output says what it was made of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    sources = "; ".join(f"{name}: {source.what}" for name, source in SOURCES.items())
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, or folders of files")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".jsonl or .parquet")
    parser.add_argument("--source", choices=SOURCES, default="prompts", help=f"{sources} (default: prompts)")
    parser.add_argument("--task", choices=TASKS, default="t2i", help="of rows that name none (default: t2i)")
    parser.add_argument("--prompt-key", metavar="NAME", help="the field or column with the prompt")
    parser.add_argument("--metadata-keys", nargs="+", default=[], metavar="NAME", help="fields to keep as metadata")
    parser.add_argument("--name", help="ids are NAME_HASH (default: the source's name)")
    parser.add_argument("--drop-faulty", action="store_true", help="leave faulty rows out, show and count them")


def run(arguments: argparse.Namespace) -> None:
    """Carry it out. Raises Refused, PromptFileError or OSError; then nothing has changed."""
    source = chosen(arguments.source, arguments.prompt_key, tuple(arguments.metadata_keys))
    conversion = Conversion(source, arguments.name or arguments.source, arguments.task)
    inputs = Inputs(data_files(arguments.input), conversion, source.columns())
    output: Path = arguments.output
    refuse_own_input([output], inputs.files)
    described(output.parent)
    with new_data_files([output]) as (writer,):
        for file, _, row in inputs.rows():
            writer.write(relocated(ordered(row), file, output.parent))
        inputs.refuse_faults(but_lines=arguments.drop_faulty)
        inputs.refuse_changes()
        inputs.refuse_nothing(writer.count)
    describe({output: _description(arguments, inputs, conversion, writer.count)})
    for line in inputs.report():
        print(f"dropped {line}")
    print(f"{output}: {writer.count} prompts; what they are made of: {output.parent / METADATA}")


def _description(
    arguments: argparse.Namespace, inputs: Inputs, conversion: Conversion, count: int
) -> dict[str, object]:
    return {
        "command": "prepare",
        "rows": count,
        "source": arguments.source,
        "inputs": inputs.hashes,
        "task": arguments.task,
        "dropped": {"faulty": inputs.num_faulty()},
        "fields_left_out": sorted(conversion.left_out),
    }
