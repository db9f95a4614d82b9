"""`python -m data_process prepare|curate|inspect`, installed as `flowrl-data`: prompt files that can be trusted."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from data_process import curate, inspect, prepare
from data_process.refused import Refused
from flowrl.data.rows import PromptFileError


def main() -> None:
    """The command: exits with 1 if data have faults, with 2 if the command has."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word, as it ends other tools
    sys.exit(command(sys.argv[1:]))


def command(arguments: Sequence[str]) -> int:
    """Carry out a command line and return its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        status: int | None = parsed.run(parsed)
    except Refused as error:
        lines = list(error.lines)
    except PromptFileError as error:
        lines = error.report(every=parsed.all)
    except OSError as error:
        lines = [f"{error.filename}: {error.strerror}"]
    else:
        return status or 0
    print("\n".join(lines), file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flowrl-data", description="Prompt files: make, split and check them.")
    commands = parser.add_subparsers(required=True)
    for module, summary in (
        (prepare, "turn a published data set into a data file"),
        (curate, "drop duplicates, filter, and split for training and evaluation"),
        (inspect, "report every fault of data files by line, or what they hold"),
    ):
        name = module.__name__.rpartition(".")[2]
        one = commands.add_parser(name, help=summary, description=module.DESCRIPTION)
        module.add_arguments(one)
        one.add_argument("--all", action="store_true", help="list every fault, even if more than 20 say the same")
        one.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    main()
